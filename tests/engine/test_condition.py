"""A condition that tasks wait for: no wake-up is lost, whoever is cancelled; a predicate is looked at after each."""

from __future__ import annotations

import anyio
import pytest

from aiote.aio import Condition

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


@pytest.mark.parametrize("after_the_wake_up", [False, True])
async def test_a_wake_up_of_a_task_that_is_cancelled_goes_to_the_next(after_the_wake_up):
    changed, woken = Condition(), []
    first = anyio.CancelScope()

    async def cancelled() -> None:
        with first:
            await changed.wait()
        woken.append("first")

    async def waits() -> None:
        await changed.wait()
        woken.append("second")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        await turns()
        tasks.start_soon(waits)
        await turns()
        if not after_the_wake_up:
            first.cancel()
            await turns()
        changed.wake_one()
        if after_the_wake_up:
            first.cancel()
        await turns()
        # A task that is woken and cancelled at once may count as woken; then the second is still to be woken.
        if "second" not in woken:
            assert woken == ["first"]
            changed.wake_one()
    assert sorted(woken) == ["first", "second"]


async def test_a_condition_that_is_made_without_a_loop_takes_that_of_its_first_wait(made_without_a_loop):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made_without_a_loop.wait)
        await turns()
        assert len(made_without_a_loop) == 1
        made_without_a_loop.wake_all()
