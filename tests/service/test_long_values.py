"""Long values are decoded in a thread, whoever sends them, and what is read in a turn of the loop is bounded."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import numpy
import pytest
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.service import codec, endpoint, values
from aiote.service.codec import LONG_ARRAYS, LONG_BODY, LONG_ITEM
from aiote.service.endpoint import TURN, TURN_BYTES, CallEndpoint
from aiote.service.frames import CallFrame, Cancel, End, HelloFrame, pack, unpack
from support.engines.opening import opened, pair, until

LONG = LONG_BODY
"""Numbers below 128 take a byte each."""
HELLO = HelloFrame(1, True, 16384, 1024, 16, 1000)


class Long(service.Service):
    @service.method
    async def numbers(self, count: int) -> list[int]:
        return [7] * count

    @service.method
    async def array(self, nbytes: int) -> NDArray[numpy.uint8]:
        return numpy.ones(nbytes, numpy.uint8)

    @service.method
    async def total(self, numbers: list[int]) -> int:
        return sum(numbers)

    @service.method
    async def wait(self) -> None:
        await anyio.sleep_forever()


class Items(service.Service):
    @service.method
    async def items(self, counts: list[int]) -> AsyncIterator[list[int]]:
        for count in counts:
            yield [len(counts)] * count

    @service.method
    async def arrays(self, sizes: list[int]) -> AsyncIterator[NDArray[numpy.uint8]]:
        for size in sizes:
            yield numpy.ones(size, numpy.uint8)


@pytest.fixture
def decoded(monkeypatch) -> dict[bool, list[int]]:
    """Return the lengths of the bodies that are decoded: in the thread of the event loop (True), and in others."""
    found: dict[bool, list[int]] = defaultdict(list)
    here, decode = threading.get_ident(), codec.decode

    def noted(decoder: Any, body: bytes, take: Any = None) -> Any:
        found[threading.get_ident() == here].append(len(body))
        return decode(decoder, body, take)

    for module in (endpoint, values):
        monkeypatch.setattr(module, "decode", noted)
    return found


@pytest.mark.anyio
async def test_long_arguments_and_results_are_decoded_in_a_thread(decoded):
    async with pair("sim") as (here, there), service.serve(there, Long()):
        client = service.client(here, there.address, Long)
        assert await client.numbers(LONG) == [7] * LONG
        assert await client.total([1] * LONG) == LONG
        assert (await client.array(LONG_ARRAYS)).all()
        assert len(decoded[False]) == 3
        assert len(await client.numbers(LONG // 2)) == LONG // 2
        assert await client.total([1] * (LONG // 2)) == LONG // 2
        assert len(decoded[False]) == 3
    assert max(decoded[True]) < LONG_BODY


@pytest.mark.anyio
async def test_a_long_result_of_another_type_is_the_server_s_error():
    class Wrong(service.Service):
        name = "Long"

        @service.method
        async def numbers(self, count: int) -> list[str]:
            return ["x"] * count

    async with pair("sim") as (here, there), service.serve(there, Wrong()):
        with pytest.raises(service.RemoteError, match="not of the annotated type: Expected `int`"):
            await service.client(here, there.address, Long).numbers(LONG)
        (one,) = CallEndpoint.of(here)._links.values()
        assert not one.values._held_bytes


@pytest.mark.anyio
async def test_a_cancelled_wait_for_a_long_result_gives_its_place_back(monkeypatch):
    async with pair("sim") as (here, there), service.serve(there, Long()):
        client, begun = service.client(here, there.address, Long), threading.Event()
        decode = codec.decode
        monkeypatch.setattr(endpoint, "decode", lambda *args: (begun.set(), decode(*args)))
        async with anyio.create_task_group() as group:
            group.start_soon(client.numbers, LONG)
            await until(begun.is_set)
            group.cancel_scope.cancel()
        (one,) = CallEndpoint.of(here)._links.values()
        await until(lambda: not one.values._held_bytes and not one.calls)
        assert await client.numbers(3) == [7] * 3


@pytest.mark.anyio
async def test_long_items_come_in_their_order_and_before_the_end(decoded):
    counts = [1, LONG, 2, 2 * LONG, 3 * LONG, 3]
    async with pair("sim") as (here, there), service.serve(there, Items()):
        client = service.client(here, there.address, Items)
        assert [len(item) async for item in client.items(counts)] == counts
        assert len(decoded[False]) == 3
        heard: list[int] = []
        ended: list[Exception | None] = []
        await client.items(counts).listen(lambda item: heard.append(len(item)), ended.append)
        await until(lambda: ended)
        assert heard == counts
        assert ended == [None]
        (one,) = CallEndpoint.of(here)._links.values()
        assert not one.values._held_bytes
    assert max(decoded[True]) < LONG_BODY


@pytest.mark.anyio
async def test_items_with_large_arrays_are_decoded_in_a_thread(decoded):
    """Those of many streams may arrive in one turn of the loop, so they are long sooner than other values."""
    sizes = [LONG_ITEM // 2, LONG_ITEM, 5, LONG_ITEM]
    async with pair("sim") as (here, there), service.serve(there, Items()):
        client = service.client(here, there.address, Items)
        assert [len(item) async for item in client.arrays(sizes)] == sizes
    assert len(decoded[False]) == 2


@pytest.mark.anyio
async def test_a_stream_that_is_left_while_an_item_is_decoded_gives_its_places_back():
    async with pair("sim") as (here, there), service.serve(there, Items()) as server:
        client = service.client(here, there.address, Items)
        for _ in range(5):
            async with client.items([1, LONG, LONG, LONG, 1]) as stream:
                assert len(await anext(stream)) == 1
            await stream.aclose()
        (one,) = CallEndpoint.of(here)._links.values()
        await until(lambda: not one.values._held_bytes and not one.calls and not server.running)
        assert [len(item) async for item in client.items([LONG])] == [LONG]


@pytest.mark.anyio
async def test_a_long_item_that_no_thread_can_decode_ends_its_stream_with_an_error(monkeypatch):
    async def without_a_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with pair("sim") as (here, there), service.serve(there, Items()) as server:
        client = service.client(here, there.address, Items)
        with monkeypatch.context() as patched:
            patched.setattr(CallEndpoint, "in_thread", without_a_thread)
            with pytest.raises(service.RemoteError, match="could not be decoded: can't start new thread"):
                assert not [item async for item in client.items([LONG, LONG, 1])]
        (one,) = CallEndpoint.of(here)._links.values()
        await until(lambda: not one.values._held_bytes and not one.calls and not server.running)
        assert [len(item) async for item in client.items([LONG])] == [LONG]


@pytest.mark.anyio
async def test_what_a_lost_peer_has_said_is_read_in_turns(monkeypatch):
    """By the task that ends its link, and beside it by the endpoint's callback. Trio orders tasks at random, so either
    may run twice before the task that counts turns runs again.
    """
    turns, taken = 0, defaultdict[tuple[int, int], int](int)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    def dispatch(*args: Any, own: Any = CallEndpoint._dispatch) -> None:
        reader = 0
        with suppress(RuntimeError):  # A callback of asyncio has no task.
            reader = anyio.get_current_task().id
        taken[turns, reader] += 1
        own(*args)

    monkeypatch.setattr(CallEndpoint, "_dispatch", dispatch)
    async with pair("sim") as (liar, there), service.serve(there, Long()) as server:
        peer = await liar.connect(there.address)
        # They are short: one message has thousands.
        cancelled = [Cancel(slot, 1) for slot in range(100)] * 30
        async with anyio.create_task_group() as group:
            group.start_soon(count)
            await liar.send(peer, pack([HELLO, CallFrame(0, 1, "Long/1.wait", 0.0, b"\x90", []), *cancelled]))
            await until(lambda: server.running)
            (one,) = server.endpoint._links.values()
            one.peer.disconnect("the test")
            await until(lambda: not server.endpoint._links)
            group.cancel_scope.cancel()
    assert sum(taken.values()) == 2 + len(cancelled)
    assert max(taken.values()) <= 2 * TURN


@pytest.mark.anyio
async def test_a_turn_reads_messages_of_some_bytes_at_most(monkeypatch):
    """Each has one frame; but of a stream it would be an item, which is decoded when it arrives."""
    turns, read = 0, defaultdict[int, int](int)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    def frames_of(data: bytes, own: Any = endpoint.frames_of) -> Any:
        read[turns] += len(data)
        return own(data)

    monkeypatch.setattr(endpoint, "frames_of", frames_of)
    async with (
        pair("sim", message_pool=64) as (liar, there),
        service.serve(there, Long()),
        anyio.create_task_group() as group,
    ):
        peer = await liar.connect(there.address)
        group.start_soon(count)
        await liar.send(peer, pack([HELLO]))
        for slot in range(64):
            liar.submit_send(peer, pack([CallFrame(slot, 1, "Long/1.none", 0.0, b"x" * 16000, [])]))
        ends = 0
        async for message in liar.messages():
            ends += sum(isinstance(frame, End) for frame in unpack(message.data))
            if ends == 64:
                break
        group.cancel_scope.cancel()
    assert max(read.values()) <= 2 * (TURN_BYTES + 16384) < sum(read.values())


class Filled(service.Service):
    @service.method
    async def fill(self, out: service.Out[numpy.uint8]) -> None:
        await anyio.sleep_forever()


@pytest.mark.anyio
async def test_small_arrays_to_be_filled_are_charged_to_their_caller():
    limits = service.Limits(peer_bytes=1 << 20, total_bytes=64 << 20)
    async with opened("sim") as liar, opened("sim") as there, service.serve(there, Filled(), limits=limits) as server:
        peer = await liar.connect(there.address)
        body = codec.encode([("|u1", (200_000,), b"")])[0]
        calls = [CallFrame(slot, 1, "Filled/1.fill", 0.0, body, []) for slot in range(8)]
        await liar.send(peer, pack([HELLO, *calls]))
        refused: list[End] = []
        async for message in liar.messages():
            refused += [frame for frame in unpack(message.data) if isinstance(frame, End)]
            if len(refused) == 3:
                break
        assert {end.status for end in refused} == {3}
        assert server.running == 5
        assert server.endpoint.budget.used == 5 * 200_000
        peer.disconnect()
        await until(lambda: not server.endpoint.budget.used)


class TwoPartsError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Failing(service.Service):
    @service.method(raises=[TwoPartsError])
    async def fail(self) -> None:
        raise TwoPartsError("one", "two")


@pytest.mark.anyio
async def test_an_error_that_cannot_be_made_of_its_text_is_a_remote_error():
    async with pair("sim") as (here, there), service.serve(there, Failing()):
        with pytest.raises(service.RemoteError, match="TwoPartsError: one two") as caught:
            await service.client(here, there.address, Failing).fail()
        assert isinstance(caught.value, aiote.AioteError)
