"""Ranks of one host write into each other's inboxes: when they do, when rails are used instead, what ends a mapping."""

from __future__ import annotations

import errno
import gc
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.moe.config import Sizes
from aiote.moe.kernels import copy_rows
from aiote.moe.plan import Counts, RoundPlan
from support.engines.opening import LOST_SOON, PATIENCE_S, opened, until
from support.moe.ranks import SHAPES, all_of, ranks
from support.moe.sharing import CONFIG, bytes_over_rails, each_shape, pairs_mapped, rounds, shaped
from support.rails.shared_memory import mappings


@pytest.mark.parametrize("provider", ["local", "socket"])
async def test_no_row_goes_over_a_rail(provider, monkeypatch):
    async with ranks(lambda: opened(provider), 3, CONFIG) as groups:
        assert pairs_mapped(groups) == [[1, 2], [0, 2], [0, 1]]
        seen = bytes_over_rails(groups, monkeypatch)
        await rounds(groups)
        assert seen
        assert not any(seen)
        rows = sum(group.statistics().sent_bytes for group in groups)
        assert rows > 3 * CONFIG.tokens * CONFIG.top_k * groups[0].sizes.row
    monkeypatch.undo()
    groups.clear()
    gc.collect()
    assert mappings() == 0


@each_shape
@pytest.mark.parametrize("setting", ["auto", "off"])
async def test_the_setting_and_the_shape_say_what_goes_over_a_rail(shape, setting, monkeypatch):
    config = replace(shaped(shape), shared_memory=setting)
    async with ranks(lambda: opened("local"), 2, config) as groups:
        assert pairs_mapped(groups) == ([[1], [0]] if setting == "auto" else [[], []])
        seen = bytes_over_rails(groups, monkeypatch)
        await rounds(groups)
        # Rows beyond the private parts wait for the counts of all ranks, and go over a rail.
        assert any(seen) == (setting == "off" or config.private is not None)


@each_shape
async def test_some_pairs_share_memory_and_others_do_not(shape, monkeypatch):
    """Rank 1 can map nothing, and rank 2 one inbox; the others go on as they can."""
    real = aiote.Engine.map_memory
    async with ranks(lambda: opened("local"), 3, shaped(shape)) as groups:
        engines = [group.engine for group in groups]

        async def map_memory(engine: aiote.Engine, descriptor: bytes, *, owner: Any) -> Any:
            rank = engines.index(engine)
            if rank == 1 or (rank == 2 and owner.address == engines[0].address):
                raise aiote.UsageError("on another host")
            return await real(engine, descriptor, owner=owner)

        monkeypatch.setattr(aiote.Engine, "map_memory", map_memory)
        await all_of(*[group.reset for group in groups])
        assert pairs_mapped(groups) == [[1, 2], [], [1]]
        await rounds(groups)


@pytest.mark.parametrize("config", [CONFIG, SHAPES["contiguous packed"], SHAPES["mask"]])
async def test_an_epoch_has_memory_of_its_own(config):
    """What is stored through a mapping of an earlier epoch, at any moment of a round, meets nobody."""
    async with ranks(lambda: opened("local"), 2, config) as groups:
        await rounds(groups, 1)
        lanes = [dict(group.mapped_inboxes.lanes[0]) for group in groups]
        old = [memory for group in groups for memory in (group.memory._shared, *group.memory._slots.values()) if memory]
        await all_of(*[group.reset for group in groups])
        assert [memory.closed for memory in old] == [True, True]
        stop = anyio.Event()

        async def stores() -> None:
            while not stop.is_set():
                for inboxes in lanes:
                    for inbox in inboxes.values():
                        inbox.received[...] = inbox.answers[...] = 0xFF
                await anyio.sleep(0)

        async def makes() -> None:
            await rounds(groups)
            stop.set()

        await all_of(stores, makes)


