"""The simulation of a published update: its NICs are those of `aiote.testing`, its table that of docs/weights.md."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from aiote.testing import Fabric, NicModel, run
from support.machine import LONG
from support.weights import published_plans

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from paper import weights as simulated

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text()
WRITES, SENDERS, RECEIVERS = 40, 4, 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("gather", ["always", "auto"] if LONG else ["always"])
@pytest.mark.parametrize("expert_ranks", [64, 32] if LONG else [32])
def test_the_table_says_what_is_simulated(expert_ranks, gather):
    plan = published_plans.plan("kimi_k2", gather, whole=False, expert_ranks=expert_ranks)
    found = dict(simulated.WAYS[gather](plan))
    for what, times in found.items():
        assert simulated.row(what, expert_ranks, times) in PAGE.splitlines()
    if (expert_ranks, gather) == (32, "always"):
        # As was published: 32 ranks share the experts, trainers go through their own parameters.
        for what in ("gather, by parameters", "gather, by parameters, one stage 10 % slower"):
            assert found[what].total == pytest.approx(simulated.PUBLISHED_MS, rel=0.1)
            assert found[what].waiting == pytest.approx(simulated.PUBLISHED_WAITING_MS, rel=0.1)
    stages = simulated.Stages.of(plan, "plan")
    if gather == "always":
        # Ranks that gather together do the same at the same time, so none waits for another.
        for first in (0, 16, 32):
            spent = {simulated.spent_in_calls(stages.jobs[r], simulated.Costs()) for r in range(first, first + 16)}
            assert max(spent) == pytest.approx(min(spent))
    if LONG:
        # One stage stands for those like it.
        whole = published_plans.plan("kimi_k2", gather, whole=True, expert_ranks=expert_ranks)
        expected = simulated.simulate(simulated.Stages.of(whole, "plan"))
        assert simulated.simulate(stages.spread()) == pytest.approx(expected, rel=0.01)


def test_writes_take_as_long_as_those_of_engines():
    """Several senders to few receivers, so that they wait for each other at both ends."""
    model = NicModel(name="slow", gbps=8, latency_us=24.5, answer_us=7.4, operation_us=0.474)
    rng = random.Random(1)
    drawn = [
        [(rng.uniform(0, 4000), rng.randrange(RECEIVERS), rng.choice((1000, 65_536, 100_000))) for _ in range(WRITES)]
        for _ in range(SENDERS)
    ]
    for several in drawn:
        several.sort()

    async def main(fabric: Fabric) -> list[float]:
        engines = [await fabric.open_engine() for _ in range(SENDERS + RECEIVERS)]
        regions = [engine.register(bytearray(100_000)) for engine in engines]
        for sender in engines[:SENDERS]:
            for receiver in engines[SENDERS:]:
                await sender.connect(receiver.address)
        began = fabric.now

        async def one(number: int, time: float, target: int, size: int) -> float:
            await asyncio.sleep(time * 1e-6)
            there = engines[number].attach(regions[SENDERS + target].descriptor)
            await engines[number].write(regions[number][:size], there[:size])
            return (fabric.now - began) * 1e6

        ends = await asyncio.gather(*(one(i, *write) for i, several in enumerate(drawn) for write in several))
        for engine in engines:
            await engine.aclose()
        return ends

    ends = run(main, model=model)
    posts = [simulated.Posts(*map(np.array, zip(*several, strict=True))) for several in drawn]
    found = simulated.delivered(posts, model)
    # Which of two that arrive at nearly the same time is first is another matter, when all are there is not.
    assert max(found) == pytest.approx(max(ends), rel=1e-3)
