"""Prefiller and decoder of the demo, each alone on an engine of its own, against a partner that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
from aiote.demo import Settings, one_process, tokens, weights
from aiote.demo.decoder import DecodeWorker
from aiote.demo.prefiller import PrefillWorker
from aiote.demo.request_cache import RequestCache
from aiote.kvcache import Consumer, PageRow, Producer, TransferRefused
from support.engines.opening import PATIENCE_S

pytestmark = pytest.mark.libfabric

PROMPT = tokens.encode(b"Once, in a storm, the lamp at the far end went out.")
SETTINGS = Settings("tcp", 2, 1, None, 4, 16, 5, 1, 0).with_pool_for(len(PROMPT))
MODEL = weights.seeded(weights.seeded_config(2), 1)
NEEDED = SETTINGS.pages_for(len(PROMPT))


@asynccontextmanager
async def two_engines() -> AsyncIterator[tuple[aiote.Engine, aiote.Engine]]:
    """Open two engines: the test's and the worker's."""
    with anyio.fail_after(PATIENCE_S):
        async with aiote.open_engine("tcp") as mine, aiote.open_engine("tcp") as its:
            yield mine, its


def computed() -> tuple[np.ndarray, np.ndarray]:
    """Return the cache and the logits of the prompt, in pages from 0 on."""
    memory = SETTINGS.memory(MODEL.config)
    return memory, MODEL.prefill(PROMPT, RequestCache(memory, range(NEEDED)), SETTINGS.chunk_tokens)


class Told:
    """What a prefiller says of its progress: pages by request."""

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}
        self.first = anyio.Event()

    def __call__(self, request: str, pages: int) -> None:
        self.pages[request] = self.pages.get(request, 0) + pages
        self.first.set()


def rows(first: int) -> dict[int, PageRow]:
    pages = range(first, first + NEEDED)
    return {0: PageRow(pages), 1: PageRow(pages[-1:])}


async def test_a_prefiller_fills_the_pages_it_is_given():
    """Those of two requests: it has pages for one at a time, and the other waits."""
    expected, logits = await anyio.to_thread.run_sync(computed)
    told = Told()
    pool, tails, cache = Settings("tcp", 2, 1, None, 4, 16, 5, 1, 2 * NEEDED + 3).cache(MODEL.config, "test")
    async with two_engines() as (mine, its):
        worker = PrefillWorker(its, SETTINGS, MODEL, written=told)
        async with worker.producer, Consumer(mine, cache) as consumer:

            async def have_filled(request: str, first: int) -> None:
                own = rows(first)
                async with consumer.receive([its.address], request, tokens=len(PROMPT), rows=own) as reception:
                    await reception.arrived()
                assert np.array_equal(pool[:, own[0].pages], expected[:, :NEEDED])
                assert np.array_equal(tails[own[1].pages[0]], logits)

            async with anyio.create_task_group() as group:
                for request, first in (("7", 0), ("1", NEEDED)):
                    group.start_soon(worker.compute, request, PROMPT)
                    group.start_soon(have_filled, request, first)
            assert not pool[:, 2 * NEEDED :].any()
            assert (worker.pages.used, worker.pages.pages) == (0, SETTINGS.pool_pages)
    assert told.pages == {"7": 2 * NEEDED, "1": 2 * NEEDED}
    # The second one's whole chunks were kept from the first, but for the last, which gives the logits.
    assert worker.cached_tokens == (len(PROMPT) - 1) // 16 * 16


async def test_a_prefiller_goes_on_after_a_request_that_was_cancelled():
    told = Told()
    _, _, cache = SETTINGS.cache(MODEL.config, "test")
    async with two_engines() as (mine, its):
        worker = PrefillWorker(its, SETTINGS, MODEL, written=told)
        async with worker.producer, Consumer(mine, cache) as consumer, anyio.create_task_group() as group:
            group.start_soon(worker.compute, "left", PROMPT)
            async with consumer.receive([its.address], "left", tokens=len(PROMPT), rows=rows(0)):
                await told.first.wait()
            group.start_soon(worker.compute, "next", PROMPT)
            async with consumer.receive([its.address], "next", tokens=len(PROMPT), rows=rows(0)) as reception:
                await reception.arrived()
        assert worker.pages.used == 0


@asynccontextmanager
async def decoder() -> AsyncIterator[tuple[DecodeWorker, Producer]]:
    """Run a decoder, and a producer that has the prompt's cache; no page may be held at the end."""
    pool, logits, cache = SETTINGS.cache(MODEL.config, "test")
    pool[...], logits[NEEDED - 1] = await anyio.to_thread.run_sync(computed)
    async with two_engines() as (mine, its):
        worker = DecodeWorker(its, SETTINGS, MODEL)
        async with Producer(mine, cache) as producer, worker.consumer:
            yield worker, producer
            assert (worker.pool.free, worker.pool.pages) == (SETTINGS.pool_pages, SETTINGS.pool_pages)


async def offer(producer: Producer, request: str) -> None:
    async with producer.offer(request, tokens=len(PROMPT), rows=rows(0)) as offered:
        for layer in producer.spec.layers:
            offered.computed(layer)


async def test_a_decoder_goes_on_from_what_arrived():
    async with decoder() as (worker, producer), anyio.create_task_group() as group:
        group.start_soon(offer, producer, "5")
        async with worker.request("5", PROMPT, producer.engine.address, SETTINGS.new_tokens) as answering:
            answer = [token async for token in answering]
            checksum = await answering.checksum()
    memory = SETTINGS.memory(MODEL.config)
    cache = RequestCache(memory, range(SETTINGS.pool_pages))
    assert answer == await anyio.to_thread.run_sync(list, one_process.generate(MODEL, PROMPT, cache, SETTINGS))
    assert checksum == cache.checksum(len(PROMPT))


async def test_a_decoder_frees_the_pages_of_a_refused_request_and_goes_on():
    async with decoder() as (worker, producer):
        for number in range(3):
            producer.refuse(str(number), "no room")
            with pytest.raises(TransferRefused, match="no room"):
                async with worker.request(str(number), PROMPT, producer.engine.address, SETTINGS.new_tokens):
                    pass


async def test_a_decoder_frees_the_pages_when_the_prefiller_is_lost():
    async with decoder() as (worker, _):
        async with aiote.open_engine("tcp") as engine:
            async with Producer(engine, SETTINGS.cache(MODEL.config, "doomed")[2]) as doomed:

                async def ask() -> None:
                    with pytest.raises((TransferRefused, aiote.PeerError)):
                        async with worker.request("r", PROMPT, engine.address, SETTINGS.new_tokens):
                            pass

                async with anyio.create_task_group() as group:
                    group.start_soon(ask)
                    async with doomed.offer("r", tokens=len(PROMPT), rows=rows(0)) as offered:
                        while not offered.active:
                            await offered.changed.wait()
                        engine.abort()
                        offered.stop("it is gone")
        for _ in range(2):
            await ask()
