"""What no rank may do or say: steps out of order, configs that do not fit, and routes and rows that cannot be."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote import service
from aiote.moe import GroupBrokenError, MoeConfig, open_group
from aiote.moe.config import Sizes
from aiote.moe.joining import NOWHERE, Meeting, service_of
from aiote.moe.memory import LaneMap
from aiote.moe.wire import Route, route_bytes
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import opened
from support.moe.ranks import Tokens, all_of, check_rows, compute, ranks, reference, whole_round
from support.moe.sharing import rows_from

RNG = np.random.default_rng(7)
each_way = pytest.mark.parametrize("shared", ["auto", "off"])
"""Between ranks that write into each other's memory, and over rails."""


def config(**more: Any) -> MoeConfig:
    """Return a small config; `more` says what a test is about."""
    return MoeConfig(**{"experts": 6, "top_k": 2, "hidden": 8, "tokens": 6, "rows": 36} | more)


def local() -> Any:
    """Open an engine."""
    return opened("local")


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


@each_way
async def test_copies_for_other_experts_than_the_route_says_break_the_round(shared):
    one = config(copies="rank", shared_memory=shared)
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


@each_way
@pytest.mark.parametrize("copies", ["expert", "rank"])
async def test_a_rank_that_says_what_cannot_be_is_masked_where_ranks_may_be(copies, shared):
    """Of its route, or of the experts that its rows are for: the others' rows and answers are as ever."""
    one = config(on_loss="mask", rows=None, copies=copies, shared_memory=shared)
    async with ranks(local, 3, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        for tokens in given:
            tokens.ids[...] = [[0, 5]]
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        sizes = groups[1].sizes
        for group in groups[1:]:
            lane = group.memory.lanes[0]
            ids = rows_from(group, 0)[:4, sizes.ids_at : sizes.weights_at]
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
    """A rank that skipped rounds would go on alone, and call it a loss of all others."""
    one = config(on_loss="mask", rows=None)
    async with ranks(local, 2, one) as groups:
        given = [Tokens(RNG, one, 4) for _ in groups]
        # Six rounds on, both the slot of routes (by parity) and that of counts (modulo 3) are the same.
        groups[0]._lanes[0].state.number = 6
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        for under_way in begun:
            with pytest.raises((aiote.PeerError, GroupBrokenError), match="every rank must take part in every round"):
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
        with pytest.raises(ValueError, match="every rank must take part in every round"):
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
        ({"layout": "contiguous", "align": 8, "rows": 12}, "is no multiple of align"),
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


class Stranger:
    """A rank that meets every other with what it was given."""

    def __init__(self, inbox: list[bytes], imm: int) -> None:
        self.inbox, self.imm = inbox, imm

    async def admit_rank(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        return Meeting(epoch, self.inbox, self.imm)

    def record_break(self, rank: int, epoch: int, reason: str, caller: aiote.Peer) -> None:
        pass

    async def record_departure(self, rank: int, epoch: int, rounds: list[int], caller: aiote.Peer) -> None:
        pass

    async def reached(self, rank: int, epoch: int, lane: int, caller: aiote.Peer) -> tuple[int, int]:
        return NOWHERE


MEETINGS = {
    **{how: f"rank 1 lent something else than an inbox of its own: .*{text}" for how, text in WRONG.items()},
    "revoked": "rank 1 lent something else than an inbox of its own: .*has revoked its lease",
    "a part too few": r"rank 1 lent something else than an inbox of its own: expected \d descriptors, got \d",
    "beyond 28 bits": "immediates from 0xffffff8 on, 9 for each of 2 lanes, pass 28 bits",
}


@pytest.mark.parametrize("on_loss", ["raise", "mask"])
@pytest.mark.parametrize("how", MEETINGS)
async def test_an_inbox_that_is_not_as_claimed_is_not_written_to(how, on_loss):
    one = config(on_loss=on_loss, lanes=2, **{"rows": None} if on_loss == "mask" else {})
    lane = LaneMap(Sizes(one, 2))
    inbox = np.zeros(2 * lane.inbox, np.uint8)
    async with local() as honest, local() as liar, local() as third:
        region = liar.register(inbox)
        lent = [region[part].descriptor for part in lane.parts(0)]
        if how in WRONG:
            lent = [claimed(how, one, liar.address, third.address) for one in lent]
        elif how == "a part too few":
            lent.pop()
        elif how == "revoked":
            await liar.connect(honest.address)
            async with region.lease(slice(None), honest.address) as lease:
                lent = [lease.descriptor] * len(lent)
        stranger = Stranger(lent, (1 << 28) - 8 if how == "beyond 28 bits" else 1 << 27)
        async with service.serve(liar, service_of(0)(stranger)):
            opening = open_group(honest, [honest.address, liar.address], 0, one)
            if on_loss == "raise":
                with pytest.raises(aiote.UsageError, match=MEETINGS[how]):
                    await opening.__aenter__()
            else:
                async with opening as group:
                    assert re.search(MEETINGS[how], group.membership.masked[1])
        assert not inbox.any()
