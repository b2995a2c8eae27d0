"""Regions and what is known of remote ones: slices and bounds, descriptors that travel, and their end."""

from __future__ import annotations

import asyncio
import dataclasses

import anyio
import numpy as np
import pytest

import aiote
from aiote.core.descriptor import RailKey, RegionDescriptor
from support.engines.opening import across, each_progress, each_provider, linked, opened, pair, until

pytestmark = pytest.mark.libfabric

BAD_SLICES = [
    (slice(-1, 4), "leaves its 100 bytes"),
    (slice(0, 101), "leaves its 100 bytes"),
    (slice(60, 40), "leaves its 100 bytes"),
    (slice(101, 101), "leaves its 100 bytes"),
    (slice(0, 10, 2), "a slice has no step, got 2; for strided access use Pages"),
    (slice(10, 0, -1), "a slice has no step, got -1"),
    (slice(0.5, 4), "the start of a slice is 0.5, expected an integer"),
    (slice(0, "4"), "the end of a slice is '4', expected an integer"),
    (3, "expected a slice of bytes"),
    ("x", "expected a slice of bytes"),
]


@pytest.mark.parametrize(("item", "says"), BAD_SLICES)
async def test_bad_slices_are_refused(item, says):
    async with pair("tcp") as (left, right):
        local = left.register(bytearray(100))
        for region in (local, across(left, right, bytearray(100))):
            with pytest.raises(aiote.UsageError, match=says):
                region[item]
        with pytest.raises(aiote.UsageError, match=r"leaves its 20 bytes: expected 0 <= start <= stop <= 20"):
            local[40:60][0:21]


@each_provider
async def test_slices_are_bytes_and_nest(provider):
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, np.uint8)
    async with linked(provider) as (left, right):
        local, remote = left.register(source), across(left, right, target)
        assert [len(part) for part in (local[:], local[10:], local[:10], local[10:20], local[100:], local[5:5])] == [
            100, 90, 10, 10, 0, 0,
        ]  # fmt: skip
        assert remote[np.int64(10) : np.int64(20)].nbytes == 10
        await left.write(local[20:80][10:20], remote[50:][5:15])
        expected = np.zeros(100, np.uint8)
        expected[55:65] = source[30:40]
        assert np.array_equal(target, expected)
        assert "100 bytes" in repr(local)
        assert "open" in repr(local)
        assert str(right.address) in repr(remote)


@each_provider
@pytest.mark.verbs_once("kind")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_a_descriptor_travels_by_message(provider, kind):
    """As bytes, of a whole region and of a slice; the slice's descriptor says nothing about the rest."""
    memory = bytearray(100)
    async with pair(provider) as (left, right):
        region = right.register(memory)
        await right.send(left.address, region.descriptor)
        await right.send(left.address, region[40:60].descriptor)
        got = sorted([(await left.recv()).data for _ in range(2)], key=lambda data: left.attach(data).nbytes)
        part, whole = (left.attach(kind(data)) for data in got)
        assert (whole.nbytes, part.nbytes) == (100, 20)
        assert whole.owner == part.owner == right.address
        assert whole.writable
        await left.write(left.register(b"a" * 20), part)
        await left.write(left.register(b"b" * 20), whole[0:20])
        assert memory == b"b" * 20 + bytes(20) + b"a" * 20 + bytes(40)
        with pytest.raises(aiote.UsageError, match="leaves its 20 bytes"):
            part[0:21]


@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_a_region_ends_with_its_engine(how):
    async with opened("tcp") as engine:
        memory = bytearray(100)
        region = engine.register(memory)
        part = region[10:20]
        if how == "aclose":
            await engine.aclose()
        else:
            engine.abort()
        assert region.closed
        assert part.closed
        for one in (region, part):
            with pytest.raises(aiote.ClosedError, match="the region is closed"):
                bytes(one.descriptor)
        await region.aclose()
        memory.clear()


async def test_a_descriptor_may_be_attached_by_many_and_any_time():
    memory = bytearray(3)
    async with pair("tcp") as (left, right), opened("tcp") as third:
        descriptor = right.register(memory).descriptor
        for number, engine in enumerate((left, third, left)):
            await engine.write(engine.register(bytes([number + 1])), engine.attach(descriptor)[number : number + 1])
        assert memory == b"\1\2\3"


@pytest.mark.parametrize("garbage", [b"", b"x", b"aioR", bytes(200), b"aioA" + bytes(100), "text", None, 5])
async def test_garbage_is_no_descriptor(garbage):
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError, match="not a region descriptor"):
            engine.attach(garbage)


