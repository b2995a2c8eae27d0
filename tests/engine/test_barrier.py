"""Barriers: nobody is through before everybody has come, round after round, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_provider, go_round, opened, round_trips

pytestmark = pytest.mark.libfabric


@asynccontextmanager
async def circle(provider: str, members: int) -> AsyncIterator[list[tuple[aiote.Engine, aiote.PeerGroup]]]:
    """Open engines that are all in one another's groups."""
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(PATIENCE_S))
        engines = [await stack.enter_async_context(opened(provider)) for _ in range(members)]
        groups = [await one.peer_group([other.address for other in engines if other is not one]) for one in engines]
        yield list(zip(engines, groups, strict=True))


@each_provider
async def test_no_member_leaves_a_round_before_all_have_entered_it(provider):
    """Each member pauses at random; none may be a round ahead of another's entry."""
    rounds = 60
    draw = random.Random(4)
    async with circle(provider, 4) as members:
        entered = [0] * len(members)

        async def member(number: int, engine: aiote.Engine, group: aiote.PeerGroup) -> None:
            for turn in range(rounds):
                if draw.random() < 0.3:
                    await asyncio.sleep(draw.random() * 0.003)
                entered[number] = turn + 1
                await engine.barrier(group, 8)
                assert min(entered) >= turn + 1, "through before everybody had come"

        await asyncio.gather(*(member(number, *pair) for number, pair in enumerate(members)))
        assert entered == [rounds] * 4
        for engine, _ in members:
            assert engine.counter(8).value == engine.counter(9).value == 0


@each_provider
async def test_a_barrier_of_an_empty_group_ends_at_once(provider):
    async with circle(provider, 1) as ((engine, group),):
        assert len(group) == 0
        await engine.barrier(group, 8)


@each_provider
async def test_a_member_that_is_lost_ends_the_wait(provider):
    async with circle(provider, 3) as members:
        (one, group), (two, other), (three, _) = members
        waits = [asyncio.create_task(one.barrier(group, 8)), asyncio.create_task(two.barrier(other, 8))]
        await round_trips(one, two)
        assert not any(wait.done() for wait in waits)
        # What they write to it for the barrier has ended: else that write fails, and not the wait.
        for member in (one, two):
            await round_trips(member, three)
        await three.aclose()
        for wait in waits:
            with pytest.raises(aiote.PeerError, match="barrier"):
                await wait
        with pytest.raises(aiote.UsageError, match="ended with an error"):
            await one.barrier(group, 8)


@pytest.mark.anyio
async def test_a_cancelled_barrier_refuses_its_immediate_afterwards():
    async with circle("tcp", 2) as ((one, group), _):
        with anyio.move_on_after(0.02) as scope:
            await one.barrier(group, 8)
        assert scope.cancelled_caught
        with pytest.raises(aiote.UsageError, match="another immediate"):
            await one.barrier(group, 8)


async def test_closing_the_engine_ends_the_barrier_with_an_error():
    async with circle("tcp", 2) as ((one, group), _):
        wait = asyncio.create_task(one.barrier(group, 8))
        await go_round()
        await one.aclose()
        with pytest.raises(aiote.AioteError):
            await wait


async def test_a_group_of_another_engine_is_refused():
    async with circle("socket", 2) as ((one, group), (other, others)):
        for wrong in (others, None, [other.address]):
            with pytest.raises(aiote.UsageError, match="expected a PeerGroup of this engine"):
                await one.barrier(wrong, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.barrier, group, 8)
            await other.barrier(others, 8)
