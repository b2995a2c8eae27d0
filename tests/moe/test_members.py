"""Who takes part: opening, cancelling, losing, masking and replacing a rank, leaving; why rounds have own counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup, leaving, open_group
from aiote.moe.states import Membership, RoundState
from support.engines.opening import LOST_SOON, PATIENCE_S, opened, until
from support.moe.ranks import Tokens, all_of, compute, ranks, reference, whole_round
from support.moe.round_model import RoundModel

CONFIG = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, rows=36, placement="packed")
MASK = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, on_loss="mask")
RNG = np.random.default_rng(3)


def local(**settings: Any) -> Any:
    """Open an engine."""
    return opened("local", **settings)


def given(config: MoeConfig, count: int) -> list[Tokens]:
    """Return tokens of so many ranks, of which each has rows for every rank."""
    made = [Tokens(RNG, config, 6) for _ in range(count)]
    for one in made:
        one.ids[:, 0] = np.arange(6)
    return made


@pytest.mark.anyio
async def test_a_cancelled_round_is_heard_of_at_once_and_a_reset_mends_it(anyio_backend):
    """No time-out passes: the heartbeat alone would take an hour."""
    async with ranks(lambda: local(heartbeat_interval=1000, heartbeat_timeout=3600), 3, CONFIG) as groups:
        tokens = given(CONFIG, 3)
        old = await whole_round(groups, tokens)
        scope = anyio.CancelScope()
        heard: list[str] = []

        async def one(rank: int) -> None:
            group, own = groups[rank], tokens[rank]
            if rank == 2:
                with scope:
                    await group.dispatch(own.x, own.ids, own.weights)
                assert scope.cancelled_caught
            # Its rows may have left before; its answers have not.
            with pytest.raises(GroupBrokenError) as caught:
                await group.combine(await group.dispatch(own.x, own.ids, own.weights))
            heard.append(str(caught.value))

        async def cancel() -> None:
            await until(lambda: groups[2]._lanes[0].state.busy)
            scope.cancel()

        # Rank 0 comes late: before it the others cannot go on.
        async def late() -> None:
            await until(lambda: groups[2].membership.failure is not None)
            await one(0)

        with anyio.fail_after(PATIENCE_S):
            await all_of(late, lambda: one(1), lambda: one(2), cancel)
        # Directly, or by way of the other rank.
        assert sum("broke the round" in text and "rank 2" in text for text in heard) == 2
        with pytest.raises(GroupBrokenError):
            await groups[0].dispatch(tokens[0].x, tokens[0].ids, tokens[0].weights)
        await all_of(*[group.reset for group in groups])
        assert [group.epoch for group in groups] == [2, 2, 2]
        with pytest.raises(aiote.UsageError, match="the round is over"):
            old[0].round.combine_send()
        for _ in range(3):
            await whole_round(groups, tokens)


async def test_a_lost_rank_is_named_and_another_takes_its_place():
    async with ranks(lambda: local(**LOST_SOON), 3, CONFIG) as groups:
        tokens = given(CONFIG, 3)
        await whole_round(groups, tokens)
        members = [group.engine.address for group in groups]
        groups[1].engine.abort()

        async def loses(group: MoeGroup) -> None:
            own = tokens[group.rank]
            with pytest.raises(aiote.PeerLostError, match="rank 1") as caught:
                await group.combine(await group.dispatch(own.x, own.ids, own.weights))
            assert caught.value.peer == str(members[1])

        await all_of(lambda: loses(groups[0]), lambda: loses(groups[2]))
        await groups.start(members, 1)
        for _ in range(2):
            await whole_round(groups, tokens)


async def test_a_masked_rank_s_experts_add_nothing_and_its_successor_s_do():
    async with ranks(lambda: local(**LOST_SOON), 3, MASK) as groups:
        tokens = given(MASK, 3)
        await whole_round(groups, tokens)
        members = [group.engine.address for group in groups]
        groups[1].engine.abort()

        async def goes_on(group: MoeGroup) -> None:
            own = tokens[group.rank]
            for last in (False, True):
                if last:
                    await until(lambda: not group.active[1])
                batch = await group.dispatch(own.x, own.ids, own.weights)
                out = await group.combine(batch, compute(group, batch))
            assert batch.active.tolist() == [True, False, True]
            assert not (batch.source[..., 0] == 1).any()
            assert out.tobytes() == reference(MASK, own, own.ids // 2 == 1).tobytes()

        await all_of(lambda: goes_on(groups[0]), lambda: goes_on(groups[2]))
        await groups.start(members, 1)
        assert groups[0].active.all()
        await whole_round(groups, tokens)


async def test_a_batch_says_whose_experts_are_in_the_sums():
    async with ranks(lambda: local(**LOST_SOON), 3, MASK) as groups:
        tokens = given(MASK, 3)
        batches: list[Any] = [None, None, None]

        async def dispatch(group: MoeGroup) -> None:
            own = tokens[group.rank]
            batches[group.rank] = await group.dispatch(own.x, own.ids, own.weights)

        async def combine(group: MoeGroup) -> None:
            own, batch = tokens[group.rank], batches[group.rank]
            assert batch.answered is None
            out = await group.combine(batch, compute(group, batch))
            assert batch.active.tolist() == [True, True, True], "it was there when rows came"
            assert batch.answered.tolist() == [True, False, True]
            assert out.tobytes() == reference(MASK, own, own.ids // 2 == 1).tobytes()

        await all_of(*(lambda group=group: dispatch(group) for group in groups))
        groups[1].engine.abort()
        await all_of(lambda: combine(groups[0]), lambda: combine(groups[2]))


async def test_a_rank_that_is_masked_by_hand_writes_no_more():
    async with ranks(local, 3, MASK) as groups:
        tokens = given(MASK, 3)
        groups[0].mask(2)
        groups[1].mask(2)
        with pytest.raises(aiote.UsageError, match="mask"):
            groups[0].mask(0)

        async def one(group: MoeGroup) -> None:
            own = tokens[group.rank]
            batch = await group.dispatch(own.x, own.ids, own.weights)
            out = await group.combine(batch, compute(group, batch))
            gone = np.isin(own.ids // 2, [2] if group.rank < 2 else [0, 1])
            assert out.tobytes() == reference(MASK, own, gone).tobytes()

        await all_of(*[lambda g=g: one(g) for g in groups])


async def test_a_reset_that_was_cancelled_is_made_once_more_by_all():
    """The later epoch wins: one rank has begun one that no other has seen."""
    async with ranks(local, 3, CONFIG) as groups:
        tokens = given(CONFIG, 3)
        await whole_round(groups, tokens)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(groups[0].reset)
                await until(lambda: groups[1].membership.failure is not None and groups[0].epoch == 2)
                scope.cancel()
        with pytest.raises(GroupBrokenError, match="could not reset"):
            groups[0].dispatch_send(tokens[0].x, tokens[0].ids, tokens[0].weights)
        with anyio.fail_after(PATIENCE_S):
            await all_of(*[group.reset for group in groups])
        assert [group.epoch for group in groups] == [3, 3, 3]
        await whole_round(groups, tokens)


async def test_tokens_that_may_not_fit_where_ranks_may_differ_are_refused_and_the_lane_is_as_it_was():
    async with ranks(local, 2, MASK) as groups:
        tokens = given(MASK, 2)
        twice = np.full((6, 2), 3, np.int32)
        for group, own in zip(groups, tokens, strict=True):
            with pytest.raises(aiote.UsageError, match="overflow"):
                group.dispatch_send(own.x, twice, own.weights)
        await whole_round(groups, tokens)


async def test_ranks_that_leave_after_the_last_round_break_nobody_s(monkeypatch):
    """Two have all that they asked for, and leave with their engines, while the first still waits for the last."""
    checked, others_reached = [], leaving._others_reached

    async def noted(*given: Any) -> bool:
        checked.append(await others_reached(*given))
        return checked[-1]

    monkeypatch.setattr(leaving, "_others_reached", noted)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(local()) for _ in range(4)]
        members = [engine.address for engine in engines]
        one = MoeConfig(experts=8, top_k=2, hidden=8, tokens=6, rows=48)
        tokens = [Tokens(RNG, one, 6, wild=False) for _ in range(4)]
        for rank in (1, 2, 3):
            tokens[rank].ids %= 6
        tokens[0].ids[:, 0] = 7
        gone: list[int] = []

        async def live(rank: int) -> None:
            engine, own = engines[rank], tokens[rank]
            async with engine, open_group(engine, members, rank, one) as group:
                batch = await group.dispatch(own.x, own.ids, own.weights)
                if rank == 3:
                    await until(lambda: len(gone) == 2 and len(engine.peers) == 1 and len(checked) > 2)
                out = await group.combine(batch, compute(group, batch))
                assert out.tobytes() == reference(one, own).tobytes()
            gone.append(rank)

        with anyio.fail_after(PATIENCE_S):
            await all_of(*[lambda r=r: live(r) for r in range(4)])


@pytest.mark.parametrize("before", [True, False])
async def test_a_round_with_one_that_has_left_is_an_error(before):
    """Whether the round was begun before the other left, or after."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(local()) for _ in range(2)]
        members = [engine.address for engine in engines]
        begun, left = anyio.Event(), anyio.Event()

        async def leaves() -> None:
            async with open_group(engines[0], members, 0, CONFIG):
                await begun.wait()
            left.set()

        async def stays() -> None:
            own = Tokens(RNG, CONFIG, 6)
            async with open_group(engines[1], members, 1, CONFIG) as group:
                with pytest.raises(aiote.PeerLostError, match="it has left the group"):
                    if not before:
                        begun.set()
                        await left.wait()
                    under_way = group.dispatch_send(own.x, own.ids, own.weights)
                    begun.set()
                    await left.wait()
                    await under_way.dispatch_recv()

        with anyio.fail_after(PATIENCE_S):
            await all_of(leaves, stays)


