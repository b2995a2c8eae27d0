"""Prepared requests in virtual time: they do what requests made anew do, are cancelled and lose rails at any moment.

`make test-all` plays more seeds than `make test`, and `AIOTE_TEST_SEEDS` asks for more.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote import ScatterTarget
from aiote.testing import Fabric, run
from support.machine import LONG

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or (60 if LONG else 10))
SIZE = 1 << 15
PAGE = 128
PAGES = SIZE // PAGE
PEERS = 3
ANEW, PREPARED = 5, 6

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")


class World:
    """An engine, its peers, and memory at each of them for either way of writing."""

    def __init__(self, fabric: Fabric, **settings: Any) -> None:
        self.fabric, self.settings = fabric, settings
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        engines = [
            await self.stack.enter_async_context(self.fabric.open_engine(**self.settings)) for _ in range(1 + PEERS)
        ]
        self.hub, self.others = engines[0], engines[1:]
        self.group = await self.hub.peer_group([other.address for other in self.others])
        self.source = np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)
        self.region = self.hub.register(self.source)
        self.memories = {imm: [np.zeros(SIZE, np.uint8) for _ in self.others] for imm in (ANEW, PREPARED)}
        self.remotes = {
            imm: [
                self.hub.attach(other.register(memory).descriptor)
                for other, memory in zip(self.others, memories, strict=True)
            ]
            for imm, memories in self.memories.items()
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    @property
    def targets(self) -> list[ScatterTarget]:
        return [ScatterTarget(self.region, remote) for remote in self.remotes[PREPARED]]

    def arrived(self, imm: int) -> tuple[list[bytes], list[int]]:
        """Return what is at each peer, and how much was counted there."""
        return [memory.tobytes() for memory in self.memories[imm]], [
            int(other.counter(imm).value) for other in self.others
        ]


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(target, length, local offset, remote offset); edges included."""
    length = draw(st.sampled_from([0, 1, SIZE]) | st.integers(0, SIZE))
    offsets = st.sampled_from([0, SIZE - length]) | st.integers(0, SIZE - length)
    return draw(st.integers(0, PEERS - 1)), length, draw(offsets), draw(offsets)


@given(st.lists(writes(), max_size=8), st.booleans(), st.integers(1, 2), st.sampled_from([0, 1000]))
def test_a_prepared_scatter_is_a_scatter(several, counted, rails, largest):
    """One after the other: where writes overlap, the last one stays."""

    async def main(fabric: Fabric) -> None:
        async with World(fabric, largest_message=largest, stripe_bytes=500) as world:
            prepared = world.hub.prepare_scatter(world.group, world.targets)
            for write in several:
                who, length, near, far = write
                target = world.remotes[ANEW][who][far : far + length]
                scatter = ScatterTarget(world.region[near : near + length], target)
                await world.hub.scatter(world.group, [scatter], ANEW if counted else None)
                numbers = (np.array([number]) for number in write)
                to, *arrays = numbers
                await prepared.write(*arrays, PREPARED if counted else None, to=to)
            await asyncio.sleep(1)
            assert world.arrived(ANEW) == world.arrived(PREPARED)
            assert sum(world.arrived(PREPARED)[1]) == len(several) * counted

    run(main, 1, rails=rails)


@given(st.data(), st.booleans(), st.integers(1, 2), st.sampled_from([1, 4]))
def test_prepared_pages_are_pages(data, counted, rails, spread):
    """Each page goes to one place, in any order, from anywhere."""
    near = data.draw(st.lists(st.integers(0, PAGES - 1), max_size=60))
    far = data.draw(st.permutations(range(PAGES // spread)).map(lambda order: order[: len(near)]))
    near = near[: len(far)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(near)), min_size=PEERS - 1, max_size=PEERS - 1)))
    begins, ends = [0, *cuts], [*cuts, len(near)]

    async def main(fabric: Fabric) -> None:
        async with World(fabric) as world:
            prepared = world.hub.prepare_pages(world.group, world.targets, PAGE, dst_stride=PAGE * spread)
            counts = np.subtract(ends, begins)
            await prepared.write(
                np.array(near, np.int64), np.array(far, np.uint64), PREPARED if counted else None, counts=counts
            )
            for remote, begin, end in zip(world.remotes[ANEW], begins, ends, strict=True):
                source = aiote.Pages(world.region, near[begin:end], PAGE)
                target = aiote.Pages(remote, far[begin:end], PAGE, PAGE * spread)
                await world.hub.write_pages(source, target, ANEW if counted else None)
            await asyncio.sleep(1)
            assert world.arrived(ANEW) == world.arrived(PREPARED)
            assert sum(world.arrived(PREPARED)[1]) == len(near) * counted

    run(main, 1, rails=rails)


