"""Streams: items in order, back-pressure for their own writer alone, and what ends them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy
import pytest
from numpy.typing import NDArray

from aiote import UsageError, service
from aiote.service.codec import decoder
from aiote.service.definition import methods_of
from aiote.service.endpoint import CallEndpoint
from support.engines.opening import each_provider, go_round, pair, until

pytestmark = pytest.mark.anyio


class Tokens(service.Service):
    def __init__(self) -> None:
        self.sent = 0
        self.left: list[str] = []
        self.may_end = anyio.Event()

    @service.method
    async def count(self, items: int) -> AsyncIterator[int]:
        try:
            for number in range(items):
                self.sent = number
                yield number
        finally:
            self.left.append("count")

    @service.method
    async def arrays(self, sizes: list[int]) -> AsyncIterator[NDArray[numpy.int32]]:
        for size in sizes:
            yield numpy.arange(size, dtype=numpy.int32)

    @service.method
    async def breaks(self, after: int) -> AsyncIterator[str]:
        for number in range(after):
            yield str(number)
        raise RuntimeError("it broke")

    @service.method
    async def lingers(self) -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self.may_end.wait()
            self.left.append("lingers")

    @service.method
    async def ping(self) -> int:
        return 1


@asynccontextmanager
async def served(provider: str = "sim", **limits: int) -> AsyncIterator[tuple[Tokens, Tokens, service.Server]]:
    async with pair(provider) as (here, there):
        tokens = Tokens()
        async with service.serve(there, tokens, limits=service.Limits(**limits)) as server:
            yield tokens, service.client(here, there.address, Tokens), server
            await until(lambda: not server.running)
            for endpoint in (client_endpoint(here), server.endpoint):
                for link in tuple(endpoint._links.values()):
                    await until(
                        lambda link=link: (
                            not (link.calls or link.values.borrowed_memory.taken_bytes or link.values._unread)
                        )
                    )


def client_endpoint(engine: Any) -> Any:
    return CallEndpoint.of(engine)


@each_provider
async def test_items_of_a_stream_come_in_order_and_whole(provider):
    async with served(provider) as (_, client, _):
        assert [number async for number in client.count(3000)] == list(range(3000))
        sizes = [0, 1, 5000, 3, 3_000_000, 2]
        found = [len(array) async for array in client.arrays(sizes)]
        assert found == sizes
        assert [number async for number in client.count(0)] == []


async def test_aclose_returns_when_the_method_has_ended_or_its_peer_is_lost():
    async with served() as (tokens, client, _):
        stream = client.lingers()
        await stream.aclose()
        stream = client.lingers()
        assert await anext(stream) == 1
        with anyio.move_on_after(0.05) as scope:
            await stream.aclose()
        assert scope.cancelled_caught
        assert tokens.left == []
        tokens.may_end.set()
        await stream.aclose()
        await stream.aclose()
        assert tokens.left == ["lingers"]
        assert [item async for item in stream] == []
    async with served() as (tokens, client, server):
        stream = client.lingers()
        assert await anext(stream) == 1
        async with anyio.create_task_group() as group:
            group.start_soon(stream.aclose)
            await go_round()
            await server.endpoint.engine.aclose()
            tokens.may_end.set()


async def test_a_slow_reader_holds_its_writer_and_nobody_else():
    async with served(stream_items=16) as (tokens, client, _):
        async with client.count(1000) as slow:
            assert await anext(slow) == 0
            await go_round(200)
            # What was taken, what may be ahead, and the one in the writer's hand.
            assert tokens.sent <= 1 + 16 + 1
            for _ in range(20):
                assert await client.ping() == 1
            assert [number async for number in client.count(100)] == list(range(100))
            assert [await anext(slow) for _ in range(500)] == list(range(1, 501))
        await until(lambda: tokens.left == ["count", "count"])


async def test_a_stream_is_ahead_by_no_more_bytes_than_allowed():
    async with served(stream_bytes=100_000) as (_, client, server):
        async with client.arrays([10_000] * 20) as stream:
            await anext(stream)
            await go_round(200)
            (link,) = server.endpoint._links.values()
            assert link.values.borrowed_memory.taken_bytes <= 100_000 + 2 * 40_000
            assert len([array async for array in stream]) == 19


async def test_an_error_of_a_streams_method_comes_behind_its_items():
    async with served() as (_, client, _):
        found = []
        with pytest.raises(service.RemoteError, match="RuntimeError: it broke"):
            async for item in client.breaks(300):
                found.append(item)
        assert found == [str(number) for number in range(300)]


@pytest.mark.parametrize("way", ["break", "close", "cancel", "drop"])
async def test_a_stream_that_is_left_is_cancelled_at_the_server(way):
    async with served() as (tokens, client, server):
        if way == "break":
            async for number in client.count(10**9):
                if number == 300:
                    break
        elif way == "cancel":
            async with anyio.create_task_group() as group:

                async def read() -> None:
                    async for _ in client.count(10**9):
                        await anyio.sleep(0)

                group.start_soon(read)
                await until(lambda: tokens.sent > 300)
                group.cancel_scope.cancel()
        else:
            stream = client.count(10**9)
            assert await anext(stream) == 0
            if way == "close":
                stream.close()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            del stream
        gc.collect()
        await until(lambda: tokens.left == ["count"])
        await until(lambda: not server.running)
        assert await client.ping() == 1


async def test_a_stream_ends_with_its_server():
    async with pair("sim") as (here, there):
        client = service.client(here, there.address, Tokens)
        async with service.serve(there, Tokens()):
            stream = client.count(10**9)
            await anext(stream)
        with pytest.raises(service.CallLostError, match="its server was stopped"):
            async for _ in stream:
                pass
        async with service.serve(there, Tokens()):
            stream = client.count(10**9)
            await anext(stream)
            here.find_peer(there.address).disconnect("the test wants it so")
            with pytest.raises(service.CallLostError, match="the test wants it so"):
                async for _ in stream:
                    pass


async def test_a_stream_that_nobody_reads_never_begins():
    async with served() as (tokens, client, server):
        client.count(5)
        await go_round()
        assert server.calls == 0
        assert tokens.left == []


async def test_a_stream_that_is_listened_to_goes_on_when_its_object_is_dropped():
    async with served(stream_items=4) as (tokens, client, _):
        heard: list[int] = []
        ends: list[Exception | None] = []
        await client.count(100).listen(heard.append, ends.append)
        gc.collect()
        await until(lambda: bool(ends))
        assert heard == list(range(100))
        assert ends == [None]
        assert tokens.left == ["count"]


async def test_a_listener_is_told_why_its_stream_ended():
    async with served() as (_, client, _):
        heard: list[str] = []
        ends: list[Exception | None] = []
        await client.breaks(3).listen(heard.append, ends.append)
        await until(lambda: bool(ends))
        assert heard == ["0", "1", "2"]
        assert isinstance(ends[0], service.RemoteError)
        assert ends[0].message == "it broke"


async def test_a_stream_that_is_listened_to_is_left_by_close():
    async with served() as (tokens, client, _):
        heard: list[int] = []
        ends: list[Exception | None] = []
        stream = client.lingers()
        await stream.listen(heard.append, ends.append)
        await until(lambda: bool(heard))
        stream.close()
        await go_round()
        assert not ends, "its method goes on"
        tokens.may_end.set()
        await until(lambda: bool(ends))
        assert tokens.left == ["lingers"]
        assert isinstance(ends[0], service.RemoteError)
        other = client.count(1)
        other.close()
        for used in (stream, other):
            with pytest.raises(UsageError, match="was begun already"):
                await used.listen(heard.append, ends.append)
        assert len(ends) == 1


async def test_a_malformed_item_ends_the_listener_once_the_method_has_ended(monkeypatch):
    async with served() as (tokens, client, _):
        heard: list[Any] = []
        ends: list[Exception | None] = []
        (count,) = [method for method in methods_of(Tokens) if method.attribute == "count"]
        monkeypatch.setattr(count, "read_result", decoder(str))
        await client.count(3).listen(heard.append, ends.append)
        await until(lambda: bool(ends))
        assert not heard
        assert "an item is not of the annotated type" in str(ends[0])
        assert tokens.left == ["count"]
