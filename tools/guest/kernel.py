"""The kernel of user-mode Linux: what is chosen in it, what is changed in its source, and how it is built.

`RECIPE` names the folder of the cache that holds the result. It is hashed as it is written, spaces and line breaks
included: whoever edits it makes everybody build once more.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from . import cache, packages
from .host import Problem, lacking, require, run_quiet
from .options import PROGRAM

# What is chosen beyond the smallest configuration there is. UML_PCI_OVER_VIRTIO brings no device but lets InfiniBand
# and soft-RoCE be chosen; its device number may be any but -1.
CONFIG = """
64BIT EXPERT MULTIUSER MMU PRINTK BUG FUTEX EPOLL SIGNALFD TIMERFD EVENTFD AIO IO_URING SHMEM
MEMBARRIER ADVISE_SYSCALLS POSIX_TIMERS HIGH_RES_TIMERS NO_HZ_IDLE SYSVIPC POSIX_MQUEUE
CROSS_MEMORY_ATTACH FILE_LOCKING INOTIFY_USER FANOTIFY BINFMT_ELF BINFMT_SCRIPT
CC_OPTIMIZE_FOR_PERFORMANCE NAMESPACES UTS_NS IPC_NS PID_NS USER_NS NET_NS
SYSFS PROC_FS PROC_SYSCTL PROC_PAGE_MONITOR TMPFS TMPFS_POSIX_ACL TMPFS_XATTR DEVTMPFS HOSTFS
OVERLAY_FS BLOCK CONFIGFS_FS TTY UNIX98_PTYS STDERR_CONSOLE SSL NULL_CHAN
NET UNIX PACKET INET IPV6 IP_ADVANCED_ROUTER IP_MULTIPLE_TABLES NETDEVICES NET_CORE VETH DUMMY
BRIDGE NET_SCHED NET_SCH_NETEM NET_SCH_TBF
VIRTIO_MENU VIRTIO_UML UML_PCI_OVER_VIRTIO PCI UDMABUF DMABUF_HEAPS DMABUF_HEAPS_SYSTEM
INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS RDMA_RXE RDMA_SIW
"""
VALUES = {"KERNEL_STACK_ORDER": "4", "UML_PCI_OVER_VIRTIO_DEVICE_ID": "1234"}
# (file, what is there, what takes its place)
CHANGES = [
    # Room for the floating-point registers of a processor: one with AMX has 11 KB of them, not 2.6.
    ("arch/x86/um/user-offsets.c", "DEFINE_LONGS(HOST_FP_SIZE, 2696)", "DEFINE_LONGS(HOST_FP_SIZE, 12288)"),
    # A thousand clock ticks a second: on the one processor, processes that poll take turns by the tick.
    ("arch/um/Kconfig", "config HZ\n\tint\n\tdefault 100\n", "config HZ\n\tint\n\tdefault 1000\n"),
]
RECIPE = (CONFIG, VALUES, CHANGES)

# Checked before the long part: a kernel that cannot be configured with these is of no use.
NEEDED = ["HOSTFS", "OVERLAY_FS", "DEVTMPFS", "SSL", "VETH", "BRIDGE", "IP_MULTIPLE_TABLES"]
NEEDED += ["INFINIBAND_USER_ACCESS", "RDMA_RXE", "RDMA_SIW"]
PROGRAMS = {"make": "make", "gcc": "gcc", "flex": "flex", "bison": "bison", "bc": "bc", "xz": "xz-utils"}
PURPOSE = "build the kernel"
BUILD_S = 3600


def home(folder: Path, package: str) -> Path:
    return cache.home(folder, package, RECIPE)


def build(folder: Path, package: str) -> None:
    """Build the kernel unless the cache has it; then it costs nothing."""
    target = home(folder, package)
    if not target.is_dir():
        require(missing(), PURPOSE)
    cache.make(target, package, _fill, announcement(target, package))


def announcement(target: Path, package: str) -> str:
    return (
        f"building a user-mode Linux kernel with soft-RoCE from {package} (140 MB to get) into {target}, once: "
        f"4 to 6 minutes with two processors, here are {os.cpu_count()}"
    )


def missing() -> dict[str, str]:
    """Return what this machine lacks to build the kernel, each with its Debian package."""
    found = lacking(PROGRAMS)
    if "gcc" in found or not _has_headers():
        found["stdio.h"] = "libc6-dev"
    return found


def _has_headers() -> bool:
    done = subprocess.run(["gcc", "-E", "-xc", "-"], input=b"#include <stdio.h>", capture_output=True)
    return done.returncode == 0


def _fill(package: str, folder: Path, scratch: Path) -> None:
    package = packages.unpack(package, scratch)
    source = _unpack_source(package, scratch)
    make = ["make", "ARCH=um", f"-j{os.cpu_count()}"]
    _configure(package, source, scratch / "config", make)
    run_quiet([*make, "linux"], PURPOSE, cwd=source, limit_s=BUILD_S)
    run_quiet(["strip", "-o", str(folder / "linux"), str(source / "linux")], "strip the kernel")


def _unpack_source(package: str, scratch: Path) -> Path:
    packed = next(scratch.glob("usr/src/linux-source-*.tar.*"), None)
    if packed is None:
        raise Problem(f"there is no kernel source in {package}; `{PROGRAM} --source` names another package")
    run_quiet(["tar", "xf", str(packed)], "unpack the kernel source", cwd=scratch)
    source = next(path for path in scratch.glob("linux-source-*") if path.is_dir())
    for name, before, after in CHANGES:
        path = source / name
        path.write_text(path.read_text().replace(before, after))
    return source


def _configure(package: str, source: Path, chosen: Path, make: list[str]) -> None:
    lines = [f"CONFIG_{name}=y\n" for name in CONFIG.split()]
    lines += [f"CONFIG_{name}={value}\n" for name, value in VALUES.items()]
    chosen.write_text("".join(lines))
    run_quiet(["env", f"KCONFIG_ALLCONFIG={chosen}", *make, "allnoconfig"], "configure the kernel", cwd=source)
    have = (source / ".config").read_text().splitlines()
    absent = [name for name in NEEDED if f"CONFIG_{name}=y" not in have]
    if absent:
        raise Problem(f"{package} cannot be configured with {', '.join(absent)}")
