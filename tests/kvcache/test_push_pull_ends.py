"""How pushed and pulled requests begin and end: matched late or never, refused, cancelled, not confirmed, expired."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.aio import Condition
from aiote.kvcache.mapping import MappingError, PageRow
from aiote.kvcache.moving import TransferBatch
from aiote.kvcache.protocol import TransferRefused
from support.engines.opening import fabric, pair, until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, decode, prefill, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19
both = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])


def clean(w: World) -> bool:
    """Tell whether nothing was written to the decode side since it was filled."""
    return all((memory == BEFORE).all() for cache in w.right.caches for memory in cache.memories)


def wipe(w: World) -> None:
    for cache in w.right.caches:
        for memory in cache.memories:
            memory[...] = BEFORE


@pytest.mark.virtual_time
@both
@pytest.mark.parametrize("first", ["producer", "consumer"])
async def test_either_side_may_know_of_a_request_first(first, reads):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        one = functools.partial(prefill, w.producers[0], "r", TOKENS, here, 1)
        other = functools.partial(decode, w, w.consumers[0], "r", TOKENS, there, reads)
        for work in (one, other) if first == "producer" else (other, one):
            group.start_soon(work)
            await anyio.sleep(5)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@pytest.mark.virtual_time
@both
async def test_who_never_comes_is_waited_for_so_long(reads):
    async with world("sim", Side(), Side(), MODEL, match_timeout=7) as w:
        here, there = w.rows(TOKENS)
        begun = anyio.current_time()
        with pytest.raises(TransferRefused, match=r"'r' was not offered within 7\.?0* s"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        assert 7 <= anyio.current_time() - begun < 8
        begun = anyio.current_time()
        assert (await prefill(w.producers[0], "r", TOKENS, here, 1)).outcome == "expired"
        assert 7 <= anyio.current_time() - begun < 8
        with pytest.raises(TransferRefused, match="'r' is over"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads)
        assert clean(w)


@pytest.mark.virtual_time
@both
async def test_what_does_not_fit_is_an_error_that_names_both(reads):
    async with world("sim", Side(tokens=4), Side(tokens=6), MODEL) as w:
        with pytest.raises(MappingError, match=r"prefill 0\.0 .* decode 0\.0"):
            await w.consumers[0].connect(w.places, reads=reads)
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        group.start_soon(prefill, w.producers[0], "short", 10, here, 1)
        with pytest.raises(TransferRefused, match="19"):
            await decode(w, w.consumers[0], "short", TOKENS, there, reads)
        late = {0: PageRow(here[0].pages[1:], 1), 1: here[1]}
        group.start_soon(offered, w, "late", late)
        with pytest.raises(TransferRefused, match=r"decode 0\.0 wants units 0 to 4 .* prefill 0\.0 has 1 to 4"):
            await decode(w, w.consumers[0], "late", TOKENS, there, reads)
        assert clean(w)


async def offered(w: World, name: str, here: dict[int, PageRow]) -> None:
    """Offer a request that is computed already."""
    async with w.producers[0].offer(name, tokens=TOKENS, rows=here) as offer:
        for layer in range(MODEL.layers):
            offer.computed(layer)


def test_pages_that_a_cache_has_not_are_refused():
    async def main() -> None:
        async with world("sim", Side(), Side(), MODEL) as w:
            for pages in ([12], [-1], [3, 3]):
                with pytest.raises(aiote.UsageError, match="group 0"):
                    async with w.consumers[0].receive(w.places, "r", tokens=4, rows={0: PageRow(np.array(pages))}):
                        raise AssertionError
            with pytest.raises(aiote.UsageError, match="group 0"):
                w.producers[0].offer("r", tokens=4, rows={0: PageRow(np.array([12]))})

    anyio.run(main)


@pytest.mark.virtual_time
@both
async def test_a_program_that_gives_a_request_up_tells_its_readers(reads):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        refused = []

        async def ask() -> None:
            with pytest.raises(TransferRefused, match="the program has stopped it"):
                await decode(w, w.consumers[0], "r", TOKENS, there, reads)
            refused.append(True)

        group.start_soon(ask)
        with pytest.raises(ZeroDivisionError):
            async with w.producers[0].offer("r", tokens=TOKENS, rows=here) as offer:
                offer.computed(0)
                await anyio.sleep(1)
                raise ZeroDivisionError
        assert (offer.outcome, len(w.producers[0]._offers)) == ("the program has stopped it", 0)
        wipe(w)
        await until(lambda: refused)
        await anyio.sleep(20)
        assert clean(w)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[aiote.Transfer]:
    """Collect what requests start, on whichever side."""
    found: list[aiote.Transfer] = []
    submit = TransferBatch.submit

    def noted(
        self: TransferBatch, pieces: int, start: Callable[..., aiote.Transfer], *arguments: Any
    ) -> aiote.Transfer:
        def run(*arguments: Any) -> aiote.Transfer:
            found.append(start(*arguments))
            return found[-1]

        return submit(self, pieces, run, *arguments)

    monkeypatch.setattr(TransferBatch, "submit", noted)
    return found


@pytest.mark.virtual_time
@both
async def test_nothing_lands_in_pages_of_a_request_that_was_left(reads, started):
    """Its bytes are on the wire when it is left, and would arrive in what follows."""
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        await w.consumers[0].connect(w.places, reads=reads)
        fabric().slow_rail(w.consumers[0].engine, by=0.05)
        group.start_soon(offered, w, "r", here)
        async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there, reads=reads) as reception:
            await until(lambda: started)
            assert not reception.complete
            assert not all(transfer.done() for transfer in started)
        assert all(transfer.done() for transfer in started)
        wipe(w)
        await anyio.sleep(20)
        assert clean(w)


@pytest.mark.virtual_time
@pytest.mark.parametrize("why", ["old", "large"])
async def test_a_rank_that_does_not_confirm_is_disconnected_and_asked_anew(why, started, monkeypatch):
    """It may have stopped and cannot say so, or it has not: then it no longer can."""
    stuck, drain = anyio.Event(), TransferBatch.drain

    async def late(self: TransferBatch) -> None:
        with anyio.move_on_after(60):
            await stuck.wait()
        await drain(self)

    monkeypatch.setattr(TransferBatch, "drain", late)
    limits = {"confirm_timeout": 3} | ({"quarantine_pages": 4} if why == "large" else {})
    async with world("sim", Side(), Side(), MODEL, **limits) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        consumer, refused = w.consumers[0], []

        async def other() -> None:
            with pytest.raises(TransferRefused, match="confirm"):
                await decode(w, consumer, "other", TOKENS, there, reads=False)
            refused.append(anyio.current_time())

        await consumer.connect(w.places)
        fabric().slow_rail(consumer.engine, by=0.05)
        group.start_soon(other)
        async with consumer.receive(w.places, "r", tokens=TOKENS, rows=there):
            group.start_soon(offered, w, "r", here)
            await until(lambda: started)
            begun = anyio.current_time()
        wipe(w)
        assert (anyio.current_time() - begun >= 3) == (why == "old")
        await until(lambda: refused)
        stuck.set()
        await anyio.sleep(20)
        assert clean(w)
        fill(w.left, here, 20)
        group.start_soon(offered, w, "again", here)
        await decode(w, consumer, "again", TOKENS, there, reads=False)
        assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@pytest.mark.virtual_time
async def test_pages_that_are_read_for_too_long_are_not_taken_for_read(started):
    async with world("sim", Side(), Side(), MODEL, match_timeout=0.3) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        await w.consumers[0].connect(w.places, reads=True)
        fabric().slow_rail(w.consumers[0].engine, by=0.5)
        outcomes = []

        async def offer() -> None:
            outcomes.append((await prefill(w.producers[0], "r", TOKENS, here, 1)).outcome)

        group.start_soon(offer)
        with pytest.raises(TransferRefused, match="expired|freed its pages"):
            await decode(w, w.consumers[0], "r", TOKENS, there, reads=True)
        await until(lambda: outcomes)
        assert (outcomes, len(started) > 0) == (["expired"], True)


@pytest.mark.virtual_time
@both
async def test_a_lost_prefiller_fails_its_requests_and_leaves_their_pages_alone(reads, started):
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        await w.consumers[0].connect(w.places, reads=reads)
        fabric().slow_rail(w.consumers[0].engine, by=0.05)
        group.start_soon(offered, w, "r", here)
        with pytest.raises(TransferRefused, match=r"prefill 0\.0|lost|silent"):
            async with w.consumers[0].receive(w.places, "r", tokens=TOKENS, rows=there, reads=reads) as reception:
                await until(lambda: started)
                fabric().partition(w.producers[0].engine)
                await reception.arrived()
        wipe(w)
        await anyio.sleep(20)
        assert clean(w)
        group.cancel_scope.cancel()


@pytest.mark.virtual_time
@both
async def test_a_leader_ends_a_request_on_all_ranks_and_tries_once_more(reads):
    """One of two prefill ranks gives up: what the other writes for both decode ranks ends, too."""
    async with world("sim", Side(ranks=2), Side(ranks=2, order="field token head"), MODEL) as w:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        wanted = [expected(cache, there, 20, BEFORE) for cache in w.right.caches]

        async def rank(producer: int, name: str, gives_up: bool) -> None:
            async with w.producers[producer].offer(name, tokens=TOKENS, rows=here, readers=2) as offer:
                for layer in w.producers[producer].spec.layers:
                    offer.computed(layer)
                    if gives_up:
                        offer.stop("it gives up")

        async def attempt(name: str, *, well: bool) -> None:
            async with anyio.create_task_group() as leader:
                leader.start_soon(rank, 0, name, False)
                leader.start_soon(rank, 1, name, not well)
                for consumer in w.consumers:
                    leader.start_soon(decode, w, consumer, name, TOKENS, there, reads)

        with pytest.raises(BaseExceptionGroup) as caught:
            await attempt("r", well=False)
        assert "it gives up" in str(caught.value.exceptions)
        wipe(w)
        await anyio.sleep(20)
        assert clean(w)
        await attempt("r again", well=True)
        assert all(same(cache, one) for cache, one in zip(w.right.caches, wanted, strict=True))


@pytest.mark.virtual_time
async def test_nothing_of_a_lost_connection_is_started_over_the_next_one():
    """A decode rank that has disconnected relies on it; the engine alone would connect anew and write."""
    async with pair("sim") as (left, right):
        memory = bytearray(8)
        peer = await left.connect(right.address)
        here, there = left.register(b"too late"), left.attach(right.register(memory).descriptor)
        batch = TransferBatch(left, peer, Condition())
        right.find_peer(left.address).disconnect("enough")
        await peer.wait_closed()
        with pytest.raises(aiote.PeerLostError, match="enough"):
            batch.submit(left.submit_write_pages, aiote.Pages(here, [0], 8), aiote.Pages(there, [0], 8))
        await batch.drain()
        await anyio.sleep(5)
        assert memory == bytes(8)
