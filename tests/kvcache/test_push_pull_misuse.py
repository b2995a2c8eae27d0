"""Programs that err, and more than there is room for: one request fails, and no other."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.moving import TransferBatch
from aiote.kvcache.producer import MOST_SESSIONS, Producer
from aiote.kvcache.protocol import PushRequest, TransferRefused, rows_to
from aiote.kvcache.tensors import Cache
from aiote.service.endpoint import CallEndpoint, Limits
from support.engines.opening import PATIENCE_S, fabric, opened, until
from support.kv.caches import Model, Side, built, expected, fill, same
from support.kv.worlds import BEFORE, decode, prefill, served, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("page", [12, -1])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_rows_that_are_replaced_by_pages_that_a_cache_has_not_are_refused(reads, page):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)

        async def offer() -> None:
            async with w.producers[0].offer("r", tokens=TOKENS, rows={1: here[1]}) as offer:
                offer.rows[0] = PageRow([*here[0].pages[1:], page])
                for layer in range(MODEL.layers):
                    offer.computed(layer)

        group.start_soon(offer)
        with pytest.raises(TransferRefused, match="group 0 has pages 0 to 11"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        assert all((memory == BEFORE).all() for memory in w.right.caches[0].memories)


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize(
    ("tokens", "row", "ends"),
    [(12, PageRow([4, 5]), 8), (13, PageRow([6, 4, 5]), 12), (12, PageRow([5], start=1), 8), (1, PageRow([]), 0)],
)
async def test_a_row_that_ends_before_the_last_token_is_refused(reads, tokens, row, ends):
    async with world("sim", Side(), Side(), MODEL) as w:
        receiving = w.consumers[0].receive(w.places, "r", tokens=tokens, rows={0: row}, reads=reads)
        with pytest.raises(aiote.UsageError, match=f"group 0 ends at token {ends} of {tokens}, "):
            await receiving.__aenter__()
        assert not w.consumers[0]._links._groups


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_rows_of_pages_that_hold_all_tokens_or_are_of_a_later_part_or_of_no_tokens_are_taken(reads):
    """Opaque pages have no tokens; a group without a row, and one whose row begins behind the end, have no pages."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        more = PageRow([*there[0].pages, *set(range(12)) - set(there[0].pages.tolist())])
        for number, rows in enumerate(({1: there[1]}, {0: PageRow([], 5)}, {0: PageRow([3], 6)}, {0: more}, there)):
            await served(w, group, TOKENS, f"r {number}", here, rows, reads)
            for memory in w.right.caches[0].memories:
                memory[...] = BEFORE


