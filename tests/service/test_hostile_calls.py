"""A peer that has the key and says what it likes of calls: it is disconnected or answered, and harms nobody else."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.service.codec import array_of, decode, decoder
from aiote.service.endpoint import TURN, CallEndpoint
from aiote.service.frames import (
    MAGIC,
    MAX_LEFT_S,
    Ask,
    CallFrame,
    Cancel,
    Credit,
    End,
    Free,
    Grant,
    HelloFrame,
    Items,
    Return,
    pack,
    unpack,
)
from aiote.service.memory import MAX_SEGMENTS
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import opened, pair, until

HELLO = HelloFrame(1, True, 16384, 8, 16, 1000)


class Plain(service.Service):
    @service.method
    async def add(self, left: NDArray[numpy.int32], right: int) -> NDArray[numpy.int32]:
        return left + right

    @service.method
    async def fill(self, out: service.Out[numpy.uint8]) -> None:
        out[...] = 1

    @service.method
    async def wait(self) -> None:
        await anyio.sleep_forever()


async def say(engine: aiote.Engine, peer: aiote.Peer, *frames: Any) -> None:
    await engine.send(peer, pack(list(frames)))


async def answers(engine: aiote.Engine, count: int) -> list[End]:
    """Read so many ends."""
    found: list[End] = []
    async for message in engine.messages():
        found += [frame for frame in unpack(message.data) if isinstance(frame, End)]
        if len(found) >= count:
            return found
    raise AssertionError


LIES: dict[str, list[Any]] = {
    "another version": [HelloFrame(2, True, 16384, 8, 16, 1000)],
    "messages too short for anything": [HelloFrame(1, True, 64, 8, 16, 1000)],
    "no slots": [HelloFrame(1, True, 16384, 0, 16, 1000)],
    "pieces in memory that was not lent": [HELLO, CallFrame(0, 1, "Plain/1.wait", 0.0, b"\x90", [(0, 0, 8)])],
    "a slot that there is not": [HELLO, CallFrame(60_000, 1, "Plain/1.wait", 0.0, b"\x90", [])],
    "a slot that is in use": [HELLO, *[CallFrame(1, 1 + n, "Plain/1.wait", 0.0, b"\x90", []) for n in range(2)]],
    "a call once more": [HELLO, *[CallFrame(1, 1, "Plain/1.nothing", 0.0, b"\x90", []) for _ in range(2)]],
    "the end of no call": [HELLO, End(0, 1, 0, b"", [])],
    "items of no call": [HELLO, Items(0, 1, 0, [b"\x01"], [])],
    "memory that nobody asked for": [HELLO, Grant(0, 1 << 20, b"x" * 100)],
    "two questions at a time": [HELLO, Ask(1), Ask(1)],
    "a return of what is not lent": [HELLO, Return(0)],
    "pieces that nobody gave": [HELLO, Free([(0, 0, 64)])],
    "a cancellation in no slot": [HELLO, Cancel(50_000, 1)],
    "a deadline of NaN": [HELLO, CallFrame(0, 1, "Plain/1.wait", math.nan, b"\x90", [])],
    "an endless deadline": [HELLO, CallFrame(0, 1, "Plain/1.wait", math.inf, b"\x90", [])],
    "a deadline before now": [HELLO, CallFrame(0, 1, "Plain/1.wait", -1.0, b"\x90", [])],
    "credit for what was not sent": [HELLO, CallFrame(1, 1, "Plain/1.wait", 0.0, b"\x90", []), Credit(1, 1, 1 << 40)],
}


@pytest.mark.anyio
@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_ends_in_an_answer_or_a_disconnection(lie):
    async with pair("sim") as (liar, there), opened("sim") as honest, service.serve(there, Plain()) as server:
        peer = await liar.connect(there.address)
        await say(liar, peer, *LIES[lie])
        if not lie.startswith("credit"):
            assert "what it says of its calls cannot be" in await peer.wait_closed()
        client = service.client(honest, there.address, Plain)
        numpy.testing.assert_array_equal(await client.add(numpy.arange(9, dtype="i4"), 1), numpy.arange(1, 10))
        if lie.startswith("credit"):
            peer.disconnect()
        await until(lambda: not server.running and len(server.endpoint._links) == 1)


@pytest.mark.anyio
async def test_many_messages_of_many_calls_let_others_run_after_each_turn(monkeypatch):
    turns, taken = 0, Counter[int]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    dispatch = CallEndpoint._dispatch
    monkeypatch.setattr(CallEndpoint, "_dispatch", lambda *args: (taken.update([turns]), dispatch(*args)))
    async with (
        pair("sim", message_pool=32) as (liar, there),
        service.serve(there, Plain()),
        anyio.create_task_group() as group,
    ):
        peer = await liar.connect(there.address)
        group.start_soon(count)
        for number in range(20):
            calls = [CallFrame(n, 1 + number, "Plain/1.x", 0.0, b"\x90", []) for n in range(500)]
            liar.submit_send(peer, pack([HELLO, *calls] if not number else calls))
        assert len(await answers(liar, 10_000)) == 10_000
        group.cancel_scope.cancel()
    # Twice, for trio may have the counter first in one turn and last in the next.
    assert max(taken.values()) <= 2 * TURN < sum(taken.values())


@pytest.mark.anyio
async def test_what_is_left_of_a_message_is_read_before_its_lost_peer_is_forgotten():
    async with pair("sim") as (liar, there), service.serve(there, Plain()) as server:
        peer = await liar.connect(there.address)
        calls = [CallFrame(n, 1, "Plain/1.wait", 0.0, b"\x90", []) for n in range(400)]
        await say(liar, peer, HELLO, *calls)
        await until(lambda: server.running)
        link = next(iter(server.endpoint._links.values()))
        assert 0 < server.running < 400
        link.peer.disconnect("the test")
        await until(lambda: not (server.endpoint._links or server.running))
        assert not list(link.incoming)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "body", "pieces", "text"),
    [
        ("Plain/1.add", b"", [], "truncated"),
        ("Plain/1.add", b"\x92\x01\x02", [], "expected an array"),
        (
            "Plain/1.add",
            msgspec.msgpack.encode((("<i4", (2,), b"1234"), 1)),
            [],
            "an array has 4 bytes, its type and shape need 8",
        ),
        ("Plain/1.add", msgspec.msgpack.encode((("<i4", (2,), 0), 1)), [], "piece 0 is missing"),
        ("Plain/1.add", msgspec.msgpack.encode((("<f8", (2,), b"1" * 16), 1)), [], "expected an array of int32"),
        ("Plain/1.add", msgspec.msgpack.encode((("|O", (1,), b"1" * 8), 1)), [], "cannot travel"),
        ("Plain/1.add", msgspec.msgpack.encode((("M8[s/0]", (1,), b"1" * 8), 1)), [], "cannot travel"),
        ("Plain/1.add", msgspec.msgpack.encode(((",i4", (1,), b"1" * 8), 1)), [], "cannot travel"),
        ("Plain/1.add", msgspec.msgpack.encode(((">i4", (1,), b"1234"), 1)), [], "cannot travel"),
        ("Plain/1.fill", msgspec.msgpack.encode((("|u1", (1 << 40,), b""),)), [], "to be filled was not lent"),
        ("Plain/1.fill", msgspec.msgpack.encode((("<f4", (2,), b""),)), [], "expected an array of uint8"),
        ("Plain/1.fill", msgspec.msgpack.encode((("|u1", (1 << 21,), b"x" * 90),)), [], "descriptor"),
    ],
)
async def test_malformed_arguments_are_refused(method, body, pieces, text):
    async with pair("sim") as (liar, there), service.serve(there, Plain()) as server:
        peer = await liar.connect(there.address)
        await say(liar, peer, HELLO, CallFrame(0, 1, method, 0.0, body, pieces))
        (end,) = await answers(liar, 1)
        assert (end.slot, end.status) == (0, 6)
        assert text in end.body.decode()
        assert not server.endpoint.budget.used


@pytest.mark.anyio
async def test_memory_of_a_third_engine_is_not_filled():
    """A server must not be made to write where only the server may."""
    async with pair("sim") as (liar, there), opened("sim") as third, service.serve(there, Plain()):
        await there.connect(third.address)
        memory = numpy.zeros(1 << 20, numpy.uint8)
        lease = third.register(memory, access="local").lease(slice(0, 1 << 20), there.address)
        peer = await liar.connect(there.address)
        body = msgspec.msgpack.encode((("|u1", (1 << 20,), lease.descriptor),))
        await say(liar, peer, HELLO, CallFrame(0, 1, "Plain/1.fill", 0.0, body, []))
        (end,) = await answers(liar, 1)
        assert end.status == 6
        assert WRONG["another engine's"] in end.body.decode()
        assert not memory.any()
        await lease.revoke()


@pytest.mark.anyio
@pytest.mark.parametrize("how", [*WRONG, "revoked"])
async def test_memory_that_is_not_as_claimed_is_not_filled(how):
    async with pair("sim") as (liar, there), opened("sim") as third, service.serve(there, Plain()):
        peer = await liar.connect(there.address)
        memory = numpy.zeros(1 << 20, numpy.uint8)
        lease = liar.register(memory, access="local").lease(slice(0, 1 << 20), there.address)
        wrong = lease.descriptor if how == "revoked" else claimed(how, lease.descriptor, liar.address, third.address)
        if how == "revoked":
            await lease.revoke()
        body = msgspec.msgpack.encode((("|u1", (1 << 20,), wrong),))
        await say(liar, peer, HELLO, CallFrame(0, 1, "Plain/1.fill", 0.0, body, []))
        (end,) = await answers(liar, 1)
        assert end.status == 6
        assert re.search(WRONG.get(how, "has revoked its lease"), end.body.decode())
        assert not memory.any()
        await lease.revoke()


@pytest.mark.anyio
async def test_a_peer_that_wants_all_memory_gets_its_share():
    async with pair("sim") as (liar, there), service.serve(there, Plain()) as server:
        peer = await liar.connect(there.address)
        await say(liar, peer, HELLO)
        grants = 0
        await say(liar, peer, Ask(1))
        async for message in liar.messages():
            for _ in [frame for frame in unpack(message.data) if isinstance(frame, Grant)]:
                grants += 1
                await say(liar, peer, Ask(1))
            if grants == 2 * MAX_SEGMENTS:
                break
        (link,) = server.endpoint._links.values()
        assert len(link.values.lent_memory._segments) <= MAX_SEGMENTS
        assert server.endpoint.budget.used <= server.endpoint.limits.peer_bytes
        peer.disconnect()
        await until(lambda: not server.endpoint.budget.used)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (lambda turn: Ask(64), "it does not read the answers|it asks for memory before its last request"),
        (lambda turn: CallFrame(0, turn, "no", 0.0, b"", []), "a call in slot 0, which is in use or out of range"),
    ],
    ids=["asks", "calls"],
)
async def test_a_peer_that_takes_no_answers_is_disconnected(frame, reason):
    """A call's slot is free again when its end was sent, so who calls without a look at the ends is found out first."""
    async with pair("sim", message_pool=4, max_transfers=4) as (liar, there):
        async with service.serve(there, Plain(), limits=service.Limits(slots=8)) as server:
            reasons: list[str] = []
            there.listen_events(lambda event: reasons.append(str(event.details.get("reason"))))
            peer = await liar.connect(there.address)
            await say(liar, peer, HELLO)
            turn = 0
            with pytest.raises(aiote.AioteError):
                while True:
                    turn += 1
                    await say(liar, peer, frame(turn))
            await until(lambda: any(re.search(reason, each) for each in reasons))
            assert turn < 1000
            assert not server.running


