"""Lend the pages of a cache to requests, in a fair order; for programs that do not have a page pool of their own.

A *holding* is the pages of one request and a numbered place for its tail. Requests for a holding wait in a queue, first
come, first served: the head waits until enough pages are free for it, and later requests do not overtake it. A request
that already holds pages and wants more goes before all of them, because they wait for the pages that it holds.

This rule alone could deadlock: every request that holds pages wants more, and no pages are free. Therefore the pool
refuses the request that would be the last of them to wait; when that request ends, its pages become free for the rest.

This module must know neither engines nor requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

import aiote

__all__ = ["Holding", "PagePool", "PagesExhausted"]


class PagesExhausted(aiote.AioteError):
    """Too few pages are free, and all other requests that hold pages wait for more."""


class Holding:
    """The pages of one request, in the order of its tokens, and the number of its place. `PagePool.take` makes it."""

    __slots__ = ("ended", "pages", "place", "wanting")

    def __init__(self, place: int, pages: list[int]) -> None:
        self.place = place
        self.pages = pages
        self.wanting = False
        self.ended = False


class _Wish:
    """A wait for a new holding, or for more pages of a holding."""

    __slots__ = ("count", "event", "granted", "holding")

    def __init__(self, count: int, holding: Holding | None) -> None:
        self.count = count
        self.holding = holding
        self.granted: Holding | None = None
        self.event: anyio.Event | None = None

    def wake(self) -> None:
        """Wake the waiting task: the wish is granted, or void."""
        if self.event is not None:
            self.event.set()


class PagePool:
    """A pool of `pages` pages and `places` places; at most `line` tasks wait for a holding."""

    def __init__(self, pages: int, places: int, line: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._places = list(range(places - 1, -1, -1))
        self._limit = line
        self._queue: deque[_Wish] = deque()
        self._more: deque[_Wish] = deque()
        self._held: dict[Holding, None] = {}
        self._closed = ""

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def held(self) -> int:
        """The number of holdings."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a holding."""
        return len(self._queue)

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncIterator[Holding]:
        """Lend `count` pages until the block is left. Raises as `take`."""
        holding = await self.take(count)
        try:
            yield holding
        finally:
            self.give(holding)

    async def take(self, count: int) -> Holding:
        """Wait in turn for a holding of `count` pages and return it. A cancelled wait loses no pages.

        Raises UsageError for more pages than the pool has, QueueFull when too many tasks wait already, ClosedError.
        """
        self._require_open()
        if count > self.pages:
            raise aiote.UsageError(f"{count} pages were asked for, and the pool has {self.pages}")
        if len(self._queue) >= self._limit:
            raise aiote.QueueFull(
                f"{self._limit} requests wait for pages, which is the limit; try again once a request has ended"
            )
        return await self._wait(self._queue, _Wish(count, None))

    async def extend(self, holding: Holding, count: int) -> None:
        """Add `count` pages to a holding, before all waits for a new holding. A cancelled wait loses no pages.

        Raises UsageError for more pages than the pool has and for a holding that waits already, PagesExhausted if the
        wait would never end, ClosedError.
        """
        self._require_open()
        if holding.ended:
            raise aiote.ClosedError("the request is over")
        if len(holding.pages) + count > self.pages:
            raise aiote.UsageError(
                f"the request would have {len(holding.pages) + count} pages, and the pool has {self.pages}"
            )
        if holding.wanting:
            raise aiote.UsageError("this request waits for more pages already; await that first")
        enough = count <= len(self._free) and not self._more
        if not enough and all(other.wanting for other in self._held if other is not holding):
            raise PagesExhausted(
                f"{count} more pages are needed, {len(self._free)} are free, and all {len(self._held)} requests that "
                "hold pages wait for more: end one of them"
            )
        holding.wanting = True
        try:
            await self._wait(self._more, _Wish(count, holding))
        finally:
            holding.wanting = False

    def give(self, holding: Holding) -> None:
        """Take a holding back; the caller ensures that no write to its pages is possible any more."""
        del self._held[holding]
        holding.ended = True
        for wish in [wish for wish in self._more if wish.holding is holding]:
            self._more.remove(wish)
            wish.wake()
        self._free += holding.pages
        self._places.append(holding.place)
        self._serve()

    def close(self, reason: str) -> None:
        """End all waits with ClosedError."""
        self._closed = reason
        for queue in (self._queue, self._more):
            for wish in queue:
                wish.wake()
            queue.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise aiote.ClosedError(self._closed)

    async def _wait(self, line: deque[_Wish], wish: _Wish) -> Holding:
        line.append(wish)
        self._serve()
        try:
            if wish.granted is None:
                # Set once, when the wish is granted or becomes void. A wish that is granted at once needs no event.
                wish.event = anyio.Event()
                await wish.event.wait()
        except BaseException:
            if wish.granted is not None and wish.holding is None:
                self.give(wish.granted)  # granted at the moment of the cancellation
            raise
        finally:
            if wish in line:
                line.remove(wish)
                self._serve()
        if wish.granted is None:
            raise aiote.ClosedError(self._closed or "the request is over")
        return wish.granted

    def _serve(self) -> None:
        while self._more and self._more[0].count <= len(self._free):
            self._grant(self._more.popleft())
        while not self._more and self._queue and self._places and self._queue[0].count <= len(self._free):
            self._grant(self._queue.popleft())

    def _grant(self, wish: _Wish) -> None:
        if wish.holding is None:
            wish.granted = Holding(self._places.pop(), [])
            self._held[wish.granted] = None
        else:
            wish.granted = wish.holding
        wish.granted.pages += [self._free.pop() for _ in range(wish.count)]
        wish.wake()
