"""A peer over a ring that says whatever a test wants: frames by hand, or anything else."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiote.rails import RemoteMemory
from aiote_native.system.wakeups import WakeupEvent
from support.rails.rail_pair import Memory, Side

SCHEME = b"aiote-ring://"
RING_BYTES = 2 << 20
DATA = 4096
RING_MARK = 0x31676E6972206F61
HEAD, TAIL = 64, 128
NUMBER = 0x1234
HEADER = struct.Struct("<HHIIiQQQ8Q")
"""Kind, places, immediate, times, status, done, key, length, and four places of an address and a length."""
WRITE, SEND, READ, ANSWER, ANSWERED, DONE, LEND, LENT, PULLED, EXPORT, OPENED, FORGET, FORGOTTEN = range(1, 14)

HANDLE = struct.Struct("<QQ16s64s")
"""Bytes of the allocation, its segments, token, and the driver's handle or the name of a socket."""
GPU_KEY = 1 << 58 | 5
"""A key of memory on a peer's device 0."""


@dataclass(frozen=True)
class Frame:
    """One frame; `length` is that of the places unless it is given, and `data` what follows the header."""

    kind: int
    places: Sequence[tuple[int, int]] = ()
    key: int = 0
    imm: int = 0
    times: int = 0
    status: int = 0
    done: int = 0
    length: int | None = None
    count: int | None = None
    data: bytes = b""

    def encode(self) -> bytes:
        length = sum(size for _, size in self.places) if self.length is None else self.length
        count = len(self.places) if self.count is None else self.count
        flat = [number for place in self.places for number in place]
        flat += [0] * (8 - len(flat))
        head = (self.kind, count, self.imm, self.times, self.status, self.done, self.key, length, *flat)
        return HEADER.pack(*head) + self.data


def write(memory: Memory, *places: tuple[int, int], data: bytes = b"", key: int | None = None, **more: Any) -> Frame:
    """Return a write into memory of the other side, at places of (offset, length)."""
    own, base = memory.local.keys[0]
    absolute = [((base + at) % (1 << 64), size) for at, size in places]
    return Frame(WRITE, absolute, own if key is None else key, data=data, **more)


def ring_memory(length: int = DATA + RING_BYTES, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """Return memory as a peer sends it, with the head of a ring in it."""
    fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    os.pwrite(fd, struct.pack("<QQQ", RING_MARK, RING_BYTES, NUMBER)[:length], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class RawRing:
    """The other end of a side's channel."""

    def __init__(self, side: Side) -> None:
        self._side = side
        ring = ring_memory()
        self.own = mmap.mmap(ring, DATA + RING_BYTES)
        self.wakeup = WakeupEvent()
        pending = side.rail_set.open_channel(0, 0)
        self._theirs = mmap.mmap(pending.endpoint.memory_fd, DATA + RING_BYTES)
        pending.map_memory([os.dup(self.wakeup.memory_fd), ring], self.wakeup.address)
        assert not pending.refused
        self.link = side.core.add_peer(side)
        side.rail_set.join(self.link, pending, SCHEME + b"%016x" % NUMBER, *side.rail_set.scratch.keys[0])
        side.rail_set.open_mailbox(self.link, 16, 4096, 16, 4096)
        side.core.progress()
        side.awake = True
        self._head = self._tail = 0

    def room(self) -> int:
        """Return how many bytes the side's ring has room for."""
        (tail,) = struct.unpack_from("<Q", self._theirs, TAIL)
        return RING_BYTES - (self._head - tail)

    def say(self, data: bytes) -> int:
        """Put bytes into the side's ring, as many as there is room for; return how many."""
        data = data[: self.room()]
        self.put(data)
        self.claim(self._head + len(data))
        return len(data)

    def put(self, data: bytes) -> None:
        """Put bytes into the side's ring without a word."""
        at = self._head % RING_BYTES
        first = data[: RING_BYTES - at]
        self._theirs[DATA + at : DATA + at + len(first)] = first
        self._theirs[DATA : DATA + len(data) - len(first)] = data[len(first) :]

    def claim(self, head: int) -> None:
        """Say that so many bytes were put into it."""
        self._head = head
        struct.pack_into("<Q", self._theirs, HEAD, head)

    def take_back(self, tail: int) -> None:
        """Say that so many bytes were taken out of the own one."""
        struct.pack_into("<Q", self.own, TAIL, tail)

    def heard(self) -> bytes:
        """Return what the side has said since the last call."""
        (head,) = struct.unpack_from("<Q", self.own, HEAD)
        data = bytes(self.own[DATA + at % RING_BYTES] for at in range(self._tail, head))
        self._tail = head
        self.take_back(head)
        return data

    def close(self) -> None:
        self.link.close()
        self._side.core.reap()
        self.own.close()
        self._theirs.close()
        self.wakeup.close()


@contextmanager
def raw_ring(side: Side) -> Iterator[RawRing]:
    ring = RawRing(side)
    try:
        yield ring
    finally:
        ring.close()


def frames(data: bytes) -> list[tuple[int, ...]]:
    """Return the headers in bytes that a side has said, without what follows them."""
    found, at = [], 0
    while at < len(data):
        head = HEADER.unpack_from(data, at)
        found.append(head)
        at += HEADER.size + (head[7] if head[0] in (WRITE, SEND, ANSWER, EXPORT) else 0)
        at += 8 * (1 + head[1]) if head[0] in (LEND, LENT) else 0
    return found


def told(side: Side, ring: RawRing, kind: int, *said: Frame) -> tuple[int, ...]:
    """Say frames, and return the first header of a kind that the side says then."""
    ring.say(b"".join(frame.encode() for frame in said))
    heard = b""
    while not (found := [head for head in frames(heard) if head[0] == kind]):
        side.core.progress()
        heard += ring.heard()
    return found[0]


def exported(side: Side, ring: RawRing, source: Memory) -> tuple[int, int, bytes, bytes]:
    """Return what the peer is told of the allocation of memory that is written to a GPU of its own."""
    side.write(ring.link, source, RemoteMemory(source.array.nbytes, True, ((GPU_KEY, 0),)))
    heard = b""
    while EXPORT not in [head[0] for head in frames(heard)]:
        side.core.progress()
        heard += ring.heard()
    at = HEADER.size * [head[0] for head in frames(heard)].index(EXPORT) + HEADER.size
    return HANDLE.unpack_from(heard, at)