async def test_different_configs_are_refused_on_opening():
    other = MoeConfig(experts=6, top_k=2, hidden=8, tokens=7, rows=36, placement="packed")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(local()) for _ in range(2)]
        members = [engine.address for engine in engines]

        async def live(rank: int) -> None:
            with pytest.raises(aiote.UsageError, match="another MoeConfig"):
                async with open_group(engines[rank], members, rank, (CONFIG, other)[rank]):
                    pass

        refused = anyio.Event()

        async def first(rank: int) -> None:
            await live(rank)
            refused.set()

        async def second() -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(live, 1)
                    await refused.wait()
                    scope.cancel()

        with anyio.fail_after(PATIENCE_S):
            await all_of(lambda: first(0), second)


@pytest.mark.parametrize("same", [True, False])
async def test_a_number_is_taken_again_while_a_rank_is_still_in_the_earlier_group(same):
    """The earlier group's rank is asked again; its config is not compared, and its inbox is nobody's in the next."""
    other = CONFIG if same else MoeConfig(experts=6, top_k=2, hidden=16, tokens=6, rows=36, placement="packed")
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(local()) for _ in range(2)]
        members, asked, both = [engine.address for engine in engines], anyio.Event(), anyio.Event()
        tokens = [Tokens(RNG, other, 5) for _ in engines]

        async def later(rank: int) -> None:
            async with open_group(engines[rank], members, rank, other) as group:
                own = tokens[rank]
                batch = await group.dispatch(own.x, own.ids, own.weights)
                out = await group.combine(batch, compute(group, batch))
                assert out.tobytes() == reference(other, own).tobytes()

        async def hasty() -> None:
            async with open_group(engines[0], members, 0, CONFIG):
                await both.wait()
            await later(0)

        async def slow() -> None:
            async with open_group(engines[1], members, 1, CONFIG) as group:
                meet = group.admit_rank

                async def noted(*given: Any) -> Any:
                    try:
                        return await meet(*given)
                    finally:
                        asked.set()

                group.admit_rank = noted
                both.set()
                await asked.wait()
            await later(1)

        with anyio.fail_after(PATIENCE_S):
            await all_of(hasty, slow)


