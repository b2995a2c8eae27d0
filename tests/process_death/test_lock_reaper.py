"""Locks in shared memory that a killed or stopped process held are freed, and only then.

The memory is made here, laid out as libfabric 1.17 does, so that the library's own version does not matter. Two tests
have the library itself meet a lock that is held, and a write of which a dead peer had posted half.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import re
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiote
from aiote.rails.lock_reaper import LOOKS, SCHEME, LockReaper
from aiote.rails.stale_files import SHARED_MEMORY, mark
from aiote_native.libfabric.device import SpinLock
from support.engines.opening import LOST_SOON, opened, served_on

pytestmark = pytest.mark.libfabric

LIBC = ctypes.CDLL(None)
VERSION, PROCESS_AT, LOCK_AT, SIGNAL_AT, QUEUE_AT = 4, 4, 24, 28, 64
QUEUE, HEAD, COMMAND, OPERATION_AT = 128, 32, 256, 16
SLOTS = 8
MESSAGE, READ, WRITE, WRITTEN = 0, 2, 4, 5  # operations; a second command follows a read and a write
PATIENCE_S = 60.0
SIZE = 1 << 18
NUMBERS = itertools.count(0xF00000)


class Lock:
    """The lock of an endpoint's memory, through a mapping of its own."""

    def __init__(self, memory: mmap.mmap, *, fresh: bool = True) -> None:
        self._word = ctypes.c_int.from_buffer(memory, LOCK_AT)
        if fresh:
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


class Commands:
    """The queue of an endpoint's memory: how many commands were read and written, and the ring of them."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        (self._at,) = struct.unpack_from("Q", memory, QUEUE_AT)
        (self._size,) = struct.unpack_from("Q", memory, self._at)

    @property
    def counts(self) -> tuple[int, int]:
        return struct.unpack_from("2Q", self._memory, self._at + 16)

    def _place(self, number: int) -> slice:
        start = self._at + HEAD + number % self._size * COMMAND
        return slice(start, start + COMMAND)

    def passed(self) -> list[bytes]:
        """Return the commands that were read and are still there, the last one last."""
        read, _ = self.counts
        return [self._memory[self._place(number)] for number in range(max(0, read - self._size), read)]

    def post(self, command: bytes) -> None:
        read, written = self.counts
        self._memory[self._place(written)] = command
        struct.pack_into("2Q", self._memory, self._at + 16, read, written + 1)


def command(operation: int) -> bytes:
    return struct.pack("16xI236x", operation)


def operation(command: bytes) -> int:
    return struct.unpack_from("I", command, OPERATION_AT)[0]


@contextmanager
def endpoint(process: int, version: int = VERSION) -> Iterator[tuple[bytes, Lock]]:
    """Lay out an endpoint's memory; yield its address and its lock, which is taken."""
    started = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    name = f"aiote-{process}-{started}-{mark().split('-')[3]}-{next(NUMBERS):x}"
    path = Path(f"{SHARED_MEMORY}/{name}")
    try:
        with path.open("xb+") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
                memory[0] = version
                memory[PROCESS_AT : PROCESS_AT + 4] = process.to_bytes(4, "little")
                struct.pack_into("Q", memory, QUEUE_AT, QUEUE)
                struct.pack_into("2Q", memory, QUEUE, SLOTS, SLOTS - 1)
                lock = Lock(memory)
                try:
                    assert not lock.taken()
                    yield f"{SCHEME}{name}\0".encode(), lock
                finally:
                    lock.forget()
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def lock_reaper(stands: float = 1000.0, rounds: Callable[[], int] = lambda: 0) -> Iterator[LockReaper]:
    one = LockReaper(rounds, stands)
    try:
        yield one
    finally:
        one.close()


