"""The tasks of calls: what one call leaves behind is not there for the next one, and callers take turns."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from aiote import service
from support.engines.opening import pair, until

pytestmark = pytest.mark.anyio

around: contextvars.ContextVar[str] = contextvars.ContextVar("around", default="nothing")
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
    async def set_around(self) -> str:
        return around.get()

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


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Tasks, Tasks, service.Server]]:
    async with pair("sim") as (here, there):
        tasks = Tasks()
        async with service.serve(there, tasks) as server:
            yield tasks, service.client(here, there.address, Tasks), server


async def test_a_call_sees_the_variables_that_were_set_around_serve():
    around.set("around serve")
    async with served() as (_, client, _):
        around.set("later")
        assert await client.set_around() == "around serve"


async def test_context_variables_of_a_call_are_its_own():
    async with served() as (_, client, _):
        for value in ("one", "two", "three"):
            assert await client.leave(value) == "nothing"
            assert await client.leave_strange() is False


async def test_a_call_that_swallowed_its_cancellation_ends_no_later_call():
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


async def test_answers_to_one_message_share_one():
    async with served() as (_, client, server):
        await client.leave("")
        endpoint = server.endpoint
        before = endpoint.messages
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client.leave, "")
        assert endpoint.messages - before <= 3


@pytest.mark.parametrize("provider", ["sim", "local"])
async def test_callers_take_turns_where_slots_are_few(provider):
    """Whoever waits for a slot has it before the caller whose call has just ended."""
    done: Counter[int] = Counter()

    async def call(number: int, client: Tasks) -> None:
        while sum(done.values()) < 200:
            await client.leave("")
            done[number] += 1

    async with pair(provider) as (here, there), service.serve(there, Tasks(), limits=service.Limits(slots=1)):
        client = service.client(here, there.address, Tasks)
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(call, number, client)
    # Of fifty each; without turns one of them has nearly all.
    assert min(done[number] for number in range(4)) >= 20
