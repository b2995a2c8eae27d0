"""A decode rank of the cluster that says anything to a prefill rank: it is refused, and others are served as before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

import aiote
from aiote import service
from aiote.aio import current_loop
from aiote.kvcache import moving, producer, protocol
from aiote.kvcache.mapping import MappingError
from aiote.kvcache.moving import TransferBatch
from aiote.kvcache.producer import MOST_SESSIONS
from aiote.kvcache.protocol import PushRequest, SentPageRow, TransferRefused, Transfers
from aiote.kvcache.tensors import CacheSpec
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import opened, until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, decode, world

MODEL = Model(layers=2, item=16, state=5)
TOKENS = 19
PARTS = (MappingError, TransferRefused, service.RemoteError, aiote.UsageError)


@dataclass
class Liar:
    """An engine with memory of its own that calls the prefill rank as it likes."""

    world: World
    engine: aiote.Engine
    client: Transfers
    part: CacheSpec
    region: aiote.Region
    shut: aiote.Region

    async def open(self, part: CacheSpec | None = None, memories: list[bytes] | None = None) -> int:
        lent = [self.region.descriptor] * len(self.part.memories) if memories is None else memories
        return (await self.client.open(part or self.part, list(range(MODEL.layers)), lent)).session

    async def push(self, **lies: Any) -> None:
        rows = {0: SentPageRow(np.arange(5), 0)}
        fetch = PushRequest(await self.open() if "session" not in lies else 0, "r", TOKENS, 7, rows)
        async for _ in self.client.push(msgspec.structs.replace(fetch, **lies)):
            pass


@asynccontextmanager
async def lying(**limits: float) -> AsyncIterator[Liar]:
    async with world("sim", Side(), Side(), MODEL, **limits) as w, opened("sim") as engine:
        peer = await engine.connect(w.producers[0].engine.address)
        part = w.right.caches[0].spec
        memory = np.zeros(max(part.memories), np.uint8)
        regions = engine.register(memory, "write"), engine.register(memory, "read")
        yield Liar(w, engine, service.client(engine, peer, Transfers), part, *regions)


async def honest(w: World) -> None:
    """Check that an honest decode rank is served."""
    here, there = w.rows(TOKENS)
    fill(w.left, here, 20)

    async def offer() -> None:
        async with w.producers[0].offer("honest", tokens=TOKENS, rows=here) as offered:
            for layer in range(MODEL.layers):
                offered.computed(layer)

    async with anyio.create_task_group() as group:
        group.start_soon(offer)
        await decode(w, w.consumers[0], "honest", TOKENS, there, False)
    assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


def lie(**changes: Any) -> Callable[[CacheSpec], CacheSpec]:
    """Return what changes the first tensor of a part."""

    def change(part: CacheSpec) -> CacheSpec:
        first = msgspec.structs.replace(part.tensors[0], **changes)
        return msgspec.structs.replace(part, tensors=(first, *part.tensors[1:]))

    return change


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "change",
    [
        lie(offset=1 << 40),
        lie(memory=1000),
        lie(page_stride=1),
        lie(first_head=1),
        lie(tokens=7),
        lie(item_bytes=1),
        lie(field="?"),
        lambda part: msgspec.structs.replace(part, memories=(0,) * len(part.memories)),
        lambda part: msgspec.structs.replace(part, tensors=part.tensors * 2),
    ],
)
async def test_a_part_that_cannot_be_is_refused(change):
    async with lying() as liar:
        with pytest.raises(PARTS):
            await liar.open(change(liar.part))
        await honest(liar.world)


@pytest.mark.virtual_time
async def test_memory_that_is_not_the_callers_own_is_not_written_to():
    async with lying() as liar:
        victim = liar.world.consumers[0]
        count = len(liar.part.memories)
        for descriptor in (victim.regions[0].descriptor, liar.shut.descriptor, b"?"):
            with pytest.raises(PARTS):
                await liar.open(memories=[descriptor] * count)
        with pytest.raises(PARTS, match="a descriptor for each memory"):
            await liar.open(memories=[liar.region.descriptor] * (count + 1))
        await honest(liar.world)


@pytest.mark.virtual_time
async def test_memories_are_attached_some_at_a_time(monkeypatch):
    """A decode rank may lend a thousand of them, and each takes a while."""
    monkeypatch.setattr(producer, "ATTACHED", 1)
    turns, attached, attach = 0, list[int](), aiote.Engine.attach

    def end_turn() -> None:
        nonlocal turns
        turns += 1

    def counted(engine: aiote.Engine, *arguments: Any, **more: Any) -> aiote.RemoteRegion:
        current_loop().call_soon(end_turn)
        attached.append(turns)
        return attach(engine, *arguments, **more)

    async with lying() as liar:
        part = msgspec.structs.replace(liar.part, memories=liar.part.memories * 3)
        monkeypatch.setattr(aiote.Engine, "attach", counted)
        await liar.open(part, [liar.region.descriptor] * len(part.memories))
        assert attached == list(range(len(part.memories)))


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "lies",
    [
        {"session": 99},
        {"tokens": TOKENS + 1},
        {"imm": (1 << 28) - 1},
        {"rows": {0: SentPageRow(np.array([-1]), 0)}},
        {"rows": {0: SentPageRow(np.array([1 << 62]), 0)}},
        {"rows": {0: SentPageRow(np.zeros((2, 2), np.int64), 0)}},
        {"rows": {0: SentPageRow(np.array([1, 2, 3, 12]), 0)}},
        {"rows": {0: SentPageRow(np.arange(1 << 19), 0)}, "tokens": 1 << 39},
        {"rows": {0: SentPageRow(np.arange((1 << 19) + 1), 0)}},
    ],
)
async def test_a_request_that_does_not_fit_is_refused(monkeypatch, lies):
    monkeypatch.setattr(protocol, "MOST_PIECES", 1 << 19)
    async with lying() as liar, anyio.create_task_group() as group:
        here, _ = liar.world.rows(TOKENS)

        async def offer() -> None:
            async with liar.world.producers[0].offer("r", tokens=TOKENS, rows=here) as offered:
                for layer in range(MODEL.layers):
                    offered.computed(layer)

        group.start_soon(offer)
        with pytest.raises(PARTS):
            await liar.push(**lies)
        await honest(liar.world)
        group.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_sessions_are_bounded_and_each_is_its_openers():
    async with lying() as liar:
        sessions = [await liar.open() for _ in range(MOST_SESSIONS + 4)]
        producer = liar.world.producers[0]
        assert len(producer._sessions) == MOST_SESSIONS
        assert not await liar.client.finish(sessions[-1], "r")
        async with opened("sim") as engine:
            stranger = service.client(engine, producer.engine.address, Transfers)
            with pytest.raises(TransferRefused, match="of this peer does not exist"):
                await anext(stranger.pull(sessions[-1], "r"))
        with pytest.raises(TransferRefused, match="of this peer does not exist"):
            await anext(liar.client.pull(sessions[0], "r"))
        await honest(liar.world)


@pytest.mark.virtual_time
@pytest.mark.parametrize("how", [*WRONG, "revoked"])
async def test_memory_that_is_not_as_claimed_is_refused(how):
    async with lying() as liar, opened("sim") as third:
        producer = liar.world.producers[0].engine
        nbytes = max(liar.part.memories)
        if how == "revoked":
            async with liar.region.lease(slice(0, nbytes), producer.address) as lease:
                wrong = lease.descriptor
        else:
            own = liar.region[0:nbytes].descriptor
            wrong = claimed(how, own, liar.engine.address, third.address)
        text = WRONG.get(how, "has revoked its lease")
        with pytest.raises(TransferRefused, match=f"lends no memory of its cache to write to: .*{text}"):
            await liar.open(memories=[wrong] * len(liar.part.memories))
        await honest(liar.world)


@pytest.mark.virtual_time
async def test_a_session_is_told_once_at_a_time_what_moves():
    async with lying() as liar:
        session = await liar.open()
        first = liar.client.moving(session, 1.0)
        with anyio.move_on_after(3):
            await anext(first)
        with pytest.raises(TransferRefused, match="has a reader of its progress already"):
            await anext(liar.client.moving(session, 1.0))
        await first.aclose()
        again = liar.client.moving(session, 1.0)
        with anyio.move_on_after(3) as scope:
            await anext(again)
        assert scope.cancelled_caught
        await honest(liar.world)


@pytest.mark.virtual_time
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_a_session_has_a_request_moved_once_at_a_time(reads):
    """Else a peer that says that its group is large makes a prefill rank keep as many page tables as it likes."""
    async with lying() as liar, anyio.create_task_group() as group:
        producer = liar.world.producers[0]
        here, _ = liar.world.rows(TOKENS)
        session = await liar.open(msgspec.structs.replace(liar.part, ranks=1000), [] if reads else None)
        refused = []

        async def offer() -> None:
            async with producer.offer("r", tokens=TOKENS, rows=here, readers=None):
                await anyio.sleep_forever()

        async def ask() -> None:
            fetch = PushRequest(session, "r", TOKENS, 7, {0: SentPageRow(np.arange(5), 0)})
            with pytest.raises(TransferRefused) as caught:
                async for _ in liar.client.pull(session, "r") if reads else liar.client.push(fetch):
                    pass
            refused.append(str(caught.value))

        group.start_soon(offer)
        for _ in range(20):
            group.start_soon(ask)
        await until(lambda: len(refused) == 19)
        assert all("this session moves request" in reason for reason in refused)
        (offered,) = producer._offers._open.values()
        assert len(offered.active) == 1
        await honest(liar.world)
        group.cancel_scope.cancel()


@pytest.mark.virtual_time
async def test_readers_that_come_and_go_keep_no_pages():
    async with lying(match_timeout=7, renewal_limit=30) as liar, anyio.create_task_group() as group:
        here, _ = liar.world.rows(TOKENS)
        session = await liar.open(msgspec.structs.replace(liar.part, ranks=1000), [])

        async def come_and_go() -> None:
            while True:
                stream = liar.client.pull(session, "r")
                with anyio.move_on_after(1):
                    async for _ in stream:
                        pass
                await stream.aclose()

        begun = anyio.current_time()
        async with liar.world.producers[0].offer("r", tokens=TOKENS, rows=here, readers=None, computed=True) as offered:
            group.start_soon(come_and_go)
        assert (offered.outcome, offered._joined > 10) == ("expired", True)
        assert 30 <= anyio.current_time() - begun <= 31
        group.cancel_scope.cancel()


@pytest.mark.virtual_time
@pytest.mark.parametrize("after", [0, 1])
async def test_a_reader_that_takes_no_writes_keeps_no_pages(monkeypatch, after):
    """Its engine lives and says so; for more than the first few writes there is no room."""
    begun_writes = []
    submit = TransferBatch.submit
    monkeypatch.setattr(moving, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(TransferBatch, "has_room", property(lambda _: len(begun_writes) < after))
    monkeypatch.setattr(TransferBatch, "room", lambda _: anyio.sleep_forever())
    monkeypatch.setattr(TransferBatch, "submit", lambda *call: (begun_writes.append(call), submit(*call))[1])
    async with lying(match_timeout=7, renewal_limit=30) as liar, anyio.create_task_group() as group:
        here, _ = liar.world.rows(TOKENS)
        begun = anyio.current_time()

        async def ask() -> None:
            with pytest.raises(TransferRefused, match="expired"):
                await liar.push()

        async with liar.world.producers[0].offer("r", tokens=TOKENS, rows=here, computed=True) as offered:
            group.start_soon(ask)
        assert (offered.outcome, len(begun_writes)) == ("expired", after)
        assert 30 <= anyio.current_time() - begun <= 31
        monkeypatch.undo()
        await honest(liar.world)
