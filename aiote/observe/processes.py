"""Identify the process that wrote a file on this host, and tell whether that process is still alive.

A PID alone does not suffice: the kernel reuses PIDs, a zombie keeps its PID until its parent waits for it, and in
another PID namespace (a container) the same PID is another process. The PID with its start time and its namespace does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessId", "this_process"]

STATE, BORN = 0, 19
"""Fields of /proc/PID/stat, counted after the name, which may contain spaces and parentheses (proc_pid_stat(5))."""
DEAD = {"Z", "X", "x"}
NAMED = re.compile(r"(\d{1,20})-(\d{1,10})-(\d{1,20})(?=-|$)")


class ProcessId(NamedTuple):
    """A process of this host: its PID namespace, its PID there, and its start time in clock ticks since the boot."""

    namespace: int
    pid: int
    born: int

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Return the process whose identity begins `text`, or None if `text` does not begin with an identity."""
        found = NAMED.match(text)
        return cls(*map(int, found.groups())) if found else None

    @property
    def local(self) -> bool:
        """Whether the process is in this PID namespace, so that its PID is meaningful here."""
        return self.namespace == _namespace()

    @property
    def alive(self) -> bool:
        """Whether the process is alive; False for a process in another namespace, whose state is not visible."""
        return self.local and _born(self.pid) == self.born

    def __str__(self) -> str:
        return f"{self.namespace}-{self.pid}-{self.born}"


def this_process() -> ProcessId:
    """Return the calling process; in a forked child that is the child. Raises OSError without /proc."""
    born = _born(os.getpid())
    if born is None:
        raise FileNotFoundError("/proc does not say when this process was started")
    return ProcessId(_namespace(), os.getpid(), born)


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _born(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    found = text.rpartition(")")[2].split()
    return None if len(found) <= BORN or found[STATE] in DEAD else int(found[BORN])
