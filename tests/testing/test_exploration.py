"""Random traffic under random faults, one seed after another: nothing hangs, nothing is counted or written wrongly.

`make test-all` plays more seeds than `make test`, and `AIOTE_TEST_SEEDS` asks for more; two thousand take two minutes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random

import pytest

import aiote
from aiote.testing import UNRULY, Fabric, run
from support.machine import LONG

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or (100 if LONG else 12))
SIZE = 1 << 16
IMM = 7
PAGES = 20


class Chaos:
    """Some engines that all write to each other, each into a part of its own, and what may have been counted."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.draw = fabric, random.Random(seed)
        self.mending: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        count = self.draw.randint(2, 4)
        self.engines = [await self.fabric.open_engine(**self.settings()) for _ in range(count)]
        self.pools = [bytearray(SIZE * count) for _ in self.engines]
        self.descriptors = [e.register(pool).descriptor for e, pool in zip(self.engines, self.pools, strict=True)]
        self.sources = [e.register(bytes([number + 1]) * SIZE) for number, e in enumerate(self.engines)]
        self.tried, self.told = [0] * count, [0] * count

    def settings(self) -> dict[str, int]:
        return {
            "message_pool": self.draw.choice([2, 4, 16]),
            "stripe_bytes": self.draw.choice([1, 1000, 65536]),
            "largest_message": self.draw.choice([0, 5000, 1 << 22]),
        }

    async def flow(self, here: int, there: int) -> None:
        """Some operations from one engine to another, each within a deadline that may be too short."""
        target = self.engines[here].attach(self.descriptors[there])[here * SIZE : (here + 1) * SIZE]
        for _ in range(self.draw.randint(1, 8)):
            try:
                async with asyncio.timeout(self.draw.choice([1e-5, 1e-3, 1, 100])):
                    await self.operation(here, there, target)
            except (TimeoutError, aiote.AioteError):
                pass

    async def operation(self, here: int, there: int, target: aiote.RemoteRegion) -> None:
        engine, source, kind = self.engines[here], self.sources[here], self.draw.choice("wiarmp")
        length = self.draw.choice([1, 100, 5000, SIZE])
        start = self.draw.randrange(SIZE - length + 1)
        part = slice(start, start + length)
        counts = {"i": 1, "a": 1, "p": PAGES}.get(kind, 0)
        self.tried[there] += counts
        if kind == "w":
            await engine.write(source[part], target[part])
        elif kind == "i":
            await engine.write_imm(source[part], target[part], IMM)
        elif kind == "a":
            await engine.write_imm(None, self.engines[there].address, IMM)
        elif kind == "r":
            await engine.read(target[part], engine.register(bytearray(length)))
        elif kind == "m":
            await engine.send(self.engines[there].address, bytes(self.draw.randrange(1000)))
        else:
            page = min(length, 64)
            numbers = [number % (SIZE // page) for number in range(PAGES)]
            await engine.write_pages(aiote.Pages(source, numbers, page), aiote.Pages(target, numbers, page), IMM)
        self.told[there] += counts

    async def break_things(self) -> None:
        """Up to four faults, each mended after a while."""
        for _ in range(self.draw.randint(0, 4)):
            await asyncio.sleep(self.draw.choice([1e-5, 1e-4, 1e-3, 0.5]))
            engine = self.draw.choice(self.engines)
            rail, how = (
                self.draw.randrange(len(engine.rails)),
                self.draw.choice(["break", "silence", "slow", "cut off"]),
            )
            self.mending.append(asyncio.ensure_future(self.break_one(engine, rail, how)))

    async def break_one(self, engine: aiote.Engine, rail: int, how: str) -> None:
        seconds = self.draw.choice([1e-4, 0.1, 3, 10])
        if how == "cut off":
            self.fabric.partition(engine)
        elif how == "slow":
            self.fabric.slow_rail(engine, rail, by=seconds / 10)
        else:
            self.fabric.kill_rail(engine, rail, silently=how == "silence")
        await asyncio.sleep(seconds)
        if how == "cut off":
            self.fabric.heal(engine)
        elif how == "slow":
            self.fabric.slow_rail(engine, rail, by=0)
        else:
            self.fabric.restore_rail(engine, rail)

    async def run(self) -> None:
        await self.open()
        readers = [asyncio.ensure_future(self.read(engine)) for engine in self.engines]
        pairs = [(i, j) for i in range(len(self.engines)) for j in range(len(self.engines)) if i != j]
        await asyncio.gather(*(self.flow(i, j) for i, j in pairs), self.break_things())
        await asyncio.gather(*self.mending)
        await asyncio.sleep(60)
        self.check()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for engine in self.engines:
            await engine.aclose()

    @staticmethod
    async def read(engine: aiote.Engine) -> None:
        while True:
            await engine.recv()

    def check(self) -> None:
        """A write that was told to be done is counted, one that failed at most once; nobody wrote where others do."""
        for number, engine in enumerate(self.engines):
            assert self.told[number] <= engine.counter(IMM).value <= self.tried[number]
            assert engine.statistics().outstanding == engine.statistics().queued == 0
            for other in range(len(self.engines)):
                part = self.pools[number][other * SIZE : (other + 1) * SIZE]
                assert set(part) <= {0, other + 1}


@pytest.mark.timeout(600)
@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
def test_random_traffic_under_random_faults_keeps_every_promise():
    for seed in range(SEEDS):
        draw = random.Random(seed)
        model = dataclasses.replace(
            UNRULY,
            queue=draw.choice([4, 64]),
            events=draw.choice([4, 64]),
            lingers=draw.random() < 0.3,
            max_sge=draw.choice([1, 2, 4]),
        )
        try:
            run(lambda fabric, seed=seed: Chaos(fabric, seed).run(), seed, rails=draw.randint(1, 4), model=model)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
