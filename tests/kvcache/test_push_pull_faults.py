"""Each side fails at any moment of a request: it ends, nothing lands in pages that were given back, and the next one is
served. In virtual time, at moments that go through a request of 40 ms.
"""

from __future__ import annotations

import anyio
import pytest

import aiote
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.offers import Offer
from aiote.kvcache.protocol import TransferRefused
from aiote.service import CallError
from support.engines.opening import fabric, opened, until
from support.kv.caches import Model, Side, expected, fill, same
from support.kv.worlds import BEFORE, World, decode, world

MODEL = Model(layers=3, item=64, state=5)
TOKENS = 19
MOMENTS_US = [0, 1, 40, 300, 1000, 4000, 11_000, 19_000, 28_000, 36_000, 39_500, 41_000]
both = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
moments = pytest.mark.parametrize("after_us", MOMENTS_US)
MISSED = (TransferRefused, CallError, aiote.PeerError, aiote.ClosedError)

pytestmark = pytest.mark.virtual_time


async def offered(w: World, name: str, here: dict[int, PageRow]) -> None:
    """Compute a request for 40 ms."""
    async with w.producers[0].offer(name, tokens=TOKENS, rows=here) as offer:
        for end in (5, 11, 16, TOKENS):
            for layer in range(MODEL.layers):
                await anyio.sleep(40e-3 / 12)
                offer.computed(layer, end)


def wipe(w: World) -> None:
    for memory in w.right.caches[0].memories:
        memory[...] = BEFORE


async def settled(w: World, reads: bool) -> None:
    """Check that nothing lands any more, that nothing is kept, and that the next request is served."""
    wipe(w)
    await anyio.sleep(20)
    assert all((memory == BEFORE).all() for memory in w.right.caches[0].memories)
    assert (len(w.consumers[0].immediates), w.producers[0].offers, w.producers[0]._pulls) == (0, 0, set())
    here, there = w.rows(TOKENS, seed=1)
    fill(w.left, here, 20)
    async with anyio.create_task_group() as group:
        group.start_soon(offered, w, "next", here)
        await decode(w, w.consumers[0], "next", TOKENS, there, reads)
    assert same(w.right.caches[0], expected(w.right.caches[0], there, 20, BEFORE))


@both
@moments
@pytest.mark.parametrize("whose", ["decode rank's", "prefill rank's"])
async def test_a_task_that_is_cancelled_at_any_moment(whose, after_us, reads):
    async with world("sim", Side(), Side(), MODEL, match_timeout=5) as w:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)
        fabric().slow_rail(w.consumers[0].engine, by=1e-3)
        scopes = {"decode rank's": anyio.CancelScope(), "prefill rank's": anyio.CancelScope()}

        async def prefill() -> None:
            with scopes["prefill rank's"]:
                await offered(w, "r", here)

        async def receive() -> None:
            with scopes["decode rank's"]:
                try:
                    await decode(w, w.consumers[0], "r", TOKENS, there, reads)
                except TransferRefused:
                    assert whose == "prefill rank's"
            wipe(w)

        async with anyio.create_task_group() as group:
            group.start_soon(prefill)
            group.start_soon(receive)
            await anyio.sleep(after_us / 1e6)
            scopes[whose].cancel()
        await settled(w, reads)


@both
@moments
async def test_a_prefill_rank_that_is_cut_off_at_any_moment(after_us, reads):
    async with world("sim", Side(), Side(), MODEL, match_timeout=5) as w:
        here, there = w.rows(TOKENS)
        fill(w.left, here, 20)

        async def receive() -> None:
            try:
                await decode(w, w.consumers[0], "r", TOKENS, there, reads)
            except MISSED:
                pass  # it was too late, or it was not
            wipe(w)

        async with anyio.create_task_group() as group:
            group.start_soon(offered, w, "r", here)
            group.start_soon(receive)
            await anyio.sleep(after_us / 1e6)
            fabric().partition(w.producers[0].engine)
            await anyio.sleep(20)
            fabric().heal(w.producers[0].engine)
        await settled(w, reads)


@both
@moments
@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_a_decode_rank_that_ends_at_any_moment_leaves_its_prefill_rank_nothing_to_do(how, after_us, reads):
    async with world("sim", Side(), Side(), MODEL, match_timeout=5) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        engine = w.consumers[0].engine

        async def receive() -> None:
            try:
                await decode(w, w.consumers[0], "r", TOKENS, there, reads)
            except MISSED:
                pass  # its engine was closed

        group.start_soon(offered, w, "r", here)
        group.start_soon(receive)
        await anyio.sleep(after_us / 1e6)
        engine.abort() if how == "abort" else await engine.aclose()
        wipe(w)
        await until(lambda: not w.producers[0].offers)
        await anyio.sleep(20)
        assert all((memory == BEFORE).all() for memory in w.right.caches[0].memories)


async def test_a_computation_hears_that_its_reader_is_gone():
    async with world("sim", Side(), Side(), MODEL) as w, anyio.create_task_group() as group:
        here, there = w.rows(TOKENS)
        heard: list[Offer] = []

        async def compute() -> None:
            async with w.producers[0].offer("r", tokens=TOKENS, rows=here) as offer:
                await until(lambda: offer.failures)
                heard.append(offer)
                offer.stop(offer.failures[0])

        group.start_soon(compute)
        with anyio.move_on_after(1):
            await decode(w, w.consumers[0], "r", TOKENS, there, False)
        await until(lambda: heard)
        assert heard[0].failures


async def test_an_engine_that_serves_nothing_says_so():
    async with world("sim", Side(), Side(), MODEL) as w, opened("sim") as bare:
        _, there = w.rows(TOKENS)
        with pytest.raises(CallError):
            async with w.consumers[0].receive([bare.address], "r", tokens=TOKENS, rows=there):
                raise AssertionError
        assert not len(w.consumers[0].immediates)