async def test_a_successor_gets_new_memory_and_what_was_lost_has_none_of_it():
    async with ranks(lambda: opened("local", **LOST_SOON), 3, CONFIG) as groups:
        await rounds(groups, 1)
        members = [group.engine.address for group in groups]
        lost = dict(groups[1].mapped_inboxes.lanes[0])
        groups[1].engine.abort()
        await until(lambda: all(groups[rank].membership.failure for rank in (0, 2)))
        await groups.start(members, 1)
        assert pairs_mapped(groups) == [[1, 2], [0, 2], [0, 1]]
        for rank, inbox in lost.items():
            assert not np.shares_memory(inbox.received, groups[rank].memory.lanes[0].received)
            inbox.received[...] = 0xFF
            assert not (groups[rank].memory.lanes[0].received == 0xFF).any()
        await rounds(groups)


async def test_without_memory_to_share_rows_go_over_rails(monkeypatch):
    share = aiote.Engine.share_memory

    async def refuses(engine: aiote.Engine, *given: Any, **how: Any) -> Any:
        raise aiote.FabricError(errno.ENOMEM, "no memory", operation="share memory")

    async with ranks(lambda: opened("local"), 2, CONFIG) as groups:
        monkeypatch.setattr(aiote.Engine, "share_memory", refuses)
        await all_of(*[group.reset for group in groups])
        assert pairs_mapped(groups) == [[], []]
        await rounds(groups)
        monkeypatch.setattr(aiote.Engine, "share_memory", share)
        await all_of(*[group.reset for group in groups])
        await rounds(groups, 1)


async def test_a_reset_whose_registration_fails_keeps_no_memory(monkeypatch):
    async with ranks(lambda: opened("local"), 2, CONFIG) as groups:
        register, before = aiote.Engine.register_async, mappings()

        async def refuses(engine: aiote.Engine, *given: Any) -> Any:
            raise aiote.FabricError(errno.ENOMEM, "no memory", operation="register")

        monkeypatch.setattr(aiote.Engine, "register_async", refuses)
        with pytest.raises(aiote.FabricError, match="no memory"):
            await groups[0].reset()
        assert mappings() <= before
        monkeypatch.setattr(aiote.Engine, "register_async", register)
        with anyio.fail_after(PATIENCE_S):
            await all_of(*[group.reset for group in groups])
        assert pairs_mapped(groups) == [[1], [0]]
        await rounds(groups)


async def test_memory_that_is_never_touched_costs_nothing():
    one = replace(CONFIG, rows=1 << 16)
    async with ranks(lambda: opened("local"), 2, one) as groups:
        assert pairs_mapped(groups) == [[1], [0]]
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
            shared = [int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem")]
        await rounds(groups)
        with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
            after = [int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem")]
        assert groups[0].memory.map.inbox > 16 << 20
        assert after[0] - shared[0] < 4 << 10


def test_rows_and_answers_of_a_mapped_inbox_count_once():
    sizes = Sizes(CONFIG, 3)
    experts = np.zeros((3, 8), np.int64)
    experts[0, 3:5], experts[2, 3] = (2, 1), 3
    plan = RoundPlan(sizes, 1, Counts(experts, np.zeros((3, 3), np.int64)))
    back = RoundPlan(sizes, 0, Counts(experts, np.zeros((3, 3), np.int64)))
    assert [plan.arrivals(rank) for rank in (0, 2)] == [3, 3]
    assert [back.replies(rank) for rank in (1, 2)] == [3, 0]
    plan.mapping_ranks = back.mapping_ranks = frozenset({0, 1})
    assert [plan.arrivals(rank) for rank in (0, 2)] == [1, 3]
    assert [back.replies(rank) for rank in (1, 2)] == [1, 0]


@pytest.mark.parametrize(
    ("there", "here", "nbytes"),
    [([3], [0], 8), ([-1], [0], 8), ([0], [5], 8), ([0], [-1], 8), ([0], [0], 9), ([0], [0], -1), ([0, 1], [0], 8)],
)
def test_a_copy_out_of_bounds_copies_nothing(there, here, nbytes):
    to, source = np.zeros((3, 8), np.uint8), np.ones((5, 8), np.uint8)
    numbers = [np.array([0, *rows], np.int64) for rows in (there, here)]
    with pytest.raises(IndexError, match="outside of its memory"):
        copy_rows(to, source, *numbers, nbytes)
    assert not to.any()
    copy_rows(to, source, np.array([2, 0], np.int64), np.array([4, 0], np.int64), 8)
    assert to.sum(1).tolist() == [8, 0, 8]
