"""A decode group of two ranks whose first prefillers fail in the middle: both arrive, each at its own pace.

Nobody coordinates the ranks: each counts its own writes, and goes on to its alternative when it hears of a failure. So
one may have everything while the other begins anew, and one may wait where the other was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import aiote
from aiote.kvcache import PrefillError, Slot
from aiote.kvcache import refused_requests as refused_module
from aiote.kvcache.fill import FillRequest
from aiote.kvcache.orders import Order
from aiote.kvcache.refused_requests import RefusedRequests
from aiote.testing import Fabric, run
from kvcaches import DecodeRank, Deployment, PrefillRank, deployed, prefill_rank, tail_of, until_idle

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or 25)
TOKENS = list(range(100, 143))
STAMP = 0xEE
HEARTBEAT, DRAIN, CONFIRM, GATHER = 3.0, 1.0, 1.0, 10.0
BOUND = HEARTBEAT + DRAIN + CONFIRM + 2 * GATHER + 1.0
TOGETHER = HEARTBEAT + DRAIN + CONFIRM + 1.0
TAIL = 24


class Ranks:
    """Two decode ranks, the prefillers that fail them, and those that do not."""

    def __init__(self, fabric: Fabric, deployment: Deployment, doomed: list[PrefillRank], draw: random.Random) -> None:
        self.fabric = fabric
        self.draw = draw
        self.deployment = deployment
        self.decode = deployment.decode
        self.doomed = doomed
        self.rounds: list[int] = [0, 0]

    async def ask(self, rank: int, late: float) -> None:
        """Have one rank's part of the request filled, and check every byte."""
        await asyncio.sleep(late)
        here = self.decode[rank]
        groups = [prefill.engine.address for prefill in self.doomed], self.deployment.group
        async with here.decoder.request(TOKENS, groups[0], alternatives=[groups[1]], request_id=b"r") as slot:
            await slot.arrived()
            await self.check(here, slot, rank)
            self.rounds[rank] = slot.round

    async def check(self, here: DecodeRank, slot: Slot, rank: int) -> None:
        for _ in range(2):
            here.check(slot, rank, 2)
            assert slot.tail == tail_of(TOKENS, TAIL)
            await asyncio.sleep(0.1)

    async def ask_all(self, skew: float = 0.0) -> None:
        """Have both parts filled; nobody may write to their pages afterwards."""
        began = self.fabric.now
        late = [0.0, skew] if self.draw.random() < 0.5 else [skew, 0.0]
        async with asyncio.TaskGroup() as group:
            for rank in (0, 1):
                group.create_task(self.ask(rank, late[rank]))
        # Whoever goes on alone waits for the other one in vain, and no longer than that.
        together = self.rounds[0] == self.rounds[1]
        assert self.fabric.now - began < (TOGETHER if together else BOUND)
        for here in self.decode:
            assert here.decoder.free_pages == here.decoder.pages
            here.memory[:] = STAMP
        await asyncio.sleep(30.0)
        assert all((here.memory == STAMP).all() for here in self.decode)
        await until_idle(self.deployment)


