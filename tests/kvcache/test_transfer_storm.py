"""Storms: random requests, cancellations and faults; every byte of every page is the request's that has the page.

A request's bytes follow from its tokens, which are drawn anew for each, so a page that another one wrote is seen. It is
looked at layer by layer, when all is there, and once more before it is given back; pages of requests that failed are
looked at by who gets them next. `AIOTE_TEST_SEEDS` asks for more seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import numpy as np
import pytest

import aiote
from aiote.kvcache import CacheLayout, Decoder, Job, PagesExhausted, Prefiller, PrefillError, Slot
from aiote.testing import Fabric, run
from kv_harm import break_things
from kvcaches import DecodeRank, PrefillRank, calls, pool_of, tail_of

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or 40)
LAYOUT = CacheLayout(layers=3, kv_heads=2, head_size=16, page_tokens=4, dtype="uint8")
PAGES, TAIL = 14, 24


class Storm:
    """Some prefillers, a decoder with few pages, and what happens to them."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.draw = fabric, random.Random(seed)
        self.prefillers: list[PrefillRank] = []
        self.leaving: list[contextlib.AsyncExitStack] = []
        self.serving: list[asyncio.Task[None]] = []
        self.arrived = self.failed = self.cancelled = 0

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        self.decode = await self.decoder(stack)
        for _ in range(self.draw.randint(1, 3)):
            await self.add_prefiller(stack)

    async def decoder(self, stack: contextlib.AsyncExitStack) -> DecodeRank:
        engine = await stack.enter_async_context(self.fabric.open_engine(message_pool=self.draw.choice([2, 16])))
        memory = pool_of(LAYOUT, PAGES, 1)
        limits = {"stall_limit": self.draw.choice([0.01, 0.3, 3]), "confirm_limit": self.draw.choice([1e-4, 0.01, 1])}
        decoder = Decoder(engine, LAYOUT, memory, tail_bytes=TAIL, slots=self.draw.choice([3, 64]), **limits)
        return DecodeRank(engine, memory, await stack.enter_async_context(decoder))

    async def add_prefiller(self, stack: contextlib.AsyncExitStack) -> None:
        settings = {"message_pool": self.draw.choice([2, 16]), "max_transfers": self.draw.choice([2, 16384])}
        engine = await stack.enter_async_context(self.fabric.open_engine(**settings))
        memory = pool_of(LAYOUT, 200, 1)
        prefiller = Prefiller(engine, LAYOUT, memory, queue=self.draw.choice([1, 64]))
        await stack.enter_async_context(prefiller)
        rank = PrefillRank(engine, memory, prefiller, 0, 1, list(range(200)), TAIL)
        self.prefillers.append(rank)
        task = asyncio.ensure_future(self.serve(rank))
        self.serving.append(task)

    async def serve(self, rank: PrefillRank) -> None:
        async with asyncio.TaskGroup() as group:
            async for job in rank.prefiller.jobs():
                group.create_task(self.compute(rank, job))

    async def compute(self, rank: PrefillRank, job: Job) -> None:
        kind = self.draw.choice("ccccccsrdx")
        if kind == "r":
            job.refuse("it does not feel like it")
        elif kind == "d":
            return  # nobody enters it
        else:
            pause = self.draw.choice([0, 1e-5, 1e-3])
            with contextlib.suppress(ZeroDivisionError, TimeoutError):
                async with asyncio.timeout(self.draw.choice([1e-4, 3e-3, 1]) if kind in "sx" else None):
                    await rank.compute(job, self.draw.choice([3, 8, 100]), pause)
                    if kind == "x":
                        raise ZeroDivisionError

    async def ask(self) -> None:
        """One request, within a deadline that may be too short."""
        await asyncio.sleep(self.draw.uniform(0, 0.02))
        group = [[self.draw.choice(self.prefillers).engine.address] for _ in range(self.draw.randint(1, 3))]
        tokens = [self.draw.randrange(1 << 20) for _ in range(self.draw.randint(1, 24))]
        try:
            async with asyncio.timeout(self.draw.choice([1e-4, 1e-3, 5e-3, 0.1, 1000])):
                async with self.decode.decoder.request(tokens, group[0], alternatives=group[1:]) as slot:
                    self.decode.memory[:, slot.pages] = 0
                    await self.use(slot)
                    self.arrived += 1
        except TimeoutError:
            self.cancelled += 1
        except (PrefillError, PagesExhausted, aiote.QueueFull):
            self.failed += 1

    async def use(self, slot: Slot) -> None:
        following = 0
        async for layer in slot.layers():
            assert layer == following or layer == 0
            self.decode.check(slot, layers=range(layer + 1))
            following = layer + 1
        assert following == LAYOUT.layers
        assert slot.tail == tail_of(slot.tokens, TAIL)
        mark = self.draw.randrange(256)
        own = len(slot.pages)
        await slot.extend(self.draw.randint(0, 8))
        added = list(slot.pages[own:])
        self.decode.memory[:, added] = mark
        await asyncio.sleep(self.draw.choice([0, 1e-3, 0.1]))
        self.decode.check(slot)
        assert slot.tail == tail_of(slot.tokens, TAIL)
        assert np.all(self.decode.memory[:, added] == mark)

    async def blow(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await self.open(stack)
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    break_things(self.fabric, self.draw, [one.engine for one in self.prefillers], self.decode.engine)
                )
                for _ in range(self.draw.randint(1, 25)):
                    group.create_task(self.ask())
            await self.nothing_is_left()
            for task in self.serving:
                task.cancel()
            await asyncio.gather(*self.serving, return_exceptions=True)

    async def nothing_is_left(self) -> None:
        decoder = self.decode.decoder
        assert (decoder.requests, decoder.waiting, decoder.free_pages) == (0, 0, PAGES)
        assert not len(decoder._context.immediates)
        assert all(not grant.borrowers for grant in decoder._context.lender._grants.values())
        self.decode.memory[:] = 7
        await asyncio.sleep(20)
        assert (self.decode.memory == 7).all()
        for rank in self.prefillers:
            assert (rank.prefiller.live, len(rank.free)) == (0, 200)
            assert not calls(rank.engine)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests_in_a_storm_never_share_a_page(seed):
    storms: list[Storm] = []

    async def main(fabric: Fabric) -> None:
        storms.append(Storm(fabric, seed))
        await storms[0].blow()

    run(main, seed=seed, rails=2)
    print(f"arrived {storms[0].arrived}, failed {storms[0].failed}, cancelled {storms[0].cancelled}")