def submits(world: World, what: str, draw: random.Random) -> Callable[[], aiote.Transfer]:
    """Return what writes all of the memory to every peer."""
    if what == "scatter":
        scatter = world.hub.prepare_scatter(world.group, world.targets)
        return lambda: scatter.submit(np.full(PEERS, SIZE), imm=PREPARED)
    pages = world.hub.prepare_pages(world.group, world.targets, PAGE)
    order = np.concatenate([draw.sample(range(PAGES), PAGES) for _ in range(PEERS)])
    return lambda: pages.submit(order, order, PREPARED, counts=np.full(PEERS, PAGES))


async def cancelled(fabric: Fabric, what: str, seed: int) -> bool:
    """Cancel a request at a random moment: it writes nothing later, and the next is whole. Was it in the middle?"""
    draw = random.Random(seed)
    async with World(fabric, stripe_bytes=draw.choice([1, 1000]), largest_message=draw.choice([300, 3000])) as world:
        submit = submits(world, what, draw)
        before = [submit() for _ in range(seed % 3)]
        for transfer in before:
            await transfer
        for memory in world.memories[PREPARED]:
            memory[:] = 0
        transfer = submit()
        task = asyncio.ensure_future(awaited(transfer))
        await asyncio.sleep(draw.random() * 1e-4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.region.memory.in_flight == 0
        assert task.cancelled() or transfer.confirmed_bytes == transfer.total_bytes
        frozen = world.arrived(PREPARED)[0]
        await asyncio.sleep(5)
        assert world.arrived(PREPARED)[0] == frozen, "a byte came after the await had ended"
        assert all(peer.has_room for peer in world.group)
        counted = world.arrived(PREPARED)[1]
        await submit()
        await asyncio.sleep(1)
        each = 1 if what == "scatter" else PAGES
        assert world.arrived(PREPARED) == (
            [world.source.tobytes()] * PEERS,
            [count + each for count in counted],
        )
        return 0 < transfer.confirmed_bytes < transfer.total_bytes


async def awaited(transfer: aiote.Transfer) -> None:
    await transfer


@pytest.mark.parametrize("what", ["scatter", "pages"])
def test_no_byte_comes_late_whenever_a_request_is_cancelled(what):
    halves = [
        run(lambda fabric, seed=seed: cancelled(fabric, what, seed), seed, rails=1 + seed % 3) for seed in range(SEEDS)
    ]
    assert any(halves), "none was cancelled in the middle"


async def over_a_lost_rail(fabric: Fabric, what: str, seed: int) -> None:
    """Kill a rail in the middle: everything comes, and counts exactly once."""
    draw = random.Random(seed)
    settings = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5}
    async with World(fabric, stripe_bytes=1000, **settings) as world:
        submit = submits(world, what, draw)
        await submit()
        fabric.kill_rail(draw.choice([world.hub, *world.others]), draw.randrange(2), after=draw.randrange(60))
        for transfer in [submit(), submit()]:
            await transfer
        await asyncio.sleep(5)
        each = 1 if what == "scatter" else PAGES
        assert world.arrived(PREPARED) == ([world.source.tobytes()] * PEERS, [3 * each] * PEERS)


@pytest.mark.parametrize("what", ["scatter", "pages"])
def test_a_request_goes_on_over_the_other_rails(what):
    for seed in range(SEEDS):
        run(lambda fabric, seed=seed: over_a_lost_rail(fabric, what, seed), seed, rails=2)
