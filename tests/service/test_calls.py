"""Calls: values and arrays there and back, what they raise, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import numpy
import pytest
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.service.codec import INLINE_BYTES
from aiote.service.memory import LEND_BYTES
from support.engines.opening import each_provider, pair, until

pytestmark = pytest.mark.anyio


class Usage(msgspec.Struct):
    texts: int
    mean: NDArray[numpy.float64]


class NoTextsError(Exception):
    """What the service below says that it raises."""


class Embed(service.Service):
    """A service with one of each."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.gate = anyio.Event()

    @service.method
    async def echo(self, text: str, times: int = 1) -> str:
        self.ran.append("echo")
        return text * times

    @service.method(raises=[NoTextsError])
    async def embed(self, texts: list[str], out: service.Out[numpy.float32]) -> Usage:
        self.ran.append("embed")
        if not texts:
            raise NoTextsError("no texts")
        out[...] = numpy.arange(out.size, dtype=numpy.float32).reshape(out.shape) + len(texts)
        return Usage(len(texts), numpy.arange(3.0))

    @service.method
    async def add(self, left: NDArray[numpy.float64], right: NDArray[Any]) -> NDArray[numpy.float64]:
        self.ran.append("add")
        return left + right

    @service.method
    async def fail(self, message: str) -> None:
        self.ran.append("fail")
        raise KeyError(message)

    @service.method
    async def hold(self) -> int:
        self.ran.append("hold")
        await self.gate.wait()
        return len(self.ran)


@asynccontextmanager
async def served(provider: str, **settings: Any) -> AsyncIterator[tuple[Embed, Embed, service.Server]]:
    """Serve on one of two engines, and yield the service, a client of it on the other engine, and the server."""
    limits = settings.pop("limits", None)
    async with pair(provider, **settings) as (here, there):
        embed = Embed()
        async with service.serve(there, embed, limits=limits) as server:
            yield embed, service.client(here, there.address, Embed), server
            await until(lambda: not server.running)


@each_provider
async def test_values_and_arrays_go_there_and_back(provider):
    async with served(provider) as (_, client, server):
        assert await client.echo("äöü", times=2) == "äöüäöü"
        for count in (0, 3, INLINE_BYTES, LEND_BYTES // 8 + 5):
            left, right = numpy.arange(count) / 2, numpy.arange(count, dtype=numpy.int32)
            total = await client.add(left, right)
            assert total.dtype == numpy.float64
            assert total.flags.writeable
            numpy.testing.assert_array_equal(total, left + right)
        for shape in ((2, 3), (INLINE_BYTES, 3), (LEND_BYTES, 1)):
            out = numpy.zeros(shape, numpy.float32)
            usage = await client.embed(["a", "b"], out)
            assert usage.texts == 2
            numpy.testing.assert_array_equal(usage.mean, numpy.arange(3.0))
            numpy.testing.assert_array_equal(out.ravel(), numpy.arange(out.size, dtype=numpy.float32) + 2)
        assert server.calls == 8


async def test_long_values_go_one_sided_and_give_their_places_back():
    async with served("sim") as (_, client, server):
        text = "x" * 1_000_000
        assert await client.echo(text) == text
        here = client._caller.endpoint
        messages = here.message_bytes
        array = numpy.ones(1 << 20)
        for _ in range(3):
            await client.add(array, array.astype(numpy.float32))
        assert here.array_bytes >= 3 * (array.nbytes + array.nbytes // 2)
        assert here.message_bytes - messages < 5000
        (mine,), (theirs,) = here._links.values(), server.endpoint._links.values()
        await until(lambda: not theirs.values.borrowed_memory.taken_bytes)
        assert not mine.values.borrowed_memory.taken_bytes
        assert not mine.calls


async def test_both_sides_may_serve_and_call():
    async with pair("sim") as (left, right):
        async with service.serve(left, Embed()), service.serve(right, Embed()):
            there, back = service.client(left, right.address, Embed), service.client(right, left.address, Embed)
            assert (await there.echo("a"), await back.echo("b")) == ("a", "b")


async def test_a_thousand_calls_at_a_time_share_messages():
    async with served("sim") as (_, client, server):
        found = {}

        async def one(number: int) -> None:
            found[number] = await client.echo(str(number))

        async with anyio.create_task_group() as group:
            for number in range(1000):
                group.start_soon(one, number)
                if number % 100 == 0:
                    await anyio.sleep(0)
        assert found == {number: str(number) for number in range(1000)}
        assert client._caller.endpoint.messages < 300
        assert server.endpoint.messages < 300


async def test_an_exception_arrives_as_its_name_and_text():
    async with served("sim") as (_, client, _):
        with pytest.raises(service.RemoteError, match="Embed/1.fail: KeyError: 'mine'") as caught:
            await client.fail("mine")
        assert (caught.value.kind, caught.value.message, caught.value.ran) == ("KeyError", "'mine'", "yes")
        out = numpy.full(4, 7, numpy.float32)
        with pytest.raises(NoTextsError, match="no texts"):
            await client.embed([], out)
        assert (out == 7).all()


MASKED = numpy.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda client: client.echo(5), service.InvalidCallError, "Expected `str`, got `int`"),
        (lambda client: client.echo(), TypeError, "Missing required argument 'text'"),
        (lambda client: client.echo("a", many=2), TypeError, "Unexpected keyword argument 'many'"),
        (lambda client: client.echo(object()), aiote.UsageError, "object cannot travel"),
        (lambda client: client.echo("x" * (5 << 20)), aiote.UsageError, "a value of 52428.. bytes"),
        (
            lambda client: client.add(numpy.arange(3), numpy.arange(3)),
            service.InvalidCallError,
            "expected an array of float64, got int64",
        ),
        (lambda client: client.add(numpy.array(["a"]), 1), aiote.UsageError, "an array of <U1 cannot travel"),
        (lambda client: client.embed(["a"], [0.0]), aiote.UsageError, "expected a contiguous, writable numpy array"),
        (lambda client: client.embed(["a"], numpy.zeros((4, 4), "f4").T), aiote.UsageError, "contiguous"),
        (lambda client: client.embed(["a"], numpy.zeros(4)), aiote.UsageError, "out: expected an array of float32"),
        (
            lambda client: client.embed(["a"], numpy.zeros(1 << 18, "i1")),
            aiote.UsageError,
            "out: expected an array of float32",
        ),
        (
            lambda client: client.embed(["a"], numpy.zeros(4, ">f4")),
            aiote.UsageError,
            "out: an array of >f4 cannot",
        ),
        (lambda client: client.embed(["a"], MASKED.astype("f4")), aiote.UsageError, "out: .* float32: it has a mask"),
        (lambda client: client.add(MASKED, numpy.arange(3, dtype="i4")), aiote.UsageError, "float64: it has a mask"),
    ],
)
async def test_wrong_arguments_are_explained_and_nothing_runs(call, error, text):
    async with served("sim") as (embed, client, _):
        with pytest.raises(error, match=text):
            await call(client)
        assert embed.ran == []
        assert await client.echo("fine") == "fine"


