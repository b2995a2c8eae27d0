"""What synchronous programs need of a group: held on a bridge, with weights that come late, and ranks that are gone."""

from __future__ import annotations

import dataclasses
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import aiote
from aiote.moe import MoeConfig, open_group
from aiote.moe.blocking import HeldGroup, PendingStep
from support.engines.opening import PATIENCE_S, opened
from support.moe.ranks import Tokens, all_of, compute, ranks, reference
from support.service.bridges import bridge_to

CONFIG = MoeConfig(experts=6, top_k=3, hidden=8, tokens=7, dtype="float32", out_dtype="float32")


def local() -> Any:
    return opened("local")


def test_a_thread_makes_rounds_of_a_group_on_a_bridge():
    given = Tokens(np.random.default_rng(1), CONFIG, 7)
    with bridge_to() as bridge, HeldGroup(bridge, [bridge.engine.address], 0, CONFIG) as held:
        for _ in range(3):
            round = held.run(held.moe.dispatch_send, given.x, given.ids, given.weights)
            found: list[Any] = []
            wait = PendingStep(held.start(round.dispatch_recv()), found.append)
            wait()
            wait()
            (batch,) = found
            held.run(round.combine_send, compute(held.moe, batch))
            out = np.zeros((7, 8), np.float32)
            end = PendingStep(held.start(round.combine_recv(out)))
            end()
            assert (out == reference(CONFIG, given)).all()
        held.close()
        with pytest.raises(aiote.UsageError, match="expected this engine's address"):
            HeldGroup(bridge, ["aiote://127.0.0.1:9/" + "ab" * 16 + "." + "cd" * 8], 0, CONFIG)
        with HeldGroup(bridge, [bridge.engine.address], 0, CONFIG) as again:
            assert again.moe.epoch == 1


async def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_one_likes():
    """By a thread or a task; the error names those that are not there, and no other."""
    config = dataclasses.replace(CONFIG, experts=9)

    def waits(idle: aiote.Address) -> None:
        with bridge_to() as bridge:
            with pytest.raises(aiote.ConnectTimeoutError, match=r"ranks \[1\] of the group") as caught:
                HeldGroup(bridge, [bridge.engine.address, idle], 0, config, open_timeout=2)
            assert caught.value.peer == str(idle)

    async with local() as idle, local() as first, local() as third:
        with anyio.fail_after(PATIENCE_S):
            await anyio.to_thread.run_sync(waits, idle.address)
        members, names = [first.address, idle.address, third.address], []

        async def one(rank: int, engine: aiote.Engine) -> None:
            with pytest.raises(aiote.ConnectTimeoutError, match="of the group") as caught:
                async with open_group(engine, members, rank, config, open_timeout=2):
                    pass
            names.append(caught.value.peer)

        with anyio.fail_after(PATIENCE_S):
            await all_of(lambda: one(0, first), lambda: one(2, third))
        assert str(members[1]) in names


async def test_weights_may_come_after_the_rows():
    """And ids that are skipped then add nothing, also where they were dropped before."""
    config = dataclasses.replace(CONFIG, rows=4, on_overflow="drop")
    rng = np.random.default_rng(2)
    async with ranks(local, 2, config) as groups:
        given = [Tokens(rng, config, 7) for _ in groups]

        async def one(rank: int) -> None:
            group, mine = groups[rank], given[rank]
            round = group.dispatch_send(mine.x, mine.ids, np.full(mine.ids.shape, np.nan, np.float32))
            batch = await round.dispatch_recv()
            skipped = np.arange(21).reshape(7, 3) % 5 == rank
            round.reweigh(mine.weights, skipped)
            round.combine_send(compute(group, batch))
            out = await round.combine_recv()
            assert batch.dropped is not None
            assert (out == reference(config, mine, batch.dropped | skipped)).all()

        await all_of(*[lambda r=r: one(r) for r in range(2)])


async def test_weights_that_experts_have_applied_come_too_late():
    config = dataclasses.replace(CONFIG, copies="rank", reduce="expert")
    given = Tokens(np.random.default_rng(3), config, 5)
    async with ranks(local, 1, config) as (group,):
        batch = await group.dispatch(given.x, given.ids, given.weights)
        with pytest.raises(aiote.UsageError, match="reduce='expert'"):
            batch.round.reweigh(given.weights)
        await group.combine(batch)


async def test_a_batch_says_of_which_rank_and_token_rows_are():
    rng = np.random.default_rng(4)
    async with ranks(local, 3, CONFIG) as groups:
        given = [Tokens(rng, CONFIG, tokens) for tokens in (7, 0, 5)]

        async def one(rank: int) -> None:
            mine = given[rank]
            batch = await groups[rank].dispatch(mine.x, mine.ids, mine.weights)
            source = batch.source
            assert batch.expert_source_tokens.shape == (2, 3)
            for number, count in enumerate(batch.expert_num_tokens.tolist()):
                assert (batch.token[number, :count] == source[number, :count, 1]).all()
                counted = np.bincount(source[number, :count, 0], minlength=3)
                assert batch.expert_source_tokens[number].tolist() == counted.tolist()
            await groups[rank].combine(batch)

        await all_of(*[lambda r=r: one(r) for r in range(3)])


async def test_nobody_waits_for_ranks_that_are_masked_from_the_start():
    config = dataclasses.replace(CONFIG, on_loss="mask")
    async with local() as first, local() as second, local() as idle:
        members = [first.address, second.address, idle.address]

        async def one(rank: int, engine: aiote.Engine) -> None:
            async with open_group(engine, members, rank, config, masked=[2]) as group:
                assert group.active.tolist() == [True, True, False]
                mine = Tokens(np.random.default_rng(rank), config, 6)
                mine.ids[...] = np.arange(18).reshape(6, 3) % 6
                batch = await group.dispatch(mine.x, mine.ids, mine.weights)
                assert batch.source_num_tokens.tolist() == [6, 6, 0]
                out = await group.combine(batch, compute(group, batch))
                # Experts 4 and 5 are the masked rank's.
                assert (out == reference(config, mine, mine.ids >= 4)).all()

        await all_of(lambda: one(0, first), lambda: one(1, second))
        with pytest.raises(aiote.UsageError, match="on_loss='raise'"):
            async with open_group(first, members, 0, CONFIG, masked=[2]):
                pass
