"""A leader of a decode group whose ranks are called: one decision, and no rank left behind with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

import aiote
from aiote import service
from aiote.kvcache import Group, Worker
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.protocol import TransferRefused
from support.engines.opening import fabric, opened, until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19

pytestmark = pytest.mark.virtual_time


@asynccontextmanager
async def led() -> AsyncIterator[tuple[World, Group]]:
    """A prefill rank, two decode ranks that serve workers, and a leader with an engine of its own."""
    async with world("sim", Side(), Side(ranks=2), MODEL) as w, opened("sim") as leader, AsyncExitStack() as stack:
        for consumer in w.consumers:
            await stack.enter_async_context(service.serve(consumer.engine, Worker(consumer)))
        yield w, Group(leader, [consumer.engine.address for consumer in w.consumers])


async def offer(w: World, name: str, here: dict[int, PageRow], layers: int = 3) -> None:
    async with w.producers[0].offer(name, tokens=TOKENS, rows=here, readers=2) as offered:
        for layer in range(layers):
            offered.computed(layer)
        if layers < MODEL.layers:
            await until(lambda: len(offered.active) == 2)
            await anyio.sleep(0.1)
            offered.stop("it gives up")


def wipe(w: World) -> None:
    for cache in w.right.caches:
        for memory in cache.memories:
            memory[...] = BEFORE


async def stays_clean(w: World) -> None:
    wipe(w)
    await anyio.sleep(20)
    assert all((memory == BEFORE).all() for cache in w.right.caches for memory in cache.memories)
    assert not any(len(consumer.immediates) for consumer in w.consumers)


@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_a_request_fails_on_all_ranks_and_its_second_try_arrives(reads):
    async with led() as (w, group), anyio.create_task_group() as tasks:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        tasks.start_soon(offer, w, "r", here, 2)
        with pytest.raises(TransferRefused, match="it gives up"):
            await group.receive(w.places, "r", tokens=TOKENS, rows=there, reads=reads)
        await stays_clean(w)
        tasks.start_soon(offer, w, "r again", here)
        await group.receive(w.places, "r again", tokens=TOKENS, rows=[there, there], reads=reads)
        assert all(same(cache, expected(cache, there, 20, BEFORE)) for cache in w.right.caches)


async def test_rows_that_do_not_fit_are_refused_by_the_leader_or_a_rank():
    async with led() as (w, group):
        _, there = w.rows(TOKENS)
        with pytest.raises(aiote.UsageError, match="expected one dict for each of 2 ranks, got 1"):
            await group.receive(w.places, "r", tokens=TOKENS, rows=[there])
        with pytest.raises(aiote.UsageError, match="ends at token 8 of 19"):
            await group.receive(w.places, "r", tokens=TOKENS, rows={0: PageRow([4, 5])})


async def test_a_rank_that_is_refused_ends_the_others():
    """One rank has a page too many in a row; the other would wait for the prefill rank."""
    async with led() as (w, group):
        _, there = w.rows(TOKENS)
        wrong = {0: PageRow([99]), 1: there[1]}
        begun = anyio.current_time()
        with pytest.raises(aiote.UsageError, match="has pages 0 to 11"):
            await group.receive(w.places, "r", tokens=TOKENS, rows=[there, wrong])
        assert anyio.current_time() - begun < 2
        await stays_clean(w)


@pytest.mark.parametrize("how", ["cancelled", "lost"])
async def test_a_leader_that_cancels_or_is_lost_leaves_no_request_behind(how):
    async with led() as (w, group), anyio.create_task_group() as tasks:
        here, there = w.rows(TOKENS)
        for consumer in w.consumers:
            fabric().slow_rail(consumer.engine, by=0.05)
        tasks.start_soon(offer, w, "r", here, 2)
        with anyio.CancelScope() as scope:

            async def end() -> None:
                await until(lambda: all(len(consumer.immediates) for consumer in w.consumers))
                group._engine.abort() if how == "lost" else scope.cancel()

            tasks.start_soon(end)
            with pytest.raises(aiote.AioteError) if how == "lost" else anyio.CancelScope():
                await group.receive(w.places, "r", tokens=TOKENS, rows=there)
        await until(lambda: not any(len(consumer.immediates) for consumer in w.consumers))
        await stays_clean(w)


async def test_a_lost_rank_ends_the_request():
    async with led() as (w, group), anyio.create_task_group() as tasks:
        _, there = w.rows(TOKENS)

        async def end() -> None:
            await until(lambda: len(w.consumers[1].immediates))
            w.consumers[1].engine.abort()

        tasks.start_soon(end)
        with pytest.raises(aiote.AioteError):
            await group.receive(w.places, "r", tokens=TOKENS, rows=there)
        await stays_clean(w)
