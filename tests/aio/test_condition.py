"""A condition that tasks wait for: no wake-up is lost, whoever is cancelled; a predicate is looked at after each."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aiote.aio import Condition, current_loop

pytestmark = pytest.mark.anyio


@pytest.fixture
def made_without_a_loop() -> Condition:
    return Condition()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await anyio.sleep(0)


async def test_until_returns_when_its_predicate_holds_and_at_once_if_it_does():
    changed, seen = Condition(), []
    await changed.until(lambda: True)

    async def wait() -> None:
        await changed.until(lambda: len(seen) == 2)
        seen.append("woken")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        for number in range(2):
            await turns()
            assert seen == list(range(number))
            seen.append(number)
            changed.wake_all()
    assert seen == [0, 1, "woken"]


async def test_all_are_woken_or_one_in_the_order_of_their_waits():
    changed, woken = Condition(), []

    async def wait(number: int) -> None:
        await changed.wait()
        woken.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(wait, number)
            await turns()
        assert len(changed) == 4
        changed.wake_one()
        await turns()
        assert woken == [0]
        changed.wake_all()
    assert sorted(woken) == [0, 1, 2, 3]
    changed.wake_all()
    assert len(changed) == 0


async def check_next_is_woken(after_the_wake_up: bool) -> None:
    changed, woken = Condition(), []

    async def waits(name: str) -> None:
        await changed.wait()
        woken.append(name)

    tasks = []
    for name in ("first", "second"):
        tasks.append(current_loop().spawn(waits, name, name=name))
        await turns()
    if not after_the_wake_up:
        tasks[0].cancel()
        await turns()
    changed.wake_one()
    if after_the_wake_up:
        tasks[0].cancel()
    await turns()
    assert woken == ["second"]
    for task in tasks:
        await task.join()


def test_a_wake_up_of_a_task_that_is_cancelled_goes_to_the_next():
    """Of one that is cancelled before, or after it and before it runs: asyncio cancels that one, trio lets it run."""
    for after_the_wake_up in (False, True):
        asyncio.run(check_next_is_woken(after_the_wake_up))


async def test_a_condition_that_is_made_without_a_loop_takes_that_of_its_first_wait(made_without_a_loop):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made_without_a_loop.wait)
        await turns()
        assert len(made_without_a_loop) == 1
        made_without_a_loop.wake_all()
