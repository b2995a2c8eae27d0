"""What a program uses of both sides: layers as they come, a watched value, figures, and pages of a pool."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache import PagePool, PageRow
from aiote.kvcache.protocol import TransferRefused
from aiote.service import sending
from support.engines.opening import until
from support.kv.caches import Model, Side, expected, fill, same, value
from support.kv.worlds import BEFORE, World, decode, prefill, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19

pytestmark = pytest.mark.virtual_time


async def test_layers_arrive_in_order_while_the_next_one_is_computed():
    async with world("sim", Side(), Side(), MODEL) as w:
        here, there = w.rows(TOKENS)
        offer = w.producers[0].offer("r", tokens=TOKENS, rows=here)
        async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there) as reception, offer:
            for layer in range(MODEL.layers):
                assert reception.layers == layer
                offer.computed(layer)
                await reception.arrived(layer + 1)
                with anyio.move_on_after(1) as scope:
                    await reception.arrived(min(layer + 2, MODEL.layers))
                assert scope.cancelled_caught == (layer + 1 < MODEL.layers)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64])
async def test_a_watched_value_that_a_model_raises_stands_for_layers(dtype):
    word = np.full(1, 254, dtype)  # of one byte, it wraps around
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        group.start_soon(decode, w, w.consumers[0], "r", TOKENS, there, False)
        async with w.producers[0].offer("r", tokens=TOKENS, rows=here) as offer, anyio.create_task_group() as chunks:
            chunks.start_soon(lambda: offer.follow(word, 8, base=254))
            chunks.start_soon(lambda: offer.follow(word, base=254 + MODEL.layers))
            for bump, computed in ((1, [8, 0, 0]), (3, [TOKENS, 8, 8]), (5, [TOKENS] * 3)):
                word[0] += np.array(bump, dtype)
                await until(lambda computed=computed: list(offer.computed_to.values()) == computed)
        assert offer.outcome == "moved"
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


async def test_a_value_that_cannot_be_watched_is_refused():
    async with world("sim", Side(), Side(), MODEL) as w:
        with pytest.raises(aiote.UsageError, match="watch"):
            async with w.producers[0].offer("r", tokens=TOKENS, rows=w.rows(TOKENS)[0]) as offer:
                await offer.follow(np.zeros(3, np.uint8))


async def test_a_producer_counts_what_it_has_written():
    async with world("sim", Side(), Side(), MODEL) as w:
        here, there = w.rows(TOKENS)
        assert w.producers[0].written == (0, 0, 0.0)
        for name in ("one", "two"):
            async with anyio.create_task_group() as group:
                group.start_soon(prefill, w.producers[0], name, TOKENS, here, 1)
                group.start_soon(decode, w, w.consumers[0], name, TOKENS, there, False)
        written = w.producers[0].written
        assert written.bytes == 2 * MODEL.layers * (20 * MODEL.heads * 2 * MODEL.item + MODEL.state)
        assert written.transfers >= 2
        assert 0 < written.busy_s < 1
        assert w.producers[0].offers == 0


async def test_pages_of_a_pool_are_lent_for_a_block():
    pool = PagePool(5, 5, 5)
    with pytest.raises(ZeroDivisionError):
        async with pool.lend(3) as holding:
            assert (len(set(holding.pages)), pool.free) == (3, 2)
            raise ZeroDivisionError
    assert pool.free == 5


@pytest.mark.parametrize("arrived", [0, 2])
async def test_a_request_of_a_closed_engine_ends_and_is_not_taken_for_complete(arrived):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        group.start_soon(decode_until_closed, w, there, arrived)
        async with w.producers[0].offer("r", tokens=TOKENS, rows=here) as offer:
            for layer in range(arrived):
                offer.computed(layer)
            await until(lambda: w.consumers[0].engine.closed)
            offer.stop("its decode rank is gone")


async def decode_until_closed(w: World, there: dict[int, PageRow], arrived: int) -> None:
    consumer = w.consumers[0]
    with pytest.raises(TransferRefused, match="closed"):
        async with consumer.receive(w.places, "r", tokens=TOKENS, rows=there) as reception:
            await until(lambda: reception._block.row.progress[0] == arrived)
            consumer.engine.abort()
            assert not reception.complete
            await reception.arrived()
    assert not reception.complete


@pytest.mark.parametrize("whole", [False, True], ids=["entries", "the dictionary"])
async def test_rows_may_be_replaced_while_they_are_pushed(whole):
    """What is written comes from the pages that the offer has then, and those are checked."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        group.start_soon(decode, w, w.consumers[0], "r", TOKENS, there, False)
        first = {0: PageRow(here[0].pages[:2]), 1: here[1]}
        async with w.producers[0].offer("r", tokens=TOKENS, rows=first) as offer:
            await until(lambda: offer.pushes)
            for layer in range(MODEL.layers):
                offer.computed(layer, 8)
            await anyio.sleep(1)
            if whole:
                offer.rows = dict(here)
            else:
                offer.rows[0] = here[0]
            for layer in range(MODEL.layers):
                offer.computed(layer)
        assert offer.outcome == "moved"
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