async def test_a_truncated_or_changed_descriptor_is_refused_or_harmless():
    """Every truncation is refused; a changed byte is refused or gives a region that nothing was started with."""
    async with pair("tcp") as (left, right):
        descriptor = right.register(bytearray(100)).descriptor
        for length in range(len(descriptor)):
            with pytest.raises(aiote.UsageError):
                left.attach(descriptor[:length])
        with pytest.raises(aiote.UsageError):
            left.attach(descriptor + b"\0")
        for place in range(len(descriptor)):
            changed = bytearray(descriptor)
            changed[place] ^= 0xFF
            try:
                left.attach(changed)
            except aiote.UsageError:
                pass
        assert left.peers == ()


async def test_the_own_descriptor_is_refused():
    async with opened("tcp") as engine:
        region = engine.register(bytearray(8))
        with pytest.raises(aiote.UsageError, match="of this engine's own memory"):
            engine.attach(region.descriptor)


async def test_what_a_peer_attached_is_refused_at_its_owner():
    async with pair("tcp") as (left, right):
        remote = across(left, right, bytearray(8))
        with pytest.raises(aiote.UsageError, match="engine's own address"):
            await right.write(right.register(bytearray(8)), remote)


async def test_every_use_of_a_closed_region_is_refused():
    async with pair("tcp") as (left, right):
        region = left.register(bytearray(8))
        part = region[0:4]
        remote = across(left, right, bytearray(8))
        await part.aclose()
        assert not region.closed, "closing a slice closes nothing"
        await region.aclose()
        await region.aclose()
        assert region.closed
        assert part.closed
        assert "closed" in repr(region)
        for use in (
            lambda: region.descriptor,
            lambda: part.descriptor,
            lambda: left.submit_write(region, remote),
            lambda: left.submit_write(part, remote[0:4]),
            lambda: left.submit_write_imm(region, remote, 1),
            lambda: left.submit_read(remote, region),
            lambda: left.submit_write_pages(aiote.Pages(region, [0], 8), aiote.Pages(remote, [0], 8)),
        ):
            with pytest.raises(aiote.ClosedError, match="the region is closed"):
                use()


@pytest.mark.anyio
@each_provider
@each_progress
async def test_aclose_waits_for_work_in_flight(provider, progress):
    """The buffer is the NIC's until the transfer is over: the region is not closed before."""
    size = 8 << 20
    async with linked(provider, progress=progress, largest_message=65536) as (left, right):
        target = np.zeros(size, np.uint8)
        memory = np.full(size, 7, np.uint8)
        region = left.register(memory)
        transfer = left.submit_write(region, across(left, right, target))
        # A native thread may be done by now.
        assert progress == "thread" or not transfer.done()
        ended = []

        async def close() -> None:
            await region.aclose()
            ended.append(transfer.done())

        async with anyio.create_task_group() as group:
            group.start_soon(close)
            group.start_soon(close)
            await until(lambda: region.closed)
            with pytest.raises(aiote.ClosedError):
                left.submit_write(region, across(left, right, target))
        assert ended == [True, True]
        await transfer
        assert (target == 7).all()


async def test_an_aclose_that_was_cancelled_may_be_called_again():
    memory = bytearray(4 << 20)
    async with linked("tcp", largest_message=65536) as (left, right):
        region = left.register(memory)
        transfer = left.submit_write(region, across(left, right, bytearray(len(memory))))
        closing = asyncio.create_task(region.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert region.closed
        with pytest.raises(BufferError):
            memory.append(1)
        await transfer
        await region.aclose()
        memory.append(1)


@pytest.mark.parametrize("provider", ["local", "socket", "tcp"])
async def test_a_slice_s_descriptor_opens_nothing_else(provider):
    """Also for one that changes it to say more: its keys are of the slice alone. Over shm no key guards anything."""
    memory = bytearray(4096)
    async with linked(provider) as (left, right):
        region = right.register(memory)
        part = region[1024:2048]
        told = RegionDescriptor.from_bytes(part.descriptor)
        whole = RegionDescriptor.from_bytes(region.descriptor)
        assert {key.key for key in told.keys}.isdisjoint(key.key for key in whole.keys)
        await left.write(left.register(b"a" * 1024), left.attach(part.descriptor))
        forged = left.attach(bytes(dataclasses.replace(told, length=2048)))
        for lie in (forged[1024:], forged[1020:1028]):
            with pytest.raises(aiote.TransferError):
                await left.write(left.register(b"b" * lie.nbytes), lie)
            with pytest.raises(aiote.TransferError):
                await left.read(lie, left.register(bytearray(lie.nbytes)))
        assert memory == bytes(1024) + b"a" * 1024 + bytes(2048)
        # The same slice has the same keys, all of a region those of the region, and no bytes need none.
        assert region[1000:][24:1048].descriptor == part.descriptor
        assert RegionDescriptor.from_bytes(region[:].descriptor) == whole
        assert RegionDescriptor.from_bytes(region[7:7].descriptor).keys == (RailKey(0, 0),)
        await region.aclose()
        with pytest.raises(aiote.TransferError):
            await left.write(left.register(b"c" * 1024), left.attach(bytes(told)))