async def test_a_producer_refuses_a_row_that_ends_before_the_last_token():
    """A decode rank that does not look at it itself."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        group.start_soon(prefill, w.producers[0], "r", TOKENS, here, 1)
        (link,) = await w.consumers[0]._links.group(w.places, reads=False)
        rows = rows_to({0: PageRow(there[0].pages[:3])})
        with pytest.raises(aiote.AioteError, match="group 0 ends at token 12 of 19"):
            async for _ in link.client.push(PushRequest(link.session, "r", TOKENS, 0, rows)):
                raise AssertionError


@pytest.mark.parametrize("tokens", [-1, 2.5, "4", None])
async def test_tokens_that_are_no_count_are_refused(tokens):
    async with world("sim", Side(), Side(), MODEL) as w:
        here, there = w.rows(4)
        with pytest.raises(aiote.UsageError, match=f"tokens={tokens!r}: expected an integer from 0 on"):
            w.producers[0].offer("r", tokens=tokens, rows=here)
        with pytest.raises(aiote.UsageError, match=f"tokens={tokens!r}: expected an integer from 0 on"):
            await w.consumers[0].receive(w.places, "r", tokens=tokens, rows=there).__aenter__()


async def test_tokens_may_be_an_integer_of_numpy():
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        for reads in False, True:
            await served(w, group, np.int64(TOKENS), f"r {reads}", here, there, reads)


async def test_a_request_that_was_left_leaves_no_counters_in_use(monkeypatch):
    """What is on its way is counted when nobody waits for it any more."""
    drain = TransferBatch.drain

    async def late(self: TransferBatch) -> None:
        await anyio.sleep(1)
        await drain(self)

    monkeypatch.setattr(TransferBatch, "drain", late)
    async with world("sim", Side(), Side(), MODEL, confirm_timeout=5) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        engine, landed = w.consumers[0].engine, []
        await w.consumers[0].connect(w.places)
        async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there) as reception:
            first = reception._block.first
            numbers = range(first, first + MODEL.layers)
            group.start_soon(prefill, w.producers[0], "r", TOKENS, here, 1)
            monkeypatch.setattr(reception, "_confirmed", noted(reception._confirmed, engine, numbers, landed))
            fabric().slow_rail(engine, by=0.05)
            await until(lambda: any(offer.pushes for offer in w.producers[0]._offers._open.values()))
            await anyio.sleep(0.01)
        assert any(landed)
        assert not any(counted(engine, numbers))


def counted(engine: aiote.Engine, immediates: range) -> list[bool]:
    return [bool(engine._runtime.core.is_counted(number)) for number in immediates]


def noted(confirmed: Callable, engine: aiote.Engine, numbers: range, landed: list[bool]) -> Callable:
    """Return what takes note of the counters in use when all writers have confirmed."""

    async def run() -> None:
        await confirmed()
        landed.extend(counted(engine, numbers))

    return run


async def test_a_place_given_as_a_peer_works_again_after_a_disconnection():
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        peer = await w.consumers[0].engine.connect(w.producers[0].engine.address)
        peer.disconnect("a hiccup")
        group.start_soon(prefill, w.producers[0], "r", TOKENS, here, 1)
        async with w.consumers[0].receive([peer], "r", tokens=TOKENS, rows=there) as reception:
            await reception.arrived()
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_a_session_that_was_forgotten_is_opened_anew(reads):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        await w.consumers[0].connect(w.places, reads=reads)
        for _ in range(MOST_SESSIONS):
            await w.consumers[0]._links._open(w.places, reads)
        with pytest.raises(TransferRefused, match="of this peer does not exist"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        await served(w, group, TOKENS, "again", here, there, reads)


async def test_groups_of_ranks_that_were_lost_are_not_kept():
    async with world("sim", Side(), Side(), MODEL) as w:
        links = w.consumers[0]._links
        for _ in range(3):
            async with opened("sim") as engine, Producer(engine, w.left.caches[0]):
                (link,) = await links.group([engine.address], reads=False)
            await link.peer.wait_closed()
        await links.group(w.places, reads=False)
        assert len(links._groups) == len(links._locks) == 1


async def test_a_session_that_is_used_is_kept():
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        for number in range(MOST_SESSIONS + 1):
            await served(w, group, TOKENS, f"r {number}", here, there)
            await w.consumers[0]._links._open(w.places, False)


async def test_a_consumer_of_an_empty_cache_is_refused():
    async with opened("sim") as engine:
        with pytest.raises(aiote.UsageError, match="empty: the cache has no tensors"):
            Consumer(engine, Cache("empty"))


async def test_as_many_pulls_at_once_as_there_are_calls_all_end_well():
    left, right = built(MODEL, Side(pages=8), "prefill"), built(MODEL, Side(), "decode")
    fill(left, {0: PageRow([1]), 1: PageRow([1])}, 4)
    with anyio.fail_after(10 * PATIENCE_S):
        async with opened("sim") as here, opened("sim") as there:
            for engine in here, there:
                CallEndpoint.of(engine, Limits(slots=4))
            async with (
                Producer(here, left.caches[0]) as producer,
                Consumer(there, right.caches[0]) as consumer,
                anyio.create_task_group() as group,
            ):
                for number in range(8):
                    rows = {0: PageRow([number]), 1: PageRow([number])}
                    group.start_soon(prefill, producer, str(number), 4, {0: PageRow([1]), 1: PageRow([1])}, 1)
                    group.start_soon(pull, consumer, here.address, str(number), rows)
    assert all((memory[:8] == memory[0]).all() for memory in right.caches[0].memories)
    assert all(memory[:8].any() for memory in right.caches[0].memories)


async def pull(consumer: Consumer, place: aiote.Address, name: str, rows: dict[int, PageRow]) -> None:
    async with consumer.receive([place], name, tokens=4, rows=rows, reads=True) as reception:
        await reception.arrived()
