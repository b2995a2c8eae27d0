"""What waits for a peer is bounded in bytes, whatever the peer says and however it comes back, and others go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import TypeVar

import anyio
import msgspec
import pytest

import aiote
from aiote import service
from aiote.service.endpoint import CallEndpoint
from aiote.service.frames import Ask, CallFrame, CallStatus, Cancel, End, Frame, Grant, HelloFrame, pack, unpack
from aiote.service.memory import Budget
from aiote.service.server import EACH
from aiote.service.unsent import CROWDED_BYTES
from support.engines.opening import opened, pair, until

GREEDY = HelloFrame(1, True, (1 << 32) - 1, 1 << 16, 1 << 20, 1 << 40)
ITEM_BYTES = 8000
STREAMS = 100
GREEDY_ENGINES = 5
F = TypeVar("F")


class Waiting(service.Service):
    @service.method
    async def get(self, nbytes: int) -> bytes:
        return b"x" * nbytes

    @service.method
    async def size(self, data: bytes) -> int:
        return len(data)

    @service.method
    async def wait(self) -> None:
        await anyio.sleep_forever()

    @service.method
    async def items(self) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * ITEM_BYTES


def call(slot: int, name: str, *arguments: object, generation: int = 1) -> CallFrame:
    return CallFrame(slot, generation, f"Waiting/1.{name}", 0.0, msgspec.msgpack.encode(arguments), [])


@pytest.mark.anyio
async def test_answers_that_nobody_takes_are_bounded_in_bytes():
    async with pair("sim", message_pool=16) as (liar, there), service.serve(there, Waiting()) as server:
        budget, most, generation = server.endpoint.budget, 0, 0
        peer = await liar.connect(there.address)
        await liar.send(peer, pack([GREEDY]))
        while not peer.lost:
            generation += 1
            for slot in range(0, 1024, 64):
                calls = [call(slot + n, "get", ITEM_BYTES, generation=generation) for n in range(64)]
                # What cannot be sent now is not missed; once it is disconnected nothing goes any more.
                with suppress(aiote.QueueFull, aiote.PeerError):
                    liar.submit_send(peer, pack(calls))
                await anyio.lowlevel.checkpoint()
                most = max(most, budget.waiting)
        assert ITEM_BYTES < most <= 1024 * (ITEM_BYTES + 1000)
        # Which of the two the liar hears of first depends on what it is doing.
        reason = await peer.wait_closed()
        assert "it does not read the answers to its calls" in reason or "Connection reset by peer" in reason
        await until(lambda: not budget.waiting and not server.running)


@pytest.mark.anyio
async def test_streams_whose_peer_takes_no_messages_stop():
    async with pair("sim", message_pool=16) as (liar, there), service.serve(there, Waiting()) as server:
        budget = server.endpoint.budget
        peer = await liar.connect(there.address)
        await liar.send(peer, pack([GREEDY, *[call(slot, "items") for slot in range(STREAMS)]]))
        await until(lambda: server.running == STREAMS and budget.waiting >= CROWDED_BYTES)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        # Each has a batch at hand when it sees that it has to wait, of one message at most.
        assert budget.waiting <= CROWDED_BYTES + STREAMS * 2 * there.config.message_bytes
        peer.disconnect()
        await until(lambda: not budget.waiting and not server.running)


@pytest.mark.anyio
async def test_calls_of_one_engine_leave_places_for_others():
    limits = service.Limits(calls=4 * EACH)
    async with opened("sim") as liar, opened("sim") as there, opened("sim") as honest:
        async with service.serve(there, Waiting(), limits=limits) as server:
            peer = await liar.connect(there.address)
            await liar.send(peer, pack([GREEDY, *[call(slot, "wait") for slot in range(300)]]))
            await until(lambda: server.running + server.queued == 300)
            assert server.running == 2 * EACH
            assert await service.client(honest, there.address, Waiting).get(3) == b"xxx"
            peer.disconnect()
            await until(lambda: not server.running and not server.queued and not server.endpoint.budget.waiting)


@pytest.mark.anyio
async def test_the_greediest_is_refused_first():
    limits = service.Limits(calls=1, queue=4)
    async with opened("sim") as liar, opened("sim") as there, opened("sim") as honest:
        async with service.serve(there, Waiting(), limits=limits) as server:
            peer = await liar.connect(there.address)
            await liar.send(peer, pack([GREEDY, *[call(slot, "wait") for slot in range(5)]]))
            await until(lambda: server.queued == 4)
            answer: list[bytes] = []

            async def ask() -> None:
                answer.append(await service.client(honest, there.address, Waiting).get(3))

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                end = await _next(liar, End)
                assert (end.slot, end.status) == (4, CallStatus.BUSY)
                await liar.send(peer, pack([Cancel(slot, 1) for slot in range(4)]))
            assert answer == [b"xxx"]


async def _next(engine: aiote.Engine, kind: type[F]) -> F:
    """Return the next frame of this kind."""
    async for message in engine.messages():
        for frame in unpack(message.data):
            if isinstance(frame, kind):
                return frame
    raise AssertionError


def test_a_share_is_its_identity_s_and_the_greediest_is_refused():
    budget, refused = Budget(100, 60), []
    share = budget.share_of(b"greedy")
    share.refuse = lambda: refused.append(b"greedy")
    budget.wait(share, 60)
    with pytest.raises(BlockingIOError, match="60 bytes wait for this peer"):
        budget.wait(budget.share_of(b"greedy"), 1)
    other = budget.share_of(b"other")
    budget.wait(other, 40)
    assert not refused
    budget.wait(other, 10)
    assert refused == [b"greedy"]
    budget.over(share, 60)
    budget.over(other, 50)
    assert not budget.waiting


@pytest.mark.anyio
async def test_engines_that_borrow_all_they_may_leave_memory_for_others():
    limits = service.Limits(peer_bytes=4 << 20, total_bytes=8 << 20)
    async with AsyncExitStack() as stack:
        there, honest, *liars = [await stack.enter_async_context(opened("sim")) for _ in range(2 + GREEDY_ENGINES)]
        server = await stack.enter_async_context(service.serve(there, Waiting(), limits=limits))
        for liar in liars:
            peer = await liar.connect(there.address)
            await liar.send(peer, pack([GREEDY]))
            nbytes = limits.peer_bytes
            while nbytes:
                await liar.send(peer, pack([Ask(nbytes)]))
                if not (await _next(liar, Grant)).descriptor:
                    nbytes //= 2
        assert server.endpoint.budget.used > limits.total_bytes // 2
        assert await service.client(honest, there.address, Waiting).size(b"x" * 100_000) == 100_000


@pytest.mark.anyio
async def test_slots_that_a_peer_claims_to_have_take_no_memory():
    async with pair("sim") as (liar, there), service.serve(there, Waiting()), service.serve(liar, Waiting()):
        peer = await liar.connect(there.address)
        await liar.send(peer, pack([GREEDY]))
        await until(lambda: any(link.hello for link in CallEndpoint.of(there)._links.values()))
        (link,) = CallEndpoint.of(there)._links.values()
        assert link.hello.slots == 1 << 16
        assert not link._generations
        assert not link._free


@pytest.mark.anyio
async def test_calls_before_the_greeting_are_charged():
    limits = service.Limits(peer_bytes=1 << 16)
    async with pair("sim") as (liar, there), service.serve(there, Waiting(), limits=limits):
        peer = await liar.connect(there.address)
        frames: list[Frame] = [CallFrame(slot, 1, "Waiting/1.wait", 0.0, b"x" * 8000, []) for slot in range(9)]
        for frame in frames:
            liar.submit_send(peer, pack([frame]))
        assert "calls arrived before the handshake" in await peer.wait_closed()
        await until(lambda: not CallEndpoint.of(there).budget.waiting)
