"""The ways to run the guest, and the choice between them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from . import kernel
from .host import Problem
from .options import Options
from .qemu import QEMU, Qemu, hardware_kvm
from .uml import Uml


class Way(Protocol):
    """A kind of guest. `home` is its kernel's folder; `channels` are lines of its start script.

    Those lines set $ctl, $out and $err to what the script reports to, and the command writes to.
    """

    name: str
    channels: str
    home: Path

    def missing(self) -> dict[str, str]:
        """Return the programs that the host lacks, each with its Debian package."""

    def ready(self) -> None:
        """Have its kernel, or raise a `Problem`."""

    def mount(self, tag: str, folder: str) -> str:
        """Return the command by which the guest mounts a shared folder."""

    def command(
        self, job: Path, shares: Mapping[str, str], channels: Mapping[str, int]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the program to start with its arguments, and its variables; `channels` are open descriptors."""

    def place(self) -> None:
        """Choose processors; called in the child, before the program is started."""


def chosen(options: Options) -> str:
    """Return the way to take: the one that was asked for, or the fastest of those that are ready."""
    if options.how != "auto":
        return options.how
    kvm = hardware_kvm()
    if kvm and shutil.which(QEMU):
        return "kvm"
    if kernel.home(options.cache, options.source).is_dir():
        return "uml"
    return "kvm" if kvm else "tcg"


def choose(options: Options) -> Way:
    """AckCounts `options.how`; return that way."""
    options.how = chosen(options)
    if options.driver == "siw" and options.how != "uml":
        raise Problem("Debian's kernel lacks siw; use --how uml, whose kernel has it")
    return Uml(options) if options.how == "uml" else Qemu(options)
