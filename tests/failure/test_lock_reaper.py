"""Locks in shared memory that a killed process held are freed, and only then.

The memory is made here, laid out as libfabric 1.17 does, so that the library's own version does not matter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiote.rails.lock_reaper import SCHEME, DeadPeerLockReaper
from aiote.rails.stale_files import SHARED_MEMORY, mark

pytestmark = pytest.mark.libfabric

LIBC = ctypes.CDLL(None)
VERSION, PROCESS_AT, LOCK_AT = 4, 4, 24
PATIENCE_S = 60.0


class Lock:
    """The lock of an endpoint's memory, through a mapping of its own."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._word = ctypes.c_int.from_buffer(memory, LOCK_AT)
        LIBC.pthread_spin_init(ctypes.byref(self._word), 1)

    def taken(self) -> bool:
        """Take it, if it is free; tell whether it was not."""
        return bool(LIBC.pthread_spin_trylock(ctypes.byref(self._word)))

    def freed(self) -> bool:
        """Tell whether it can be taken in the end."""
        end = time.monotonic() + PATIENCE_S
        while self.taken():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def forget(self) -> None:
        del self._word


@contextmanager
def endpoint(process: int, version: int = VERSION) -> Iterator[tuple[bytes, Lock]]:
    """Lay out an endpoint's memory; yield its address and its lock, which is taken."""
    started = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    name = f"aiote-{process}-{started}-{mark().split('-')[3]}-{process:x}"
    path = Path(f"{SHARED_MEMORY}/{name}")
    try:
        with path.open("xb+") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                memory[0] = version
                memory[PROCESS_AT : PROCESS_AT + 4] = process.to_bytes(4, "little")
                lock = Lock(memory)
                try:
                    assert not lock.taken()
                    yield f"{SCHEME}{name}\0".encode(), lock
                finally:
                    lock.forget()
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def lock_reaper() -> Iterator[DeadPeerLockReaper]:
    one = DeadPeerLockReaper()
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_both_locks_are_freed_when_the_peer_is_killed(later):
    with ExitStack() as stack:
        watch = stack.enter_context(lock_reaper())
        own, ours = stack.enter_context(endpoint(os.getpid()))
        pairs = []
        for _ in range(1 + later):
            process = subprocess.Popen(["sleep", "1000"])
            stack.callback(process.wait)
            stack.callback(process.kill)
            peer, theirs = stack.enter_context(endpoint(process.pid))
            watch.add(SimpleNamespace(closed=False), own, peer)  # type: ignore[arg-type]
            pairs.append((process, theirs))
        killed, theirs = pairs[-1]
        time.sleep(0.05)
        assert ours.taken(), "freed while everybody lives"
        assert theirs.taken(), "freed while everybody lives"
        killed.kill()
        assert ours.freed()
        assert theirs.freed()
        for process, other in pairs[:-1]:
            assert process.poll() is None
            assert other.taken(), "freed though its own process lives"


def test_memory_of_another_layout_is_left_alone():
    with ExitStack() as stack:
        watch = stack.enter_context(lock_reaper())
        process = subprocess.Popen(["sleep", "1000"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        own, ours = stack.enter_context(endpoint(os.getpid()))
        peer, theirs = stack.enter_context(endpoint(process.pid, version=VERSION + 1))
        watch.add(SimpleNamespace(closed=False), own, peer)  # type: ignore[arg-type]
        process.kill()
        process.wait()
        time.sleep(0.05)
        assert ours.taken()
        assert theirs.taken()