slots, generations, few, none = st.integers(0, 3), st.integers(1, 4), st.integers(0, 9), st.just([])
left = st.floats(0, MAX_LEFT_S)
frames = st.one_of(
    st.builds(HelloFrame, few, st.booleans(), st.integers(0, 1 << 31), few, few, few),
    st.builds(CallFrame, slots, generations, st.just("Plain/1.add"), left, st.binary(), none),
    st.builds(End, slots, generations, few, st.binary(), st.just([(0, 0, 1)])),
    st.builds(Items, slots, generations, few, st.lists(st.binary()), none),
    st.builds(Credit, slots, generations, st.integers(0, 1 << 40)),
    st.builds(Cancel, slots, generations),
    st.builds(Ask, st.integers(0, 1 << 61)),
    st.builds(Grant, st.integers(0, 3), st.integers(0, 1 << 61), st.binary(), st.text(max_size=9)),
    st.builds(Return, few),
    st.builds(Free, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99)), max_size=3)),
)


@given(st.lists(frames, max_size=20))
def test_packed_frames_unpack_to_themselves(found):
    data = pack(found)
    assert data[:1] == MAGIC
    assert msgspec.msgpack.encode(unpack(data)) == data[1:]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_unpack_to_frames_or_a_value_error(data):
    try:
        unpack(MAGIC + data)
    except ValueError:
        pass


