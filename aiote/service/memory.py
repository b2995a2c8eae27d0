"""Manage the memory for bytes that are too long for a message: lent to a peer, borrowed from it, and staged for it.

Each side lends memory to the other in *segments*; each segment has a lease of its own, which ends with the peer. The
borrower writes what it sends into a place in a segment, and reuses the place after the lender has read it. So a single
call needs no request for memory, and a cancelled caller need not wait for its places. The borrower gives a segment back
after the segment was idle for a while, and asks for a new one when it needs one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy
from numpy.typing import NDArray

import aiote

from ..aio import Condition, EventLoop, TurnQueue
from ..core.allocator import Allocator, aligned
from .frames import Piece

__all__ = ["LEND_BYTES", "BorrowedMemory", "Budget", "LentMemory", "Share", "Staging"]

FIRST_BYTES = 1 << 20
SEGMENT_BYTES = 16 << 20
"""A segment has at least the requested bytes and at least as many as the peer's segments before it together.
FIRST_BYTES and SEGMENT_BYTES bound the second, so a peer that sends little costs little memory.
"""
LEND_BYTES = 256 << 10
"""`Out` arrays from this size on are lent for the call and written in place; a lease costs 0.3 ms."""
MAX_SEGMENTS = 64
"""The most segments of one peer in one direction; each of them is a registration."""
IDLE_S = 10.0
"""A segment is given back after it was empty for this long at least, and for twice as long at most, in seconds."""
SLOW_BYTES = 4 << 20
"""Larger segments are registered without blocking the event loop, because pinning them may take long."""


class Share:
    """The bytes of one identity: `waiting`, its calls that have not ended and the answers that it has not taken; and
    `held`, its segments and the decoded objects of its calls.

    `refuse` is called when the budget is used up and this identity has the largest share. The identity then gets no
    more bytes until all of its bytes are given back.
    """

    def __init__(self) -> None:
        self.waiting = self.held = 0
        self.refused = False
        self.refuse: Callable[[], object] | None = None


class Budget:
    """The memory that an engine spends on values in flight, in all and for one peer: lent, staged, decoded and waiting.

    Bytes are charged to an identity, so a peer that reconnects has only what is left of its share. A segment cannot be
    taken back while its peer may write to it. Therefore some memory stays free for others: where a part `p` of `total`
    is free, an identity may hold `p * p` of it. So the identity that holds the most is refused first, and `n` of them
    leave at least `total / (n + 1)` free.
    """

    def __init__(self, total: int, peer: int) -> None:
        self.total = total
        self.peer = peer
        self.used = self.waiting = 0
        # The waiting bytes of refused identities, which are about to be given back.
        self._returning = 0
        self._shares: weakref.WeakValueDictionary[bytes, Share] = weakref.WeakValueDictionary()

    def share_of(self, identity: bytes) -> Share:
        """Return the share of an identity; the share exists as long as a reference to it does."""
        return self._shares.setdefault(identity, Share())

    def wait(self, share: Share, nbytes: int, most: int | None = None) -> None:
        """Charge bytes that wait for a peer. Raises BlockingIOError beyond `most` bytes of it, by default `self.peer`.

        If this would exceed `total`, first refuse the identities with the largest shares. Raises BlockingIOError if no
        other share is larger than this one would become.
        """
        most = self.peer if most is None else most
        if share.waiting + nbytes > most:
            raise BlockingIOError(
                f"{share.waiting} bytes wait for this peer; {nbytes} more would exceed its limit of {most} (peer_bytes)"
            )
        if share.refused:
            raise BlockingIOError(
                f"this peer was refused because it held too much; {share.waiting} bytes are still to be freed"
            )
        while self.waiting - self._returning + nbytes > self.total:
            self._refuse_greediest(share.waiting + nbytes)
        share.waiting += nbytes
        self.waiting += nbytes

    def _refuse_greediest(self, least: int) -> None:
        """Refuse the identity with the largest share. Raises BlockingIOError unless it has more than `least` bytes."""
        greediest = max((one for one in self._shares.values() if not one.refused), key=lambda one: one.waiting)
        if greediest.waiting <= least or greediest.refuse is None:
            raise BlockingIOError(f"{self.waiting} bytes wait for peers; the limit is {self.total} (total_bytes)")
        greediest.refused = True
        self._returning += greediest.waiting
        greediest.refuse()

    def over(self, share: Share, nbytes: int) -> None:
        """Stop charging bytes that have waited."""
        share.waiting -= nbytes
        self.waiting -= nbytes
        if share.refused:
            self._returning -= nbytes
            share.refused = share.waiting > 0

    def take(self, share: Share, nbytes: int, held: int, segments: int) -> int:
        """Charge a segment that holds `nbytes` contiguous bytes, and return its size.

        The peer has `held` bytes in `segments` segments in the same direction already. Raises BlockingIOError with the
        reason if the segment would exceed the limits.
        """
        least = aligned(nbytes)
        size = max(least, min(SEGMENT_BYTES, max(FIRST_BYTES, held)))
        if held + size > self.peer or not self._leaves_enough(share, size):
            size = least
        if held + size > self.peer or segments >= MAX_SEGMENTS:
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: one peer may have {self.peer} under way (peer_bytes)"
            )
        if not self._leaves_enough(share, size):
            raise BlockingIOError(
                f"no room for {nbytes} bytes of arrays: {self.used} of {self.total} (total_bytes) are in use, "
                f"{share.held} by this peer, and some stay free for others"
            )
        self._hold(share, size)
        return size

    def charge(self, share: Share, nbytes: int, held: int) -> None:
        """Charge `nbytes` for the decoded objects of a message. Raises BlockingIOError beyond the limits.

        The objects of the peer's other messages have `held` bytes already.
        """
        if held + nbytes > self.peer or not self._leaves_enough(share, nbytes):
            raise BlockingIOError(f"no room for values of about {nbytes} bytes as objects (peer_bytes, total_bytes)")
        self._hold(share, nbytes)

    def give(self, share: Share, nbytes: int) -> None:
        """Stop charging bytes of `take` or `charge`."""
        share.held -= nbytes
        self.used -= nbytes

    def _leaves_enough(self, share: Share, nbytes: int) -> bool:
        """Return whether enough stays free for others if this identity holds `nbytes` more."""
        free = self.total - self.used - nbytes
        return free >= 0 and (share.held + nbytes) * self.total <= free * free

    def _hold(self, share: Share, nbytes: int) -> None:
        share.held += nbytes
        self.used += nbytes


class LentMemory:
    """The segments that one peer may write to. `close` takes them back; their bytes can still be read afterwards."""

    def __init__(self, engine: aiote.Engine, loop: EventLoop, peer: aiote.Peer, budget: Budget) -> None:
        self._engine, self._peer, self._budget = engine, peer, budget
        self._share = budget.share_of(peer.address.identity)
        self._segments: dict[int, tuple[memoryview, aiote.Region]] = {}
        self._count = self._taken = self._numbers = self._returning = 0
        self._returned = Condition(loop)
        self._closed = False
        self.nbytes = 0

    async def lend(self, nbytes: int) -> tuple[int, int, bytes]:
        """Lend one more segment of at least `nbytes` bytes; return its number, length and descriptor.

        Raises BlockingIOError with the reason if there is no memory for it, ClosedError if the peer is lost, and
        FabricError.
        """
        while self._returning:
            # A segment that the peer has just given back counts until the peer cannot write to it any more.
            await self._returned.wait()
        if self._closed:
            raise aiote.ClosedError("the peer is lost")
        size = self._budget.take(self._share, nbytes, self._taken, self._count)
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
            self._budget.give(self._share, size)
            if region is not None:
                await region.aclose()
            raise
        number, self._numbers = self._numbers, self._numbers + 1
        self._segments[number] = (memoryview(region).toreadonly(), region)
        self.nbytes += size
        return number, size, descriptor

    def returned(self, number: int) -> aiote.Region:
        """Record that the peer gives a segment back; return its region, which the caller passes to `take_back`.

        Raises KeyError for an unknown segment.
        """
        _, region = self._segments.pop(number)
        self.nbytes -= region.nbytes
        self._returning += 1
        return region

    async def take_back(self, region: aiote.Region) -> None:
        """Close a returned region, and stop charging it."""
        try:
            await region.aclose()
        finally:
            self._returning -= 1
            self._count -= 1
            self._taken -= region.nbytes
            self._budget.give(self._share, region.nbytes)
            self._returned.wake_all()

    def view(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece, read-only. Raises ValueError if the piece is not in a lent segment."""
        number, offset, nbytes = piece
        if number not in self._segments:
            raise ValueError(f"memory {number} was not lent to it")
        memory = self._segments[number][0]
        if offset + nbytes > len(memory):
            raise ValueError(f"bytes {offset} to {offset + nbytes} leave the {len(memory)} of lent memory {number}")
        return memory[offset : offset + nbytes]

    async def close(self) -> None:
        """Take all segments back; when this returns, the peer cannot write to them any more."""
        self._closed = True
        for _, region in tuple(self._segments.values()):
            await region.aclose()
        self._budget.give(self._share, self.nbytes)
        self._taken -= self.nbytes
        self.nbytes = 0


