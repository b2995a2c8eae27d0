"""Storms of pushed and pulled requests: freed pages are filled with a pattern, and nothing is written to them then.

A request's bytes follow from its number, so a page that another one wrote is seen. Pages are looked at when all is
there, and when they are taken: they hold the pattern still. `AIOTE_TEST_SEEDS` asks for more seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random

import numpy as np
import pytest

import aiote
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.producer import Producer
from aiote.kvcache.protocol import TransferRefused
from aiote.service import CallError
from aiote.testing import Fabric, run
from support.kv.caches import Model, Side, built, fill, item, spread, value
from support.kv.faults import break_things

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or 30)
MODEL = Model(layers=3, heads=2, item=16)
PATTERN, PAGES = 0xEE, 14


class Storm:
    """Some prefillers, a decode rank with few pages, and what happens to them."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.draw = fabric, random.Random(seed)
        self.right = built(MODEL, Side(pages=PAGES, tokens=self.draw.choice([2, 4])), "decode")
        self.free = list(range(PAGES))
        self.producers: list[tuple[Producer, Side, list[int]]] = []
        self.arrived = self.failed = self.cancelled = 0
        for memory in self.right.caches[0].memories:
            memory[...] = PATTERN

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        engine = await stack.enter_async_context(self.fabric.open_engine())
        limits = {"confirm_timeout": self.draw.choice([1e-4, 0.01, 1]), "quarantine_pages": self.draw.choice([3, 100])}
        self.consumer = await stack.enter_async_context(Consumer(engine, self.right.caches[0], **limits))
        for _ in range(self.draw.randint(1, 3)):
            engine = await stack.enter_async_context(
                self.fabric.open_engine(max_transfers=self.draw.choice([2, 16384]))
            )
            side = built(
                MODEL,
                Side(pages=200, tokens=4, order=self.draw.choice(["field head token", "token head field"])),
                "prefill",
            )
            producer = Producer(engine, side.caches[0], match_timeout=self.draw.choice([0.01, 1]))
            self.producers.append((await stack.enter_async_context(producer), side, list(range(200))))

    async def prefill(self, number: int, place: int, tokens: int) -> None:
        """Offer a request, compute it slowly, and perhaps give it up."""
        producer, side, free = self.producers[place]
        await asyncio.sleep(self.draw.choice([0, 1e-3, 0.02]))
        pages = [free.pop(self.draw.randrange(len(free))) for _ in range(-(-tokens // 4))]
        rows = {0: PageRow(np.array(pages, np.int64))}
        fill(side, rows, len(pages) * 4, number)
        with contextlib.suppress(ZeroDivisionError, TimeoutError):
            async with (
                asyncio.timeout(self.draw.choice([1e-3, 5e-3, 1000, 1000, 1000])),
                producer.offer(str(number), tokens=tokens, rows=rows) as offer,
            ):
                for end in [*range(3, tokens, 3), tokens]:
                    for layer in range(MODEL.layers):
                        offer.computed(layer, end)
                        await asyncio.sleep(self.draw.choice([0, 1e-5, 1e-4]))
                if self.draw.random() < 0.1:
                    raise ZeroDivisionError
        self.scratch(side, pages)
        free += pages

    def scratch(self, side: Side, pages: list[int]) -> None:
        """Fill freed pages with the pattern."""
        for memory in side.caches[0].memories:
            memory[pages] = PATTERN

    async def ask(self, number: int) -> None:
        """One request, within a deadline that may be too short."""
        await asyncio.sleep(self.draw.uniform(0, 0.02))
        place = self.draw.randrange(len(self.producers))
        size = self.right.tokens
        tokens = self.draw.randint(1, 5 * size)
        while len(self.free) < -(-tokens // size):
            await asyncio.sleep(1e-3)
        pages = [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(-(-tokens // size))]
        self.holds_pattern(pages)
        if self.draw.random() < 0.9:
            self.tasks.create_task(self.prefill(number, place, tokens))
        rows = {0: PageRow(np.array(pages, np.int64))}
        address = [self.producers[place][0].engine.address]
        try:
            async with (
                asyncio.timeout(self.draw.choice([1e-4, 1e-3, 5e-3, 0.1, 1000])),
                self.consumer.receive(
                    address, str(number), tokens=tokens, rows=rows, reads=self.draw.random() < 0.3
                ) as reception,
            ):
                await reception.arrived()
                self.check(rows[0], tokens, number)
                await asyncio.sleep(self.draw.choice([0, 1e-3, 0.1]))
                self.check(rows[0], tokens, number)
                self.arrived += 1
        except TimeoutError:
            self.cancelled += 1
        except (TransferRefused, CallError, aiote.PeerError):
            self.failed += 1
        self.scratch(self.right, pages)
        self.free += pages

    def holds_pattern(self, pages: list[int]) -> None:
        assert all((memory[pages] == PATTERN).all() for memory in self.right.caches[0].memories)

    def check(self, row: PageRow, tokens: int, number: int) -> None:
        cache = self.right.caches[0]
        for tensor in cache.tensors:
            flat = cache.memories[tensor.memory].reshape(-1)
            for page, head, inner, token in spread(tensor, row, tokens):
                at = item(cache, tensor, page, head, inner)
                assert np.array_equal(flat[at], value(tensor, head, token, number))

    async def blow(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await self.open(stack)
            async with asyncio.TaskGroup() as self.tasks:
                self.tasks.create_task(
                    break_things(
                        self.fabric, self.draw, [one[0].engine for one in self.producers], self.consumer.engine
                    )
                )
                for number in range(self.draw.randint(1, 25)):
                    self.tasks.create_task(self.ask(number))
            await asyncio.sleep(20)
            assert sorted(self.free) == list(range(PAGES))
            self.holds_pattern(self.free)
            assert not len(self.consumer.immediates)
            for producer, _, free in self.producers:
                assert (len(producer._offers), len(free), producer._pulls) == (0, 200, set())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests_in_a_storm_never_share_a_page(seed):
    storms: list[Storm] = []

    async def main(fabric: Fabric) -> None:
        storms.append(Storm(fabric, seed))
        await storms[0].blow()

    run(main, seed=seed, rails=2)
    print(f"arrived {storms[0].arrived}, failed {storms[0].failed}, cancelled {storms[0].cancelled}")
