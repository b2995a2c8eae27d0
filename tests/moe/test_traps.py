"""What other implementations crash, hang or lie at: each a round whose output is compared with a dense reference."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeOverflowError
from aiote.moe.config import Sizes
from aiote.moe.wire import Route, route_bytes
from engines import opened
from moe_ranks import Tokens, all_of, check_rows, compute, ranks, reference, whole_round

each_placement = pytest.mark.parametrize("placement", ["packed", "direct"])
RNG = np.random.default_rng(7)


def config(**more: Any) -> MoeConfig:
    """Return a small config; `more` says what a test is about."""
    return MoeConfig(**{"experts": 6, "top_k": 2, "hidden": 8, "tokens": 6, "rows": 36} | more)


def local() -> Any:
    """Open an engine."""
    return opened("local")


@each_placement
async def test_ranks_without_tokens(placement):
    """One token on one rank, then none on any: the routes go all the same."""
    one = config(placement=placement)
    async with ranks(local, 3, one) as groups:
        for counts in ([0, 1, 0], [0, 0, 0], [6, 0, 6], [1, 1, 1]):
            await whole_round(groups, [Tokens(RNG, one, count) for count in counts])


@each_placement
async def test_all_to_one_expert_and_named_twice(placement):
    one = config(placement=placement, top_k=4, rows=72)
    async with ranks(local, 3, one) as groups:
        given = [Tokens(RNG, one, 6) for _ in groups]
        for tokens in given:
            tokens.ids[...] = 5
        batches = await whole_round(groups, given)
        assert [batch.expert_num_tokens.tolist() for batch in batches] == [[0, 0], [0, 0], [0, 72]]


@each_placement
async def test_ids_that_are_no_experts(placement):
    """-1, and 0xFFFFFFFF of unsigned ids: no row, and nothing added, whatever the weight is."""
    one = config(placement=placement)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 5) for _ in groups]
        for tokens in given:
            tokens.ids = np.where(tokens.ids % 2, tokens.ids, -1).astype(np.int64).astype(np.uint32)
            tokens.weights[tokens.ids >= one.experts] = np.nan
        await whole_round(groups, given)
        for tokens in given:
            tokens.ids[...] = 0xFFFFFFFF
        batches = await whole_round(groups, given)
        assert all((batch.source == -1).all() for batch in batches)


@each_placement
@pytest.mark.parametrize("count", [2, 4])
async def test_experts_that_are_no_multiple_of_the_ranks(placement, count):
    """Three experts: the last rank has fewer, or none at all."""
    one = config(placement=placement, experts=3, rows=99)
    async with ranks(local, count, one) as groups:
        assert groups[-1].sizes.held(count - 1) == (1 if count == 2 else 0)
        for _ in range(2):
            await whole_round(groups, [Tokens(RNG, one, 6) for _ in groups])


@each_placement
async def test_an_odd_hidden_size_and_as_many_experts_as_k(placement):
    one = config(placement=placement, experts=22, top_k=22, hidden=2880, rows=12, scales=23, dtype="uint8")
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 6) for _ in groups]
        for tokens in given:
            tokens.ids = np.tile(RNG.permutation(22).astype(np.int32), (6, 1))
        await whole_round(groups, given)


@each_placement
async def test_views_with_any_stride_and_alignment(placement):
    one = config(placement=placement, scales=3)
    async with ranks(local, 2, one) as groups:
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


@each_placement
async def test_every_pattern_of_a_number_arrives_as_it_was(placement):
    """NaN payloads, denormals and negative zeros: all 65,536 patterns of two bytes."""
    one = config(placement=placement, tokens=64, hidden=1024, top_k=1, rows=128)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 64, wild=False) for _ in groups]
        for tokens in given:
            tokens.x = RNG.permutation(np.arange(1 << 16)).astype(np.uint16).reshape(64, 1024)

        async def one_rank(group: Any, tokens: Tokens) -> None:
            batch = await group.dispatch(tokens.x, tokens.ids, tokens.weights)
            check_rows(group, batch, given)
            await group.combine(batch)

        await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])


async def test_infinite_answers_and_weights_of_zero():
    """0 * inf is NaN, as in any sum of products, and a NaN is always the same one."""
    one = config(out_dtype="float32", hidden=1, top_k=1, dtype="float32")
    async with ranks(local, 2, one) as groups:

        async def one_rank(group: Any) -> None:
            x, ids = np.ones((3, 1), np.float32), np.full((3, 1), 3, np.int32)
            weights = np.array([[0.0], [-1.0], [np.nan]], np.float32)
            batch = await group.dispatch(x, ids, weights)
            batch.y[...] = np.inf
            out = await group.combine(batch)
            assert out.view(np.uint32)[:, 0].tolist() == [0x7FC00000, 0xFF800000, 0x7FC00000]

        await all_of(*[lambda g=g: one_rank(g) for g in groups])


@pytest.mark.parametrize("layout", ["grouped", "contiguous"])
@pytest.mark.parametrize(
    "shape", [{"placement": "direct"}, {"placement": "packed"}, {"private": 2}, {"copies": "rank"}]
)
async def test_what_overflows_is_dropped_by_a_rule_that_all_know(layout, shape):
    one = config(**{"rows": 8, "on_overflow": "drop", "layout": layout} | shape)
    async with ranks(local, 3, one) as groups:
        dropped = 0
        for _ in range(4):
            batches = await whole_round(groups, [Tokens(RNG, one, 6, wild=False) for _ in groups])
            now = sum(0 if batch.dropped is None else int(batch.dropped.sum()) for batch in batches)
            assert {batch.demand > 8 for batch in batches} == {now > 0}
            dropped += now
        assert dropped
        assert sum(group.statistics().dropped_rows for group in groups) == dropped


@pytest.mark.parametrize("shape", [{"placement": "direct"}, {"placement": "packed"}, {"private": 2}])
async def test_what_overflows_is_raised_on_every_rank_and_the_next_round_is_whole(shape):
    one = config(rows=3, **shape)
    async with ranks(local, 3, one) as groups:
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


async def test_two_rounds_at_once_in_two_lanes():
    one = config(lanes=2)
    async with ranks(local, 2, one) as groups:
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


@each_placement
async def test_registered_inputs_an_output_of_ones_own_and_sums_on_top(placement):
    one = config(placement=placement, scales=2, dtype="float32", out_dtype="float32")
    async with ranks(local, 2, one, debug=True) as groups:
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


@pytest.mark.parametrize("layout", ["rank", "grouped"])
async def test_ranks_that_sum_what_their_experts_return(layout):
    """Copies go once to a rank, with ids and weights; each rank sums, and the source sums what ranks return."""
    rows = {} if layout == "rank" else {"rows": 48}
    one = MoeConfig(
        experts=6, top_k=4, hidden=8, tokens=6, dtype="float32", out_dtype="float32", copies="rank", reduce="expert",
        layout=layout, **rows,
    )  # fmt: skip
    async with ranks(local, 3, one) as groups:
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


def summed(group: Any, batch: Any) -> Any:
    """Return what a rank returns in layout "rank": of each copy the weighted sum over its own experts."""
    from moe_ranks import expert

    y = np.zeros(batch.y.shape, np.float32)
    for rank, count in enumerate(batch.source_num_tokens.tolist()):
        for token in range(count):
            for slot, number in enumerate(batch.topk_ids[rank, token].tolist()):
                if number >= 0:
                    value = expert(group.config, group.sizes.first(group.rank) + number, batch.x[rank, token][None])[0]
                    y[rank, token] += batch.topk_weights[rank, token, slot] * value
    return y


async def test_steps_out_of_order_are_refused_and_harm_nothing():
    one = config()
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]

        async def one_rank(group: Any, tokens: Tokens) -> None:
            with pytest.raises(aiote.UsageError, match="topk_ids: expected int32"):
                group.dispatch_send(tokens.x, tokens.ids[:, :1], tokens.weights)
            with pytest.raises(aiote.UsageError, match="7 tokens"):
                group.dispatch_send(np.zeros((7, 8)), np.zeros((7, 2), np.int32), np.zeros((7, 2), np.float32))
            begun = group.dispatch_send(tokens.x, tokens.ids, tokens.weights)
            for wrong in (lambda: group.dispatch_send(tokens.x, tokens.ids, tokens.weights), begun.combine_send):
                with pytest.raises(aiote.UsageError, match="one round at a time"):
                    wrong()
            batch = await begun.dispatch_recv()
            with pytest.raises(aiote.UsageError, match="y: expected bfloat16"):
                begun.combine_send(np.zeros((1, 1), np.uint16))
            out = await group.combine(batch, compute(group, batch))
            assert out.tobytes() == reference(one, tokens).tobytes()
            with pytest.raises(aiote.UsageError, match="one round at a time"):
                await begun.combine_recv()

        await all_of(*[lambda g=g, t=t: one_rank(g, t) for g, t in zip(groups, given, strict=True)])
        await whole_round(groups, given)


async def test_a_route_that_cannot_be_breaks_the_round_and_names_the_rank():
    """What a peer says of its rows becomes no offset before it was checked."""
    one = config(rows=36)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        lane = groups[1].memory.lanes[0]
        while not lane.routes[0, 0, 0]:
            await turn_of_the_loop()
        lane.routes[0, 0, 6:12] += 1000
        with pytest.raises(aiote.PeerError, match="rank 0: its route"):
            await begun[1].dispatch_recv()
        with pytest.raises(GroupBrokenError, match="rank 1 broke the round"):
            await groups[0].combine(await begun[0].dispatch_recv())


async def test_copies_for_other_experts_than_the_route_says_break_the_round():
    one = config(copies="rank")
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        for tokens in given:
            tokens.ids[...] = [[0, 5]]
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        sizes, lane = groups[1].sizes, groups[1].memory.lanes[0]
        ids = lane.received[:4, sizes.ids_at : sizes.weights_at]
        while not ids.any():
            await turn_of_the_loop()
        ids[2] = np.array([0, 4], np.int32).view(np.uint8)
        with pytest.raises(aiote.PeerError, match="rank 0: its rows are not for the experts"):
            await begun[1].dispatch_recv()


@pytest.mark.parametrize("copies", ["expert", "rank"])
async def test_a_rank_that_says_what_cannot_be_is_masked_where_ranks_may_be(copies):
    """Of its route, or of the experts that its rows are for: the others' rows and answers are as ever."""
    one = config(on_loss="mask", rows=None, copies=copies)
    async with ranks(local, 3, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        for tokens in given:
            tokens.ids[...] = [[0, 5]]
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        sizes = groups[1].sizes
        for group in groups[1:]:
            lane = group.memory.lanes[0]
            ids = lane.received[:4, sizes.ids_at : sizes.weights_at]
            while not (lane.routes[0, 0, 0] and (group.rank == 1 or ids.any())):
                await turn_of_the_loop()
            if copies == "expert":
                lane.routes[0, 0, 6:12] += 1000
            elif group.rank == 2:
                ids[2] = np.array([0, 4], np.int32).view(np.uint8)

        async def goes_on(rank: int) -> None:
            group, tokens = groups[rank], given[rank]
            batch = await begun[rank].dispatch_recv()
            if rank == 2 or copies == "expert":
                assert batch.active.tolist() == [False, True, True]
                assert not (batch.source[..., 0] == 0).any()
            check_rows(group, batch, given)
            out = await group.combine(batch, compute(group, batch))
            gone = np.full((4, 1), not batch.answered[0]) & (tokens.ids // 2 == 0)
            assert batch.answered[0] == (rank == 1 and copies == "rank")
            assert out.tobytes() == reference(one, tokens, gone).tobytes()

        async def liar() -> None:
            with suppress(GroupBrokenError, aiote.PeerError):
                batch = await begun[0].dispatch_recv()
                await groups[0].combine(batch, compute(groups[0], batch))

        await all_of(lambda: goes_on(1), lambda: goes_on(2), liar)
        assert not any(group.membership.failure for group in groups[1:])


async def test_a_route_of_another_round_breaks_the_group_though_ranks_may_be_masked():
    """A rank that skipped a round would go on alone, and call it a loss of all others."""
    one = config(on_loss="mask", rows=None)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        groups[0]._lanes[0].state.number = 2
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        for under_way in begun:
            with pytest.raises((aiote.PeerError, GroupBrokenError), match="every rank takes part in every round"):
                await under_way.dispatch_recv()


@pytest.mark.parametrize("shape", [{}, {"layout": "contiguous"}, {"layout": "contiguous", "copies": "rank"}])
async def test_a_token_that_names_an_expert_again_and_again_is_refused_where_ranks_may_be_masked(shape):
    """On one side before anything is sent, on the other as a route that cannot be."""
    one = config(**{"on_loss": "mask", "rows": None, "top_k": 4, "experts": 2} | shape)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 6, wild=False) for _ in groups]
        for tokens in given:
            tokens.ids[...] = 1
        with pytest.raises(aiote.UsageError, match="overflow"):
            groups[0].dispatch_send(given[0].x, given[0].ids, given[0].weights)
        sizes, words = groups[0].sizes, np.zeros(route_bytes(groups[0].sizes) // 4, np.uint32)
        Route(1, 0, 6, np.array([0, 24]), np.array([0, 6])).write(words)
        with pytest.raises(ValueError, match="rows may overflow"):
            Route.read(words, sizes, 1, 0)
        for tokens in given:
            tokens.ids[...] = -1
            tokens.ids[:, 0] = [0, 1, 0, 1, 0, 1]
        await whole_round(groups, given)


async def turn_of_the_loop() -> None:
    """Let the loop run."""
    await anyio.sleep(0)


SIZES = Sizes(config(), 3)


@given(st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=6, max_size=6), st.integers(0, 7), st.data())
def test_routes_are_checked_before_they_are_believed(experts, tokens, data):
    words = np.zeros(route_bytes(SIZES) // 4, np.uint32)
    pairs = [sum(experts[2 * rank : 2 * rank + 2]) for rank in range(3)]
    copies = [-(-n // 2) + data.draw(st.sampled_from([0, 0, 0, 1, -1])) * (n > 0) for n in pairs]
    counts = np.array(experts, np.int64), np.array(copies, np.int64)
    Route(5, 1 << 33, tokens, *counts).write(words)
    true = tokens <= 6 and sum(experts) <= 2 * tokens
    true = true and all(-(-n // 2) <= c <= min(n, tokens) for n, c in zip(pairs, copies, strict=True))
    if true:
        read = Route.read(words, SIZES, 5, 1 << 33)
        assert (read.tokens, read.experts.tolist(), read.copies.tolist()) == (tokens, experts, copies)
    else:
        with pytest.raises(ValueError):
            Route.read(words, SIZES, 5, 1 << 33)
    for epoch, number in ((6, 1 << 33), (5, 1), (5, (1 << 33) + 1)):
        with pytest.raises(ValueError, match="every rank takes part"):
            Route.read(words, SIZES, epoch, number)
    words[data.draw(st.integers(0, len(words) - 1))] ^= data.draw(st.integers(1, (1 << 32) - 1))
    try:
        read = Route.read(words, SIZES, 5, 1 << 33)
    except ValueError:
        return
    assert read.experts.sum() <= 2 * read.tokens <= 12


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"experts": 0}, "experts=0"),
        ({"layout": "flat"}, "layout='flat'"),
        ({"align": 4}, "align is of layout"),
        ({"layout": "contiguous", "align": 8, "rows": 12}, "no multiple"),
        ({"layout": "rank", "rows": None}, "copies='rank'"),
        ({"reduce": "expert"}, "reduce='expert'"),
        ({"placement": "direct", "copies": "rank"}, "one place"),
        ({"placement": "direct", "private": 1}, "private is of"),
        ({"on_loss": "mask"}, "rows=None"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"out_dtype": "uint8"}, "out_dtype='uint8'"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong, why):
    with pytest.raises(aiote.UsageError, match=why):
        config(**wrong)
