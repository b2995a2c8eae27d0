"""How calls end before their time: cancelled, past a deadline, peer lost, server stopped. Nothing is left."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy
import pytest
import sniffio
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.service.frames import MAGIC, CallFrame, Cancel, End, HelloFrame, pack, unpack
from aiote.service.memory import LEND_BYTES
from aiote.testing import run
from support.engines.opening import PATIENCE_S, go_round, opened, pair, until

pytestmark = pytest.mark.anyio


class Work(service.Service):
    """A service that says what becomes of its calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = anyio.Event()

    @service.method
    async def hold(self, name: str) -> str:
        self.log.append(f"{name} began")
        try:
            await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.log.append(f"{name} cancelled")
            raise
        self.log.append(f"{name} done")
        return name

    @service.method(idempotent=True)
    async def twice(self, name: str) -> str:
        return await self.hold(name)

    @service.method
    async def fill(self, out: service.Out[numpy.int64], data: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        out[...] = data
        await self.gate.wait()
        out[...] = -data
        return data + 1


@asynccontextmanager
async def served(provider: str = "sim", **settings: Any) -> AsyncIterator[tuple[Work, Work, service.Server]]:
    limits = settings.pop("limits", None)
    async with pair(provider, **settings) as (here, there):
        work = Work()
        async with service.serve(there, work, limits=limits) as server:
            yield work, service.client(here, there.address, Work), server


async def at_rest(client: Any, server: service.Server) -> None:
    """Wait until neither side holds anything of a call."""
    here, there = client._caller.endpoint, server.endpoint
    await until(lambda: not server.running)
    for endpoint in (here, there):
        for link in tuple(endpoint._links.values()):
            values = link.values
            await until(lambda link=link: not (link.calls or link.running))
            await until(lambda values=values: not (values.borrowed_memory.taken_bytes or values._unread))
            assert not link.early
            assert not link._early_ends
            await until(lambda link=link: not link.values._held_bytes)
            for segment in link.values.staging.segments.values():
                await until(lambda segment=segment: segment[0]._lengths == [segment[0].nbytes])
    assert here.registrations.in_use == 0
    # No lease but those of the memory that is lent for as long as the peer is there.
    lent = {region.memory for link in here._links.values() for _, region in link.values.lent_memory._segments.values()}
    assert set(here.engine._links.leases._live) <= lent


async def test_a_cancelled_call_is_cancelled_at_the_server():
    async with served() as (work, client, server), anyio.create_task_group() as group:
        group.start_soon(client.hold, "a")
        await until(lambda: work.log)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await until(lambda: work.log == ["a began", "a cancelled"])
            await at_rest(client, server)


def test_the_deadline_of_a_call_cancels_it_at_the_server():
    async def main(fabric: Any) -> None:
        async with fabric.open_engine() as here, fabric.open_engine() as there:
            work = Work()
            async with service.serve(there, work):
                client = service.client(here, there.address, Work)
                work.gate.set()
                await client.hold("a")
                work.gate = anyio.Event()
                work.log.clear()
                # A caller that is heard no more: what counts is what it had said before.
                client._caller._link.cancel = lambda slot, generation: None
                began = anyio.current_time()
                with anyio.move_on_after(5):
                    await client.hold("b")
                while len(work.log) < 2:
                    await anyio.sleep(0.001)
                assert work.log == ["b began", "b cancelled"]
                assert anyio.current_time() - began == pytest.approx(5, abs=0.01)

    run(main)


async def test_a_call_is_cancelled_at_every_await_of_its_way():
    """Cancel a call with arrays both ways after each number of turns of the loop, until one is through."""
    async with served() as (work, client, server):
        data = numpy.arange(LEND_BYTES // 8 + 3)
        out = numpy.zeros_like(data)
        work.gate.set()
        await client.fill(out, data)
        turns, through = 0, False
        while not through:
            scope = anyio.CancelScope()
            result: list[NDArray[numpy.int64]] = []
            out[...] = 0

            async def call(scope: anyio.CancelScope = scope, result: list[NDArray[numpy.int64]] = result) -> None:
                with scope:
                    result.append(await client.fill(out, data))

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await go_round(turns)
                scope.cancel()
            after = out.copy()
            await at_rest(client, server)
            # Once its await has ended nothing of it lands.
            numpy.testing.assert_array_equal(out, after)
            through = bool(result)
            turns += 1
        numpy.testing.assert_array_equal(result[0], data + 1)
        numpy.testing.assert_array_equal(out, -data)
        assert turns > 5


async def test_a_call_of_a_lost_peer_says_whether_it_ran():
    async with opened("sim") as here:
        async with opened("sim") as there, service.serve(there, Work()):
            client = service.client(here, there.address, Work)
            async with anyio.create_task_group() as group:
                caught: list[service.CallLostError] = []

                async def call() -> None:
                    try:
                        await client.hold("a")
                    except service.CallLostError as error:
                        caught.append(error)

                group.start_soon(call)
                await until(lambda: client._caller._link and client._caller._link.calls)
                await go_round(50)
                there.abort()
                await until(lambda: caught)
        assert caught[0].ran == "perhaps"
        with pytest.raises((aiote.PeerError, service.CallLostError)) as error:
            await client.hold("b")
        assert getattr(error.value, "ran", "no") == "no"


async def test_a_peer_that_is_lost_ends_its_calls_here():
    async with opened("sim") as there:
        work = Work()
        async with service.serve(there, work) as server:
            async with opened("sim") as here:
                client = service.client(here, there.address, Work)
                async with anyio.create_task_group() as group:
                    group.start_soon(swallow, client.hold, "a")
                    await until(lambda: work.log)
                    here.abort()
            await until(lambda: work.log == ["a began", "a cancelled"])
            await until(lambda: not server.running)
            await until(lambda: not server.endpoint._links)
            await until(lambda: not server.endpoint.budget.used)


async def swallow(function: Callable[..., Awaitable[object]], *arguments: object) -> None:
    try:
        await function(*arguments)
    except (aiote.AioteError, service.CallError):
        pass


async def test_a_server_that_ends_cancels_what_runs_and_tells_the_callers():
    async with pair("sim") as (here, there), anyio.create_task_group() as group:
        work, caught = Work(), []
        client = service.client(here, there.address, Work)

        async def call() -> None:
            try:
                await client.hold("a")
            except service.CallLostError as error:
                caught.append(error)

        async with service.serve(there, work):
            group.start_soon(call)
            await until(lambda: work.log)
        assert work.log == ["a began", "a cancelled"]
        await until(lambda: caught)
        assert (caught[0].ran, caught[0].reason) == ("perhaps", "its server was stopped; the method has perhaps run")


async def test_an_idempotent_method_is_called_once_more():
    """Elsewhere, when its server was lost; one that is not says that it has perhaps run."""

    class Two:
        def __init__(self, *engines: aiote.Engine) -> None:
            self.engines = list(engines)

        async def addresses(self) -> list[aiote.Address]:
            return [engine.address for engine in self.engines]

    async with opened("sim") as here, opened("sim") as first, opened("sim") as second:
        works = {first: Work(), second: Work()}
        async with service.serve(first, works[first]), service.serve(second, works[second]):
            client = service.client(here, Two(first, second), Work)
            for method, ran in ((client.twice, True), (client.hold, False)):
                results: list[str] = []
                async with anyio.create_task_group() as group:

                    async def call(method: Any = method, results: list[str] = results) -> None:
                        try:
                            results.append(await method("a"))
                        except service.CallLostError as error:
                            results.append(error.ran)

                    group.start_soon(call)
                    await until(lambda: any(work.log for work in works.values()))
                    chosen = next(engine for engine, work in works.items() if work.log)
                    other = second if chosen is first else first
                    works[chosen].log.clear()
                    here.find_peer(chosen.address).disconnect("the test wants it so")
                    if ran:
                        await until(lambda other=other: works[other].log)
                        works[other].gate.set()
                    await until(lambda results=results: results)
                assert results == (["a"] if ran else ["perhaps"])
                for work in works.values():
                    work.log.clear()
                    work.gate = anyio.Event()


async def test_the_members_with_fewest_calls_take_the_next():
    class Three:
        async def addresses(self) -> list[aiote.Address]:
            return [engine.address for engine in engines]

    async with opened("sim") as here, opened("sim") as a, opened("sim") as b, opened("sim") as c:
        engines, works = [a, b, c], [Work(), Work(), Work()]
        async with (
            service.serve(a, works[0]),
            service.serve(b, works[1]),
            service.serve(c, works[2]) as draining,
            anyio.create_task_group() as group,
        ):
            client = service.client(here, Three(), Work)
            for number in range(6):
                group.start_soon(client.hold, str(number))
                await until(lambda number=number: sum(len(work.log) for work in works) == number + 1)
            assert [len(work.log) for work in works] == [2, 2, 2]
            works[2].gate.set()
            await draining.drain()
            # Whom the draining one refuses goes elsewhere.
            for number in range(4):
                group.start_soon(client.hold, f"more {number}")
            await until(lambda: len(works[0].log) + len(works[1].log) == 8)
            for work in works:
                work.gate.set()


async def raw(engine: aiote.Engine, peer: aiote.Peer, *frames: Any) -> None:
    await engine.send(peer, pack(list(frames)))


async def next_end(engine: aiote.Engine) -> End:
    """Read frames until one is an end."""
    async for message in engine.messages():
        assert message.data[:1] == MAGIC
        for frame in unpack(message.data):
            if isinstance(frame, End):
                return frame
    raise AssertionError


async def test_a_cancellation_that_overtakes_its_call_ends_it():
    async with pair("sim") as (here, there), service.serve(there, Work()) as server:
        peer = await here.connect(there.address)
        await raw(here, peer, HelloFrame(1, True, 16384, 8, 16, 1000), Cancel(3, 7))
        await raw(here, peer, CallFrame(3, 7, "Work/1.hold", 0.0, b"\x91\xa1a", []))
        end = await next_end(here)
        assert (end.slot, end.generation, end.status) == (3, 7, 2)
        assert server.calls == 0
        # One that is late means nothing.
        await raw(here, peer, Cancel(3, 7))
        await raw(here, peer, CallFrame(3, 8, "Health/1.check", 0.0, b"\x90", []))
        assert (await next_end(here)).status == 0


async def test_a_result_that_has_come_is_not_lost_with_its_peer():
    """The server answers and is gone before the caller's task has run again."""

    class Last(service.Service):
        @service.method
        async def word(self) -> NDArray[numpy.int64]:
            return numpy.arange(50_000)

    async with opened("sim") as here:
        async with opened("sim") as there, service.serve(there, Last()) as server:
            client = service.client(here, there.address, Last)
            await client.word()
            async with anyio.create_task_group() as group:
                found: list[NDArray[numpy.int64]] = []

                async def call() -> None:
                    found.append(await client.word())

                group.start_soon(call)
                link = client._caller._link
                ended = link.on_end

                def on_end(frame: End) -> None:
                    ended(frame)
                    there.abort()

                link.on_end = on_end
                await until(lambda: found)
            numpy.testing.assert_array_equal(found[0], numpy.arange(50_000))
            assert not server.running


async def test_a_call_that_waited_in_a_queue_is_said_not_to_have_run():
    limits = service.Limits(calls=1)
    async with pair("sim") as (here, there), anyio.create_task_group() as group:
        work, ends = Work(), {}
        client = service.client(here, there.address, Work, limits=limits)

        async def call(name: str) -> None:
            try:
                await client.hold(name)
            except service.CallError as error:
                ends[name] = error.ran

        async with service.serve(there, work, limits=limits) as server:
            group.start_soon(call, "first")
            await until(lambda: work.log)
            group.start_soon(call, "second")
            await until(lambda: server.queued)
        await until(lambda: len(ends) == 2)
        assert ends == {"first": "perhaps", "second": "no"}


@pytest.mark.parametrize("by", ["caller", "deadline"])
async def test_memory_that_was_to_be_filled_is_free_when_the_call_has_ended(by):
    """Without the help of the garbage collector, whatever refers to the cancellation within the method."""

    class Fill(service.Service):
        def __init__(self) -> None:
            self.under_way = False

        @service.method
        async def fill(self, out: service.Out[numpy.uint8]) -> None:
            self.under_way = True
            if asyncio_runs():
                async with asyncio.TaskGroup():
                    await anyio.sleep_forever()
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)

    async with pair("sim") as (here, there), service.serve(there, fill := Fill()) as server:
        client = service.client(here, there.address, Fill)
        gc.disable()
        try:
            async with anyio.create_task_group() as group:
                if by == "deadline":
                    while not fill.under_way:
                        await end_in_time(client.fill, 0.05)
                else:
                    group.start_soon(end_in_time, client.fill, 1000)
                    await until(lambda: fill.under_way)
                    group.cancel_scope.cancel()
            await until(lambda: not server.running)
            (link,) = server.endpoint._links.values()
            (segment,) = link.values.staging.segments.values()
            await until(lambda: segment[0]._lengths == [segment[0].nbytes])
        finally:
            gc.enable()


def asyncio_runs() -> bool:
    return sniffio.current_async_library() == "asyncio"


async def end_in_time(fill: Callable[..., Awaitable[None]], seconds: float) -> None:
    with anyio.move_on_after(seconds):
        await fill(numpy.zeros(LEND_BYTES, numpy.uint8))


async def test_a_method_that_cancels_itself_has_failed():
    class Odd(service.Service):
        @service.method
        async def give_up(self) -> None:
            raise anyio.get_cancelled_exc_class()

    async with pair("sim") as (here, there), service.serve(there, Odd()):
        with pytest.raises(service.RemoteError), anyio.fail_after(300):
            await service.client(here, there.address, Odd).give_up()


async def test_a_member_that_is_dead_holds_up_no_call():
    class Both:
        async def addresses(self) -> list[aiote.Address]:
            return [dead, there.address]

    async with opened("sim") as gone:
        dead = gone.address
    async with pair("sim") as (here, there), service.serve(there, Work()) as server:
        client = service.client(here, Both(), service.Health)
        for _ in range(3):
            with anyio.fail_after(PATIENCE_S):
                assert (await client.check()).serving
        assert server.calls == 3


async def test_calls_do_not_see_the_context_of_whoever_came_first():
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")

    class Who(service.Service):
        @service.method
        async def am_i(self) -> str:
            return user.get()

    async with pair("sim") as (here, there):
        token = user.set("alice")
        service.client(there, here.address, Who)
        user.reset(token)
        async with service.serve(there, Who()):
            assert await service.client(here, there.address, Who).am_i() == "nobody"
