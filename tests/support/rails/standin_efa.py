"""The stand-in for EFA's provider (tests/standin_efa): built, given to a process, and driven there by ctypes.

A process finds it by the environment that it starts with, and then lists it for good; so whatever meets it runs in a
process of its own. `driver` is for such a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiote.rails.library import find_libfabric
from support import TESTS
from support.checkout.compiled import kept

SOURCES = TESTS / "standin_efa"
EVERY = -1
"""Every NIC of this process."""
FAULTS = ("hold", "stop", "lose", "duplicate", "hide", "dry")
COUNTED = ("duplicated", "held", "lost", "orphaned", "discarded", "overflown", "not_ready", "silent")
COUNTED += ("flushed", "bad_key", "gone", "not_ready_ends", "unreachable")
OPEN = ("endpoints", "registrations", "addresses", "packets", "work", "unread")
WRITES = 1 << 0
REQUESTS = 1 << 0 | 1 << 1 | 1 << 2  # writes, messages, reads


@functools.cache
def provider_folder() -> Path:
    """Compile it, unless that was done, and return the folder for FI_PROVIDER_PATH."""
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command = [*shlex.split(os.environ.get("CC") or "cc"), *flags, *sorted(SOURCES.glob("*.c")), "-lpthread"]
    return kept("libefa-fi.so", command, sorted(SOURCES.glob("*.h"))).parent


def libraries() -> list[str]:
    """The newer of the wheel's and the system's library, and the system's."""
    system = Path("/lib/x86_64-linux-gnu/libfabric.so.1")
    return [*dict.fromkeys([str(find_libfabric().path), *([str(system)] if system.exists() else [])])]


def spoken(library: str) -> str:
    """Name a library in a test's name."""
    return "wheel" if "mpich" in library else "system"


def environment(wire: Path, library: str, **behaviour: str) -> dict[str, str]:
    """Return the environment of a process that is to find it; `behaviour` are its variables, `wire` its network."""
    return {
        **os.environ,
        "FI_PROVIDER_PATH": str(provider_folder()),
        "EFA_STANDIN_WIRE": str(wire),
        "EFA_STANDIN_API": "20" if spoken(library) == "wheel" else "17",
        "AIOTE_LIBFABRIC": library,
        "PYTHONWARNINGS": "ignore:provider='efa' was never run:RuntimeWarning",
        **behaviour,
    }


@functools.cache
def _loaded() -> Any:
    loaded = ctypes.CDLL(str(Path(os.environ["FI_PROVIDER_PATH"]) / "libefa-fi.so"))
    loaded.efa_standin_count.restype = loaded.efa_standin_open.restype = ctypes.c_long
    loaded.efa_standin_fault.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return loaded


def fault(what: str, value: int, nic: int = EVERY) -> None:
    """Set a fault of a NIC of this process: `hold` the kinds of packets in a mask, `stop` the NIC, `lose` or
    `duplicate` so many of 1000 packets, `hide` what immediates have come, be `dry`: take no receive, and end what
    waits for one after so many ms.
    """
    _loaded().efa_standin_fault(nic, FAULTS.index(what), value)


@contextmanager
def faulty(what: str, value: int, nic: int = EVERY) -> Iterator[None]:
    """Have a fault within the block."""
    fault(what, value, nic)
    try:
        yield
    finally:
        fault(what, 0, nic)


def break_pairs(nic: int = EVERY) -> None:
    """Put the queue pairs of a NIC into the state of errors."""
    _loaded().efa_standin_break(nic)


def counted(what: str) -> int:
    """Return how often something happened in this process."""
    return int(_loaded().efa_standin_count(COUNTED.index(what)))


def still_open(what: str) -> int:
    """Return how many of something this process has open."""
    return int(_loaded().efa_standin_open(OPEN.index(what)))
