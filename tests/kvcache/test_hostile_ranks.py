"""A prefill rank of the cluster that says anything to a decode rank, or nothing: one request fails, and no other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

import aiote
from aiote import service
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.protocol import Opened, Pinned, PushRequest, TransferRefused, Transfers, rows_to
from aiote.kvcache.tensors import CacheSpec
from aiote.service.definition import DirectCall
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import opened
from support.kv.caches import Model, Side, built, fill
from support.kv.worlds import BEFORE, served, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS, STALL_S = 19, 4

pytestmark = pytest.mark.virtual_time


class Answer(DirectCall):
    """A push that ends at once, or when it is cancelled."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def begin(self, end: Callable[[Exception | None], None]) -> None:
        self.end = end
        if not self.silent:
            end(None)

    def cancel(self) -> None:
        self.end(None)


class Liar:
    """A rank that answers what it was told to, and does not answer the calls whose names it was told."""

    def __init__(self, spec: CacheSpec, memories: list[bytes], pins: list[Pinned], silent: str = "") -> None:
        self.spec, self.memories, self.pins, self.silent = spec, memories, pins, silent

    async def nothing(self, call: str) -> None:
        if self.silent == call:
            await anyio.sleep_forever()

    def describe(self) -> CacheSpec:
        return self.spec

    async def open(self, peer: aiote.Peer, part: CacheSpec, immediates: list[int], memories: list[bytes]) -> Opened:
        await self.nothing("open")
        return Opened(1, self.memories)

    def push(self, peer: aiote.Peer, fetch: PushRequest) -> DirectCall:
        return Answer(self.silent == "push")

    async def pull(self, peer: aiote.Peer, session: int, request: str) -> AsyncGenerator[Pinned]:
        await self.nothing("pull")
        for pin in self.pins:
            yield pin

    async def moving(self, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]:
        yield ["another"]

    def finish(self, peer: aiote.Peer, session: int, request: str) -> bool:
        return True


class SilentAtTheEnd(Transfers):
    """What serves a rank that never says whether its pages were kept."""

    @service.method
    async def finish(self, session: int, request: str) -> bool:
        await anyio.sleep_forever()
        return True


async def revoked(engine: aiote.Engine, regions: list[aiote.Region], reader: aiote.Engine) -> list[bytes]:
    """Return descriptors of leases that are revoked again, of which the reader has heard."""
    peer = await engine.connect(reader.address)
    async with engine.lease(regions, peer) as lease:
        found = list(lease.descriptors)
    return found


@asynccontextmanager
async def lying(how: str, rows: dict[int, PageRow], reader: aiote.Engine) -> AsyncIterator[aiote.Engine]:
    """Serve a rank that gives memories that are none of its own, says nothing of pages, or does not answer a call."""
    cache = built(MODEL, Side(), "liar").caches[0]
    spec = cache.spec
    async with opened("sim") as engine, opened("sim") as other:
        regions = [engine.register(memory, "read") for memory in cache.memories]
        memories = [region.descriptor for region in regions]
        if how in WRONG:
            memories = [claimed(how, one, engine.address, other.address) for one in memories]
        if how == "revoked":
            memories = await revoked(engine, regions, reader)
        if how in ("no memory", "garbage"):
            memories = [b"?"] * len(memories) if how == "garbage" else []
        if how == "no cache":
            spec = msgspec.structs.replace(spec, memories=(1,) * len(spec.memories))
        pins = [] if how == "no page" else [Pinned(TOKENS, rows_to(rows))]
        serves = SilentAtTheEnd if how == "finish" else Transfers
        async with service.serve(engine, serves(Liar(spec, memories, pins, how))):
            yield engine


LIES = {
    "no memory": "lends 0 memories",
    "no page": "did not say where",
    **{how: rf"liar 0\.0 lends no memory of its cache to read: .*{text}" for how, text in WRONG.items()},
    "revoked": "has revoked its lease",
    "garbage": r"liar 0\.0 lends no memory of its cache",
    "no cache": "describes an impossible cache: liar",
}


@pytest.mark.parametrize("how", LIES)
async def test_a_rank_that_lies_fails_its_own_request_alone(how):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        async with lying(how, here, w.consumers[0].engine) as liar:
            with pytest.raises(TransferRefused, match=LIES[how]):
                async with w.consumers[0].receive(
                    [liar.address], "lie", tokens=TOKENS, rows=there, reads=True
                ) as reception:
                    await reception.arrived()
        assert all((memory == BEFORE).all() for memory in w.right.caches[0].memories)
        await served(w, group, TOKENS, "r", here, there)


SILENCES = {"open": "the handshake with .* did not end", "push": "no layer", "pull": "no layer", "finish": "no layer"}


@pytest.mark.parametrize("call", SILENCES)
async def test_a_rank_that_does_not_answer_is_waited_for_so_long(call):
    """Its engine lives, and another request to it is under way: neither ends the wait."""
    async with world("sim", Side(), Side(), MODEL, stall_timeout=STALL_S) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        ended = []

        async def ask(liar: aiote.Engine, name: str) -> None:
            begun = anyio.current_time()
            with pytest.raises(TransferRefused, match=SILENCES[call]):
                async with w.consumers[0].receive(
                    [liar.address], name, tokens=TOKENS, rows=there, reads=call != "push"
                ) as reception:
                    await reception.arrived()
            ended.append(anyio.current_time() - begun)

        async with lying(call, here, w.consumers[0].engine) as liar, anyio.create_task_group() as asking:
            for number in range(3):
                asking.start_soon(ask, liar, f"lie {number}")
        # The confirmation of a push that is left is waited for, too.
        assert all(STALL_S <= took <= STALL_S + 1 + 2 * (call == "push") for took in ended), ended
        for memory in w.right.caches[0].memories:
            memory[...] = BEFORE
        await served(w, group, TOKENS, "r", here, there)
