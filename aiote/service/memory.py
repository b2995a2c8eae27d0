"""Memory for what is too long for a message: lent to a peer, and borrowed from it.

Each side lends the other some, in pieces of memory called *segments*, each by a lease of its own that ends with the
peer. Who has borrowed a segment places what it sends in it, and takes a place again once the other side has read it:
so nothing has to be asked for a single call, and a caller that is cancelled need not wait for its places. It gives a
segment back in which nothing was placed for a while, and asks again when it needs one.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy
from numpy.typing import NDArray

import aiote

from ..aio import EventLoop, Signal, Waiter
from .frames import Piece

__all__ = ["LEND_BYTES", "Allocator", "Borrowed", "Budget", "Lent", "Share", "Staging"]

ALIGNMENT = 64
FIRST_BYTES = 1 << 20
SEGMENT_BYTES = 16 << 20
"""A segment has as many bytes as are asked for in one piece, and at least as many as all before it, within these two:
a peer that sends little costs little.
"""
LEND_BYTES = 256 << 10
"""Arrays to be filled, from this size on, are lent for the call and written in place; a lease costs 0.3 ms."""
MAX_SEGMENTS = 64
"""Of one peer, in one direction: each is a registration."""
IDLE_S = 10.0
"""A segment in which nothing was for at least so long, and at most twice as long, is given back."""
SLOW_BYTES = 4 << 20
"""More than so many bytes are registered beside the event loop: to pin them may take long."""


class Allocator:
    """Places of one stretch of memory, first fit; `take` returns an offset or None."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._starts = [0]
        self._lengths = [nbytes]
        self._used = True

    def take(self, nbytes: int) -> int | None:
        """Take a place for so many bytes."""
        need = _aligned(nbytes)
        self._used = True
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
        index = bisect.bisect_left(self._starts, offset)
        self._starts.insert(index, offset)
        self._lengths.insert(index, _aligned(nbytes))
        # With its neighbours it makes one.
        for left in (index, index - 1):
            if 0 <= left < len(self._starts) - 1 and self._end(left) == self._starts[left + 1]:
                self._lengths[left] += self._lengths[left + 1]
                del self._starts[left + 1], self._lengths[left + 1]

    def idle(self) -> bool:
        """Tell whether no place is taken, nor was since this was asked last."""
        used, self._used = self._used, False
        return not used and self.free

    @property
    def free(self) -> bool:
        """Whether no place is taken."""
        return self._lengths == [self.nbytes]

    def _end(self, index: int) -> int:
        return self._starts[index] + self._lengths[index]


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class Share:
    """What waits for one identity, in bytes: its calls that have not ended, and answers that it has not taken.

    `refuse` is called where all have taken what there is, and this one the most of it; until its bytes are given back
    it has no more.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self.refused = False
        self.refuse: Callable[[], object] | None = None


class Budget:
    """How much memory an engine spends on values under way, in all and for one peer: lent, staged, unfolded, waiting.

    What waits is charged to an identity, so that a peer that connects anew has what is left of its share.
    """

    def __init__(self, total: int, peer: int) -> None:
        self.total = total
        self.peer = peer
        self.used = self.waiting = 0
        # What waits of those that were refused: it is about to be given back.
        self._returning = 0
        self._shares: weakref.WeakValueDictionary[bytes, Share] = weakref.WeakValueDictionary()

    def share_of(self, identity: bytes) -> Share:
        """Return the share of an identity, which lasts as long as somebody has it."""
        return self._shares.setdefault(identity, Share())

    def wait(self, share: Share, nbytes: int, most: int | None = None) -> None:
        """Charge bytes that wait for a peer, `peer` at most by default. Raises BlockingIOError for more.

        Where all is used, the greediest is refused first, and this one if there is no greedier.
        """
        most = self.peer if most is None else most
        if share.waiting + nbytes > most:
            raise BlockingIOError(f"{share.waiting} bytes wait for this peer, and {nbytes} more, of {most} that may")
        if share.refused:
            raise BlockingIOError(f"this peer was refused, and {share.waiting} bytes of it are not given back yet")
        while self.waiting - self._returning + nbytes > self.total:
            self._refuse_greediest(share.waiting + nbytes)
        share.waiting += nbytes
        self.waiting += nbytes

    def _refuse_greediest(self, least: int) -> None:
        """Refuse whoever has the most. Raises BlockingIOError where nobody has more than so many bytes."""
        greediest = max((one for one in self._shares.values() if not one.refused), key=lambda one: one.waiting)
        if greediest.waiting <= least or greediest.refuse is None:
            raise BlockingIOError(f"{self.waiting} bytes wait for peers, at most {self.total} may (total_bytes)")
        greediest.refused = True
        self._returning += greediest.waiting
        greediest.refuse()

    def over(self, share: Share, nbytes: int) -> None:
        """Charge bytes no more that have waited."""
        share.waiting -= nbytes
        self.waiting -= nbytes
        if share.refused:
            self._returning -= nbytes
            share.refused = share.waiting > 0

    def take(self, nbytes: int, held: int, segments: int) -> int:
        """Take a segment's bytes, for `nbytes` in one piece, for a peer that has `held` bytes in so many segments.

        Raises BlockingIOError with the reason where there are none.
        """
        least = _aligned(nbytes)
        size = max(least, min(SEGMENT_BYTES, max(FIRST_BYTES, held)))
        if held + size > self.peer:
            size = least
        if held + size > self.peer or segments >= MAX_SEGMENTS:
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: one peer has at most {self.peer} under way (peer_bytes)"
            )
        if self.used + size > self.total:
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: {self.used} of {self.total} (total_bytes) are in use"
            )
        self.used += size
        return size

    def charge(self, nbytes: int, held: int) -> None:
        """Take bytes for the objects of a message, for a peer whose others have `held`. Raises BlockingIOError."""
        if held + nbytes > self.peer or self.used + nbytes > self.total:
            raise BlockingIOError(f"no room for values of about {nbytes} bytes as objects (peer_bytes, total_bytes)")
        self.used += nbytes


class Lent:
    """The segments that one peer may write to. `close` takes them back; what is in them can still be read."""

    def __init__(self, engine: aiote.Engine, loop: EventLoop, peer: aiote.Peer, budget: Budget) -> None:
        self._engine, self._peer, self._budget = engine, peer, budget
        self._segments: dict[int, tuple[memoryview, aiote.Region]] = {}
        self._count = self._taken = self._numbers = self._returning = 0
        self._returned = Signal(loop)
        self._closed = False
        self.nbytes = 0

    async def lend(self, nbytes: int) -> tuple[int, int, bytes]:
        """Lend one more segment, of at least so many bytes; return its number, length and descriptor.

        Raises BlockingIOError with the reason where there is no memory for it, ClosedError, FabricError.
        """
        while self._returning:
            # What the peer has just given back counts until nobody can write there.
            await self._returned.wait()
        if self._closed:
            raise aiote.ClosedError("the peer is lost")
        size = self._budget.take(nbytes, self._taken, self._count)
        self._taken += size
        self._count += 1
        region: aiote.Region | None = None
        try:
            memory = numpy.zeros(size, numpy.uint8)
            slow = size > SLOW_BYTES
            region = (
                await self._engine.register_async(memory, "local") if slow else self._engine.register(memory, "local")
            )
            if self._closed:
                raise aiote.ClosedError("the peer is lost")
            descriptor = region.lease(slice(0, size), self._peer).descriptor
        except BaseException:
            self._taken -= size
            self._count -= 1
            self._budget.used -= size
            if region is not None:
                await region.aclose()
            raise
        number, self._numbers = self._numbers, self._numbers + 1
        self._segments[number] = (memoryview(region).toreadonly(), region)
        self.nbytes += size
        return number, size, descriptor

    def returned(self, number: int) -> aiote.Region:
        """Take note that the peer wants a segment no more; return what is to be closed by `take_back`.

        Raises KeyError for a segment that there is not.
        """
        _, region = self._segments.pop(number)
        self.nbytes -= region.nbytes
        self._returning += 1
        return region

    async def take_back(self, region: aiote.Region) -> None:
        """Close what was returned, and count it no more."""
        try:
            await region.aclose()
        finally:
            self._returning -= 1
            self._count -= 1
            self._taken -= region.nbytes
            self._budget.used -= region.nbytes
            self._returned.set()

    def view(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece, read-only. Raises ValueError for what is none."""
        number, offset, nbytes = piece
        if number not in self._segments:
            raise ValueError(f"there is no lent memory {number}")
        memory = self._segments[number][0]
        if offset + nbytes > len(memory):
            raise ValueError(f"bytes {offset} to {offset + nbytes} leave the {len(memory)} of lent memory {number}")
        return memory[offset : offset + nbytes]

    async def close(self) -> None:
        """Take all segments back: nobody writes there any more when this returns."""
        self._closed = True
        for _, region in tuple(self._segments.values()):
            await region.aclose()
        self._budget.used -= self.nbytes
        self._taken -= self.nbytes
        self.nbytes = 0


