"""Caches of two sides, moved between engines: pushed layer by layer, or pulled, whichever side knows first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.offers import Offer
from aiote.kvcache.producer import Producer
from engines import PATIENCE_S, opened
from mapped_caches import Model, Side, built, expected, fill, rows, same

BEFORE = 0xEE
MODEL = Model(layers=3, state=5, scales=True)


@dataclass
class World:
    """Two sides on engines of their own, and the pages of one request."""

    left: Side
    right: Side
    producers: list[Producer]
    consumers: list[Consumer]

    @property
    def places(self) -> list[aiote.Address]:
        return [producer.engine.address for producer in self.producers]

    def rows(self, tokens: int, skip: int = 0, seed: int = 0) -> tuple[dict[int, PageRow], dict[int, PageRow]]:
        random = np.random.default_rng(seed)
        return rows(self.left, tokens, random), rows(self.right, tokens, random, skip)


@asynccontextmanager
async def world(
    provider: str, left: Side, right: Side, model: Model = MODEL, settings: dict | None = None, **limits: float
) -> AsyncIterator[World]:
    built(model, left, "prefill"), built(model, right, "decode")
    for cache in right.caches:
        for memory in cache.memories:
            memory[...] = BEFORE
    limits = {"match_timeout": PATIENCE_S} | limits
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(opened(provider, **(settings or {})))
                for _ in (*left.caches, *right.caches)
            ]
            producers = [
                await stack.enter_async_context(Producer(engine, cache, match_timeout=limits["match_timeout"]))
                for engine, cache in zip(engines, left.caches, strict=False)
            ]
            more = {name: limit for name, limit in limits.items() if name != "match_timeout"}
            consumers = [
                await stack.enter_async_context(Consumer(engine, cache, turn=turn, **more))
                for turn, (engine, cache) in enumerate(zip(engines[len(producers) :], right.caches, strict=True))
            ]
            yield World(left, right, producers, consumers)


async def prefill(producer: Producer, name: str, tokens: int, here: dict[int, PageRow], readers: int) -> Offer:
    """Compute a request in chunks of 5 tokens, layer by layer, with pages as they are needed."""
    offer = producer.offer(name, tokens=tokens, rows={1: here[1]}, readers=readers)
    async with offer:
        for end in [*range(5, tokens, 5), tokens]:
            offer.rows[0] = PageRow(here[0].pages[: -(-end // PAGE)], 0)
            for layer in producer.spec.layers:
                offer.computed(layer, end)
                await anyio.sleep(0)
    return offer


PAGE = 4


async def decode(w: World, consumer: Consumer, name: str, tokens: int, there: dict[int, PageRow], reads: bool) -> None:
    async with consumer.receive(w.places, name, tokens=tokens, rows=there, reads=reads) as reception:
        await reception.arrived()
        assert reception.complete


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
@pytest.mark.parametrize("provider", ["sim", "local", "tcp"])
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
