"""Scatter: one request for many peers, each with its own length and place, one count at each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import numpy as np
import pytest

import aiote
from aiote import ScatterTarget
from support.engines.opening import PATIENCE_S, across, each_memory, each_progress, each_provider, noise, opened, until

pytestmark = pytest.mark.libfabric


@asynccontextmanager
async def star(provider: str, points: int, **settings) -> AsyncIterator[tuple[aiote.Engine, list[aiote.Engine]]]:
    """Open an engine and several others for it to write to."""
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(PATIENCE_S))
        hub = await stack.enter_async_context(opened(provider, **settings))
        others = [await stack.enter_async_context(opened(provider, **settings)) for _ in range(points)]
        yield hub, others


@pytest.mark.anyio
@each_memory
@each_progress
async def test_every_target_gets_its_bytes_and_one_count(provider, progress):
    lengths = [0, 1, 8, 16385, 196611, 3_000_000]
    async with star(provider, 3, progress=progress, largest_message=1 << 20) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        source = noise(4_000_000)
        region = hub.register(source)
        memories = [np.zeros(8_000_000, np.uint8) for _ in others]
        remotes = [across(hub, other, memory) for other, memory in zip(others, memories, strict=True)]
        expected = [memory.copy() for memory in memories]
        targets = []
        free = [3, 5, 7]
        for i, length in enumerate([*lengths, *reversed(lengths)]):
            who, start = i % 3, free[i % 3]
            free[who] += length + i
            targets.append(ScatterTarget(region[i : i + length], remotes[who][start : start + length]))
            expected[who][start : start + length] = source[i : i + length]
        await hub.scatter(group, targets, 5)
        for other in others:
            await other.counter(5).wait(len(targets) // 3)
            assert other.counter(5).value == 0
        assert all(np.array_equal(memory, wanted) for memory, wanted in zip(memories, expected, strict=True))
        await hub.scatter(group, [ScatterTarget(region, remote[:4_000_000]) for remote in remotes])
        assert all(np.array_equal(memory[:4_000_000], source) for memory in memories)


@each_provider
async def test_a_scatter_without_targets_ends_and_counts_nothing(provider):
    async with star(provider, 1) as (hub, others):
        group = await hub.peer_group([others[0].address])
        await hub.scatter(group, [], 5)
        await hub.scatter(await hub.peer_group([]), [], 5)
        transfer = hub.submit_scatter(group, [], 5)
        await transfer
        assert others[0].counter(5).value == 0


@each_provider
async def test_immediates_alone_to_several_targets_at_one_member_all_count(provider):
    async with star(provider, 2) as (hub, others):
        group = await hub.peer_group([others[0].address, str(others[1].address)])
        peer = group[0]
        await hub.scatter(group, [ScatterTarget(None, peer), ScatterTarget(None, others[1].address)] * 10, 3)
        for other in others:
            await other.counter(3).wait(10)
            assert other.counter(3).value == 0


@pytest.mark.blocking_allowed("tcp of 1.17 takes 50 ms for each connection, and these are all made in one turn")
async def test_one_scatter_to_256_targets_writes_and_counts_each():
    """256 targets, one Python object, and a count at each; eight engines stand for them."""
    async with star("tcp", 8, message_pool=2) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        memories = [np.zeros(32 * 64, np.uint8) for _ in others]
        remotes = [across(hub, other, memory) for other, memory in zip(others, memories, strict=True)]
        region = hub.register(noise(256 * 64))
        targets = [
            ScatterTarget(region[i * 64 : i * 64 + 64], remotes[i % 8][i // 8 * 64 : i // 8 * 64 + 64])
            for i in range(256)
        ]
        await hub.scatter(group, targets, 9)
        whole = noise(256 * 64).reshape(256, 64)
        for number, (other, memory) in enumerate(zip(others, memories, strict=True)):
            await other.counter(9).wait(32)
            assert np.array_equal(memory.reshape(32, 64), whole[number::8])


@each_provider
async def test_a_lost_member_fails_alone_and_by_name(provider):
    async with star(provider, 3) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        memories = [bytearray(8) for _ in others]
        remotes = [across(hub, other, memory) for other, memory in zip(others, memories, strict=True)]
        region = hub.register(b"8 bytes.")
        await others[1].aclose()
        await group[1].wait_closed()
        with pytest.raises(aiote.PeerError, match="closed"):
            await hub.scatter(group, [ScatterTarget(region, remote) for remote in remotes], 1)
        assert [bytes(memory) for memory in memories] == [bytes(8)] * 3, "nothing was started"
        rest = await hub.peer_group([group[0], group[2]])
        await hub.scatter(rest, [ScatterTarget(region, remotes[0]), ScatterTarget(region, remotes[2])], 1)
        assert bytes(memories[0]) == bytes(memories[2]) == b"8 bytes."


@each_memory
async def test_a_member_that_dies_under_way_is_the_error_and_the_others_are_served(provider):
    # More than is on its way at a time: a NIC would otherwise have it all there before the member dies.
    size = 24 << 20
    async with star(provider, 2) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        memories = [np.zeros(size, np.uint8) for _ in others]
        remotes = [across(hub, other, memory) for other, memory in zip(others, memories, strict=True)]
        region = hub.register(noise(size))
        transfer = hub.submit_scatter(group, [ScatterTarget(region, remote) for remote in remotes], 1)
        others[1].abort()
        await others[0].counter(1).wait(1)
        assert np.array_equal(memories[0], noise(size))
        with pytest.raises(aiote.TransferError, match="target 1 with peer") as caught:
            await transfer
        assert str(others[1].address) in str(caught.value)
        assert caught.value.confirmed_bytes >= size


@pytest.mark.anyio
@each_memory
async def test_a_cancelled_scatter_lets_go_of_all_memory(provider):
    size = 32 << 20
    async with star(provider, 2) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        remotes = [across(hub, other, np.zeros(size, np.uint8)) for other in others]
        region = hub.register(noise(size))
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hub.scatter, group, [ScatterTarget(region, remote) for remote in remotes], 1)
                await anyio.sleep(0)
                scope.cancel()
        assert scope.cancelled_caught
        assert region.memory.in_flight == 0
        await region.aclose()
        await until(lambda: hub.statistics().outstanding == 0)


@each_memory
async def test_a_lease_that_is_revoked_ends_the_scatter(provider):
    async with star(provider, 2) as (hub, others):
        group = await hub.peer_group([other.address for other in others])
        memories = [others[0].register(bytearray(8)), others[1].register(bytearray(8))]
        region = hub.register(b"8 bytes.")
        lease = memories[0].lease(slice(0, 8), hub.address)
        async with lease:
            targets = [
                ScatterTarget(region, hub.attach(lease.descriptor)),
                ScatterTarget(region, hub.attach(memories[1].descriptor)),
            ]
            await hub.scatter(group, targets, 1)
        with pytest.raises(aiote.TransferError, match="revoked"):
            await hub.scatter(group, targets, 1)
        await others[1].counter(1).wait(1)
        assert others[1].counter(1).value == 0


async def test_scatters_beyond_the_limit_wait_or_are_refused():
    async with star("tcp", 1, max_transfers=4) as (hub, others):
        group = await hub.peer_group([others[0].address])
        targets = [ScatterTarget(None, group[0])]
        held = [hub.submit_scatter(group, targets, 2) for _ in range(4)]
        with pytest.raises(aiote.QueueFull, match="await engine.room"):
            hub.submit_scatter(group, targets, 2)
        await asyncio.gather(*(hub.scatter(group, targets, 2) for _ in range(20)))
        for transfer in held:
            await transfer
        await others[0].counter(2).wait(24)


async def test_bad_targets_are_refused_before_anything_is_posted():
    async with star("tcp", 2) as (hub, others):
        group = await hub.peer_group([others[0].address])
        region = hub.register(b"8 bytes.")
        mine = across(hub, others[0], bytearray(8))
        theirs = across(hub, others[1], bytearray(8))
        good = ScatterTarget(region, mine)
        cases = {
            "outside the group": ScatterTarget(region, theirs),
            "a source of 8 bytes and a destination of 4": ScatterTarget(region, mine[:4]),
            "expected ScatterTarget": 7,
            "Region as source": ScatterTarget(b"raw", mine),
            "another engine": ScatterTarget(others[1].register(b"8 bytes."), mine),
        }
        for text, bad in cases.items():
            with pytest.raises(aiote.UsageError, match=text):
                await hub.scatter(group, [good, bad], 1)
        with pytest.raises(aiote.UsageError, match="immediate"):
            await hub.scatter(group, [good], 1 << 28)
        with pytest.raises(aiote.UsageError, match="PeerGroup"):
            await hub.scatter([others[0].address], [good], 1)
        with pytest.raises(aiote.UsageError, match="twice"):
            await hub.peer_group([others[0].address, group[0]])
        with pytest.raises(aiote.UsageError, match="own address"):
            await hub.peer_group([hub.address])
        assert others[0].counter(1).value == 0


async def test_a_wait_for_room_at_several_members_is_not_starved():
    """At each member somebody takes whatever room there is; the room at one is kept while the other is waited for."""
    async with opened("socket", max_transfers=2) as hub, opened("socket") as first, opened("socket") as second:
        group = await hub.peer_group([first.address, second.address])
        over = False

        async def writes(member: aiote.Peer) -> None:
            while not over:
                await hub.room(member)
                hub.submit_write_imm(None, member, 1)

        async with anyio.create_task_group() as tasks:
            for member in group:
                for _ in range(6):
                    tasks.start_soon(writes, member)
            await until(lambda: not any(member.has_room for member in group))
            for number in range(20):
                with anyio.fail_after(PATIENCE_S):
                    await hub.room_for(group)
                # Without an await between, each member has the room that was waited for.
                hub.submit_scatter(group, [aiote.ScatterTarget(None, member) for member in group], 100 + number)
            over = True
        for one in (first, second):
            await one.counter(119).wait(1)


async def test_a_wait_for_room_at_several_members_fails_when_one_is_lost():
    async with opened("socket", max_transfers=1) as hub, opened("socket") as first:
        async with opened("socket") as second:
            group = await hub.peer_group([first.address, second.address])
            stuck = hub.submit_write_imm(None, group[0], 1)
            await second.aclose()
            await until(lambda: group[1].lost)
            with pytest.raises(aiote.PeerError):
                await hub.room_for(group)
            await stuck
        for _ in range(3):
            await hub.room(first.address)
            hub.submit_write_imm(None, group[0], 1)
