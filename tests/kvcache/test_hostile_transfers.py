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
from aiote.kvcache.mapping import MappingError
from aiote.kvcache.producer import MOST_SESSIONS
from aiote.kvcache.protocol import Fetch, Row, TransferRefused, Transfers
from aiote.kvcache.tensors import CacheSpec
from engines import opened
from kv_worlds import BEFORE, World, decode, world
from mapped_caches import Model, Side, expected, fill, same

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
        rows = {0: Row(np.arange(5), 0)}
        fetch = Fetch(await self.open() if "session" not in lies else 0, "r", TOKENS, 7, rows)
        async for _ in self.client.push(msgspec.structs.replace(fetch, **lies)):
            pass


@asynccontextmanager
async def lying() -> AsyncIterator[Liar]:
    async with world("sim", Side(), Side(), MODEL) as w, opened("sim") as engine:
        producer = w.producers[0].engine
        peer = await engine.connect(producer.address)
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
@pytest.mark.parametrize(
    "lies",
    [
        {"session": 99},
        {"tokens": TOKENS + 1},
        {"imm": (1 << 28) - 1},
        {"rows": {0: Row(np.array([-1]), 0)}},
        {"rows": {0: Row(np.array([1 << 62]), 0)}},
        {"rows": {0: Row(np.zeros((2, 2), np.int64), 0)}},
        {"rows": {0: Row(np.array([1, 2, 3, 12]), 0)}},
        {"rows": {0: Row(np.arange(1 << 20), 0)}, "tokens": 1 << 39},
    ],
)
async def test_a_request_that_does_not_fit_is_refused(lies):
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
            with pytest.raises(TransferRefused, match="no session"):
                await anext(stranger.pull(sessions[-1], "r"))
        with pytest.raises(TransferRefused, match="no session"):
            await anext(liar.client.pull(sessions[0], "r"))
        await honest(liar.world)
