"""Checks, before libfabric is called, of the system resources that an endpoint needs; and the limit on locked memory.

libfabric's providers crash if a resource is missing: `shm` of 2.5 in fi_enable without a descriptor, address space or
room in /dev/shm, `tcp` of 1.17 with six descriptors left or little address space. A check cannot prevent another thread
or process from taking the last of a resource between the check and the call.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import secrets

from .stale_files import SHARED_MEMORY

__all__ = ["locked_limit", "require_descriptors", "require_memory", "require_shared_memory"]

DESCRIPTORS = 16
"""More descriptors than an endpoint takes: tcp of 1.17 takes 7, tcp of 2.5 takes 4, shm takes 1 for a moment."""
SHARED_BYTES = 16 << 20
"""The size of an shm endpoint's file: 16 MiB with 1.17, 12.8 MiB with 2.5. If pages of it are missing later, the
process is killed.
"""

MEMORY_BYTES = 32 << 20
"""Bytes of address space: shm maps its file, and a few MiB more at most."""


def locked_limit() -> str:
    """Return the end of an error message: how much memory this process may lock. Empty if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; registration locks memory, and this process may lock {limit >> 10} KiB: raise the limit (ulimit -l)"


def require_memory() -> None:
    """Raise OSError unless an endpoint's memory can be mapped."""
    try:
        mmap.mmap(-1, MEMORY_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        reason = f"an endpoint takes up to {MEMORY_BYTES >> 20} MiB of address space: {error.strerror}"
        raise OSError(error.errno, f"{reason}; raise the limit (ulimit -v)") from error


def require_descriptors() -> None:
    """Raise OSError unless as many descriptors are free as an endpoint may take."""
    opened: list[int] = []
    try:
        for _ in range(DESCRIPTORS):
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        reason = f"an endpoint takes up to {DESCRIPTORS} descriptors, and {len(opened)} are free: {error.strerror}"
        raise OSError(error.errno, f"{reason}; raise the limit on open files (ulimit -n), or close some") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def require_shared_memory(mark: str) -> None:
    """Raise OSError unless an `shm` endpoint can create its file in /dev/shm and fill it. `mark` begins its name."""
    path = os.path.join(SHARED_MEMORY, mark + secrets.token_hex(8))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, SHARED_BYTES)
            found = os.fstatvfs(descriptor)
            if found.f_bavail * found.f_frsize < SHARED_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as error:
        reason = f"each peer takes a file of {SHARED_BYTES >> 20} MiB in {SHARED_MEMORY}: {error.strerror}"
        advice = "mount a tmpfs there that is writable and large enough (docker: --shm-size), or use provider='local'"
        raise OSError(error.errno, f"{reason}; {advice}") from error