class _Turn:
    """One who waits for a place."""

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: Waiter | None = None


class Borrowed:
    """The segments that a peer has lent to us, and who waits for a place in them, first come, first served."""

    def __init__(
        self,
        engine: aiote.Engine,
        loop: EventLoop,
        owner: aiote.Peer,
        ask: Callable[[int], object],
        give_back: Callable[[int], object],
    ) -> None:
        self._engine, self._loop, self._owner, self._ask, self._give_back = engine, loop, owner, ask, give_back
        self.segments: dict[int, tuple[Allocator, aiote.RemoteRegion]] = {}
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
        for number, (allocator, remote) in self.segments.items():
            offset = allocator.take(nbytes)
            if offset is not None:
                piece = (number, offset, nbytes)
                self._taken.add(piece)
                return piece, remote[offset : offset + nbytes]
        return None

    def _grow(self, nbytes: int) -> None:
        """Ask for one more segment, once; where that is refused, wait for places, if they may ever suffice."""
        if self._refused and nbytes < self._asked:
            self._asked, self._refused = 0, ""
        if not self._asked:
            self._asked = nbytes
            self._ask(nbytes)
        elif self._refused:
            largest = max((allocator.nbytes for allocator, _ in self.segments.values()), default=0)
            if _aligned(nbytes) > largest:
                reason, self._asked, self._refused = self._refused, 0, ""
                if not self._return([number for number, (one, _) in self.segments.items() if one.free]):
                    raise BlockingIOError(reason)
                # There may be room for one large segment in place of small ones.
                self._asked = nbytes
                self._ask(nbytes)

    def granted(self, number: int, nbytes: int, descriptor: bytes, reason: str) -> None:
        """Take note of the answer to what was asked. Raises ValueError for what was not asked for, or is not its."""
        if not self._asked or self._refused:
            raise ValueError("memory is lent that nobody has asked for")
        if not descriptor:
            self._refused = reason or "it lends no memory"
        else:
            remote = self._engine.attach(descriptor, owner=self._owner, access="write", nbytes=nbytes)
            if number in self.segments or remote.nbytes != nbytes or nbytes < self._asked:
                raise ValueError("the memory that is lent is not what was asked for")
            self.segments[number] = (Allocator(nbytes), remote)
            self._asked = 0
        self._wake()

    def give(self, piece: Piece) -> None:
        """Give a place back. Raises KeyError for one that is not taken."""
        self._taken.remove(piece)
        number, offset, nbytes = piece
        self.segments[number][0].give(offset, nbytes)
        if self._refused:
            # What was refused may be granted now: others have given back, too.
            self._asked, self._refused = 0, ""
        self._wake()

    def sweep(self) -> None:
        """Give back what nobody has used for a while."""
        if self._return([number for number, (one, _) in self.segments.items() if one.idle()]) and self._refused:
            self._asked, self._refused = 0, ""
            self._wake()

    def _return(self, numbers: list[int]) -> bool:
        for number in numbers:
            del self.segments[number]
            self._give_back(number)
        return bool(numbers)

    @property
    def taken_bytes(self) -> int:
        """How many bytes are taken now."""
        return sum(piece[2] for piece in self._taken)

    def close(self, error: Exception) -> None:
        """End every wait with an error."""
        self._end = error
        self._wake()


