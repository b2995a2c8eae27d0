"""Ranks on GPUs whose peers are on CPUs, are lost, lie, or are a round ahead: they do what ranks on CPUs do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiote
from aiote.moe import GroupBrokenError, MoeConfig
from support.engines.opening import LOST_SOON, opened, until
from support.gpu.emulation import EmulatedGpu, Emulation
from support.moe.devices import Place, fetched, filled, mixed, moved, turn
from support.moe.ranks import Tokens, all_of, reference

RNG = np.random.default_rng(11)
MASK = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, on_loss="mask")
BY_RANK = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, on_loss="mask", copies="rank", layout="contiguous")
SOON = partial(opened, "local", **LOST_SOON)
local = partial(opened, "local")

pytestmark = pytest.mark.needs_cxx


@pytest.fixture
def place(emulation: Emulation) -> Iterator[Place]:
    gpu = EmulatedGpu(emulation)
    yield Place(gpu, gpu.array, gpu.fetch)
    gpu.close()


def given_to(place: Place, group: Any, one: Tokens) -> list[Any]:
    """Return what a rank dispatches, where it takes it."""
    return [one.x, one.ids, one.weights, one.scales] if group.launcher is None else moved(place, one)


async def sums_of(place: Place, group: Any, batch: Any) -> Any:
    """Combine what a rank's experts return, and return its sums."""
    y = filled(place, group, batch)
    return fetched(place, await group.combine(batch, y if group.launcher is None else place.there(y)))


def drawn(config: MoeConfig, count: int) -> list[Tokens]:
    """Return tokens of so many ranks, of which each has rows for every rank."""
    made = [Tokens(RNG, config, 6) for _ in range(count)]
    for one in made:
        one.ids[:, 0] = np.arange(6)
    return made