async def test_calls_of_what_is_not_served_fail_with_the_reason():
    class Other(service.Service):
        @service.method
        async def go(self) -> None: ...

    async with pair("sim", connect_timeout=3.0) as (here, there):
        client = service.client(here, there.address, Other)
        with pytest.raises(service.NotServedError, match="did not answer within connect_timeout"):
            await client.go()
        async with service.serve(there, Embed()):
            with pytest.raises(service.NotServedError, match="Other/1.go: it serves Embed/1.add") as caught:
                await client.go()
            assert caught.value.ran == "no"
        with pytest.raises(service.NotServedError):
            await client.go()


async def test_two_versions_of_a_service_are_served_side_by_side():
    class Newer(Embed):
        name = "Embed"
        version = 2

        @service.method
        async def echo(self, text: str, times: int = 1) -> str:
            return text.upper()

    async with pair("sim") as (here, there), service.serve(there, Embed(), Newer()):
        assert await service.client(here, there.address, Embed).echo("a") == "a"
        assert await service.client(here, there.address, Newer).echo("a") == "A"


async def test_an_engine_serves_several_times_and_each_ends_alone():
    class Who(service.Service):
        @service.method
        async def calls(self) -> tuple[str, bytes]:
            call = service.current_call()
            return call.method, call.peer.address.identity

    async with pair("sim") as (here, there):
        embed, who = (service.client(here, there.address, kind) for kind in (Embed, Who))
        health = service.client(here, there.address, service.Health)
        async with service.serve(there, Embed()):
            async with service.serve(there, Who()) as second:
                assert await embed.echo("a") == "a"
                assert await who.calls() == ("Who/1.calls", here.address.identity)
                await second.drain()
                assert not (await health.check()).serving
                assert await embed.echo("b") == "b"
            with pytest.raises(service.NotServedError, match="it serves Embed/1.add"):
                await who.calls()
            assert await health.check() == service.HealthStatus(True, 0, 0)
    with pytest.raises(aiote.UsageError, match="no remote call runs here"):
        service.current_call()


async def test_health_is_answered_by_every_server():
    async with served("sim") as (embed, client, server), anyio.create_task_group() as group:
        health = service.client(client._caller.endpoint.engine, server.endpoint.engine.address, service.Health)
        group.start_soon(client.hold)
        await until(lambda: embed.ran)
        assert await health.check() == service.HealthStatus(True, 1, 0)
        group.start_soon(server.drain)
        await until(lambda: server.draining)
        assert not (await health.check()).serving
        embed.gate.set()


