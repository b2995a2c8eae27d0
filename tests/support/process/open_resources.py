"""What a process has open: its descriptors, its threads, its files in /dev/shm, its memory."""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BEFORE = frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else frozenset()
"""What lay there before this process was started: no child of it has made that, though one may have the number."""


def descriptors() -> dict[int, str]:
    """Return this process's descriptors with what they lead to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return found


def described(fd: int, leads_to: str) -> str:
    """Return one line on a descriptor; of a socket also the addresses at its two ends."""
    ends = []
    if leads_to.startswith("socket:"):
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            ends.append(f"{copy.family.name} at {copy.getsockname()}")
            ends.append("listens" if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else "does not listen")
            ends.append(f"leads to {copy.getpeername()}")
    return ", ".join([f"descriptor {fd} -> {leads_to}", *ends])


def threads() -> dict[int, str]:
    """Return this process's threads with their names."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        try:
            found[int(name)] = Path(f"/proc/self/task/{name}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def shared_files(pid: int = 0) -> list[str]:
    """Return the files in /dev/shm that a process made, this one or another, alive or not."""
    pid = pid or os.getpid()
    found = {path.name for pattern in (f"aiote-{pid}-*", f"{pid}:*") for path in SHARED_MEMORY.glob(pattern)}
    return sorted(found - BEFORE)


def resident_bytes() -> int:
    """Return this process's resident memory, without what is free in it.

    glibc keeps freed blocks of up to 32 MiB for later: those that tcp's buffers had, 17 MB each, now and then.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def idle_threads() -> int:
    """Return how many engines have an idle thread, which may start at any time and ends with its engine."""
    return sum(name == "aiote-idle" for name in threads().values())


class Baseline:
    """What was open at one moment."""

    def __init__(self) -> None:
        self._descriptors = descriptors()
        self._threads = threads()
        self._files = shared_files()

    def left(self) -> list[str]:
        """Return what is open now and was not then."""
        return [
            *(described(fd, to) for fd, to in descriptors().items() if self._descriptors.get(fd) != to),
            *(f"thread {number} ({name})" for number, name in threads().items() if number not in self._threads),
            *(f"/dev/shm/{name}" for name in shared_files() if name not in self._files),
        ]
