"""Counters in a row: waited for together, in the order of their immediates, whatever comes first."""

from __future__ import annotations

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_progress, each_provider, go_round, linked, opened, until

pytestmark = [pytest.mark.libfabric, pytest.mark.anyio]

FIRST = 100


async def send(engine: aiote.Engine, to: aiote.Engine, *imms: int) -> None:
    """Have these immediates counted at another engine, in this order."""
    for imm in imms:
        before = to.statistics().immediates
        await engine.write_imm(None, to.address, imm)
        await until(lambda before=before: to.statistics().immediates > before)


@each_provider
@each_progress
async def test_a_row_goes_as_far_as_all_before_have_their_counts(provider, progress):
    with anyio.fail_after(PATIENCE_S):
        async with linked(provider, progress=progress) as (owner, writer):
            with owner.counters(FIRST, [2, 1, 0, 1]) as row:
                assert len(row) == 4
                await send(writer, owner, FIRST + 1, FIRST)
                assert row.progress == (2, 1)  # the third needs none
                await send(writer, owner, FIRST)
                assert await row.wait(1) == 3
                assert row.progress == (3, 0)
                await send(writer, owner, FIRST + 3)
                assert [await row.wait(count) for count in (0, 4)] == [4, 4]
            assert [owner.counter(FIRST + at).value for at in range(4)] == [0] * 4


async def test_one_arrival_ends_every_wait_of_the_row_that_it_satisfies():
    async def wait(count: int) -> None:
        reached.append((count, await row.wait(count)))

    with anyio.fail_after(PATIENCE_S):
        async with linked("sim") as (owner, writer):
            reached: list[tuple[int, int]] = []
            with owner.counters(FIRST, [1] * 3) as row:
                async with anyio.create_task_group() as group:
                    for count in (3, 1, 3):
                        group.start_soon(wait, count)
                    await send(writer, owner, FIRST + 2, FIRST + 1)
                    assert reached == []
                    await send(writer, owner, FIRST)
                assert sorted(reached) == [(1, 3), (3, 3), (3, 3)]


async def test_a_wait_that_is_cancelled_loses_nothing():
    with anyio.fail_after(PATIENCE_S):
        async with linked("sim") as (owner, writer):
            with owner.counters(FIRST, [1, 1]) as row:
                for _ in range(3):
                    with anyio.move_on_after(0.01) as scope:
                        await row.wait(2)
                    assert scope.cancelled_caught
                await send(writer, owner, FIRST, FIRST + 1)
                assert await row.wait(2) == 2


async def test_closing_a_row_ends_its_waits_and_drops_its_counts():
    async with linked("sim") as (owner, writer):
        for end in ("row", "engine"):
            row = owner.counters(FIRST, [1, 2])
            await send(writer, owner, FIRST + 1)

            async def wait(row: aiote.CounterRow = row) -> None:
                with pytest.raises(aiote.ClosedError):
                    await row.wait(2)

            with anyio.fail_after(PATIENCE_S):
                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await go_round()
                    if end == "engine":
                        await owner.aclose()
                    row.close()
            if end == "row":
                assert owner.counter(FIRST + 1).value == 0
                assert owner._runtime.core.statistics()["counters"] == 0
            with pytest.raises(aiote.ClosedError):
                await row.wait(1)


async def test_a_row_begins_empty_and_leaves_others_their_counts():
    async with linked("sim") as (owner, writer):
        await send(writer, owner, FIRST)
        with owner.counters(FIRST, [1]) as row:
            assert row.progress == (0, 0)
        with owner.counter(FIRST) as counter:
            await send(writer, owner, FIRST)
            with owner.counters(FIRST, [2]) as row:
                assert row.progress == (0, 1)
            assert counter.value == 1


async def test_bad_arguments_of_a_row_are_refused():
    async with opened("sim") as engine:
        for first, needs in ((-1, [1]), (1 << 28, [1]), ((1 << 28) - 1, [1, 1]), (0, [-1]), (0, [1.0])):
            with pytest.raises(aiote.UsageError):
                engine.counters(first, needs)
        assert engine._runtime.core.statistics()["counters"] == 0
        with engine.counters(0, [1]) as row, pytest.raises(aiote.UsageError, match="has 1 immediates"):
            await row.wait(2)
    async with opened("sim", max_counters=2) as engine:
        with pytest.raises(aiote.UsageError, match="max_counters"):
            engine.counters(0, [1, 1, 1])
        assert engine._runtime.core.statistics()["counters"] == 0