@given(st.text(max_size=9), st.lists(st.one_of(st.integers(), st.text(max_size=2)), max_size=40))
def test_an_arbitrary_description_gives_an_array_or_a_value_error(text, shape):
    try:
        dtype, lengths, nbytes = array_of(text, shape)
    except ValueError:
        return
    assert dtype.kind in "biufc"
    assert numpy.prod(lengths, dtype=object) * dtype.itemsize == nbytes


@given(st.binary(max_size=100), st.integers(0, 3))
def test_arbitrary_bytes_decode_to_a_value_or_a_value_error(data, lent):
    memory = memoryview(bytes(1000))

    def take(number: int, nbytes: int) -> memoryview:
        if number >= lent:
            raise ValueError("no such piece")
        return memory[:nbytes]

    kind = decoder(tuple[NDArray[numpy.float32], list[NDArray[numpy.int8]], str])
    try:
        decode(kind, data, take)
    except ValueError:
        pass


@pytest.mark.anyio
async def test_a_storm_of_frames_harms_nobody_else():
    """Frames at random, in slots and generations that sometimes fit; after each disconnection it begins anew."""
    rng = random.Random(3)
    async with pair("sim") as (liar, there), opened("sim") as honest, service.serve(there, Plain()) as server:
        client = service.client(honest, there.address, Plain)
        for turn in range(60):
            peer = await liar.connect(there.address)
            try:
                await say(liar, peer, HELLO)
                for _ in range(30):
                    await say(liar, peer, *[at_random(rng) for _ in range(rng.randrange(4))])
            except aiote.AioteError:
                pass
            if turn % 10 == 0:
                assert (await client.add(numpy.arange(5000, dtype="i4"), 1)).sum() == sum(range(1, 5001))
        for peer in liar.peers:
            peer.disconnect()
        await until(lambda: not server.running and len(server.endpoint._links) == 1)