def test_without_a_thread_left_the_next_peer_begins_the_watch(monkeypatch):
    """As where the limit of processes is reached: the peer is connected, and watched as soon as that can be."""
    peer = SimpleNamespace(closed=False)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with ExitStack() as stack:
        watch = stack.enter_context(lock_reaper())
        own, ours = stack.enter_context(endpoint(os.getpid()))
        process = subprocess.Popen(["sleep", "1000"])
        stack.callback(process.wait)
        stack.callback(process.kill)
        addresses = [stack.enter_context(endpoint(process.pid)) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            watch.add(peer, own, addresses[0][0])  # type: ignore[arg-type]
        watch.add(peer, own, addresses[1][0])  # type: ignore[arg-type]
        process.kill()
        assert all(lock.freed() for lock in (ours, addresses[0][1], addresses[1][1]))


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


@pytest.mark.parametrize("half", [False, True], ids=["whole", "half"])
@given(
    read=st.integers(0, 3 * SLOTS),
    operations=st.lists(st.sampled_from([MESSAGE, READ, WRITE, WRITTEN]), max_size=SLOTS // 2 - 1),
)
@settings(max_examples=30, deadline=None)
def test_the_first_of_two_commands_is_taken_back_and_nothing_else(half, read, operations):
    with endpoint(os.getpid()) as (address, _):
        path = f"{SHARED_MEMORY}/{address.decode().rstrip(chr(0)).removeprefix(SCHEME)}"
        with open(path, "rb+") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            struct.pack_into("2Q", memory, QUEUE + 16, read, read)
            queue = Commands(memory)
            for operation in operations:
                queue.post(command(operation))
                if operation in (READ, WRITE):
                    queue.post(command(WRITE))
            whole = queue.counts
            if half:
                queue.post(command(WRITE))
            assert SpinLock(path, os.getpid()).drop_half() is half
            assert queue.counts == whole


def test_a_queue_whose_size_is_changed_later_is_read_within_its_bounds():
    """The peer can write to it, and so to the word that says where the ring ends."""
    with endpoint(os.getpid()) as (address, _):
        path = f"{SHARED_MEMORY}/{address.decode().rstrip(chr(0)).removeprefix(SCHEME)}"
        with open(path, "rb+") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            lock = SpinLock(path, os.getpid())
            for read, written in ((1 << 40, (1 << 40) + SLOTS), (0, 1 << 40), (5, 4)):
                struct.pack_into("4Q", memory, QUEUE, 1 << 60, (1 << 60) - 1, read, written)
                assert not lock.drop_half()
                assert Commands(memory).counts == (read, written)


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


class Link:
    """A link that notes with what it was given up."""

    closed = False

    def __init__(self) -> None:
        self.given_up: list[int] = []
        self.told = threading.Event()

    def fail(self, errnum: int) -> None:
        self.given_up.append(errnum)
        self.told.set()


def paired(stack: ExitStack, watch: LockReaper, *command: str) -> tuple[Any, Lock, Lock, Link]:
    """Start a process, and watch a pair of endpoints of which it has one; both locks are taken."""
    process = subprocess.Popen(command)
    stack.callback(process.wait)
    stack.callback(process.kill)
    own, ours = stack.enter_context(endpoint(os.getpid()))
    peer, theirs = stack.enter_context(endpoint(process.pid))
    link = Link()
    watch.add(link, own, peer)  # type: ignore[arg-type]
    return process, ours, theirs, link


def test_both_locks_are_freed_when_the_peer_is_stopped_and_not_when_it_works():
    with ExitStack() as stack:
        watch = stack.enter_context(lock_reaper(stands=0.5))
        _, busy, _, other = paired(stack, watch, "sh", "-c", "while :; do :; done")
        process, ours, theirs, link = paired(stack, watch, "sh", "-c", "while :; do :; done")
        process.send_signal(signal.SIGSTOP)
        assert ours.freed()
        assert theirs.freed()
        assert link.told.wait(PATIENCE_S)
        assert link.given_up == [errno.ETIMEDOUT]
        assert busy.taken(), "freed though its peer works"
        assert other.given_up == []


def test_locks_are_not_freed_while_the_engine_does_rounds():
    rounds = itertools.count()
    looked = threading.Event()

    def count() -> int:
        number = next(rounds)
        if number == 10 * LOOKS:
            looked.set()
        return number

    with ExitStack() as stack:
        watch = stack.enter_context(lock_reaper(stands=0.1, rounds=count))
        process, ours, theirs, link = paired(stack, watch, "sleep", "1000")
        process.send_signal(signal.SIGSTOP)
        assert looked.wait(PATIENCE_S)
        assert ours.taken()
        assert theirs.taken()
        assert link.given_up == []


@pytest.mark.anyio
@pytest.mark.blocking_allowed("libfabric before 2.0 spins until its lock is freed")
async def test_an_engine_goes_on_when_a_peer_is_stopped_with_the_lock_held(child):
    """With libfabric before 2.0; later ones have no such lock, and the peer is only stopped."""
    victim = child()
    async with opened("shm", **LOST_SOON) as engine, opened("shm") as other:
        await victim.open("shm", SIZE, heartbeat_timeout=1000.0)
        await engine.connect(victim.address)
        await engine.connect(other.address)
        source = engine.register(bytearray(SIZE))
        target = engine.attach(victim.descriptor)
        await engine.write(source, target)
        await victim.stop()
        hold_locks(victim.pid)
        with pytest.raises(aiote.AioteError, match=re.escape(str(victim.address))):
            while True:
                await engine.write(source, target)
        await served_on(engine, other)


@pytest.mark.anyio
@pytest.mark.blocking_allowed("libfabric before 2.0 spins until its lock is freed")
async def test_an_engine_goes_on_when_a_peer_is_killed_between_the_two_commands_of_a_write(child):
    """With libfabric before 2.0, which never stops there or crashes; with a later one the peer is only killed."""
    victim = child()
    async with opened("shm", **LOST_SOON) as engine, opened("shm") as other:
        await victim.open("shm", SIZE)
        await engine.connect(victim.address)
        target = engine.register(bytearray(SIZE))
        await victim.ask("pour", descriptor=target.descriptor.hex(), imm=1, size=SIZE, count=9, window=1)
        await engine.counter(1).wait(9)
        half_a_write()
        victim.kill()
        with pytest.raises(aiote.AioteError, match=re.escape(str(victim.address))):
            while True:
                await engine.write(target, engine.attach(victim.descriptor))
        await engine.connect(other.address)
        await served_on(engine, other)


def half_a_write() -> None:
    """Post the first command of the write that came last once more, as if its peer were killed before the second."""
    for path in Path(SHARED_MEMORY).glob(f"aiote-{os.getpid()}-*"):
        with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as memory:
            if memory[0] != VERSION:
                continue
            queue = Commands(memory)
            writes = [one for one in queue.passed() if operation(one) == WRITE]
            if writes:
                lock = Lock(memory, fresh=False)
                assert not lock.taken()
                queue.post(writes[-1])
                struct.pack_into("i", memory, SIGNAL_AT, 1)
                lock.forget()


def hold_locks(process: int) -> None:
    """Take the lock of each of a process's endpoints, as if it were stopped in the midst of one."""
    for path in Path(SHARED_MEMORY).glob(f"aiote-{process}-*"):
        with path.open("rb+") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            if memory[0] == VERSION:
                lock = Lock(memory, fresh=False)
                while lock.taken():
                    time.sleep(0.001)
                lock.forget()
