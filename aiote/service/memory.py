"""Memory for what is too long for a message: lent to a peer, borrowed from it, and registered for a while.

Each side lends the other some, in pieces of memory called *segments*, each by a lease of its own that ends with the
peer. Who has borrowed a segment places what it sends in it, and takes a place again once the other side has read it:
so nothing has to be asked for a single call, and a caller that is cancelled need not wait for its places.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy
from numpy.typing import NDArray

import aiote

from ..aio import EventLoop, Waiter
from .frames import Piece

__all__ = ["LEND_BYTES", "Allocator", "Borrowed", "Budget", "Lent", "Registrations", "Staging"]

ALIGNMENT = 64
SEGMENT_BYTES = 16 << 20
"""A segment has at least so many bytes, and as many as are asked for in one piece."""
LEND_BYTES = 1 << 20
"""Arrays to be filled, from this size on, are lent for the call and written in place; a lease costs 0.3 ms."""
MOST_SEGMENTS = 64
"""Of one peer, in one direction: each is a registration."""


class Allocator:
    """Places of one stretch of memory, first fit; `take` returns an offset or None."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._starts = [0]
        self._lengths = [nbytes]

    def take(self, nbytes: int) -> int | None:
        """Take a place for so many bytes."""
        need = _aligned(nbytes)
        for index, length in enumerate(self._lengths):
            if length >= need:
                start = self._starts[index]
                if length == need:
                    del self._starts[index], self._lengths[index]
                else:
                    self._starts[index], self._lengths[index] = start + need, length - need
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a place back that was taken."""
        need = _aligned(nbytes)
        index = bisect.bisect_left(self._starts, offset)
        self._starts.insert(index, offset)
        self._lengths.insert(index, need)
        # With its neighbours it makes one.
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._end(left) == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]

    def _end(self, index: int) -> int:
        return self._starts[index] + self._lengths[index]


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class Budget:
    """How much memory an engine lends and stages, in all and for one peer."""

    def __init__(self, total: int, peer: int) -> None:
        self.total = total
        self.peer = peer
        self.used = 0

    def take(self, nbytes: int, held: int, segments: int) -> int:
        """Take a segment's bytes, for `nbytes` in one piece, for a peer that has `held` bytes in so many segments.

        Raises BlockingIOError with the reason where there are none.
        """
        least = _aligned(nbytes)
        size = max(SEGMENT_BYTES, least) if held + SEGMENT_BYTES <= self.peer else least
        if held + size > self.peer or segments >= MOST_SEGMENTS:
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: one peer has at most {self.peer} under way (peer_bytes)"
            )
        if self.used + size > self.total:
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: {self.used} of {self.total} (total_bytes) are in use"
            )
        self.used += size
        return size


class Lent:
    """The segments that one peer may write to. `close` takes them back."""

    def __init__(self, engine: aiote.Engine, peer: aiote.Peer, budget: Budget) -> None:
        self._engine, self._peer, self._budget = engine, peer, budget
        self._segments: dict[int, tuple[memoryview, aiote.Region]] = {}
        self.nbytes = 0

    def lend(self, nbytes: int) -> tuple[int, int, bytes]:
        """Lend one more segment, of at least so many bytes; return its number, length and descriptor.

        Raises BlockingIOError with the reason where there is no memory for it, FabricError.
        """
        size = self._budget.take(nbytes, self.nbytes, len(self._segments))
        try:
            region = self._engine.register(numpy.zeros(size, numpy.uint8), access="local")
            descriptor = region.lease(slice(0, size), self._peer).descriptor
        except BaseException:
            self._budget.used -= size
            raise
        self.nbytes += size
        number = len(self._segments)
        self._segments[number] = (memoryview(region), region)
        return number, size, descriptor

    def view(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece, read-only. Raises ValueError for what is none."""
        number, offset, nbytes = piece
        if number not in self._segments:
            raise ValueError(f"there is no lent memory {number}")
        memory = self._segments[number][0]
        if offset + nbytes > len(memory):
            raise ValueError(f"bytes {offset} to {offset + nbytes} leave the {len(memory)} of lent memory {number}")
        return memory[offset : offset + nbytes].toreadonly()

    async def close(self) -> None:
        """Take all segments back: nobody writes there any more when this returns."""
        segments, self._segments = self._segments, {}
        try:
            # Arrays that a method still has are views of the memory, which lives as long as they do.
            for _, region in segments.values():
                await region.aclose()
        finally:
            self._budget.used -= self.nbytes
            self.nbytes = 0


class _Turn:
    """One who waits for a place."""

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: Waiter | None = None