async def test_interceptors_surround_calls_on_both_sides():
    seen: list[tuple[str, ...]] = []

    async def note(info: service.CallInfo, proceed: Any) -> Any:
        seen.append(("before", info.method))
        try:
            return await proceed()
        finally:
            seen.append(("after", info.method))

    async def forbid(info: service.CallInfo, proceed: Any) -> Any:
        if info.method == "Embed/1.hold":
            raise PermissionError(f"not for {info.peer.address.host}")
        return await proceed()

    async with pair("sim") as (here, there), service.serve(there, Embed(), interceptors=[note, forbid]):
        client = service.client(here, there.address, Embed, interceptors=[note])
        assert await client.echo("a") == "a"
        assert seen == [("before", "Embed/1.echo")] * 2 + [("after", "Embed/1.echo")] * 2
        with pytest.raises(service.RemoteError, match="PermissionError: not for"):
            await client.hold()


async def test_calls_beyond_the_limits_wait_or_are_refused():
    limits = service.Limits(slots=4, calls=2, queue=1)
    async with served("sim", limits=limits) as (embed, client, server), anyio.create_task_group() as group:
        here, there = client._caller.endpoint.engine, server.endpoint.engine
        impatient = service.client(here, there.address, Embed, wait=False)
        for _ in range(3):
            group.start_soon(client.hold)
        await until(lambda: (server.running, server.queued) == (2, 1))
        with pytest.raises(service.BusyError, match="2 calls run, 1 wait") as caught:
            await client.echo("one too many")
        assert caught.value.ran == "no"
        link = client._caller._link
        assert len(link.calls) == 3
        link._free.clear()
        with pytest.raises(service.BusyError, match="3 calls of this engine are under way"):
            await impatient.echo("no slot")
        with anyio.move_on_after(0.05) as scope:
            await client.echo("waits for a slot")
        assert scope.cancelled_caught
        embed.gate.set()
        await until(lambda: not server.running)
        assert await client.echo("now") == "now"
        assert "waits for a slot" not in embed.ran


async def test_a_draining_server_ends_what_it_has():
    async with served("sim") as (embed, client, server), anyio.create_task_group() as group:
        results: list[int] = []

        async def hold() -> None:
            results.append(await client.hold())

        group.start_soon(hold)
        await until(lambda: embed.ran)
        with anyio.move_on_after(0.05) as scope:
            await server.drain()
        assert scope.cancelled_caught
        with pytest.raises(service.DrainingError):
            await client.echo("too late")
        embed.gate.set()
        await server.drain()
        await until(lambda: results)
        assert results == [1]


def test_services_that_cannot_be_called_are_explained():
    class Bare(service.Service):
        @service.method
        async def go(self, text) -> None: ...

    class Silent(service.Service):
        @service.method
        async def go(self): ...

    class Starred(service.Service):
        @service.method
        async def go(self, *texts: str) -> None: ...

    class Empty(service.Service):
        pass

    class Filled(service.Service):
        @service.method
        async def go(self, out: service.Out[numpy.int8]) -> AsyncIterator[int]: ...

    class Foreign(service.Service):
        @service.method
        async def go(self, what: set[aiote.Engine] | list[aiote.Peer]) -> None: ...

    from aiote.service.definition import methods_of

    for kind, text in (
        (Bare, "parameter text has no annotation"),
        (Silent, "its result has no annotation"),
        (Starred, r"\*texts: .* expected an ordinary parameter"),
        (Empty, "no remote method"),
        (Filled, "a stream cannot fill arrays"),
        (Foreign, "Foreign/1.go: Type unions may not contain more than one"),
        (int, "a subclass of aiote.service.Service"),
    ):
        with pytest.raises(aiote.UsageError, match=text):
            methods_of(kind)


async def test_serving_or_limiting_twice_is_refused():
    async with pair("sim") as (_, there), service.serve(there, Embed()):
        with pytest.raises(aiote.UsageError, match="Embed/1.add.*: this engine serves these methods already"):
            async with service.serve(there, Embed()):
                pass
        with pytest.raises(aiote.UsageError, match="other limits of calls already"):
            service.client(there, there.address, Embed, limits=service.Limits(slots=3))
    async with pair("sim") as (_, there):
        with pytest.raises(aiote.UsageError, match="Embed/1.add is served twice"):
            async with service.serve(there, Embed(), Embed()):
                pass
        async with service.serve(there, Embed()):
            pass
    for wrong in ({"slots": 0}, {"slots": 1 << 17}, {"calls": 1.5}, {"queue": -1}):
        with pytest.raises(aiote.UsageError, match=f"{next(iter(wrong))}="):
            service.Limits(**wrong)