class Staging:
    """Memory of our own for arrays that a method fills for one peer, which never see another peer's bytes.

    A place is free again when nobody has the array any more: a thread that goes on behind a cancelled call writes
    into nothing else.
    """

    def __init__(self, engine: aiote.Engine, loop: EventLoop, budget: Budget) -> None:
        self._engine, self._loop, self._budget = engine, loop, budget
        self.segments: dict[int, tuple[Allocator, memoryview, aiote.Region]] = {}
        self._nbytes = self._numbers = 0
        self._closed = False

    def take(self, nbytes: int) -> tuple[NDArray[numpy.uint8], aiote.Region]:
        """Return zeros, and their registration. Raises BlockingIOError with the reason where there is no room."""
        if self._closed:
            raise BlockingIOError("the peer is lost")
        for number, (allocator, memory, region) in self.segments.items():
            offset = allocator.take(nbytes)
            if offset is not None:
                array = numpy.frombuffer(memory[offset : offset + nbytes], numpy.uint8)
                array.fill(0)
                weakref.finalize(array, self._let_go, number, offset, nbytes).atexit = False
                return array, region[offset : offset + nbytes]
        size = self._budget.take(nbytes, self._nbytes, len(self.segments))
        try:
            region = self._engine.register(numpy.zeros(size, numpy.uint8), "local")
        except BaseException:
            self._budget.used -= size
            raise
        self._nbytes += size
        self._numbers += 1
        self.segments[self._numbers] = (Allocator(size), memoryview(region), region)
        return self.take(nbytes)

    def _let_go(self, number: int, offset: int, nbytes: int) -> None:
        # In whatever thread the last one had it. A loop that has ended needs no place.
        with suppress(RuntimeError):
            self._loop.call_from_thread(partial(self.segments[number][0].give, offset, nbytes))

    def sweep(self) -> None:
        """Give up what nobody has used for a while."""
        for number in [number for number, (allocator, _, _) in self.segments.items() if allocator.idle()]:
            _, _, region = self.segments.pop(number)
            self._nbytes -= region.nbytes
            self._loop.spawn(self._end, region, name="aiote service: give up memory")

    async def _end(self, region: aiote.Region) -> None:
        await region.aclose()
        self._budget.used -= region.nbytes

    async def close(self) -> None:
        """End the registrations, once no transfer uses them."""
        self._closed = True
        for _, _, region in tuple(self.segments.values()):
            await region.aclose()
        self._budget.used -= self._nbytes
        self._nbytes = 0