class Borrowed:
    """The segments that a peer has lent to us, and who waits for a place in them, first come, first served."""

    def __init__(self, engine: aiote.Engine, loop: EventLoop, ask: Callable[[int], object]) -> None:
        self._engine, self._loop, self._ask = engine, loop, ask
        self._segments: dict[int, tuple[Allocator, aiote.RemoteRegion]] = {}
        self._taken: set[Piece] = set()
        self._line: deque[_Turn] = deque()
        self._asked = 0
        self._refused = ""
        self._end: Exception | None = None

    async def place(self, nbytes: int) -> tuple[Piece, aiote.RemoteRegion]:
        """Take a place for so many bytes, waiting until there is one.

        Raises BlockingIOError with the reason where there will be none, and what `close` was given.
        """
        turn = _Turn()
        self._line.append(turn)
        try:
            while True:
                if self._end is not None:
                    raise self._end
                if self._line[0] is turn:
                    found = self._take(nbytes)
                    if found is not None:
                        return found
                    self._grow(nbytes)
                turn.waiter = self._loop.waiter()
                await turn.waiter
        finally:
            self._line.remove(turn)
            self._wake()

    def _wake(self) -> None:
        """Have the first in line look again."""
        waiter = self._line[0].waiter if self._line else None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self, nbytes: int) -> tuple[Piece, aiote.RemoteRegion] | None:
        for number, (allocator, remote) in self._segments.items():
            offset = allocator.take(nbytes)
            if offset is not None:
                piece = (number, offset, nbytes)
                self._taken.add(piece)
                return piece, remote[offset : offset + nbytes]
        return None

    def _grow(self, nbytes: int) -> None:
        """Ask for one more segment, once; where that is refused, wait for places, if they may ever suffice."""
        if not self._asked:
            self._asked = nbytes
            self._refused = ""
            self._ask(nbytes)
        elif self._refused:
            largest = max((allocator.nbytes for allocator, _ in self._segments.values()), default=0)
            if _aligned(nbytes) > largest:
                reason, self._asked = self._refused, 0
                raise BlockingIOError(reason)

    def granted(self, number: int, nbytes: int, descriptor: bytes, reason: str) -> None:
        """Take note of the answer to what was asked. Raises ValueError for one to nothing, UsageError."""
        if not self._asked or self._refused:
            raise ValueError("memory is lent that nobody has asked for")
        if not descriptor:
            self._refused = reason or "it lends no memory"
        else:
            remote = self._engine.attach(descriptor)
            if number in self._segments or remote.nbytes != nbytes or nbytes < self._asked:
                raise ValueError("the memory that is lent is not what was asked for")
            self._segments[number] = (Allocator(nbytes), remote)
            self._asked = 0
        self._wake()

    def give(self, piece: Piece) -> None:
        """Give a place back. Raises KeyError for one that is not taken."""
        self._taken.remove(piece)
        number, offset, nbytes = piece
        self._segments[number][0].give(offset, nbytes)
        if self._refused:
            # What was refused may be granted now: others have given back, too.
            self._asked, self._refused = 0, ""
        self._wake()

    @property
    def taken_bytes(self) -> int:
        """How many bytes are taken now."""
        return sum(piece[2] for piece in self._taken)

    def close(self, error: Exception) -> None:
        """End every wait with an error."""
        self._end = error
        self._wake()


class Registrations:
    """The registrations of arrays that callers passed last, kept for the next call with the same memory.

    They keep the arrays alive, up to `nbytes` in all and MOST of them; those not used for longest go first.
    """

    MOST = 32

    def __init__(self, engine: aiote.Engine, nbytes: int, closing: Callable[[aiote.Region], object]) -> None:
        self._engine, self._limit, self._closing = engine, nbytes, closing
        self._kept: OrderedDict[tuple[int, int, bool], tuple[aiote.Region, int]] = OrderedDict()
        self._nbytes = 0

    def take(self, array: NDArray[Any]) -> aiote.Region:
        """Return the registration of an array, of which `give` has to tell that it is not used any more."""
        key = _key(array)
        found = self._kept.get(key)
        if found is not None:
            self._kept[key] = (found[0], found[1] + 1)
            return found[0]
        region = self._engine.register(array, access="local")
        self._kept[key] = (region, 1)
        self._nbytes += region.nbytes
        return region

    def give(self, array: NDArray[Any]) -> None:
        """Take note that an array's registration was used; keep it, if there is room."""
        key = _key(array)
        region, users = self._kept[key]
        self._kept[key] = (region, users - 1)
        self._kept.move_to_end(key)
        self._shrink()

    def _shrink(self) -> None:
        for key in tuple(self._kept):
            if self._nbytes <= self._limit and len(self._kept) <= self.MOST:
                return
            region, users = self._kept[key]
            if not users:
                del self._kept[key]
                self._nbytes -= region.nbytes
                self._closing(region)


def _key(array: NDArray[Any]) -> tuple[int, int, bool]:
    return array.__array_interface__["data"][0], array.nbytes, array.flags.writeable


class Staging:
    """Memory of our own for arrays that a method fills for one peer, which never see another peer's bytes."""

    def __init__(self, engine: aiote.Engine, budget: Budget) -> None:
        self._engine, self._budget = engine, budget
        self._segments: list[tuple[Allocator, NDArray[numpy.uint8], aiote.Region]] = []
        self._nbytes = 0

    def take(self, nbytes: int) -> tuple[int, int, NDArray[numpy.uint8], aiote.Region]:
        """Return the number, offset, memory and registration of a place. Raises BlockingIOError with the reason."""
        for number, (allocator, memory, region) in enumerate(self._segments):
            offset = allocator.take(nbytes)
            if offset is not None:
                return number, offset, memory[offset : offset + nbytes], region[offset : offset + nbytes]
        size = self._budget.take(nbytes, self._nbytes, len(self._segments))
        try:
            memory = numpy.zeros(size, numpy.uint8)
            region = self._engine.register(memory, access="local")
        except BaseException:
            self._budget.used -= size
            raise
        self._nbytes += size
        self._segments.append((Allocator(size), memory, region))
        return self.take(nbytes)

    def give(self, number: int, offset: int, nbytes: int) -> None:
        """Give a place back."""
        self._segments[number][0].give(offset, nbytes)

    async def close(self) -> None:
        """Let go of the memory, once no transfer uses it."""
        segments, self._segments = self._segments, []
        try:
            for _, _, region in segments:
                await region.aclose()
        finally:
            self._budget.used -= self._nbytes
            self._nbytes = 0
