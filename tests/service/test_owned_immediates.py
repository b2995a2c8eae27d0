"""All services on one engine: none counts on an immediate of another, nor on one that is the program's to number."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache import Consumer, Producer
from aiote.moe import MoeConfig, MoeGroup, open_group
from aiote.moe.wire import SLOTS
from aiote.transfers import Counters
from aiote.weights import Controller, Layout, Replicate, serve_source, serve_target
from support.engines.opening import opened, until
from support.kv.caches import Side, built, rows
from support.kv.worlds import MODEL, compute
from support.moe.ranks import Tokens, all_of, whole_round

LAYOUT = Layout.over([0], {"a": ((64,), "F32", Replicate())})
OWN = range(1 << 27)
TOKENS = 19
RNG = np.random.default_rng(3)


@pytest.fixture
def opened_on(monkeypatch) -> dict[Counters, list[int]]:
    """Return the immediates whose counters each engine has opened, in order."""
    found: dict[Counters, list[int]] = {}
    one, row = Counters.open, Counters.open_row

    def open(self: Counters, imm: int | None = None) -> aiote.Counter:
        counter = one(self, imm)
        found.setdefault(self, []).append(counter.imm)
        return counter

    def open_row(self: Counters, first: int, needs: Sequence[int]) -> aiote.CounterRow:
        found.setdefault(self, []).extend(range(first, first + len(needs)))
        return row(self, first, needs)

    monkeypatch.setattr(Counters, "open", open)
    monkeypatch.setattr(Counters, "open_row", open_row)
    return found


async def move(hub: aiote.Engine, other: aiote.Engine, number: int) -> None:
    """Have two requests moved at a time into each of two caches on one engine, from a producer on another."""
    left, right = Side(), [Side(), Side()]
    built(MODEL, left, "prefill")
    for side in right:
        built(MODEL, side, "decode")
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(other, left.caches[0]))
        consumers = [await stack.enter_async_context(Consumer(hub, side.caches[0])) for side in right]
        async with anyio.create_task_group() as group:
            for place, (consumer, side) in enumerate(zip(consumers, right, strict=True)):

                async def receive(consumer: Consumer, side: Side, name: str) -> None:
                    there = rows(side, TOKENS, np.random.default_rng(number))
                    async with consumer.receive([other.address], name, tokens=TOKENS, rows=there) as reception:
                        await reception.arrived()

                for turn in range(2):
                    name = f"{number} {place} {turn}"
                    here = rows(left, TOKENS, np.random.default_rng(number))
                    group.start_soon(compute, producer, name, TOKENS, here)
                    group.start_soon(receive, consumer, side, name)


async def exchange(hub: aiote.Engine, other: aiote.Engine, group: int, on_loss: str) -> None:
    """Make two rounds of a group in each of two epochs."""
    config = MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, on_loss=on_loss, **{"lanes": 2} if group else {})
    found: dict[int, MoeGroup] = {}
    over = anyio.Event()

    async def live(rank: int, engine: aiote.Engine) -> None:
        async with open_group(engine, [hub.address, other.address], rank, config, group=group) as found[rank]:
            await over.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live, 0, hub)
        tasks.start_soon(live, 1, other)
        await until(lambda: len(found) == 2)
        ranks = [found[0], found[1]]
        for _ in range(2):
            for _ in range(2):
                await whole_round(ranks, [Tokens(RNG, config, 4, wild=on_loss == "raise") for _ in ranks])
            await all_of(*[one.reset for one in ranks])
        over.set()


async def test_no_two_services_of_an_engine_count_on_one_immediate(opened_on):
    async with opened("sim") as hub, opened("sim") as other, opened("sim") as third, AsyncExitStack() as stack:
        own = [stack.enter_context(hub.counter(number)) for number in (0, 7, 5 << 24, OWN[-1])]
        granted = [stack.enter_context(hub.counter()) for _ in range(20)]
        values = {"a": np.zeros(64, np.float32)}
        await stack.enter_async_context(serve_source(other, LAYOUT, 0, values))
        target = await stack.enter_async_context(serve_target(hub, LAYOUT, 0, {"a": np.ones(64, np.float32)}))
        controller = Controller(third, [other.address], [hub.address])

        async def update() -> None:
            for version in range(1, 4):
                await controller.update(version)

        groups = [(0, "raise"), (1, "mask"), (2, "raise")]
        await all_of(
            update,
            lambda: move(hub, other, 1),
            *[lambda n=n, on_loss=on_loss: exchange(hub, other, n, on_loss) for n, on_loss in groups],
        )
        await until(lambda: target.version == 3)
        counted = opened_on[hub._counters]
    assert counted[:4] == [counter.imm for counter in own]
    assert [counter.imm for counter in granted] == counted[4:24]
    # Of groups SLOTS a lane and epoch, of one that masks SLOTS a rank; 4 requests of 3 layers; 3 updates.
    assert len(counted) == 24 + 3 * (1 + 2 * 2 + 2) * SLOTS + 4 * MODEL.layers + 3
    assert not [value for value in counted[4:] if value in OWN]
    assert len(set(counted)) == len(counted)