class BorrowedMemory:
    """The segments that a peer lends to this engine, and the queue for places in them, first come, first served."""

    def __init__(
        self,
        engine: aiote.Engine,
        loop: EventLoop,
        owner: aiote.Peer,
        ask: Callable[[int], object],
        give_back: Callable[[int], object],
    ) -> None:
        self._engine, self._owner, self._ask, self._give_back = engine, owner, ask, give_back
        self.segments: dict[int, tuple[Allocator, aiote.RemoteRegion]] = {}
        self._taken: set[Piece] = set()
        self._queue = TurnQueue(loop)
        self._asked_bytes = 0
        self._refused = ""
        self._end: Exception | None = None

    async def place(self, nbytes: int) -> tuple[Piece, aiote.RemoteRegion]:
        """Wait for a place of `nbytes` bytes and take it; return its piece and its remote memory.

        Raises BlockingIOError with the peer's reason if there will be no place, and the error of `close` after that.
        """
        return await self._queue.take(partial(self._find_or_grow, nbytes))

    def _find_or_grow(self, nbytes: int) -> tuple[Piece, aiote.RemoteRegion] | None:
        if self._end is not None:
            raise self._end
        found = self._take(nbytes)
        if found is None:
            self._grow(nbytes)
        return found

    def _take(self, nbytes: int) -> tuple[Piece, aiote.RemoteRegion] | None:
        for number, (allocator, remote) in self.segments.items():
            offset = allocator.take(nbytes)
            if offset is not None:
                piece = (number, offset, nbytes)
                self._taken.add(piece)
                return piece, remote[offset : offset + nbytes]
        return None

    def _grow(self, nbytes: int) -> None:
        """Ask for one more segment, once. If that is refused, wait for free places if a segment is large enough.

        Otherwise give the free segments back and ask once more; without free segments, raise BlockingIOError with the
        reason.
        """
        if self._refused and nbytes < self._asked_bytes:
            self._asked_bytes, self._refused = 0, ""
        if not self._asked_bytes:
            self._asked_bytes = nbytes
            self._ask(nbytes)
        elif self._refused:
            largest = max((allocator.nbytes for allocator, _ in self.segments.values()), default=0)
            if aligned(nbytes) > largest:
                reason, self._asked_bytes, self._refused = self._refused, 0, ""
                if not self._return([number for number, (one, _) in self.segments.items() if one.free]):
                    raise BlockingIOError(reason)
                # After small segments are returned, there may be room for a large one.
                self._asked_bytes = nbytes
                self._ask(nbytes)

    def granted(self, number: int, nbytes: int, descriptor: bytes, reason: str) -> None:
        """Take the answer to an Ask. Raises ValueError if there was no Ask, or if the memory does not fit it."""
        if not self._asked_bytes or self._refused:
            raise ValueError("it lends memory without a request")
        if not descriptor:
            self._refused = reason or "it lends no memory and gives no reason"
        else:
            remote = self._engine.attach(descriptor, owner=self._owner, access="write", nbytes=nbytes)
            if number in self.segments or remote.nbytes != nbytes or nbytes < self._asked_bytes:
                raise ValueError("it lends other memory than was requested")
            self.segments[number] = (Allocator(nbytes), remote)
            self._asked_bytes = 0
        self._queue.wake()

    def give(self, piece: Piece) -> None:
        """Give a place back. Raises KeyError if it is not taken."""
        self._taken.remove(piece)
        number, offset, nbytes = piece
        self.segments[number][0].give(offset, nbytes)
        if self._refused:
            # Ask again: the peer may grant now what it refused, because memory may have been given back meanwhile.
            self._asked_bytes, self._refused = 0, ""
        self._queue.wake()

    def sweep(self) -> None:
        """Give idle segments back to the peer."""
        if self._return([number for number, (one, _) in self.segments.items() if one.idle()]) and self._refused:
            self._asked_bytes, self._refused = 0, ""
            self._queue.wake()

    def _return(self, numbers: list[int]) -> bool:
        for number in numbers:
            del self.segments[number]
            self._give_back(number)
        return bool(numbers)

    @property
    def taken_bytes(self) -> int:
        """The number of bytes that are taken now."""
        return sum(piece[2] for piece in self._taken)

    def close(self, error: Exception) -> None:
        """End every wait with an error."""
        self._end = error
        self._queue.wake()


