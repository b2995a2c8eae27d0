"""Producers and consumers for tests: two sides on engines of their own, and what moves between them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import numpy as np

import aiote
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.offers import Offer
from aiote.kvcache.producer import Producer
from support.engines.opening import PATIENCE_S, opened, until
from support.kv.caches import Model, Side, built, expected, fill, rows, same

PAGE = 4
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
    provider: str,
    left: Side,
    right: Side,
    model: Model = MODEL,
    settings: dict | None = None,
    rails: Sequence[list[str]] = (),
    **limits: float,
) -> AsyncIterator[World]:
    """Open two sides; rails: of each engine in turn, prefill ranks first."""
    built(model, left, "prefill"), built(model, right, "decode")
    for cache in right.caches:
        for memory in cache.memories:
            memory[...] = BEFORE
    limits = {"match_timeout": PATIENCE_S} | limits
    kept = {name: limit for name, limit in limits.items() if name in ("match_timeout", "renewal_limit")}
    more = {name: limit for name, limit in limits.items() if name not in kept}
    with anyio.fail_after(10 * PATIENCE_S if provider == "sim" else PATIENCE_S):
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(opened(provider, own, **(settings or {})))
                for own, _ in zip(itertools.cycle(rails or [None]), (*left.caches, *right.caches), strict=False)
            ]
            producers = [
                await stack.enter_async_context(Producer(engine, cache, **kept))
                for engine, cache in zip(engines, left.caches, strict=False)
            ]
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


async def decode(w: World, consumer: Consumer, name: str, tokens: int, there: dict[int, PageRow], reads: bool) -> None:
    async with consumer.receive(w.places, name, tokens=tokens, rows=there, reads=reads) as reception:
        await reception.arrived()
        assert reception.complete


async def served(
    w: World, group: anyio.abc.TaskGroup, tokens: int, name: str, here: dict, there: dict, reads: bool = False
) -> None:
    """Have a request moved, and look at its bytes."""
    group.start_soon(prefill, w.producers[0], name, tokens, here, 1)
    await decode(w, w.consumers[0], name, tokens, there, reads)
    assert same(w.right.caches[0], expected(w.right.caches[0], there, -(-tokens // PAGE) * PAGE, BEFORE))


async def served_while(w: World, tokens: int, reads: bool, requests: int, harm: Callable[[int], object]) -> list[str]:
    """Have requests moved one after the other, harm the network in the midst of each, and compare all bytes of it.

    Returns the events of both engines.
    """
    events: list[str] = []
    for engine in (w.producers[0].engine, w.consumers[0].engine):
        engine.listen_events(lambda event: events.append(event.name))
    memory = w.right.caches[0].memories[0]
    for number in range(requests):
        here, there = w.rows(tokens, seed=number)
        fill(w.left, here, tokens, number)
        for each in w.right.caches[0].memories:
            each[...] = BEFORE
        async with anyio.create_task_group() as group:
            group.start_soon(compute, w.producers[0], f"r {number}", tokens, here)
            group.start_soon(decode, w, w.consumers[0], f"r {number}", tokens, there, reads)
            await until(lambda: not (memory == BEFORE).all())
            harm(number)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, tokens, BEFORE, number))
    return events


async def compute(producer: Producer, name: str, tokens: int, here: dict[int, PageRow]) -> None:
    """Compute a request layer by layer."""
    async with producer.offer(name, tokens=tokens, rows=here) as offer:
        for layer in producer.spec.layers:
            offer.computed(layer)
            await anyio.sleep(0)
    assert offer.outcome == "moved"
