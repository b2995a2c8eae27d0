"""Waiting for the first of several things, and for pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from aiote.cli.demo.pages import PageAllocator, PagesExhausted

__all__ = ["PageQueue", "first_of"]


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Start all and return when one of them is over, with the others cancelled."""
    async with anyio.create_task_group() as group:

        async def run(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(run, wait)


class PageQueue:
    """Hands out an allocator's pages, first come, first served; who finds too few waits until enough are back."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._turn = anyio.Lock()
        self._returned = anyio.Event()

    @asynccontextmanager
    async def borrow(self, count: int) -> AsyncIterator[list[int]]:
        """Hold so many pages for the block; raises PagesExhausted if there never are so many."""
        if count > self._pages.pages:
            raise PagesExhausted(f"{count} pages wanted of a pool of {self._pages.pages}")
        async with self._turn:
            while self._pages.free < count:
                self._returned = anyio.Event()
                await self._returned.wait()
            held = self._pages.take(count)
        try:
            yield held
        finally:
            self._pages.give(held)
            self._returned.set()
