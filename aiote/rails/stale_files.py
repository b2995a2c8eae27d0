"""Removing the shared memory of processes that were killed.

Endpoints of `shm` have files in /dev/shm, and a process that is killed with -9 leaves them behind. We choose their
names, which identify the owner: `aiote-<process>-<start>-<namespace>-...`, with the process's start time and the PID
namespace. So neither a process that reuses the number nor one of another container is mistaken for the owner.
"""

from __future__ import annotations

import os
import re

__all__ = ["SHARED_MEMORY", "mark", "owner", "processor_ticks", "remove_stale_files"]

SHARED_MEMORY = "/dev/shm"
NAME = re.compile(r"aiote-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


def mark() -> str:
    """Return the prefix of the names of this process's endpoints."""
    pid = os.getpid()
    return f"aiote-{pid}-{_start(pid) or 0}-{_namespace()}-"


def owner(name: str) -> int | None:
    """Return the process that owns one of our files, or None if the process is of another PID namespace."""
    match = NAME.match(name)
    return int(match[1]) if match is not None and int(match[3]) == _namespace() else None


def remove_stale_files() -> int:
    """Remove the files of dead processes; return how many. Files that this process may not remove are left."""
    removed = 0
    namespace = _namespace()
    dead: dict[tuple[int, int], bool] = {}
    for name in _names():
        match = NAME.match(name)
        if match is None or int(match[3]) != namespace:
            continue
        owner = int(match[1]), int(match[2])
        if owner not in dead:
            dead[owner] = _start(owner[0]) != owner[1]
        if dead[owner]:
            try:
                os.unlink(os.path.join(SHARED_MEMORY, name))
                removed += 1
            except OSError:
                pass
    return removed


def _names() -> list[str]:
    try:
        return os.listdir(SHARED_MEMORY)
    except OSError:
        return []


def _namespace() -> int:
    """Return the number of this process's PID namespace, or 0 if it cannot be read."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _fields(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; None for a dead process, waited for or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields


def _start(pid: int) -> int | None:
    """Return when a process was started, in ticks since the boot; None for a dead process, waited for or not."""
    fields = _fields(pid)
    return None if fields is None else int(fields[19])


def processor_ticks(pid: int) -> int | None:
    """Return the processor time that a process has used, in ticks; None for a dead process, waited for or not."""
    fields = _fields(pid)
    return None if fields is None else int(fields[11]) + int(fields[12])
