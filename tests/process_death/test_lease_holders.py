"""Leases whose holder is stopped, silent or dead: revoking them ends all the same, and nothing lands afterwards."""

from __future__ import annotations

import random

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_progress, opened, real_provider, until
from support.machine import SLOWER

pytestmark = pytest.mark.libfabric

BIG = 16 << 20 if SLOWER == 1 else 4 << 20
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""
SOON = {"drain_timeout": 0.2, "heartbeat_timeout": NEVER_S}


async def hammered(owner: aiote.Engine, holder, region: aiote.Region, memory: np.ndarray) -> aiote.Lease:
    """Lease all of a region to a child that writes to it without end, and wait until it does."""
    lease = region.lease(slice(0, BIG), holder.address)
    await holder.ask("hammer", descriptor=lease.descriptor.hex(), value=1)
    await until(lambda: memory.any())
    return lease


async def failed(holder, count: int) -> list[str]:
    """Wait until so many of the child's writers have ended, and return why."""
    while len(failures := (await holder.ask("failures"))["failures"]) < count:
        await anyio.sleep(0.005)
    return failures


@real_provider
@each_progress
async def test_nothing_lands_after_the_revocation_from_a_holder_stopped_in_a_write(provider, progress, child):
    """The memory is another's at once: what the holder had under way does not land when it continues."""
    holder = child()
    moments = random.Random(7)
    with anyio.fail_after(PATIENCE_S):
        await holder.open(provider, heartbeat_timeout=NEVER_S)
        async with opened(provider, progress=progress, **SOON) as owner:
            memory = np.zeros(BIG, np.uint8)
            region = owner.register(memory)
            for turn in range(3):
                lease = await hammered(owner, holder, region, memory)
                spent = lease.descriptor
                await anyio.sleep(moments.uniform(0, 0.01))
                await holder.stop()
                await lease.revoke()
                memory[:] = 0
                await anyio.sleep(0.02)
                assert not memory.any()
                holder.resume()
                before = await failed(holder, 8 * turn + 4)
                assert not memory.any()
                # It may come back, and is told what it has lost.
                await owner.connect(holder.address)
                await holder.ask("hammer", descriptor=spent.hex(), value=1)
                for text in (await failed(holder, len(before) + 4))[len(before) :]:
                    assert f"it has revoked lease {lease.number}" in text
                assert not memory.any()


@real_provider
async def test_revoking_the_lease_of_a_killed_holder_ends(provider, child):
    holder = child()
    with anyio.fail_after(PATIENCE_S):
        await holder.open(provider, heartbeat_timeout=NEVER_S)
        async with opened(provider, **SOON) as owner, opened(provider) as other:
            await owner.connect(other.address)
            memory = np.zeros(BIG, np.uint8)
            region = owner.register(memory)
            lease = await hammered(owner, holder, region, memory)
            holder.kill()
            await lease.revoke()
            memory[:] = 0
            await anyio.sleep(0.05)
            assert not memory.any()
            # Others are served on, and the memory is there to be lent again.
            async with region.lease(slice(0, BIG), other.address) as again:
                await other.write(other.register(b"3" * BIG), other.attach(again.descriptor))
            assert (memory == ord("3")).all()


@real_provider
async def test_a_live_holder_gives_it_back_and_stays(provider, child):
    holder = child()
    with anyio.fail_after(PATIENCE_S):
        # A refused write breaks the connection of some NICs, and the new one may take its time on a busy machine.
        await holder.open(provider, heartbeat_timeout=PATIENCE_S)
        async with opened(provider, heartbeat_timeout=PATIENCE_S, drain_timeout=PATIENCE_S) as owner:
            memory = np.zeros(BIG, np.uint8)
            region = owner.register(memory)
            for turn in range(5):
                lease = await hammered(owner, holder, region, memory)
                await lease.revoke()
                memory[:] = 0
                for text in (await failed(holder, 4 * turn + 4))[4 * turn :]:
                    assert f"it has revoked lease {turn + 1}" in text
                assert not memory.any()
            assert len(owner.peers) == 1
