"""What can be asked for on the command line, and the environment's say in it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "python tools/guest"
MOST_NICS = 100
DESCRIPTION = """\
Run a command under a throw-away kernel that has software RDMA NICs.

The guest's root file system is this host's, read-only, with a layer in memory on top: programs, libraries and
virtual environments are where they are here. Only the current directory is written through; all else that is
written is gone afterwards. Output is passed on as it comes, the exit status is the command's (125: the guest
could not be run, 124: --timeout). Neither root nor RDMA in the host's kernel is needed.

There are N NICs nic0.. (10.77.0.1..) with a soft-RoCE device rxe0.. each, plugged into one virtual switch, and
what they send each other really crosses it: `ip link set sw1 down` in the guest pulls the cable of nic1,
`tc qdisc add dev sw1 root netem loss 1%` makes it a bad one. In the guest RDMA_VM is set, to the way it is run:

  kvm  Debian's kernel in QEMU, with the processor's virtualization
  uml  user-mode Linux, a kernel built as an ordinary program: up in half a second, system calls are slow;
       it is built once, with --build-uml
  tcg  as kvm with the processor emulated: 10 to 30 times slower, works everywhere

Without --how it is the first of these that is ready here.
"""


@dataclass
class Options:
    """What one run of the program is to do; `how` is settled by the run where it is "auto"."""

    command: list[str]
    cache: Path
    nics: int = 2
    driver: str = "rxe"
    mtu: int = 9000
    how: str = "auto"
    memory: int = 1024
    cpus: int | None = None
    timeout: float = 0.0
    boot_timeout: float = 120.0
    rw: tuple[str, ...] = ()
    discard: bool = False
    kernel: str = "linux-image-amd64"
    source: str = "linux-source"
    prepare: bool = False
    build_uml: bool = False
    append: tuple[str, ...] = ()
    keep: bool = False
    verbose: bool = False


def default_cache(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return environment.get("RDMA_VM_CACHE") or os.path.join(base, "rdma-vm")


def _add_guest(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    add = parser.add_argument_group("the guest").add_argument
    add("--nics", type=int, default=2, metavar="N", help="how many NICs with an RDMA device (2)")
    add("--driver", choices=["rxe", "siw"], default="rxe", help="soft-RoCE, or soft-iWARP (rxe)")
    add("--mtu", type=int, default=9000, metavar="BYTES", help="of the NICs; RoCE uses 4096 of it at most (9000)")
    add(
        "--how",
        choices=["auto", "kvm", "uml", "tcg"],
        default=environment.get("RDMA_VM_HOW", "auto"),
        help="the way to run it ($RDMA_VM_HOW, or auto)",
    )
    add("--memory", type=int, default=1024, metavar="MIB", help="1024 if not given")
    add("--cpus", type=int, metavar="N", help="kvm: 2 if not given, tcg: 1; uml has one")
    add("--append", action="append", default=[], metavar="WORD", help="one more word for the kernel's command line")


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the run").add_argument
    add("--timeout", type=float, default=0, metavar="S", help="end the command after S seconds, with status 124")
    add("--boot-timeout", type=float, default=120, metavar="S", help="until the command is started (120)")
    add("--rw", action="append", default=[], metavar="DIR", help="one more folder to write through")
    add("--discard", action="store_true", help="write nothing through, not the current directory either")
    add("--keep", action="store_true", help="keep the run's folder, with what the kernel said")
    add("-v", "--verbose", action="store_true", help="tell what is done, and when")


def _add_kernel(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    add = parser.add_argument_group("its kernel").add_argument
    cache = default_cache(environment)
    add("--cache", default=cache, metavar="DIR", help=f"where kernels are kept ($RDMA_VM_CACHE, or {cache})")
    add(
        "--kernel",
        default=environment.get("RDMA_VM_KERNEL", "linux-image-amd64"),
        metavar="PACKAGE",
        help="package or .deb file that kvm and tcg take it from ($RDMA_VM_KERNEL, or linux-image-amd64)",
    )
    add(
        "--source",
        default=environment.get("RDMA_VM_SOURCE", "linux-source"),
        metavar="PACKAGE",
        help="package or .deb file with the source for uml ($RDMA_VM_SOURCE, or linux-source)",
    )
    add("--prepare", action="store_true", help="get the kernel for kvm and tcg, unless it is there")
    add("--build-uml", action="store_true", help="build the kernel for uml, unless it is there: some minutes")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Return the options; what makes no sense ends the program with argparse's message and status 2."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [--nics N] [options] -- COMMAND [ARGUMENT...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_guest(parser, environment)
    _add_run(parser)
    _add_kernel(parser, environment)
    parser.add_argument("command", nargs="*", metavar="COMMAND", help=argparse.SUPPRESS)
    values = vars(parser.parse_args(arguments))
    values["cache"] = Path(values["cache"]).absolute()
    values["rw"], values["append"] = tuple(values["rw"]), tuple(values["append"])
    options = Options(**values)
    if not 0 <= options.nics <= MOST_NICS:
        parser.error(f"--nics: from 0 to {MOST_NICS}")
    if not (options.command or options.prepare or options.build_uml):
        parser.error("expected a command to run in the guest")
    return options