@pytest.mark.parametrize("config", [MASK, BY_RANK], ids=["grouped", "contiguous by rank"])
async def test_a_rank_that_is_lost_is_masked_and_its_successor_takes_part(place, config):
    async with mixed(SOON, config, place, [True, True, False], later=[True]) as groups:
        tokens = drawn(config, 3)

        async def whole(group: Any) -> None:
            found = await turn(place, group, tokens[group.rank], 0)
            assert found.sums.tobytes() == reference(config, tokens[group.rank]).tobytes()

        async def goes_on(group: Any) -> None:
            own = tokens[group.rank]
            for last in (False, True):
                if last:
                    await until(lambda: not group.active[1])
                batch = await group.dispatch(*given_to(place, group, own))
                sums = await sums_of(place, group, batch)
            assert batch.active.tolist() == [True, False, True]
            assert not (batch.source[..., 0] == 1).any()
            assert sums.tobytes() == reference(config, own, own.ids // 2 == 1).tobytes()

        await all_of(*[lambda g=g: whole(g) for g in groups])
        members = [group.engine.address for group in groups]
        groups[1].engine.abort()
        await all_of(lambda: goes_on(groups[0]), lambda: goes_on(groups[2]))
        await groups.start(members, 1)
        assert groups[0].active.all()
        await all_of(*[lambda g=g: whole(g) for g in groups])


async def test_a_batch_says_whose_experts_are_in_the_sums(place):
    async with mixed(SOON, MASK, place, [True, True, False]) as groups:
        tokens = drawn(MASK, 3)
        dispatch = [lambda g=g, t=t: g.dispatch(*given_to(place, g, t)) for g, t in zip(groups, tokens, strict=True)]
        batches = await all_of(*dispatch)

        async def combine(rank: int) -> None:
            sums = await sums_of(place, groups[rank], batches[rank])
            assert batches[rank].answered.tolist() == [True, False, True]
            assert sums.tobytes() == reference(MASK, tokens[rank], tokens[rank].ids // 2 == 1).tobytes()

        groups[1].engine.abort()
        await all_of(lambda: combine(0), lambda: combine(2))


@pytest.mark.parametrize("shape", [{}, {"layout": "contiguous"}, {"layout": "contiguous", "copies": "rank"}])
async def test_a_token_that_names_an_expert_again_and_again_is_refused_before_anything_is_sent(place, shape):
    """By `dispatch_recv`: only then the host knows what the GPU has counted. The round may be begun anew."""
    config = MoeConfig(experts=2, top_k=4, hidden=8, tokens=6, on_loss="mask", **shape)
    async with mixed(local, config, place, [True, False]) as groups:
        tokens = [Tokens(RNG, config, 6, wild=False) for _ in groups]
        tokens[0].ids[...] = 1
        begun = groups[0].dispatch_send(*moved(place, tokens[0]))
        with pytest.raises(aiote.UsageError, match="overflow"):
            await begun.dispatch_recv()
        assert not groups[0].statistics().sent_bytes
        with pytest.raises(aiote.UsageError, match="one round at a time"):
            await begun.dispatch_recv()
        for one in tokens:
            one.ids[...] = -1
            one.ids[:, 0] = [0, 1, 0, 1, 0, 1]
        for _ in range(2):
            found = await all_of(*[lambda g=g, t=t: turn(place, g, t, 0) for g, t in zip(groups, tokens, strict=True)])
            for one, own in zip(found, tokens, strict=True):
                assert one.sums.tobytes() == reference(config, own).tobytes()


@pytest.mark.parametrize("loss", ["raise", "mask"])
async def test_a_rank_whose_copies_are_for_other_experts_is_lost(place, loss):
    config = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, copies="rank", on_loss=loss)
    async with mixed(local, config, place, [False, True, True]) as groups:
        tokens = [Tokens(RNG, config, 4) for _ in groups]
        for one in tokens:
            one.ids[...] = [[0, 5]]
        begun = [g.dispatch_send(*given_to(place, g, t)) for g, t in zip(groups, tokens, strict=True)]
        sizes, lane = groups[2].sizes, groups[2].memory.lanes[0]
        ids = lane.received[:4, sizes.ids_at : sizes.weights_at]
        await until(lambda: ids.any())
        ids[2] = np.array([0, 4], np.int32).view(np.uint8)
        if loss == "raise":
            with pytest.raises(aiote.PeerError, match="rank 0: its rows are not for the experts"):
                await begun[2].dispatch_recv()
            return

        async def goes_on(rank: int) -> None:
            with suppress(*[GroupBrokenError, aiote.PeerError] if rank == 0 else []):
                batch = await begun[rank].dispatch_recv()
                sums = await sums_of(place, groups[rank], batch)
                if rank:
                    assert batch.answered[0] == (rank == 1)
                    gone = np.full((4, 1), not batch.answered[0]) & (tokens[rank].ids // 2 == 0)
                    assert sums.tobytes() == reference(config, tokens[rank], gone).tobytes()

        await all_of(*[lambda r=r: goes_on(r) for r in range(3)])
        assert not any(group.membership.failure for group in groups[1:])


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["grouped", "contiguous"])
async def test_a_rank_whose_rows_are_all_dropped_may_be_a_round_ahead(place, layout, on_gpu):
    """Nobody answers it, so the copies of its next round lie where those of this one did, and are not looked at."""
    config = MoeConfig(experts=6, top_k=2, hidden=8, tokens=4, rows=4, copies="rank", on_overflow="drop", layout=layout)
    async with mixed(local, config, place, [False, on_gpu, False]) as groups:
        tokens = [Tokens(RNG, config, count) for count in (4, 0, 4, 4)]
        for one, ids in zip(tokens, ([2, -1], [-1, -1], [2, -1], [3, -1]), strict=True):
            one.ids[...] = ids
        late = groups[1].dispatch_send(*given_to(place, groups[1], tokens[1]))

        async def ends(group: Any, own: Tokens, dropped: bool) -> None:
            batch = await group.dispatch(own.x, own.ids, own.weights)
            assert (batch.dropped is not None and batch.dropped.any()) == dropped
            sums = await group.combine(batch, filled(place, group, batch))
            assert sums.tobytes() == reference(config, own, batch.dropped).tobytes()

        async def goes_ahead() -> Any:
            await ends(groups[2], tokens[2], True)
            ahead = groups[2].dispatch_send(tokens[3].x, tokens[3].ids, tokens[3].weights)
            sizes, lane = groups[1].sizes, groups[1].memory.lanes[0]
            ids = lane.received[2 * sizes.private :][:4, sizes.ids_at : sizes.weights_at]
            await until(lambda: (ids.copy().view(np.int32)[:, 0] == 3).all())
            batch = await late.dispatch_recv()
            assert batch.expert_num_tokens.tolist() == [4, 0]
            await sums_of(place, groups[1], batch)
            return ahead

        _, ahead = await all_of(lambda: ends(groups[0], tokens[0], False), goes_ahead)

        async def following(rank: int) -> None:
            begun = ahead if rank == 2 else groups[rank].dispatch_send(*given_to(place, groups[rank], tokens[1]))
            batch = await begun.dispatch_recv()
            sums = await sums_of(place, groups[rank], batch)
            assert rank != 2 or sums.tobytes() == reference(config, tokens[3]).tobytes()

        await all_of(*[lambda r=r: following(r) for r in range(3)])


async def test_rows_of_a_batch_that_is_over_are_overwritten_in_debug_mode(place):
    config = MoeConfig(experts=4, top_k=2, hidden=8, tokens=6, placement="packed")
    async with mixed(local, config, place, [True, True], debug=True) as groups:
        tokens = [Tokens(RNG, config, 6) for _ in groups]

        async def one(group: Any, own: Tokens) -> None:
            batch = await group.dispatch(*moved(place, own))
            sums = await sums_of(place, group, batch)
            assert sums.tobytes() == reference(config, own).tobytes()
            assert set(place.back(batch.x).tobytes()) == {0xFF}

        for _ in range(2):
            await all_of(*[lambda g=g, t=t: one(g, t) for g, t in zip(groups, tokens, strict=True)])


async def test_other_weights_are_taken_before_the_sum(place):
    config = MoeConfig(experts=4, top_k=2, hidden=8, tokens=6)
    async with mixed(local, config, place, [True, False]) as groups:
        tokens = [Tokens(RNG, config, 6) for _ in groups]

        async def one(group: Any, own: Tokens) -> None:
            batch = await group.dispatch(*given_to(place, group, own))
            y = filled(place, group, batch)
            batch.round.combine_send(y if group.launcher is None else place.there(y))
            own.weights = own.weights[::-1].copy()
            skipped = RNG.random(own.weights.shape) < 0.3
            batch.round.reweigh(own.weights if group.launcher is None else place.there(own.weights), skipped)
            sums = await batch.round.combine_recv()
            assert fetched(place, sums).tobytes() == reference(config, own, skipped).tobytes()

        await all_of(*[lambda g=g, t=t: one(g, t) for g, t in zip(groups, tokens, strict=True)])


class SlowToPack(EmulatedGpu):
    """A GPU that numbers rows at once, and packs them when it is told to."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(emulation)
        self.packs = threading.Event()

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        if name == "moe_pack":
            self._launched.put(lambda: self.packs.wait() and None)
        super().launch(name, blocks, threads, shared, arguments)


async def test_a_rank_that_leaves_and_waits_no_longer_stops_no_row_to_another(emulation):
    """Its lease is gone before a GPU has packed; it had no rows of that one, but a third rank has."""
    config, gpu = MoeConfig(experts=6, top_k=2, hidden=8, tokens=4, placement="packed"), SlowToPack(emulation)
    place = Place(gpu, gpu.array, gpu.fetch)
    try:
        async with mixed(partial(local, drain_timeout=2.0), config, place, [False, True, False]) as groups:
            tokens = [Tokens(RNG, config, count) for count in (0, 4, 0)]
            tokens[1].ids[...] = [[4, 5]]
            begun = groups[1].dispatch_send(*moved(place, tokens[1]))
            others = [groups[rank].dispatch_send(*given_to(place, groups[rank], tokens[rank])) for rank in (0, 2)]
            await sums_of(place, groups[0], await others[0].dispatch_recv())
            await groups[0].leave()
            await groups[0].memory.take_all_back()
            gpu.packs.set()
            batches = await all_of(begun.dispatch_recv, others[1].dispatch_recv)
            made = [lambda g=g, b=b: sums_of(place, g, b) for g, b in zip(groups[1:], batches, strict=True)]
            sums, _ = await all_of(*made)
            assert sums.tobytes() == reference(config, tokens[1]).tobytes()
    finally:
        gpu.packs.set()
        gpu.close()