async def test_members_that_cannot_be_are_refused():
    async with local() as one, local() as other:
        for members, rank, group, why in (
            ([one.address, other.address], 1, 0, "expected this engine"),
            ([one.address, one.address], 0, 0, "named twice"),
            ([one.address], 1, 0, "an index into members"),
            ([one.address], 0, 32, "group=32"),
        ):
            with pytest.raises(aiote.UsageError, match=why):
                async with open_group(one, members, rank, CONFIG, group=group):
                    pass


async def test_two_groups_on_the_same_engines():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(local()) for _ in range(2)]
        members = [engine.address for engine in engines]

        async def live(rank: int) -> None:
            async with AsyncExitStack() as both:
                groups = [
                    await both.enter_async_context(open_group(engines[rank], members, rank, CONFIG, group=number))
                    for number in range(2)
                ]
                own = [Tokens(np.random.default_rng([rank, number]), CONFIG, 5) for number in range(2)]
                batches = [await g.dispatch(o.x, o.ids, o.weights) for g, o in zip(groups, own, strict=True)]
                for group, batch, tokens in zip(groups, batches, own, strict=True):
                    out = await group.combine(batch, compute(group, batch))
                    assert out.tobytes() == reference(CONFIG, tokens).tobytes()

        await all_of(*[lambda r=r: live(r) for r in range(2)])


def test_states_of_members():
    members = Membership(3, 1, masks=False)
    members.reset(1)
    assert not members.record_break(0, 0, "old")
    assert members.record_break(0, 1, "x")
    assert not members.record_break(2, 1, "y")
    with pytest.raises(GroupBrokenError, match="rank 0"):
        members.require_whole()
    with pytest.raises(aiote.UsageError, match="not later"):
        members.reset(1)
    members.reset(5)
    members.require_whole()
    state = RoundState()
    with pytest.raises(aiote.UsageError, match="one round at a time"):
        state.enter("combine_send")


def schedules(**kwargs: Any) -> Iterator[RoundModel]:
    for seed in range(1500):
        model = RoundModel(random.Random(seed), **kwargs)
        model.run()
        yield model


def test_two_slots_and_three_counters_are_enough_and_one_fewer_of_either_is_not():
    """The model of the protocol without barriers, on random schedules."""
    assert not any(run.wrong or run.noticed for run in schedules(slots=2, counters=3))
    assert any(run.wrong for run in schedules(slots=1, counters=3))
    assert any(run.noticed for run in schedules(slots=2, counters=2)), "a rank that is ahead counts too much"


def test_a_count_too_many_is_noticed_in_its_round_or_the_next():
    """Whatever the schedule is: not handed on from round to round as a write that is always late."""
    runs = list(schedules(slots=2, counters=3, surplus=True))
    assert sum(run.surplus for run in runs) > 1000
    assert all(run.noticed == run.surplus for run in runs)
    assert any(run.wrong for run in runs)
