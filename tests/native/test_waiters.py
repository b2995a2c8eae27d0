"""The waiter that stands in for a future: asyncio's tasks take it, and its task runs where it is woken."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import weakref

import pytest

from aiote.aio.waiting import wake
from aiote_native.engine.core import Core
from aiote_native.requests.operations import NativeWaiter


def waiter() -> NativeWaiter:
    return NativeWaiter(asyncio.get_running_loop(), asyncio.CancelledError)


async def asleep(*waiters: NativeWaiter, log: list[object] | None = None) -> list[asyncio.Task[None]]:
    """Start a task on each waiter, and return when all of them sleep."""

    async def sleep(one: NativeWaiter) -> None:
        await one
        if log is not None:
            log.append(one)

    tasks = [asyncio.create_task(sleep(one)) for one in waiters]
    await asyncio.sleep(0)
    return tasks


async def test_a_task_that_is_woken_goes_on_in_the_next_turn():
    one = waiter()
    (task,) = await asleep(one)
    one.set_result(None)
    assert one.done()
    assert not task.done()
    await asyncio.wait_for(task, 60)


async def test_a_waiter_that_was_woken_before_its_await_ends_it_at_once():
    one = waiter()
    one.set_result(None)
    await one
    assert one.result() is None
    assert not one.cancelled()


async def test_waking_twice_is_a_mistake_and_through_wake_is_none():
    one = waiter()
    one.set_result(None)
    with pytest.raises(RuntimeError, match="already woken"):
        one.set_result(None)
    wake(one)


async def test_asking_for_the_result_too_early_is_an_error():
    with pytest.raises(RuntimeError, match="not woken yet"):
        waiter().result()


async def test_several_tasks_on_one_waiter_are_all_woken():
    one = waiter()
    tasks = await asleep(one, one, one)
    one.set_result(None)
    await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def test_a_cancelled_task_raises_with_its_message():
    one = waiter()
    (task,) = await asleep(one)
    assert task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task
    assert one.cancelled()
    assert not one.cancel(), "it is over"
    wake(one)


async def test_a_timeout_ends_the_await_of_a_waiter():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await waiter()


async def test_a_cancellation_that_meets_the_wake_up_is_not_lost():
    one = waiter()
    (task,) = await asleep(one)
    one.set_result(None)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_keeps_its_context():
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="")
    seen = []

    async def sleep(one: NativeWaiter) -> None:
        name.set("mine")
        await one
        seen.append(name.get())

    one = waiter()
    task = asyncio.create_task(sleep(one))
    await asyncio.sleep(0)
    one.set_result(None)
    await task
    assert seen == ["mine"]
    assert name.get() == ""


async def test_a_waiter_of_another_loop_is_refused():
    other = asyncio.new_event_loop()
    try:
        (task,) = await asleep(NativeWaiter(other, asyncio.CancelledError))
        with pytest.raises(RuntimeError, match="attached to a different loop"):
            await task
    finally:
        other.close()


async def test_waking_when_its_loop_was_closed_does_nothing():
    other = asyncio.new_event_loop()
    one = NativeWaiter(other, asyncio.CancelledError)
    one.add_done_callback(lambda _one: None)
    other.close()
    wake(one)
    assert one.done()


async def test_a_coroutine_that_is_dropped_lets_go_of_everything():
    one = waiter()

    async def sleep() -> None:
        await one

    coroutine = sleep()
    assert coroutine.send(None) is one
    coroutine.close()
    reference = weakref.ref(coroutine)
    del coroutine
    gc.collect()
    assert reference() is None


async def test_nothing_is_left_of_many():
    async def many(count: int) -> None:
        for _ in range(count):
            one = waiter()
            (task,) = await asleep(one)
            one.set_result(None)
            await task

    await many(100)
    gc.collect()
    before = sys.getallocatedblocks()
    await many(2000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 200


def test_a_core_without_peers_takes_turns_and_tells_when_it_may_sleep():
    """Nothing is under way, so nothing is spun for, however soon the next turn comes."""
    core = Core(spin_us=1_000_000)
    try:
        before = core.statistics()["rounds"]
        for _ in range(10):
            assert not core.run_turn(lambda _failed: [])
        # A round, and the one before it says that it may sleep.
        assert core.statistics()["rounds"] - before == 20
    finally:
        core.close()
