"""Shared memory as a liar makes it, and what this process has open and mapped."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from aiote_native.system.wakeups import SEALS

SIZE = 3 * 4096 + 5
NAME = "memfd:aiote-shared"
F_SEAL_FUTURE_WRITE = 0x10


def mappings() -> int:
    """Return how often this process has mapped memory that an engine shared."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        return sum(NAME in line for line in lines)


def descriptors() -> int:
    """Return how many memories, sockets and files this process has open; an engine opens timers when it needs them."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("anon_inode:")
    return count


def forged(length: int = SIZE, seals: int = SEALS, flags: int = 0) -> int:
    """Return a memfd of this length with these seals."""
    made = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(made, length)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def read_only() -> int:
    """Return sound memory, opened for reading."""
    made = forged()
    try:
        return os.open(f"/proc/self/fd/{made}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(made)