class Staging:
    """This engine's memory for the arrays that a method fills for one peer; it never holds another peer's bytes.

    A place becomes free when the last reference to its array is gone. So a thread that outlives a cancelled call cannot
    write into another array.
    """

    def __init__(self, engine: aiote.Engine, loop: EventLoop, budget: Budget, share: Share) -> None:
        self._engine, self._loop, self._budget, self._share = engine, loop, budget, share
        self.segments: dict[int, tuple[Allocator, memoryview, aiote.Region]] = {}
        self._nbytes = self._numbers = 0
        self._closed = False

    def take(self, nbytes: int) -> tuple[NDArray[numpy.uint8], aiote.Region]:
        """Return an array of zeros and its registration. Raises BlockingIOError with the reason if there is no room."""
        if self._closed:
            raise BlockingIOError("the peer is lost")
        for number, (allocator, memory, region) in self.segments.items():
            offset = allocator.take(nbytes)
            if offset is not None:
                array = numpy.frombuffer(memory[offset : offset + nbytes], numpy.uint8)
                array.fill(0)
                weakref.finalize(array, self._let_go, number, offset, nbytes).atexit = False
                return array, region[offset : offset + nbytes]
        size = self._budget.take(self._share, nbytes, self._nbytes, len(self.segments))
        try:
            region = self._engine.register(numpy.zeros(size, numpy.uint8), "local")
        except BaseException:
            self._budget.give(self._share, size)
            raise
        self._nbytes += size
        self._numbers += 1
        self.segments[self._numbers] = (Allocator(size), memoryview(region), region)
        return self.take(nbytes)

    def _let_go(self, number: int, offset: int, nbytes: int) -> None:
        # This runs in the thread that dropped the last reference. A loop that has ended needs no places.
        with suppress(RuntimeError):
            self._loop.call_from_thread(partial(self.segments[number][0].give, offset, nbytes))

    def sweep(self) -> None:
        """Close idle segments."""
        for number in [number for number, (allocator, _, _) in self.segments.items() if allocator.idle()]:
            _, _, region = self.segments.pop(number)
            self._nbytes -= region.nbytes
            self._loop.spawn(self._end, region, name="aiote service: give up memory")

    async def _end(self, region: aiote.Region) -> None:
        await region.aclose()
        self._budget.give(self._share, region.nbytes)

    async def close(self) -> None:
        """Wait until no transfer uses the segments, and end their registrations."""
        self._closed = True
        for _, _, region in tuple(self.segments.values()):
            await region.aclose()
        self._budget.give(self._share, self._nbytes)
        self._nbytes = 0
