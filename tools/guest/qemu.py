"""A guest that is a virtual machine of QEMU, on the processor's virtualization (kvm) or emulated (tcg)."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from . import debian
from .host import lacking
from .options import Options

QEMU = "qemu-system-x86_64"

CHANNELS = """\
for p in /sys/class/virtio-ports/*; do
    read -r name <$p/name
    case $name in ctl|out|err) eval "$name=/dev/${p##*/}";; esac
done
"""


class Qemu:
    """How to prepare, start and talk to such a guest; see `ways.Way`."""

    channels = CHANNELS

    def __init__(self, options: Options) -> None:
        self._options = options
        self.name = options.how
        self.home = debian.home(options.cache, options.kernel)

    def missing(self) -> dict[str, str]:
        return lacking({QEMU: "qemu-system-x86"})

    def ready(self) -> None:
        debian.prepare(self._options.cache, self._options.kernel)

    def mount(self, tag: str, folder: str) -> str:
        return f"mount -t 9p -o cache=mmap,version=9p2000.L,msize=512000,trans=virtio {tag} {shlex.quote(folder)}"

    def command(
        self, job: Path, shares: Mapping[str, str], channels: Mapping[str, int]
    ) -> tuple[list[str], dict[str, str]]:
        command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", *self._machine(job)]
        for name, descriptor in channels.items():
            command += ["-chardev", f"socket,id={name},fd={descriptor}"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        for tag, folder in [("root", "/"), *shares.items()]:
            access = "readonly=on" if tag == "root" else "readonly=off"
            path = folder.replace(",", ",,")  # QEMU's way to quote one
            command += ["-fsdev", f"local,id={tag},security_model=none,multidevs=remap,{access},path={path}"]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        return command, dict(os.environ)

    def _machine(self, job: Path) -> list[str]:
        options, kvm = self._options, self.name == "kvm"
        words = ["console=ttyS0", "panic=-1", "quiet", f"job={job}", "mitigations=off", "nokaslr", "no_timer_check"]
        words += ["tsc=reliable", "random.trust_cpu=on", "audit=0", "apparmor=0", *options.append]
        return [
            *("-machine", "q35", "-m", str(options.memory), "-smp", str(options.cpus or (2 if kvm else 1))),
            *("-accel", self.name, "-cpu", "host" if kvm else "max"),
            *("-kernel", str(self.home / "kernel"), "-initrd", str(self.home / "initramfs")),
            *("-append", " ".join(words), "-device", "virtio-serial-pci"),
            *("-chardev", f"file,id=console,path={job}/console", "-serial", "chardev:console"),
        ]

    def place(self) -> None:
        """Run wherever the host's kernel likes."""


def hardware_kvm() -> bool:
    """Tell whether /dev/kvm runs guests on the processor's own virtualization.

    In some sandboxes it is of a kind that serves guests made for it alone: any other kernel starts, and is
    interpreted one instruction at a time, far slower than QEMU's emulation. The processor's flags tell them apart.
    """
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
        return re.search(r"^flags\s*:.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False
