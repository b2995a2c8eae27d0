"""Everything that goes between two engines at once, both ways, and what has to come of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

import aiote
from support.engines.opening import LOST_SOON, across, linked

SIZE = 200_000
WRITES = 120
MESSAGES = 150
IMM = 7


@asynccontextmanager
async def railed(
    rails: int, provider: str = "tcp", **settings
) -> AsyncIterator[tuple[aiote.Engine, aiote.Engine, list[str]]]:
    """Open two connected engines with so many rails, and write down what becomes of these."""
    async with linked(provider, ["127.0.0.1"] * rails, **LOST_SOON, **settings) as (left, right):
        seen: list[str] = []
        left.listen_events(lambda event: seen.append(event.name))
        yield left, right, seen


def noise(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE), np.uint8)


class Traffic:
    """Writes, pages, immediates and messages from left to right, reads from right to left; all different each seed."""

    def __init__(self, left: aiote.Engine, right: aiote.Engine, seed: int, writes: int = WRITES) -> None:
        self.left, self.right = left, right
        self.writes = writes
        self.sent, self.got = noise(writes, seed), np.zeros((writes, SIZE), np.uint8)
        self.back = np.zeros((writes // 4, SIZE), np.uint8)
        self.source = left.register(self.sent.reshape(-1))
        self.target = across(left, right, self.got.reshape(-1))
        self.there = right.attach(self.source.descriptor)
        self.local = right.register(self.back.reshape(-1))
        self.messages: list[bytes] = []

    def part(self, region, i: int):
        return region[i * SIZE : (i + 1) * SIZE]

    async def write(self) -> None:
        half = self.writes // 2
        pages = [
            aiote.Pages(region, range(half * 50, self.writes * 50), SIZE // 50) for region in (self.source, self.target)
        ]
        transfers = [
            self.left.submit_write_imm(self.part(self.source, i), self.part(self.target, i), IMM) for i in range(half)
        ]
        transfers.append(self.left.submit_write_pages(*pages, IMM))
        transfers += [self.left.submit_write_imm(None, self.target, IMM) for _ in range(50)]
        for transfer in transfers:
            await transfer

    async def read(self) -> None:
        for i in range(self.writes // 4):
            await self.right.read(self.part(self.there, i), self.part(self.local, i))

    async def send(self) -> None:
        for number in range(MESSAGES):
            await self.left.send(self.right.address, b"%d" % number)

    async def receive(self) -> None:
        while len(self.messages) < MESSAGES:
            self.messages.append((await self.right.recv()).data)

    async def run(self) -> None:
        await asyncio.gather(self.write(), self.read(), self.send(), self.receive(), self.count())

    async def count(self) -> None:
        await self.right.counter(IMM).wait(self.writes // 2 + self.writes // 2 * 50 + 50)
        # At the count all bytes are there, whichever rail they came by.
        assert np.array_equal(self.got, self.sent)

    def check(self) -> None:
        assert self.right.counter(IMM).value == 0
        assert np.array_equal(self.got, self.sent)
        assert np.array_equal(self.back, self.sent[: self.writes // 4])
        assert sorted(self.messages, key=int) == [b"%d" % number for number in range(MESSAGES)]
