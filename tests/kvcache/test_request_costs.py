"""What a request costs, in calls of Python and turns of the loop. These numbers, unlike times, are always the same."""

from __future__ import annotations

import asyncio
import cProfile
import pstats

import numpy as np

import aiote
from aiote.kvcache import Cache, Consumer, PageRow, Producer

PAGES, TOKENS, ITEM, WARM, REQUESTS = 8, 4, 8, 8, 20


def cache(layers: int) -> Cache:
    made = Cache("a rank")
    array = np.zeros((layers, 2 * PAGES, 2, TOKENS, 1, ITEM), np.uint8)
    made.add(array, "layer page field token head item", fields=["k", "v"])
    return made


async def request(producer: Producer, consumer: Consumer, name: str, layers: int) -> None:
    """Move a request that is computed at once, both sides in one process."""

    async def prefill() -> None:
        async with producer.offer(name, tokens=PAGES * TOKENS, rows={0: PageRow(range(PAGES))}) as offer:
            for layer in range(layers):
                offer.computed(layer)
        assert offer.outcome == "moved"

    task = asyncio.create_task(prefill())
    rows = {0: PageRow(range(PAGES, 2 * PAGES))}
    async with consumer.receive([producer.engine.address], name, tokens=PAGES * TOKENS, rows=rows) as reception:
        await reception.arrived()
    await task


async def measured(layers: int) -> dict[str, float]:
    """Return the calls, turns and rounds of a request."""
    profile = cProfile.Profile()
    async with (
        aiote.open_engine("local") as left,
        aiote.open_engine("local") as right,
        Producer(left, cache(layers)) as producer,
        Consumer(right, cache(layers)) as consumer,
    ):
        for number in range(WARM):
            await request(producer, consumer, f"warm {number}", layers)
        profile.enable()
        for number in range(REQUESTS):
            await request(producer, consumer, f"r {number}", layers)
        profile.disable()
    calls = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    named = {name: sum(found[1] for key, found in calls.items() if key[2] == name) for name in ("_run_once", "_round")}
    total = sum(found[1] for found in calls.values())
    return {"calls": total / REQUESTS, "turns": named["_run_once"] / REQUESTS, "rounds": named["_round"] / REQUESTS}


def test_a_request_costs_few_calls_and_none_by_layer():
    few, many = (asyncio.run(measured(layers), debug=False) for layers in (2, 32))
    # They are the same when this is written, 870 calls and 4 turns; a turn more costs about 40 calls.
    assert abs(many["calls"] - few["calls"]) < 30, (few, many)
    assert many["calls"] < 960, many
    assert many["turns"] <= 5, many
