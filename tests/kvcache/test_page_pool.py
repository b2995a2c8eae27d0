"""Who gets pages, and when: first come, first served, who holds some before who does not, and nobody for ever."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.kvcache.pool import Holding, PagePool, PagesExhausted

pytestmark = pytest.mark.anyio


async def settle() -> None:
    await anyio.wait_all_tasks_blocked()


async def test_waits_for_pages_are_served_in_order_and_none_is_passed():
    pool = PagePool(4, 4, 10)
    first = await pool.take(3)
    order: list[int] = []

    async def want(count: int) -> None:
        holding = await pool.take(count)
        order.append(count)
        pool.give(holding)

    async with anyio.create_task_group() as group:
        for count in (4, 1, 2):
            group.start_soon(want, count)
            await settle()
        assert order == []
        assert pool.waiting == 3
        pool.give(first)
    assert order[0] == 4
    assert (pool.free, pool.held, pool.waiting) == (4, 0, 0)


async def test_a_holder_of_pages_is_served_before_new_requests():
    pool = PagePool(4, 4, 10)
    one, two = await pool.take(2), await pool.take(2)
    done: list[str] = []

    async def new() -> None:
        await pool.take(1)
        done.append("new")

    async def more() -> None:
        await pool.extend(one, 2)
        done.append("more")

    async with anyio.create_task_group() as group:
        group.start_soon(new)
        await settle()
        group.start_soon(more)
        await settle()
        with pytest.raises(PagesExhausted):
            await pool.extend(two, 1)
        pool.give(two)
        await settle()
        assert done == ["more"]
        assert (len(one.pages), pool.free) == (4, 0)
        pool.give(one)
    assert done == ["more", "new"]


async def test_a_cancelled_wait_loses_nothing_and_lets_others_pass():
    pool = PagePool(4, 1, 10)
    first = await pool.take(4)
    with anyio.move_on_after(0.01) as scope:
        await pool.take(1)
    assert scope.cancelled_caught
    async with anyio.create_task_group() as group:
        group.start_soon(pool.take, 4)
        await settle()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pool.take(1)
        pool.give(first)
    assert (pool.free, pool.held, pool.waiting) == (0, 1, 0)


async def test_a_pool_refuses_more_than_it_has_and_ends_waits_when_closed():
    pool = PagePool(4, 4, 1)
    with pytest.raises(aiote.UsageError, match="5 pages"):
        await pool.take(5)
    holding = await pool.take(4)
    with pytest.raises(aiote.UsageError):
        await pool.extend(holding, 1)
    ended = 0

    async def want() -> None:
        nonlocal ended
        with pytest.raises(aiote.ClosedError, match="it is over"):
            await pool.take(1)
        ended += 1

    async with anyio.create_task_group() as group:
        group.start_soon(want)
        await settle()
        with pytest.raises(aiote.QueueFull):
            await pool.take(1)
        pool.close("it is over")
    assert ended == 1
    with pytest.raises(aiote.ClosedError):
        await pool.take(1)


async def test_a_holding_that_ends_gets_no_more_pages():
    pool = PagePool(4, 4, 1)
    one, _ = await pool.take(2), await pool.take(2)

    async def more() -> None:
        with pytest.raises(aiote.ClosedError, match="the request is over"):
            await pool.extend(one, 1)

    async with anyio.create_task_group() as group:
        group.start_soon(more)
        await settle()
        pool.give(one)
    assert pool.free == 2
    with pytest.raises(aiote.ClosedError):
        await pool.extend(one, 1)


@given(st.lists(st.tuples(st.sampled_from("tge"), st.integers(0, 5)), max_size=60))
def test_no_page_is_held_twice(steps: list[tuple[str, int]]):
    async def main() -> None:
        pool = PagePool(7, 3, 100)
        held: list[Holding] = []
        for step, number in steps:
            with anyio.move_on_after(0):
                try:
                    if step == "t":
                        held.append(await pool.take(number))
                    elif step == "e" and held:
                        await pool.extend(held[number % len(held)], number)
                    elif step == "g" and held:
                        pool.give(held.pop(number % len(held)))
                except aiote.AioteError:
                    pass
            out = [page for holding in held for page in holding.pages]
            assert len(out) == len(set(out)) == 7 - pool.free
            assert pool.held == len(held) <= 3

    anyio.run(main)
