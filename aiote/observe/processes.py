"""Which process wrote something that lies on this host, and whether it is the one that lives now.

A number alone does not tell: numbers are given again, a child that nobody has waited for still has its own, and in
another PID namespace (a container) the same number is somebody else. The time of its birth and the namespace do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["ProcessId", "this_process"]

STATE, BORN = 0, 19
"""Fields of /proc/PID/stat behind the name, which may contain spaces and parentheses (proc_pid_stat(5))."""
DEAD = {"Z", "X", "x"}
NAMED = re.compile(r"(\d{1,20})-(\d{1,10})-(\d{1,20})(?=-|$)")


class ProcessId(NamedTuple):
    """A process of this host: its PID namespace, its number there, and its birth in ticks since the boot."""

    namespace: int
    pid: int
    born: int

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Return the one whose text `text` begins with; None where it begins with none."""
        found = NAMED.match(text)
        return cls(*map(int, found.groups())) if found else None

    @property
    def local(self) -> bool:
        """Whether its number means something here."""
        return self.namespace == _namespace()

    @property
    def alive(self) -> bool:
        """Whether it runs; of one in another namespace nobody can tell, and this is False."""
        return self.local and _born(self.pid) == self.born

    def __str__(self) -> str:
        return f"{self.namespace}-{self.pid}-{self.born}"


def this_process() -> ProcessId:
    """Return the one that asks; after a fork it is the child. Raises OSError without /proc."""
    born = _born(os.getpid())
    if born is None:
        raise FileNotFoundError("/proc does not tell when this process was born")
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
