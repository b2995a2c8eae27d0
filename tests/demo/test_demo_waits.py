"""Waiting for pages and for the first of several things."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from aiote.cli.demo.pages import PageAllocator, PagesExhausted
from aiote.cli.demo.waits import PageQueue, first_of

pytestmark = pytest.mark.anyio


async def test_the_first_ends_the_others():
    ended = []

    async def quick():
        await anyio.lowlevel.checkpoint()

    async def endless():
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("endless")

    with anyio.fail_after(5):
        await first_of(endless, quick)
    assert ended == ["endless"]


async def test_pages_are_handed_out_in_turn():
    allocator = PageAllocator(10)
    queue = PageQueue(allocator)
    order = []

    async def borrow(name, count):
        async with queue.borrow(count) as pages:
            order.append(name)
            assert len(pages) == count
            assert allocator.held <= 10
            await anyio.sleep(0.01)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for name, count in (("a", 6), ("big", 10), ("small", 1), ("b", 4)):
                group.start_soon(borrow, name, count)
                await anyio.wait_all_tasks_blocked()
    assert order == ["a", "big", "small", "b"]
    assert allocator.held == 0


async def test_pages_come_back_from_one_who_fails_or_is_cancelled():
    allocator = PageAllocator(4)
    queue = PageQueue(allocator)
    with pytest.raises(KeyError):
        async with queue.borrow(4):
            raise KeyError
    with anyio.move_on_after(0.01):
        async with queue.borrow(4):
            await anyio.sleep_forever()
    with anyio.fail_after(5):
        async with queue.borrow(3), anyio.create_task_group() as group:

            async def wait_in_vain():
                async with queue.borrow(2):
                    pass

            group.start_soon(wait_in_vain)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert allocator.held == 0
    with anyio.fail_after(5):
        async with queue.borrow(4) as pages:
            assert sorted(pages) == [0, 1, 2, 3]


async def test_more_than_the_pool_is_refused_at_once():
    with pytest.raises(PagesExhausted, match="5 pages wanted of a pool of 4"):
        async with PageQueue(PageAllocator(4)).borrow(5):
            pass