def at_random(rng: random.Random) -> Any:
    slot, generation = rng.randrange(3), rng.randrange(1, 200)
    body = rng.choice((b"\x90", b"", rng.randbytes(9), msgspec.msgpack.encode((("<i4", (2,), b"12345678"), 1))))
    return rng.choice(
        (
            CallFrame(slot, generation, rng.choice(("Plain/1.add", "Plain/1.wait", "x")), rng.random() / 100, body, []),
            Cancel(slot, generation),
            Ask(rng.randrange(1 << 22)),
            *([Credit(slot, generation, 0)] * 3),
            Free([(0, 0, 9)]),
            Return(rng.randrange(3)),
            End(slot, generation, 0, b"", []),
            Items(slot, generation, 0, [b""], []),
            HELLO,
        )
    )


@pytest.mark.anyio
async def test_pieces_that_read_a_place_again_are_refused():
    """What is placed in lent memory is never more than was lent: so a few bytes do not become many."""
    async with pair("sim") as (liar, there), service.serve(there, Plain()) as server:
        peer = await liar.connect(there.address)
        await say(liar, peer, HELLO, Ask(1 << 20))
        async for message in liar.messages():
            grants = [frame for frame in unpack(message.data) if isinstance(frame, Grant)]
            if grants:
                break
        nbytes = grants[0].nbytes
        body = msgspec.msgpack.encode((("<i4", (nbytes // 4,), 0), 1))
        twice = msgspec.msgpack.encode((("<i4", (64,), 0), ("<i4", (64,), 0)))
        await say(liar, peer, CallFrame(0, 1, "Plain/1.add", 0.0, twice, [(0, 0, 256)]))
        assert (await answers(liar, 1))[0].status == 6
        calls = [CallFrame(slot, 1, "Plain/1.add", 0.0, body, [(0, 0, nbytes)]) for slot in range(1, 4)]
        await say(liar, peer, *calls)
        assert "pieces in lent memory overlap" in await peer.wait_closed()
        await until(lambda: not server.running and not server.endpoint.budget.used)


@pytest.mark.anyio
async def test_an_end_for_a_call_that_was_not_sent_is_a_lie():
    async with pair("sim", connect_timeout=3.0) as (here, liar):
        client = service.client(here, liar.address, Plain)
        async with anyio.create_task_group() as group:
            caught: list[service.CallError] = []

            async def call() -> None:
                try:
                    await client.add(numpy.zeros(10_000, "i4"), 1)
                except service.CallError as error:
                    caught.append(error)

            group.start_soon(call)
            message = await liar.recv()
            await say(liar, message.source, HELLO)
            # It asks for memory, and has a slot, but has sent nothing.
            await until(lambda: client._caller._link and client._caller._link.calls)
            await say(liar, message.source, End(0, 1, 0, b"", []))
            # It is called once more, which is not answered at all.
            await until(lambda: caught)
        assert caught[0].ran == "no"
        assert "End for slot 0, in which no call is under way" in message.source.reason


@pytest.mark.anyio
async def test_a_call_may_overtake_the_greeting():
    async with pair("sim") as (other, there), service.serve(there, Plain()):
        peer = await other.connect(there.address)
        await say(other, peer, CallFrame(0, 1, "Health/1.check", 0.0, b"\x90", []))
        await say(other, peer, HELLO)
        assert (await answers(other, 1))[0].status == 0


@pytest.mark.anyio
async def test_a_peer_that_was_lost_before_it_was_heard_holds_nothing():
    async with pair("sim") as (_, there):
        async with opened("sim") as gone:
            peer = await gone.connect(there.address)
            await say(gone, peer, HELLO, *[Ask(1 << 20) for _ in range(5)])
        await until(lambda: not there.peers)
        async with service.serve(there, Plain()) as server:
            await until(lambda: server.endpoint.unknown)
            assert not server.endpoint.budget.used
            assert not server.endpoint._links


class Loose(service.Service):
    """Methods whose types let a few bytes become many objects."""

    def __init__(self) -> None:
        self.open = anyio.Event()

    @service.method
    async def count(self, values: list[list[int]]) -> int:
        await self.open.wait()
        return len(values)


def lists(count: int) -> bytes:
    """Return the arguments of `count`: so many empty lists, a byte each."""
    return b"\x91\xdd" + count.to_bytes(4, "big") + b"\x90" * count


@pytest.mark.anyio
async def test_a_few_bytes_do_not_become_many_objects():
    """What a message takes as objects is bounded before there are any, and so is what all of them take."""
    limits = service.Limits(message_bytes=8 << 10, peer_bytes=400_000)
    async with pair("sim") as (liar, there), service.serve(there, loose := Loose(), limits=limits) as server:
        peer = await liar.connect(there.address)
        await say(liar, peer, HELLO, CallFrame(0, 1, "Loose/1.count", 0.0, lists(1000), []))
        (end,) = await answers(liar, 1)
        assert (end.status, b"bytes as objects; put them in arrays" in end.body) == (6, True)
        # 134 KB each: the third has no room while two run, and has it when they are over.
        await say(liar, peer, *[CallFrame(slot, 2, "Loose/1.count", 0.0, lists(600), []) for slot in range(3)])
        (end,) = await answers(liar, 1)
        assert (end.status, end.body[:18]) == (3, b"no room for values")
        assert server.endpoint.budget.used > 250_000
        loose.open.set()
        assert [end.status for end in await answers(liar, 2)] == [0, 0]
        await say(liar, peer, CallFrame(3, 1, "Loose/1.count", 0.0, lists(600), []))
        assert [end.status for end in await answers(liar, 1)] == [0]
        assert not server.endpoint.budget.used


@pytest.mark.anyio
async def test_items_that_nobody_reads_do_not_become_many_objects():
    class Many(service.Service):
        @service.method
        async def lists(self) -> AsyncIterator[list[list[int]]]:
            for _ in range(6):
                yield [[]] * 700

    limits = service.Limits(message_bytes=16 << 10)
    async with pair("sim") as (here, there), service.serve(there, Many()):
        stream = service.client(here, there.address, Many, limits=limits).lists()
        assert await anext(stream) == [[]] * 700
        await until(lambda: len(stream._incoming._ready) == 5)
        # 157 KB each, of 393 KB: when all come at once there is room for two.
        fitting = 0
        with pytest.raises(service.RemoteError, match="unread items would take about"):
            while True:
                assert len(await anext(stream)) == 700
                fitting += 1
        assert fitting in (1, 2)