async def test_pages_may_be_others_from_one_layer_to_the_next():
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        elsewhere, _ = w.rows(TOKENS, seed=1)
        fill(w.left, elsewhere, 20, salt=1)
        fill(w.left, here, 20)
        group.start_soon(decode, w, w.consumers[0], "r", TOKENS, there, False)
        async with w.producers[0].offer("r", tokens=TOKENS, rows=elsewhere) as offer:
            await until(lambda: offer.pushes)
            offer.computed(0)
            await anyio.sleep(1)
            fill(w.left, here, 20)
            offer.rows = here
            for layer in range(1, MODEL.layers):
                offer.computed(layer)
        found = w.right.caches[0]
        first = [tensor.memory for tensor in found.tensors if tensor.layer == 0]
        wanted = [expected(found, there, 20, BEFORE, salt) for salt in (0, 1)]
        assert not any(np.array_equal(*pair) for pair in zip(*wanted, strict=True))
        others = [number for number in range(len(found.memories)) if number not in first]
        flat = [memory.reshape(-1).view(np.uint8) for memory in found.memories]
        assert all(np.array_equal(flat[number], wanted[0][number]) for number in others)
        assert not any(np.array_equal(flat[number], wanted[0][number]) for number in first)


@pytest.mark.parametrize("tokens", [0, 4])
async def test_a_state_is_not_pushed_before_all_of_its_offer_is_computed(tokens):
    """However few tokens its reader asks for: what the page holds before is another request's."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(tokens)
        there[1] = PageRow([2])
        whole, _ = w.rows(TOKENS)
        whole = {0: PageRow([*here[0].pages, *set(whole[0].pages) - set(here[0].pages)][:5]), 1: whole[1]}
        group.start_soon(decode, w, w.consumers[0], "r", tokens, there, False)
        async with w.producers[0].offer("r", tokens=TOKENS, rows=whole) as offer:
            await until(lambda: offer.pushes)
            for layer in range(MODEL.layers):
                offer.computed(layer, 5)
            await anyio.sleep(1)
            fill(w.left, whole, 20)
            for layer in range(MODEL.layers):
                offer.computed(layer)
        assert offer.outcome == "moved"
        found = w.right.caches[0]
        flat = [memory.reshape(-1) for memory in found.memories]
        for tensor in found.tensors:
            if not tensor.tokens:
                place = slice(tensor.offset + 2 * tensor.page_stride, tensor.offset + 3 * tensor.page_stride)
                assert np.array_equal(flat[tensor.memory][place], value(tensor, 0, 0))


async def test_a_request_is_over_before_the_news_of_its_end_comes(monkeypatch):
    monkeypatch.setattr(sending, "LATE_S", 3600)
    async with world("sim", Side(), Side(), MODEL) as w:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        for turn in range(2):
            async with anyio.create_task_group() as group:
                group.start_soon(prefill, w.producers[0], f"r{turn}", TOKENS, here, 1)
                async with w.consumers[0].receive(w.places, f"r{turn}", tokens=TOKENS, rows=there) as reception:
                    await reception.arrived()
                    assert reception.complete
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))
        # What is left early is confirmed at once, whatever else may wait.
        async with w.consumers[0].receive(w.places, "left", tokens=TOKENS, rows=there):
            pass
        assert not w.consumers[0].engine.peers[0].lost
