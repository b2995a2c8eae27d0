"""What peers may do with registered memory, and what this process sees of it."""

from __future__ import annotations

import dataclasses
import gc

import anyio
import numpy as np
import pytest

import aiote
from aiote.core.descriptor import RegionDescriptor
from support.engines.opening import PATIENCE_S, each_provider, opened, pair, run_script, until

pytestmark = pytest.mark.anyio
BYTES = 4096


@each_provider
@pytest.mark.parametrize("access", ["read-write", "read", "write"])
async def test_a_peer_may_do_what_the_descriptor_says(provider, access):
    with anyio.fail_after(PATIENCE_S):
        async with pair(provider) as (left, right):
            theirs = bytearray(b"t" * BYTES)
            region = right.register(theirs, access)
            assert (region.access, region.writable) == (access, True)
            for part in (region, region[64:128]):
                far = left.attach(part.descriptor)
                assert (far.writable, far.readable) == ("write" in access, "read" in access)
                mine = left.register(bytearray(b"m" * len(far)))
                if far.readable:
                    await left.read(far, mine)
                    assert bytes(memoryview(mine)) == b"t" * len(far)
                else:
                    with pytest.raises(aiote.UsageError, match="access='write'"):
                        await left.read(far, mine)
                source = left.register(b"w" * len(far))
                if far.writable:
                    await left.write(source, far)
                    assert theirs.count(b"w") == len(far)
                    theirs[:] = b"t" * BYTES
                else:
                    with pytest.raises(aiote.UsageError, match="read-only"):
                        await left.write(source, far)


@pytest.mark.parametrize("provider", ["tcp", "local", "socket", "sim", "verbs"])
@pytest.mark.parametrize("access", ["read", "write"])
async def test_a_forged_descriptor_opens_nothing_more(provider, access):
    """What the owner did not grant its NIC refuses, whatever the peer believes; shm of libfabric checks no rights."""
    with anyio.fail_after(PATIENCE_S):
        async with pair(provider) as (left, right):
            theirs = bytearray(b"t" * BYTES)
            region = right.register(theirs, access)
            told = RegionDescriptor.from_bytes(region.descriptor)
            far = left.attach(bytes(dataclasses.replace(told, readable=True, writable=True)))
            mine = left.register(bytearray(b"m" * BYTES))
            with pytest.raises((aiote.TransferError, aiote.PeerError)):
                if access == "write":
                    await left.read(far, mine)
                else:
                    await left.write(mine, far)
            await until(lambda: not (left.statistics().outstanding or right.statistics().outstanding))
            assert bytes(theirs) == b"t" * BYTES
            assert bytes(memoryview(mine)) == b"m" * BYTES


async def test_a_local_region_has_no_descriptor_and_can_be_lent():
    with anyio.fail_after(PATIENCE_S):
        async with pair("socket") as (left, right):
            peer = await right.connect(left.address)
            theirs = bytearray(b"t" * BYTES)
            region = right.register(theirs, access="local")
            for part in (region, region[0:8]):
                with pytest.raises(aiote.UsageError, match="the region is local"):
                    _ = part.descriptor
            async with region.lease(slice(0, 8), peer) as lease:
                await left.write(left.register(b"borrowed"), left.attach(lease.descriptor))
            assert bytes(memoryview(region)[:8]) == b"borrowed"
            mine = left.register(bytearray(BYTES))
            await right.write(region, right.attach(mine.descriptor))
            assert bytes(memoryview(mine)[:8]) == b"borrowed"


async def test_a_lease_grants_no_more_than_its_region():
    with anyio.fail_after(PATIENCE_S):
        async with pair("socket") as (left, right):
            peer = await right.connect(left.address)
            region = right.register(bytearray(BYTES), access="read")
            async with region.lease(slice(0, 8), peer) as lease:
                far = left.attach(lease.descriptor)
                assert (far.readable, far.writable) == (True, False)


@pytest.mark.parametrize("wrong", ["", "rw", None, 3, "READ"])
async def test_an_access_of_another_name_is_refused(wrong):
    async with opened("socket") as engine:
        with pytest.raises(aiote.UsageError, match="expected one of 'read-write', 'read', 'write', 'local'"):
            engine.register(bytearray(8), wrong)


async def test_read_only_memory_is_not_opened_for_writing():
    """Opening nothing, it would be taken for a local one, which a lease opens for reading."""
    async with opened("socket") as engine:
        with pytest.raises(aiote.UsageError, match="the memory is read-only, so peers cannot write"):
            engine.register(b"constant", "write")
        lender = bytearray(b"lent")
        with pytest.raises(aiote.UsageError):
            engine.register(memoryview(lender).toreadonly(), "write")
        lender.append(0)


async def test_a_view_of_a_region_is_its_memory():
    async with opened("socket") as engine:
        array = np.arange(16, dtype=np.uint8)
        async with engine.register(array) as region:
            view = memoryview(region[4:8])
            assert (bytes(view), view.readonly, len(view)) == (b"\x04\x05\x06\x07", False, 4)
            view[0] = 99
            assert array[4] == 99
            assert np.asarray(region).tolist() == array.tolist()
            assert bytes(region[3:3]) == b""
            view.release()
        async with engine.register(b"constant") as region:
            view = memoryview(region)
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 1
            view.release()


async def test_a_view_holds_the_buffer_behind_the_close():
    """The lender cannot take its memory back while somebody looks at it; then it can at once."""
    async with opened("socket") as engine:
        lender = bytearray(b"lent")
        region = engine.register(lender)
        view, other = memoryview(region), memoryview(region)[1:2]
        await region.aclose()
        assert region.closed
        with pytest.raises(BufferError, match="closed"):
            memoryview(region)
        for each in (view, other):
            with pytest.raises(BufferError):
                lender.append(0)
            assert bytes(view[:4] if each is view else other) in (b"lent", b"e")
            each.release()
        del region, view, other
        gc.collect()
        lender.append(0)


async def test_a_view_outlives_the_engine():
    async with opened("socket") as engine:
        view = memoryview(engine.register(bytearray(b"lent")))
    assert bytes(view) == b"lent"
    view.release()


def test_a_view_collected_with_its_region_gives_the_buffer_back():
    """The collector clears the region first; the view gives the buffer back after that."""
    done = run_script(
        """
        import asyncio, gc
        import aiote

        class Holder:
            pass

        async def main():
            async with aiote.open_engine("local") as engine:
                gc.disable()
                for _ in range(10):
                    region = engine.register(bytearray(4096))
                    holder = Holder()
                    holder.itself, holder.region, holder.view = holder, region, memoryview(region)
                    await region.aclose()
                    del holder, region
                    gc.collect()

        asyncio.run(main())
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
