"""A member of a MoE group that writes wherever it can: what it spoils is its own, and others are not masked for it."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe import MoeConfig, MoeGroup, leaving
from aiote.moe.wire import PAYLOAD, slot_of
from aiote.service import client
from support.engines.opening import PATIENCE_S, opened, until
from support.moe.ranks import Tokens, all_of, check_rows, compute, ranks, reference, whole_round

CONFIG = MoeConfig(
    experts=6, top_k=2, hidden=8, tokens=6, dtype="float32", out_dtype="float32", lanes=2, on_loss="mask"
)
RANK_SIZE = 2
HONEST, LIAR, OTHER = range(3)


def tokens_between_the_honest(seed: int) -> Tokens:
    """Return tokens of which no expert is the liar's."""
    rng = np.random.default_rng(seed)
    one = Tokens(rng, CONFIG, 5)
    experts = [number for number in range(CONFIG.experts) if number // RANK_SIZE != LIAR]
    one.ids[...] = [rng.choice(experts, CONFIG.top_k, replace=False) for _ in one.ids]
    return one


async def rounds_of_the_honest(groups: list[MoeGroup], lane: int, count: int) -> None:
    """Have the honest ranks make rounds, which are right, and in which both take part."""

    async def one(group: MoeGroup) -> None:
        for number in range(count):
            given = [tokens_between_the_honest(10 * number + rank) for rank in range(3)]
            mine = given[group.rank]
            batch = await group.dispatch(mine.x, mine.ids, mine.weights, lane=lane)
            assert batch.active[[HONEST, OTHER]].all()
            check_rows(group, batch, given)
            out = await group.combine(batch, compute(group, batch))
            assert out.tobytes() == reference(CONFIG, mine).tobytes()

    await all_of(*[lambda group=group: one(group) for group in (groups[HONEST], groups[OTHER])])


def own_slots(group: MoeGroup, rank: int) -> np.ndarray:
    """Return which bytes of a rank's inbox are another one's slots: its routes, its rows and its answers."""
    lane, sizes = group.memory.map, group.sizes
    own = np.zeros(lane.inbox * CONFIG.lanes, np.bool_)
    for base in range(0, len(own), lane.inbox):
        for at, nbytes in (
            (lane.route_at(rank, 0), 2 * lane.route),
            (lane.rows_at + rank * sizes.private * sizes.row, sizes.private * sizes.row),
            (lane.answers_at + rank * sizes.answers_of_rank * sizes.y_row, sizes.answers_of_rank * sizes.y_row),
        ):
            own[base + at : base + at + nbytes] = True
    return own


@pytest.mark.parametrize("provider", ["local", "socket"])
async def test_what_a_member_spoils_is_its_own(provider):
    """It fills all that it may write to, and reaches for more with the keys that it has."""
    async with ranks(lambda: opened(provider), 3, CONFIG) as groups:
        victim, liar = groups[HONEST], groups[LIAR]
        inbox, regions = victim.memory._inbox, liar.posting._inboxes[HONEST].regions
        await whole_round(groups, [Tokens(np.random.default_rng(rank), CONFIG, 5) for rank in range(3)])
        before, own = inbox.copy(), own_slots(victim, LIAR)
        for region in regions:
            async with liar.engine.register(np.full(region.nbytes, 0xFF, np.uint8)) as junk:
                await liar.engine.write(junk, region)
        assert (inbox[own] == 0xFF).all()
        told = regions[0]._descriptor
        for more in (1, len(inbox) - told.length):
            async with liar.engine.register(np.full(told.length + more, 0xFF, np.uint8)) as junk:
                beyond = liar.engine.attach(bytes(replace(told, length=told.length + more)))
                with pytest.raises(aiote.AioteError):
                    await liar.engine.write(junk, beyond)
        assert (inbox[~own] == before[~own]).all()
        for group in (groups[HONEST], groups[OTHER]):
            group.mask(LIAR)
        await rounds_of_the_honest(groups, 1, 4)


@pytest.mark.parametrize("on_loss", ["raise", "mask"])
async def test_a_member_cannot_have_left_after_a_round_that_is_not_over(on_loss):
    """Its absence would be waited out as that of one that has done its part."""
    async with ranks(lambda: opened("sim"), 3, replace(CONFIG, on_loss=on_loss)) as groups:
        victim, liar = groups[HONEST], groups[LIAR]
        await client(liar.engine, victim.engine.address, liar.service).left(LIAR, liar.epoch, [0, 1])
        told = victim.membership.masked.get(LIAR, "") if on_loss == "mask" else str(victim.membership.failure)
        assert "it says that it has left after a round that is not over" in told


async def test_a_member_that_leaves_again_and_again_is_checked_by_one_task(monkeypatch):
    checks: list[int] = []

    async def check(group: MoeGroup, lanes: object, client: object, rank: int) -> None:
        checks.append(rank)

    monkeypatch.setattr(leaving, "_lose_if_incomplete", check)
    async with ranks(lambda: opened("sim"), 3, replace(CONFIG, on_loss="raise", lanes=1)) as groups:
        victim, liar = groups[HONEST], groups[LIAR]
        for number in (0, 0, 0, 1, 7):
            await client(liar.engine, victim.engine.address, liar.service).left(LIAR, liar.epoch, [number])
        await until(lambda: checks)
        assert checks == [LIAR]
        assert victim.membership.departed[LIAR] == [0]


async def leave_with(liar: MoeGroup, honest: list[MoeGroup], first: int) -> None:
    """Have the liar say that it takes part in no round from that one on, and end its connections."""
    for group in honest:
        await client(liar.engine, group.engine.address, liar.service).left(LIAR, liar.epoch, [first])
    liar.engine.abort()


@pytest.mark.parametrize("on_loss", ["raise", "mask"])
async def test_a_member_that_has_left_and_owes_its_route_is_lost(on_loss):
    config = replace(CONFIG, on_loss=on_loss, lanes=1)
    async with ranks(lambda: opened("sim"), 3, config) as groups:
        honest, mine = [groups[HONEST], groups[OTHER]], tokens_between_the_honest(0)

        async def one(group: MoeGroup) -> None:
            begun = group.dispatch_send(mine.x, mine.ids, mine.weights)
            if group is honest[0]:
                await leave_with(groups[LIAR], honest, 1)
            if on_loss == "raise":
                with pytest.raises(aiote.AioteError, match="before its route came"):
                    await begun.dispatch_recv()
                return
            batch = await begun.dispatch_recv()
            assert group.membership.takes_part(OTHER)
            assert not group.membership.takes_part(LIAR)
            out = await group.combine(batch, compute(group, batch))
            assert out.tobytes() == reference(config, mine).tobytes()

        await all_of(*[lambda group=group: one(group) for group in honest])


@pytest.mark.parametrize("owes", ["rows", "answers"])
@pytest.mark.parametrize("goes", [True, False])
async def test_a_member_that_has_left_and_owes_rows_or_answers_is_lost(owes, goes, monkeypatch):
    """One count over all ranks does not tell whose are missing; the others are asked whether theirs have come."""
    config = replace(CONFIG, on_loss="raise", lanes=1)
    async with ranks(lambda: opened("sim"), 3, config) as groups:
        honest, liar = [groups[HONEST], groups[OTHER]], groups[LIAR]
        given = [Tokens(np.random.default_rng(rank), config, 5, wild=False) for rank in range(3)]
        for tokens in given:
            tokens.ids[...] = [[0, LIAR * RANK_SIZE]] * 4 + [[0, OTHER * RANK_SIZE]]
        posting, write = liar.posting, liar.posting.post_writes
        rows = slot_of(0, PAYLOAD, 0)
        monkeypatch.setattr(posting, "post_writes", lambda writes, slot: write([] if slot == rows else writes, slot))
        if owes == "answers":
            given[LIAR].ids[...] = -1
        own, why = given[LIAR], f"rank {LIAR}.* it has left the group, and writes of round"
        liar.dispatch_send(own.x, own.ids, own.weights)

        async def one(group: MoeGroup) -> None:
            mine = given[group.rank]
            begun = group.dispatch_send(mine.x, mine.ids, mine.weights)
            if group is honest[0]:
                await until(lambda: all(one._lanes[0].state.phase != "idle" for one in honest))
                for other in honest:
                    await client(liar.engine, other.engine.address, liar.service).left(LIAR, liar.epoch, [1])
                if goes:
                    liar.engine.abort()
            with pytest.raises(aiote.AioteError, match=why):
                batch = await begun.dispatch_recv()
                await group.combine(batch, compute(group, batch))

        with anyio.fail_after(PATIENCE_S):
            await all_of(*[lambda group=group: one(group) for group in honest])


async def test_a_member_that_was_masked_without_a_reason_is_not_waited_for():
    config = replace(CONFIG, lanes=1)
    async with ranks(lambda: opened("sim"), 3, config) as groups:
        mine = tokens_between_the_honest(0)

        async def one(group: MoeGroup) -> None:
            begun = group.dispatch_send(mine.x, mine.ids, mine.weights)
            group.mask(LIAR, "")
            batch = await begun.dispatch_recv()
            out = await group.combine(batch, compute(group, batch))
            assert out.tobytes() == reference(config, mine).tobytes()

        await all_of(*[lambda group=group: one(group) for group in (groups[HONEST], groups[OTHER])])


async def test_a_member_that_has_left_and_owes_answers_is_masked():
    config = replace(CONFIG, lanes=1)
    async with ranks(lambda: opened("sim"), 3, config) as groups:
        honest = [groups[HONEST], groups[OTHER]]
        given = [Tokens(np.random.default_rng(rank), config, 5) for rank in range(3)]
        begun = [g.dispatch_send(t.x, t.ids, t.weights) for g, t in zip(groups, given, strict=True)]
        batches = [await one.dispatch_recv() for one in begun]
        await leave_with(groups[LIAR], honest, 1)

        async def one(group: MoeGroup) -> None:
            mine, batch = given[group.rank], batches[group.rank]
            out = await group.combine(batch, compute(group, batch))
            assert batch.answered.tolist() == [True, False, True]
            assert out.tobytes() == reference(config, mine, mine.ids // RANK_SIZE == LIAR).tobytes()

        await all_of(*[lambda group=group: one(group) for group in honest])
