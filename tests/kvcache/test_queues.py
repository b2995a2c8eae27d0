"""Requests that wait: in a queue that moves no limit counts it, in one that stands still they fail; one message says so
for all of a link.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import pytest

import aiote
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.producer import Producer
from aiote.kvcache.protocol import TransferRefused
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, decode, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS, MATCH_S, STALL_S = 19, 7, 4
both = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
limits = {"match_timeout": MATCH_S, "stall_timeout": STALL_S}

pytestmark = pytest.mark.virtual_time


async def compute(w: World, name: str, here: dict[int, PageRow], pause: float, upto: int = TOKENS) -> None:
    """Compute a request token by token, layer by layer."""
    async with w.producers[0].offer(name, tokens=TOKENS, rows=here) as offer:
        for end in range(1, upto + 1):
            for layer in range(MODEL.layers):
                offer.computed(layer, end)
            await anyio.sleep(pause)
        if not offer.complete:
            await anyio.sleep(60)
            offer.stop("it was never computed")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the messages about queues."""
    found: list[list[str]] = []
    moving = Producer.moving

    async def noted(self: Producer, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]:
        async for names in moving(self, peer, session, interval):
            found.append(names)
            yield names

    monkeypatch.setattr(Producer, "moving", noted)
    return found


@both
async def test_a_queue_that_moves_counts_for_no_limit(reads, told):
    async with world("sim", Side(), Side(), MODEL, **limits) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        names = [f"r{number}" for number in range(6)]
        for name in names:
            group.start_soon(decode, w, w.consumers[0], name, TOKENS, there, reads)
        for _ in range(30):
            w.producers[0].queued(names)
            await anyio.sleep(2)
        w.producers[0].queued([])
        for name in names:
            group.start_soon(compute, w, name, here, 0)
    assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))
    # One message of all six for each interval of a quarter of the limit, however many requests wait.
    assert 58 <= len(told) <= 62
    assert sorted(told[10]) == names


@both
async def test_a_request_that_nobody_speaks_of_fails_in_time(reads):
    async with world("sim", Side(), Side(), MODEL, **limits) as w:
        _, there = w.rows(TOKENS)
        w.producers[0].queued(["another"])
        begun = anyio.current_time()
        with pytest.raises(TransferRefused, match="no layer arrived for 4 s"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        assert STALL_S <= anyio.current_time() - begun <= STALL_S + 1


async def test_a_queue_that_stands_still_counts():
    """It was said once that the request waits; after `match_timeout` that is no news any more."""
    async with world("sim", Side(), Side(), MODEL, match_timeout=MATCH_S) as w:
        _, there = w.rows(TOKENS)
        w.producers[0].queued(["r"])
        begun = anyio.current_time()
        with pytest.raises(TransferRefused, match="was not offered within"):
            await decode(w, w.consumers[0], "r", TOKENS, there, False)
        assert MATCH_S <= anyio.current_time() - begun <= MATCH_S + 1


@both
async def test_a_slow_computation_is_no_stall_and_one_that_stops_is(reads):
    async with world("sim", Side(), Side(), MODEL, **limits) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        group.start_soon(compute, w, "slow", here, 2)
        await decode(w, w.consumers[0], "slow", TOKENS, there, reads)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))
        group.start_soon(compute, w, "stuck", here, 0, 7)
        with pytest.raises(TransferRefused, match="no layer arrived for 4 s"):
            await decode(w, w.consumers[0], "stuck", TOKENS, there, reads)
        group.cancel_scope.cancel()


@both
async def test_an_offer_is_kept_for_a_reader_that_waits_for_pages(reads):
    """It renews what is computed, and reads it long after the time for which nobody would have kept it."""
    async with world("sim", Side(), Side(), MODEL, **limits) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        group.start_soon(compute, w, "r", here, 0)
        for _ in range(10):
            await anyio.sleep(MATCH_S - 1)
            # Of what a rank does not know it says nothing.
            await w.consumers[0].renew(w.places[0], ["r", "unknown"])
        await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@both
async def test_nobody_keeps_an_offer_for_ever(reads):
    async with world("sim", Side(), Side(), MODEL, **limits, renewal_limit=30) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        begun = anyio.current_time()

        async def renew() -> None:
            while True:
                await w.consumers[0].renew(w.places[0], ["r"])
                await anyio.sleep(1)

        group.start_soon(renew)
        async with w.producers[0].offer("r", tokens=TOKENS, rows=here, computed=True) as offer:
            pass
        assert offer.outcome == "expired"
        assert 30 <= anyio.current_time() - begun <= 30 + MATCH_S
        with pytest.raises(TransferRefused, match="'r' is over: expired"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        group.cancel_scope.cancel()
