"""A queue of tasks: they take what they wait for in the order in which they came."""

from __future__ import annotations

import anyio
import pytest

from aiote.aio import TurnQueue

pytestmark = pytest.mark.anyio


class Counted:
    """Room for a number of bytes, and the order in which tasks took some."""

    def __init__(self) -> None:
        self.queue = TurnQueue()
        self.room = 0
        self.served: list[int] = []

    async def take(self, nbytes: int) -> None:
        self.served.append(await self.queue.take(lambda: self.attempt(nbytes)))

    def attempt(self, nbytes: int) -> int | None:
        if nbytes < 0:
            raise ValueError("less than nothing")
        if nbytes > self.room:
            return None
        self.room -= nbytes
        return nbytes

    def give(self, nbytes: int) -> None:
        self.room += nbytes
        self.queue.wake()


async def turns() -> None:
    for _ in range(10):
        await anyio.sleep(0)


async def test_small_wishes_do_not_overtake_a_large_one():
    memory = Counted()
    async with anyio.create_task_group() as tasks:
        for nbytes in (10, 1, 2):
            tasks.start_soon(memory.take, nbytes)
            await turns()
        assert len(memory.queue) == 3
        memory.give(9)
        await turns()
        assert memory.served == []
        memory.give(3)
        await turns()
        assert memory.served == [10, 1]
        memory.give(1)
    assert memory.served == [10, 1, 2]


async def test_one_that_gives_up_lets_the_next_try():
    memory = Counted()
    memory.room = 1
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(memory.take, 10)
                await turns()
                tasks.start_soon(memory.take, 1)
                await turns()
                assert memory.served == []
                scope.cancel()
    assert memory.served == [1]
    assert len(memory.queue) == 0


async def test_the_error_of_an_attempt_ends_its_wait_alone():
    memory = Counted()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(memory.take, 2)
        await turns()

        async def fail() -> None:
            with pytest.raises(ValueError, match="less than nothing"):
                await memory.take(-1)

        tasks.start_soon(fail)
        tasks.start_soon(memory.take, 1)
        await turns()
        memory.give(3)
    assert memory.served == [2, 1]
