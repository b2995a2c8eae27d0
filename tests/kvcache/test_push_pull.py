"""Caches of two sides, moved between engines: pushed layer by layer, or pulled, whichever side knows first."""

from __future__ import annotations

import anyio
import pytest

from aiote.kvcache.producer import Producer
from kv_worlds import BEFORE, decode, prefill, world
from mapped_caches import Side, expected, fill, same

CASES = {
    "alike": (Side(), Side()),
    "hnd to nhd": (Side(), Side(order="field token head")),
    "apart to together": (Side(apart=True), Side(order="head token field")),
    "larger pages": (Side(), Side(tokens=8)),
    "smaller pages": (Side(order="token head field"), Side(tokens=2)),
    "1 to 2 ranks": (Side(), Side(ranks=2)),
    "2 to 1 ranks": (Side(ranks=2), Side()),
    "2 stages to 2 ranks": (Side(stages=2), Side(ranks=2, order="field token head")),
}


def of_case(case: str) -> tuple[Side, Side]:
    return tuple(Side(side.ranks, side.stages, side.tokens, side.order, side.apart) for side in CASES[case])


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["sim", "local", "tcp", "verbs"])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("case", CASES)
async def test_a_request_arrives_byte_by_byte_and_nothing_else(provider, reads, case):
    tokens = 19
    left, right = of_case(case)
    async with world(provider, left, right) as w:
        here, there = w.rows(tokens, skip=1)
        unit = min(left.tokens, right.tokens)
        fill(left, here, -(-tokens // unit) * unit)
        outcomes = []

        async def compute(producer: Producer) -> None:
            outcomes.append((await prefill(producer, "r", tokens, here, len(w.consumers))).outcome)

        async with anyio.create_task_group() as group:
            for producer in w.producers:
                group.start_soon(compute, producer)
            for consumer in w.consumers:
                group.start_soon(decode, w, consumer, "r", tokens, there, reads)
        assert outcomes == ["moved"] * len(w.producers)
        for cache in right.caches:
            assert same(cache, expected(cache, there, -(-tokens // unit) * unit, BEFORE))
