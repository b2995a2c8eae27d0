"""Producers and consumers of a program that calls synchronously: what it submits, polls and cancels."""

from __future__ import annotations

import time
from collections.abc import Iterator

import anyio.from_thread
import numpy as np
import pytest

import aiote
from aiote.kvcache.blocking import Blocking, BlockingConsumer, BlockingProducer, Finished
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.producer import Producer
from support.engines.opening import PATIENCE_S, opened
from support.kv.caches import Model, Side, built, expected, fill, same
from support.service.bridges import bridge_to

MODEL = Model(layers=3, item=64)
TOKENS, PATTERN = 19, 0xEE

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]


@pytest.fixture
def left() -> Side:
    return built(MODEL, Side(), "prefill")


@pytest.fixture
def right() -> Side:
    side = built(MODEL, Side(order="field token head"), "decode")
    for memory in side.caches[0].memories:
        memory[...] = PATTERN
    return side


def finished(blocking: Blocking) -> Finished:
    """Poll as an engine does between two steps, until something has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = blocking.poll()
        if found.moved or found.failed:
            return found
    raise AssertionError("nothing has ended")


@pytest.fixture
def portal() -> Iterator[anyio.from_thread.BlockingPortal]:
    with anyio.from_thread.start_blocking_portal() as portal:
        yield portal


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
def test_a_worker_submits_and_polls(portal, left, right, reads):
    rows = {0: PageRow(np.array([7, 2, 9, 1, 0]))}
    fill(left, rows, 20)
    with (
        bridge_to() as bridge,
        BlockingProducer(bridge, left.caches[0]) as producer,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Consumer(engine, right.caches[0])) as consumer,
    ):
        there = {0: PageRow(np.array([3, 11, 4, 5, 6]))}

        async def receive(name: str) -> None:
            async with consumer.receive(
                [bridge.engine.address], name, tokens=TOKENS, rows=there, reads=reads
            ) as reception:
                await reception.arrived()

        arrived = portal.start_task_soon(receive, "r")
        producer.offer("r", tokens=TOKENS, rows={0: PageRow(rows[0].pages[:3])})
        with pytest.raises(aiote.UsageError, match="under way"):
            producer.offer("r", tokens=TOKENS, rows=rows)
        with pytest.raises(aiote.UsageError, match="layer 3"):
            producer.computed("r", 3)
        for layer in range(3):
            producer.computed("r", layer, 12)
        assert producer.poll() == ([], {}, {})
        for layer in range(3):
            producer.computed("r", layer, rows=rows)
        assert finished(producer) == (["r"], {}, {})
        arrived.result(PATIENCE_S)
        assert same(right.caches[0], expected(right.caches[0], there, 20, PATTERN))
        producer.computed("r", 0)
        refused = portal.start_task_soon(receive, "never")
        producer.offer("never", tokens=TOKENS, rows=rows)
        producer.cancel("never")
        producer.cancel("unknown")
        assert finished(producer) == ([], {"never": "it was cancelled"}, {0: {0, 1, 2, 7, 9}})
        with pytest.raises(aiote.AioteError, match="stopped|cancelled"):
            refused.result(PATIENCE_S)


def test_a_worker_has_requests_come_and_hears_of_those_that_do_not(portal, left, right):
    here, there = {0: PageRow(np.arange(5))}, {0: PageRow(np.array([3, 11, 4, 5, 6]))}
    fill(left, here, 20)
    with (
        bridge_to() as bridge,
        BlockingConsumer(bridge, right.caches[0], confirm_timeout=PATIENCE_S) as consumer,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, left.caches[0])) as producer,
    ):

        async def offer(name: str) -> None:
            async with producer.offer(name, tokens=TOKENS, rows=here) as offered:
                for layer in range(3):
                    offered.computed(layer)

        place = [engine.address]
        consumer.submit(place, "cancelled", tokens=8, rows={0: PageRow(np.array([0, 1]))})
        consumer.cancel("cancelled")
        assert finished(consumer) == ([], {"cancelled": "it was cancelled"}, {0: {0, 1}})
        with pytest.raises(aiote.UsageError, match="group 0 has pages 0 to 11"):
            consumer.submit(place, "r", tokens=4, rows={0: PageRow(np.array([99]))})
        with pytest.raises(aiote.UsageError, match="ends at token 8 of 19"):
            consumer.submit(place, "r", tokens=TOKENS, rows={0: PageRow(np.array([0, 1]))})
        consumer.submit(place, "r", tokens=TOKENS, rows=there)
        portal.call(offer, "r")
        assert finished(consumer) == (["r"], {}, {})
        assert same(right.caches[0], expected(right.caches[0], there, 20, PATTERN))
        consumer.submit(place, "left", tokens=TOKENS, rows=there)
        consumer.close()
        assert consumer.poll().failed == {"left": "it was cancelled"}


def test_what_cannot_be_opened_says_why(left):
    left.caches[0].memories[0] = left.caches[0].memories[0][..., ::2]
    with bridge_to() as bridge, pytest.raises(aiote.UsageError):
        BlockingProducer(bridge, left.caches[0])


def test_an_offer_that_is_cancelled_at_once_is_not_kept(left):
    with bridge_to() as bridge, BlockingProducer(bridge, left.caches[0]) as producer:
        names = {str(number) for number in range(50)}
        for name in names:
            producer.offer(name, tokens=TOKENS, rows={0: PageRow(np.arange(5))})
            producer.cancel(name)
        while names:
            names -= set(finished(producer).failed)
        assert producer._offers == {}


def test_the_first_reader_says_how_many_there_are(portal, left):
    """Two ranks of a decode group, whose requests the program calls otherwise than the producer does."""
    rows = {0: PageRow(np.arange(5))}
    fill(left, rows, 20)
    group = built(MODEL, Side(ranks=2), "decode")
    for cache in group.caches:
        cache.ranks = 2
    with (
        bridge_to() as bridge,
        BlockingProducer(bridge, left.caches[0]) as producer,
        portal.wrap_async_context_manager(opened("local")) as one,
        portal.wrap_async_context_manager(opened("local")) as other,
        portal.wrap_async_context_manager(Consumer(one, group.caches[0])) as first,
        portal.wrap_async_context_manager(Consumer(other, group.caches[1])) as second,
    ):

        async def receive(consumer: Consumer) -> None:
            async with consumer.receive([bridge.engine.address], "r", tokens=TOKENS, rows=rows) as reception:
                await reception.arrived()

        producer.offer("r", tokens=TOKENS, rows=rows, readers=None, computed=True)
        portal.call(receive, first)
        assert producer.poll() == ([], {}, {})
        portal.call(receive, second)
        assert finished(producer) == (["r"], {}, {})
        with pytest.raises(aiote.AioteError, match="over"):
            portal.call(receive, first)
    for cache in group.caches:
        assert same(cache, expected(cache, rows, 20))


def test_requests_of_producers_that_share_a_name(portal, left, right):
    fill(left, {0: PageRow(np.arange(5))}, 20)
    with (
        bridge_to() as bridge,
        BlockingConsumer(bridge, right.caches[0]) as consumer,
        portal.wrap_async_context_manager(opened("local")) as engine,
        portal.wrap_async_context_manager(Producer(engine, left.caches[0])) as producer,
    ):

        async def offer() -> None:
            async with producer.offer("r", tokens=TOKENS, rows={0: PageRow(np.arange(5))}, computed=True):
                pass

        there = {0: PageRow(np.array([3, 11, 4, 5, 6]))}
        consumer.submit([engine.address], "r", tokens=TOKENS, rows=there, name="ours")
        consumer.submit(["aiote://nobody"], "r", tokens=4, rows={0: PageRow(np.array([0]))}, name="theirs")
        assert list(finished(consumer).failed) == ["theirs"]
        portal.call(offer)
        assert finished(consumer) == (["ours"], {}, {})
