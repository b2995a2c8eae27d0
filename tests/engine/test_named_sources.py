"""Immediates that have named their sources: who else writes with them is not counted, and told of."""

from __future__ import annotations

import pytest

import aiote
from support.engines.opening import each_provider, linked, opened, until

pytestmark = pytest.mark.libfabric


async def write(engine: aiote.Engine, to: aiote.Engine, imm: int, times: int = 1) -> None:
    for _ in range(times):
        await engine.write_imm(None, to.address, imm)


@pytest.mark.anyio
@each_provider
async def test_only_sources_count_and_others_are_tallied(provider):
    async with linked(provider) as (friend, hub), opened(provider) as stranger:
        peer = await hub.connect(friend.address)
        with hub.reserve_immediates(3, [peer]) as block, hub.counter(block[1]) as counter:
            source, memory = stranger.register(b"there"), bytearray(5)
            target = stranger.attach(hub.register(memory).descriptor)
            await stranger.write_imm(source, target, block[1])
            await write(stranger, hub, block[2], 2)
            await write(friend, hub, block[1], 2)
            await counter.wait(2)
            await until(lambda: hub.statistics().uninvited == 3)
            assert memory == b"there"  # the bytes are the stranger's own business: it has the descriptor
            assert counter.value == 0
            block.allow(stranger.address)
            await write(stranger, hub, block[1])
            await counter.wait()
            assert hub.statistics().uninvited == 3
        assert friend.statistics().uninvited == 0


@pytest.mark.anyio
@each_provider
async def test_a_source_that_connects_later_counts_from_its_first_write(provider):
    async with opened(provider) as hub, opened(provider) as later:
        with hub.reserve_immediates(1, [later.address]) as block, hub.counter(block[0]) as counter:
            await write(later, hub, block[0], 3)
            await counter.wait(3)
            later.find_peer(hub.address).disconnect()
            # The same life of it, over another connection.
            await write(later, hub, block[0])
            await counter.wait()
        assert hub.statistics().uninvited == 0


async def test_another_life_of_a_source_is_none():
    async with opened("sim") as hub:
        config = {"identity": b"i" * 16}
        async with opened("sim", **config) as first:
            block = hub.reserve_immediates(1, [first.address])
            counter = hub.counter(block[0])
            await write(first, hub, block[0])
            await counter.wait()
        async with opened("sim", **config) as second:
            assert second.address.identity == first.address.identity
            await write(second, hub, block[0])
            await until(lambda: hub.statistics().uninvited == 1)
            assert counter.value == 0
        counter.close()
        block.close()


async def test_nobody_inherits_what_a_lost_source_might():
    """The native half of a peer that comes may lie where that of a lost one did."""
    async with opened("sim") as hub:
        block = hub.reserve_immediates(1, sources=())
        counter = hub.counter(block[0])
        for turn in range(40):
            async with opened("sim") as engine:
                if turn % 2 == 0:
                    block.allow(engine.address)
                await write(engine, hub, block[0])
                await until(lambda turn=turn: counter.value + hub.statistics().uninvited == turn + 1)
        assert (counter.value, hub.statistics().uninvited) == (20, 20)
        counter.close()
        block.close()
        assert hub.reserve_immediates(1)
        assert not hub._runtime.sources


async def test_a_block_that_is_closed_or_has_no_sources_names_none():
    async with opened("sim") as hub, opened("sim") as other:
        block = hub.reserve_immediates(2)
        with pytest.raises(aiote.UsageError, match="reserve it with sources"):
            block.allow(other.address)
        named = hub.reserve_immediates(2, ())
        named.close()
        named.close()
        with pytest.raises(aiote.ClosedError, match="the block of immediates is closed"):
            named.allow(other.address)
        kept = hub.reserve_immediates(2, [other.address])
    with pytest.raises(aiote.ClosedError):
        kept.allow(other.address)
    kept.close()
    block.close()