@asynccontextmanager
async def ranks(fabric: Fabric, draw: random.Random, of_doomed: int, pause: float = 2e-4) -> AsyncIterator[Ranks]:
    """Open two decode ranks, a group of prefillers that is to fail and one that serves; close those that are left."""
    size = draw.choice([1, 2])
    async with contextlib.AsyncExitStack() as stack:
        limits = {"stall_limit": 30.0, "confirm_limit": CONFIRM}
        deployment = await stack.enter_async_context(
            deployed(fabric.open_engine, prefill=size, decode=2, tail_bytes=TAIL, **limits)
        )
        doomed = [
            await stack.enter_async_context(
                prefill_rank(fabric.open_engine, rank=rank, ranks=of_doomed, tail_bytes=TAIL)
            )
            for rank in range(of_doomed)
        ]
        serving = [asyncio.ensure_future(rank.serve(pause=pause)) for rank in doomed]
        try:
            yield Ranks(fabric, deployment, doomed, draw)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("fault", ["crash", "partition", "refusal", "one rank's leases"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_prefiller_fails_in_the_middle_and_both_ranks_arrive(fault, seed):
    async def main(fabric: Fabric) -> None:
        draw = random.Random(seed)
        async with ranks(fabric, draw, draw.choice([1, 2])) as both:
            victim = draw.choice(both.doomed)

            async def strike() -> None:
                await asyncio.sleep(draw.uniform(0, 6e-3))
                if fault == "refusal":
                    for job in tuple(victim.prefiller._jobs):
                        job.refuse("it does not feel like it")
                elif fault == "one rank's leases":
                    lender = draw.choice(both.decode).decoder._context.lender
                    for grant in tuple(lender._grants.values()):
                        lender.end(grant, "as in this test")
                else:
                    getattr(fabric, fault)(victim.engine)

            if draw.random() < 0.5:
                fabric.slow_rail(draw.choice(both.decode).engine, 0, by=draw.choice([1e-4, 1e-3]))
            async with asyncio.TaskGroup() as group:
                group.create_task(strike())
                group.create_task(both.ask_all(draw.choice([0, 1e-4, 1e-3])))

    run(main, seed=seed, rails=2)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_part_that_is_refused_ends_the_part_of_the_other_rank(seed, monkeypatch):
    """Whichever part comes first, nobody waits for one that does not come."""

    async def main(fabric: Fabric) -> None:
        draw = random.Random(seed)
        async with ranks(fabric, draw, draw.choice([1, 2])) as both:
            refused, victim = draw.choice([0, 1]), draw.choice(both.doomed).prefiller._orders
            take = victim.order

            def order(peer: aiote.Peer, fill: FillRequest) -> Order:
                if fill.ranks.decode == refused:
                    raise aiote.QueueFull("as in this test")
                return take(peer, fill)

            monkeypatch.setattr(victim, "order", order)
            await both.ask_all(draw.choice([0, 1e-5, 1e-4, 1e-3]))
            # A name that is used anew is that of another request.
            monkeypatch.setattr(victim, "order", take)
            await both.ask_all(draw.choice([0, 1e-5, 1e-4, 1e-3]))

    run(main, seed=seed, rails=2)


def test_a_rank_that_has_everything_is_not_waited_for_in_the_next_round():
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric, random.Random(1), 1) as both:

            async def strike() -> None:
                one, two = (rank.decoder for rank in both.decode)
                while not two._slots or not next(iter(two._slots)).complete:
                    await asyncio.sleep(1e-4)
                assert not next(iter(one._slots)).complete
                (grant,) = one._context.lender._grants.values()
                one._context.lender.end(grant, "as in this test")

            fabric.slow_rail(both.decode[0].engine, 0, by=0.05)
            fabric.slow_rail(both.decode[0].engine, 1, by=0.05)
            async with asyncio.TaskGroup() as group:
                group.create_task(strike())
                group.create_task(both.ask_all())
            assert both.rounds == [2, 1]

    run(main, rails=2)


def test_a_first_round_without_all_parts_fails_with_its_reason():
    async def main(fabric: Fabric) -> None:
        async with ranks(fabric, random.Random(1), 1) as both:
            here, began = both.decode[0].decoder, fabric.now
            with pytest.raises(PrefillError, match="the decode ranks 1 have not asked for it within 10.0 s"):
                async with here.request(TOKENS, [both.doomed[0].engine.address], request_id=b"r") as slot:
                    await slot.arrived()
            assert fabric.now - began < GATHER + 1.0
            assert both.doomed[0].prefiller.live == 0

    run(main, rails=2)


@pytest.mark.virtual_time
async def test_reasons_of_refused_requests_are_told_once_and_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(refused_module, "MOST", 3)
    refused = RefusedRequests(10.0)
    refused.note((b"r", 1), "why", {0})
    refused.note((b"r", 1), "again", {1})
    assert [refused.take((b"r", 1), 2), refused.take((b"r", 2), 2)] == ["why", ""]
    assert refused.take((b"r", 1), 1) == ""  # it was told, so this is another request
    assert refused.take((b"r", 1), 2) == ""
    for number in range(5):
        refused.note((b"r", number), "why", set())
    assert len(refused) == 3
    await asyncio.sleep(10.1)
    assert refused.take((b"r", 4), 0) == ""
    refused.note((b"s", 1), "why", set())
    assert len(refused) == 1
