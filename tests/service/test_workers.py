"""Tasks that run several calls: what one call leaves in its task is not there for the next one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import sniffio

from aiote import service
from aiote.service import workers
from engines import pair, until

pytestmark = pytest.mark.anyio

left_behind: contextvars.ContextVar[str] = contextvars.ContextVar("left behind", default="nothing")


class Incomparable:
    """A value that cannot be compared, as an array cannot."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("which of my elements?")

    __hash__ = None  # type: ignore[assignment]


strange: contextvars.ContextVar[Incomparable] = contextvars.ContextVar("strange")


class Tasks(service.Service):
    """A service that says which task runs its calls."""

    def __init__(self) -> None:
        self.gate = anyio.Event()

    @service.method
    async def which(self) -> int:
        return id(asyncio.current_task())

    @service.method
    async def leave(self, value: str) -> str:
        found = left_behind.get()
        left_behind.set(value)
        return found

    @service.method
    async def leave_strange(self) -> bool:
        found = strange.get(None)
        strange.set(Incomparable())
        return found is not None

    @service.method
    async def swallow(self) -> str:
        try:
            await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            pass
        return "cancelled, and went on"

    @service.method
    async def wait(self) -> bool:
        await self.gate.wait()
        return service.current_call().method == "Tasks/1.wait"


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Tasks, Tasks, service.Server]]:
    async with pair("sim") as (here, there):
        tasks = Tasks()
        async with service.serve(there, tasks) as server:
            yield tasks, service.client(here, there.address, Tasks), server


async def test_a_task_runs_one_call_after_the_other():
    async with served() as (_, client, server):
        if sniffio.current_async_library() != "asyncio":
            assert not server.workers.idle
            return
        assert len({await client.which() for _ in range(5)}) == 1
        assert len(server.workers.idle) == 1
    assert not server.workers.idle


async def test_context_variables_of_a_call_are_its_own():
    async with served() as (_, client, _):
        for value in ("one", "two", "three"):
            assert await client.leave(value) == "nothing"
            assert await client.leave_strange() is False


async def test_a_task_that_was_cancelled_runs_no_other_call():
    async with served() as (tasks, client, server):
        await client.leave("")
        async with anyio.create_task_group() as group:
            group.start_soon(client.swallow)
            await until(lambda: server.running)
            group.cancel_scope.cancel()
        await until(lambda: not server.running)
        tasks.gate.set()
        for _ in range(3):
            assert await client.swallow() == "cancelled, and went on"


async def test_idle_tasks_are_few_and_run_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "MAX_IDLE", 3)
    async with served() as (tasks, client, server):
        for _ in range(2):
            tasks.gate = anyio.Event()
            answers: list[bool] = []

            async def call(answers: list[bool] = answers) -> None:
                answers.append(await client.wait())

            async with anyio.create_task_group() as group:
                for _ in range(10):
                    group.start_soon(call)
                await until(lambda: server.running == 10)
                tasks.gate.set()
            assert answers == [True] * 10
            await until(lambda: not server.running)
            assert len(server.workers.idle) <= 3


async def test_answers_to_one_message_share_one():
    async with served() as (_, client, server):
        await client.leave("")
        endpoint = server.endpoint
        before = endpoint.messages
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.leave, "")
        assert endpoint.messages - before <= 3
