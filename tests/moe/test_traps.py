"""What other implementations crash, hang or lie at: each a round whose output is compared with a dense reference.

Each over memory that the ranks share, over rails through memory and sockets, over RDMA where there is some, and over
two unequal NICs of which one is pulled in the midst of the rounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aiote.moe import MoeConfig, MoeGroup, MoeOverflowError
from aiote.testing import CONNECTX7_400G, EFA_100G, Fabric
from support.engines.opening import opened
from support.moe.ranks import Tokens, all_of, check_rows, compute, expert, ranks, reference, summed, whole_round

each_provider = pytest.mark.parametrize("provider", ["shared", "local", "socket", "uneven", "verbs"])
each_placement = pytest.mark.parametrize("placement", ["packed", "direct"])
RNG = np.random.default_rng(7)


def config(**more: Any) -> MoeConfig:
    """Return a small config; `more` says what a test is about."""
    return MoeConfig(**{"experts": 6, "top_k": 2, "hidden": 8, "tokens": 6, "rows": 36} | more)


@asynccontextmanager
async def over(provider: str, count: int, config: MoeConfig, **more: Any) -> AsyncIterator[list[MoeGroup]]:
    """Open a group; of "uneven", ranks with two NICs each, of which one's faster NIC dies some events later.

    Of "shared", ranks write into each other's memory; otherwise they use rails.
    """
    config = replace(config, shared_memory="auto" if provider == "shared" else "off")
    provider = "local" if provider == "shared" else provider
    if provider != "uneven":
        async with ranks(lambda: opened(provider), count, config, **more) as groups:
            yield groups
        return
    fabric = Fabric(seed=1, model=[CONNECTX7_400G, EFA_100G])
    async with ranks(fabric.open_engine, count, config, **more) as groups:
        fabric.kill_rail(groups[-1].engine, 0, after=9)
        yield groups
        assert [one.what for one in fabric.trace()].count("fault") == 1, "it dies in the midst of the rounds"
    fabric.close()


@each_provider
@each_placement
async def test_ranks_without_tokens(provider, placement):
    """One token on one rank, then none on any: the routes go all the same."""
    one = config(placement=placement)
    async with over(provider, 3, one) as groups:
        for counts in ([0, 1, 0], [0, 0, 0], [6, 0, 6], [1, 1, 1]):
            await whole_round(groups, [Tokens(RNG, one, count) for count in counts])


@each_provider
@each_placement
async def test_all_to_one_expert_and_named_twice(provider, placement):
    one = config(placement=placement, top_k=4, rows=72)
    async with over(provider, 3, one) as groups:
        given = [Tokens(RNG, one, 6) for _ in groups]
        for tokens in given:
            tokens.ids[...] = 5
        batches = await whole_round(groups, given)
        assert [batch.expert_num_tokens.tolist() for batch in batches] == [[0, 0], [0, 0], [0, 72]]


@each_provider
@each_placement
async def test_ids_that_are_no_experts(provider, placement):
    """-1, and 0xFFFFFFFF of unsigned ids: no row, and nothing added, whatever the weight is."""
    one = config(placement=placement)
    async with over(provider, 2, one) as groups:
        given = [Tokens(RNG, one, 5) for _ in groups]
        for tokens in given:
            tokens.ids = np.where(tokens.ids % 2, tokens.ids, -1).astype(np.int64).astype(np.uint32)
            tokens.weights[tokens.ids >= one.experts] = np.nan
        await whole_round(groups, given)
        for tokens in given:
            tokens.ids[...] = 0xFFFFFFFF
        batches = await whole_round(groups, given)
        assert all((batch.source == -1).all() for batch in batches)


@each_provider
@each_placement
@pytest.mark.parametrize("count", [2, 4])
async def test_experts_that_are_no_multiple_of_the_ranks(provider, placement, count):
    """Three experts: the last rank has fewer, or none at all."""
    one = config(placement=placement, experts=3, rows=99)
    async with over(provider, count, one) as groups:
        assert groups[-1].sizes.experts_of(count - 1) == (1 if count == 2 else 0)
        for _ in range(2):
            await whole_round(groups, [Tokens(RNG, one, 6) for _ in groups])


@each_provider
@each_placement
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(22, 22, 2880), (700, 22, 1), (5, 9, 2880), (5, 9, 1)])
async def test_sizes_that_others_do_not_have(provider, placement, experts, top_k, hidden):
    """Rows of a byte, and no multiple of a power of two; k over 9, and all experts; more than 512 experts."""
    one = config(
        placement=placement, experts=experts, top_k=top_k, hidden=hidden, rows=12, scales=23, dtype="uint8",
    )  # fmt: skip
    async with over(provider, 2, one) as groups:
        for _ in range(2):
            given = [Tokens(RNG, one, count) for count in (6, 1)]
            for tokens in given:
                tokens.ids = np.array([RNG.permutation(max(experts, top_k))[:top_k] for _ in tokens.ids], np.int32)
            await whole_round(groups, given)


@each_provider
@each_placement
async def test_nothing_for_other_ranks_and_all_for_another_one(provider, placement):
    """Nobody waits for rows that do not come; and as many as there may be come to one rank."""
    one = config(placement=placement, rows=72)
    async with over(provider, 3, one) as groups:
        for shift in (0, 1, 0, 2):
            given = [Tokens(RNG, one, 6) for _ in groups]
            for rank, tokens in enumerate(given):
                tokens.ids[...] = [[(rank + shift) % 3 * 2, (rank + shift) % 3 * 2 + 1]]
            batches = await whole_round(groups, given)
            assert [batch.expert_num_tokens.tolist() for batch in batches] == [[6, 6]] * 3


@each_provider
@each_placement
async def test_the_same_tokens_give_the_same_rows_and_sums_each_time(provider, placement):
    one = config(placement=placement, dtype="float32", out_dtype="float32")
    async with over(provider, 3, one) as groups:
        given = [Tokens(RNG, one, count) for count in (6, 2, 5)]
        for _ in range(3):
            await whole_round(groups, given)
        seen: dict[int, set[tuple[bytes, bytes]]] = {rank: set() for rank in range(3)}

        async def one_rank(group: MoeGroup) -> None:
            own = given[group.rank]
            batch = await group.dispatch(own.x, own.ids, own.weights)
            order = batch.source.tobytes()
            seen[group.rank].add((order, (await group.combine(batch, compute(group, batch))).tobytes()))

        for _ in range(3):
            await all_of(*[lambda g=g: one_rank(g) for g in groups])
        assert [len(found) for found in seen.values()] == [1, 1, 1]


@each_provider
@each_placement
async def test_views_with_any_stride_and_alignment(provider, placement):
    one = config(placement=placement, scales=3)
    async with over(provider, 2, one) as groups:
        given = [Tokens(RNG, one, 6) for _ in groups]
        for tokens in given:
            wide = np.zeros((6, 2 * one.hidden * 2 + 7), np.uint8)
            view = wide[:, 3 : 3 + one.hidden * 2].view(np.uint16)
            view[...] = tokens.x
            tokens.x = view
            tokens.ids = np.repeat(tokens.ids, 3, 0)[::3]
            scales = np.zeros((6, 9), np.float32)[:, 2:5]
            scales[...] = tokens.scales
            tokens.scales = scales
        await whole_round(groups, given, in_place=False)


@each_provider
@each_placement
async def test_every_pattern_of_a_number_arrives_as_it_was(provider, placement):
    """NaN payloads, denormals and negative zeros: all 65,536 patterns of two bytes."""
    one = config(placement=placement, tokens=64, hidden=1024, top_k=1, rows=128)
    async with over(provider, 2, one) as groups:
        given = [Tokens(RNG, one, 64, wild=False) for _ in groups]
        for tokens in given:
            tokens.x = RNG.permutation(np.arange(1 << 16)).astype(np.uint16).reshape(64, 1024)

        async def one_rank(group: Any, tokens: Tokens) -> None:
            batch = await group.dispatch(tokens.x, tokens.ids, tokens.weights)
            check_rows(group, batch, given)
            await group.combine(batch)

        await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])


@each_provider
async def test_infinite_answers_and_weights_of_zero(provider):
    """0 * inf is NaN, as in any sum of products, and a NaN is always the same one."""
    one = config(out_dtype="float32", hidden=1, top_k=1, dtype="float32")
    async with over(provider, 2, one) as groups:

        async def one_rank(group: Any) -> None:
            x, ids = np.ones((3, 1), np.float32), np.full((3, 1), 3, np.int32)
            weights = np.array([[0.0], [-1.0], [np.nan]], np.float32)
            batch = await group.dispatch(x, ids, weights)
            batch.y[...] = np.inf
            out = await group.combine(batch)
            assert out.view(np.uint32)[:, 0].tolist() == [0x7FC00000, 0xFF800000, 0x7FC00000]

        await all_of(*[lambda g=g: one_rank(g) for g in groups])


@each_provider
@pytest.mark.parametrize("layout", ["grouped", "contiguous"])
@pytest.mark.parametrize(
    "shape", [{"placement": "direct"}, {"placement": "packed"}, {"private": 2}, {"copies": "rank"}]
)
async def test_what_overflows_is_dropped_by_a_rule_that_all_know(provider, layout, shape):
    one = config(**{"rows": 8, "on_overflow": "drop", "layout": layout} | shape)
    async with over(provider, 3, one) as groups:
        dropped = 0
        for _ in range(4):
            batches = await whole_round(groups, [Tokens(RNG, one, 6, wild=False) for _ in groups])
            now = sum(0 if batch.dropped is None else int(batch.dropped.sum()) for batch in batches)
            assert {batch.demand > 8 for batch in batches} == {now > 0}
            dropped += now
        assert dropped
        assert sum(group.statistics().dropped_rows for group in groups) == dropped


@each_provider
@pytest.mark.parametrize("shape", [{"placement": "direct"}, {"placement": "packed"}, {"private": 2}])
async def test_what_overflows_is_raised_on_every_rank_and_the_next_round_is_whole(provider, shape):
    one = config(rows=3, **shape)
    async with over(provider, 3, one) as groups:
        for _ in range(3):
            given = [Tokens(RNG, one, 6) for _ in groups]
            for tokens in given:
                tokens.ids[...] = -1
                tokens.ids[:, 0] = 4

            async def one_rank(group: Any, tokens: Tokens) -> None:
                with pytest.raises(MoeOverflowError) as caught:
                    await group.dispatch(tokens.x, tokens.ids, tokens.weights)
                assert (caught.value.demand, caught.value.rows) == (18, 3)

            await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])
            for tokens in given:
                tokens.ids[:, 0] = np.arange(6)
            await whole_round(groups, given)


@each_placement
@pytest.mark.parametrize("provider", ["shared", "local"])
async def test_rows_beyond_four_gigabytes(provider, placement):
    """Each expert has room for more than 2**32 bytes, of which only those that come are ever touched."""
    one = config(placement=placement, experts=4, rows=90_000_000)
    async with over(provider, 2, one) as groups:
        assert one.rows * groups[0].sizes.row > 1 << 32
        for _ in range(2):
            given = [Tokens(RNG, one, 6, wild=False) for _ in groups]

            async def one_rank(group: MoeGroup, own: Tokens) -> None:
                batch = await group.dispatch(own.x, own.ids, own.weights)
                for number, count in enumerate(batch.expert_num_tokens.tolist()):
                    numbered = group.sizes.first_expert_of(group.rank) + number
                    batch.y[number, :count] = expert(one, numbered, batch.x[number, :count])
                assert (await group.combine(batch)).tobytes() == reference(one, own).tobytes()

            await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])


@each_provider
async def test_two_rounds_at_once_in_two_lanes(provider):
    one = config(lanes=2)
    async with over(provider, 2, one) as groups:
        given = [[Tokens(RNG, one, 6) for _ in groups] for _ in range(2)]
        for _ in range(3):

            async def one_rank(rank: int) -> None:
                group = groups[rank]
                begun = [
                    group.dispatch_send(one[rank].x, one[rank].ids, one[rank].weights, lane=lane)
                    for lane, one in enumerate(given)
                ]
                for lane, under_way in enumerate(begun):
                    batch = await under_way.dispatch_recv()
                    check_rows(group, batch, given[lane])
                    under_way.combine_send(compute(group, batch))
                for lane in (1, 0):
                    out = await begun[lane].combine_recv()
                    assert out.tobytes() == reference(group.config, given[lane][rank]).tobytes()

            await all_of(*[lambda r=r: one_rank(r) for r in range(2)])


@each_provider
@each_placement
async def test_registered_inputs_an_output_of_ones_own_and_sums_on_top(provider, placement):
    one = config(placement=placement, scales=2, dtype="float32", out_dtype="float32")
    async with over(provider, 2, one, debug=True) as groups:
        given = [Tokens(RNG, one, 6) for _ in groups]

        async def one_rank(group: Any, tokens: Tokens) -> None:
            x, scales = group.inputs()
            x[...], scales[...] = tokens.x, tokens.scales
            batch = await group.dispatch(x, tokens.ids, tokens.weights, scales, count=4)
            check_rows(group, batch, given)
            compute(group, batch, batch.y)
            out = np.full((5, one.hidden), 3, np.float32)
            assert await group.combine(batch, out=out, accumulate=True) is out
            tokens.x, tokens.ids, tokens.weights = tokens.x[:4], tokens.ids[:4], tokens.weights[:4]
            assert (out[:4] == reference(one, tokens) + np.float32(3)).all()
            assert (out[4] == 3).all()
            assert set(batch.x.tobytes()) == {0xFF}

        for tokens in given:
            tokens.ids[4:] = -1
        await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])


@each_provider
@pytest.mark.parametrize("layout", ["rank", "grouped"])
async def test_ranks_that_sum_what_their_experts_return(provider, layout):
    """Copies go once to a rank, with ids and weights; each rank sums, and the source sums what ranks return."""
    rows = {} if layout == "rank" else {"rows": 48}
    one = MoeConfig(
        experts=6, top_k=4, hidden=8, tokens=6, dtype="float32", out_dtype="float32", copies="rank", reduce="expert",
        layout=layout, **rows,
    )  # fmt: skip
    async with over(provider, 3, one) as groups:
        for turn in range(3):
            given = [Tokens(RNG, one, count) for count in (6, 0, 3)]

            async def one_rank(group: Any, tokens: Tokens, turn: int = turn) -> None:
                batch = await group.dispatch(tokens.x, tokens.ids, tokens.weights)
                if layout == "grouped":
                    out = await group.combine(batch, compute(group, batch))
                else:
                    assert batch.topk_ids.shape == batch.topk_weights.shape == (3, 6, 4)
                    y = summed(group, batch)
                    if turn == 0:
                        batch.y[...] = y
                    out = await group.combine(batch, None if turn == 0 else y)
                assert np.allclose(out, reference(one, tokens), rtol=1e-4, atol=1e-4)

            await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])
