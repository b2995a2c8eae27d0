"""What is dropped without being left, and what a request leaves behind: pages and links do not depend on either."""

from __future__ import annotations

import gc

import anyio
import pytest

from support.engines.opening import until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, decode, prefill, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19
both = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])


@pytest.mark.virtual_time
@both
async def test_a_request_leaves_nothing_for_the_garbage_collector(reads):
    """On neither side: a collector that has work comes in every few requests, and holds up the event loop."""
    async with world("sim", Side(), Side(), MODEL) as w:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)

        async def ask(first: int, count: int) -> None:
            for number in range(first, first + count):
                async with anyio.create_task_group() as group:
                    group.start_soon(prefill, w.producers[0], str(number), TOKENS, here, 1)
                    await decode(w, w.consumers[0], str(number), TOKENS, there, reads)

        def left() -> int:
            return sum(str(type(one).__module__).startswith("aiote.kvcache") for one in gc.get_objects())

        await ask(0, 3)
        gc.collect()
        before = left()
        gc.disable()
        try:
            await ask(3, 20)
            # Reference counts alone have freed what twenty requests were made of.
            assert left() - before < 20
        finally:
            gc.enable()


@pytest.mark.virtual_time
@both
async def test_a_reception_that_is_dropped_unread_is_left_by_the_collector(reads):
    """Its block was entered and forgotten: the writes end, the immediates are free, and its pages may be used."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        consumer, producer = w.consumers[0], w.producers[0]
        outcomes = []

        async def offer() -> None:
            async with producer.offer("r", tokens=TOKENS, rows=here) as offered:
                offered.computed(0)
                while not (offered.stopped or not offered.awaited):
                    await anyio.sleep(0.1)
                offered.stop("nobody reads it")
            outcomes.append(offered.outcome)

        group.start_soon(offer)
        block = consumer.receive(w.places, "r", tokens=TOKENS, rows=there, reads=reads)
        await block.__aenter__()
        await until(lambda: producer.offers)
        await anyio.sleep(1)
        del block
        gc.collect()
        await until(lambda: outcomes)
        await until(lambda: not consumer._receptions and not len(consumer.immediates))
        for memory in w.right.caches[0].memories:
            memory[...] = BEFORE
        await anyio.sleep(20)
        assert all((memory == BEFORE).all() for memory in w.right.caches[0].memories)
        group.start_soon(prefill, producer, "again", TOKENS, here, 1)
        await decode(w, consumer, "again", TOKENS, there, reads)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


async def read_one(stream):
    """Wait for an item, in a coroutine: the oldest anyio takes no other awaitable."""
    await anext(stream, None)


@pytest.mark.virtual_time
async def test_pages_of_a_rank_that_never_reads_are_free_after_the_limit():
    """It has asked for the request, and neither reads it nor leaves: its prefill rank's pages are pinned no longer."""
    async with world("sim", Side(), Side(), MODEL, match_timeout=7) as w:
        here, _ = w.rows(TOKENS)
        producer, consumer = w.producers[0], w.consumers[0]
        await consumer.connect(w.places, reads=True)
        ((link,),) = consumer._links._groups.values()
        stream = link.client.pull(link.session, "r")
        async with anyio.create_task_group() as group:
            group.start_soon(read_one, stream)
            begun = anyio.current_time()
            async with producer.offer("r", tokens=TOKENS, rows=here, computed=True) as offered:
                pass
            assert 7 <= anyio.current_time() - begun < 8
            assert (offered.outcome, producer.offers, len(producer._pulls)) == ("expired", 0, 0)
        assert not await link.client.finish(link.session, "r"), "what it would read now is not the request's"
        stream.close()
