"""Caches of two sides, moved between engines: pushed layer by layer, or pulled, whichever side knows first."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

import aiote
from aiote.aio import current_loop
from aiote.kvcache import moving, pushing
from aiote.kvcache.moving import TransferBatch
from aiote.kvcache.producer import Producer
from support.kv.caches import Side, expected, fill, same
from support.kv.worlds import BEFORE, decode, prefill, world

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


@pytest.mark.virtual_time
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("case", ["alike", "hnd to nhd", "smaller pages"])
async def test_a_layer_of_many_pieces_leaves_the_loop_its_turns(monkeypatch, reads, case):
    """The peer's layout decides how many pieces a layer has, so they are computed and submitted some at a time."""
    monkeypatch.setattr(moving, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(moving, "MOST_KEPT", 4)
    monkeypatch.setattr(pushing, "FEW_PAGES", 0)
    submitted, turn = Counter[tuple[TransferBatch, int]](), 0
    submit = TransferBatch.submit

    def end_turn() -> None:
        nonlocal turn
        turn += 1

    def counted(self, pieces, *arguments, **more) -> aiote.Transfer:
        current_loop().call_soon(end_turn)
        submitted[self, turn] += 1
        return submit(self, pieces, *arguments, **more)

    monkeypatch.setattr(TransferBatch, "submit", counted)
    tokens = 20
    left, right = of_case(case)
    async with world("sim", left, right) as w:
        here, there = w.rows(tokens, skip=1)
        fill(left, here, tokens)
        async with anyio.create_task_group() as group:
            group.start_soon(prefill, w.producers[0], "r", tokens, here, 1)
            group.start_soon(decode, w, w.consumers[0], "r", tokens, there, reads)
        assert same(right.caches[0], expected(right.caches[0], there, tokens, BEFORE))
    # A turn submits until it has three pieces, so at most three transfers.
    assert len(submitted) > 2
    assert max(submitted.values()) <= 3
