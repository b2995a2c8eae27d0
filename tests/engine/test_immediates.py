"""Immediates that an engine grants: nobody else has one, the user's half is left alone, and a freed one rests."""

from __future__ import annotations

import gc
import itertools
import random
from typing import Any

import pytest

import aiote
from aiote.transfers import immediates
from aiote.transfers.immediates import END, FIRST, LONGEST, ImmediateGrants
from support.engines.opening import linked, opened, until


class Runtime:
    """Whose counters are those of a set of values."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.core: Any = self

    def is_counted(self, imm: int) -> bool:
        return imm in self.open


def test_nothing_is_granted_twice_and_nothing_of_the_user_s_half():
    rng, runtime = random.Random(7), Runtime()
    grants, blocks, owned = ImmediateGrants(runtime), [], set[int]()
    for _ in range(1000):
        turn = rng.random()
        if turn < 0.45:
            blocks.append(grants.block(rng.choice((1, 2, 5, 60, 300))))
            new = set(range(blocks[-1].first, blocks[-1].first + len(blocks[-1])))
        elif turn < 0.7:
            new = {grants.single()}
            runtime.open |= new
        elif blocks:
            block = blocks.pop(rng.randrange(len(blocks)))
            block.close()
            block.close()
            owned -= set(range(block.first, block.first + len(block)))
            continue
        else:
            continue
        assert FIRST <= min(new) <= max(new) < END
        assert not new & owned
        owned |= new
        if rng.random() < 0.1:
            # As if it were to come round: among those that are taken.
            grants._next = rng.choice(sorted(owned))


def test_one_that_was_given_back_comes_again_after_all_others():
    grants, values = ImmediateGrants(Runtime()), set[int]()
    for _ in range(1000):
        with grants.block(7) as block:
            new = {block[number] for number in range(7)}
        new.add(grants.single())
        assert not new & values
        values |= new
    assert len(grants._block_starts) <= 1


def test_who_was_told_one_block_cannot_tell_the_next():
    grants = ImmediateGrants(Runtime())
    firsts = [grants.block(3).first for _ in range(50)]
    assert len({b - a for a, b in itertools.pairwise(firsts)}) > 10


def test_blocks_have_so_many_at_most_and_room_comes_back(monkeypatch):
    monkeypatch.setattr(immediates, "MOST", 4000)
    grants = ImmediateGrants(Runtime())
    blocks = [grants.block(1000) for _ in range(4)]
    with pytest.raises(aiote.UsageError, match="4000 immediates are reserved"):
        grants.block(1)
    assert FIRST <= grants.single() < END
    blocks.pop().close()
    assert len(grants.block(1000)) == 1000


def test_a_half_without_a_row_that_is_long_enough_is_an_error():
    class Odd(Runtime):
        def is_counted(self, imm: int) -> bool:
            return imm & 0xFF == 1

    grants = ImmediateGrants(Odd())
    with pytest.raises(aiote.UsageError, match="65536 consecutive immediates are not free"):
        grants.block(LONGEST)
    assert FIRST <= grants.single() < END


@pytest.mark.parametrize("count", [0, -1, LONGEST + 1, 1.5, "7", None])
async def test_a_wrong_number_is_refused(count):
    async with opened("sim") as engine:
        with pytest.raises(aiote.UsageError, match="expected the number of immediates, an integer from 1 to 2[*][*]16"):
            engine.reserve_immediates(count)


async def test_a_block_counts_what_peers_write_and_is_skipped_by_counters():
    async with linked("sim") as (left, right):
        with right.reserve_immediates(3) as block:
            assert [block[number] for number in range(3)] == [*range(block.first, block.first + 3)]
            with pytest.raises(IndexError):
                block[3]
            with right.counters(block.first, [1, 2, 0]) as row:
                for number in (0, 1, 1):
                    await left.write_imm(None, right.address, block[number])
                assert await row.wait(3) == 3
            # What is still counted on a value keeps it from being granted, though its block is closed.
            await left.write_imm(None, right.address, block[0])
            await until(lambda: right.statistics().immediates == 4)
        right._counters._grants._next = block.first
        with right.counter() as counter:
            assert counter.imm == block.first + 1


async def test_a_block_that_was_dropped_is_given_back():
    async with opened("sim") as engine:
        grants = engine._counters._grants
        engine.reserve_immediates(5)
        gc.collect()
        assert len(engine.reserve_immediates(6)) == 6
        assert grants._reserved == 6


async def test_a_closed_engine_grants_nothing():
    async with opened("sim") as engine:
        block = engine.reserve_immediates(2)
    with pytest.raises(aiote.ClosedError):
        engine.reserve_immediates(1)
    block.close()
    assert repr(block).endswith("closed>")
