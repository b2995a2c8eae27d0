"""Prepared scatters and pages: the promises of a scatter, for requests that bring nothing but arrays."""

from __future__ import annotations

import array
import asyncio
import ctypes

import anyio
import numpy as np
import pytest

import aiote
from aiote import ScatterTarget
from support.engines.fan_out import SIZE, star
from support.engines.opening import across, each_memory, each_progress, each_provider, opened, round_trips, until

pytestmark = pytest.mark.libfabric

PAGE = 512


@pytest.mark.anyio
@each_memory
@each_progress
async def test_every_target_gets_its_bytes_and_one_count(provider, progress):
    size = 2_000_000
    async with star(provider, 3, size, progress=progress, largest_message=1 << 20) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        expected = [np.zeros(size, np.uint8) for _ in here.others]
        rounds = [([0, 1, 8], [0, 3, 5]), ([16385, 196611, 0], [7, 9, size]), ([1_500_000, 40, 1_500_000], [0, 11, 17])]
        place = 64
        for lengths, offsets in rounds:
            places = [min(place, size - length) for length in lengths]
            await prepared.write(np.array(lengths), np.array(offsets), np.array(places, np.uint64), 5)
            for wanted, length, start, at in zip(expected, lengths, offsets, places, strict=True):
                wanted[at : at + length] = here.source[start : start + length]
            place += 200_000
        for other, memory, wanted in zip(here.others, here.memories, expected, strict=True):
            await other.counter(5).wait(len(rounds))
            assert other.counter(5).value == 0
            assert np.array_equal(memory, wanted)


@each_memory
async def test_some_of_the_targets_in_any_order_and_several_times(provider):
    async with star(provider, 3) as here:
        prepared = here.hub.prepare_scatter(here.group, [*here.targets, ScatterTarget(None, here.group[0])])
        to = array.array("q", [2, 0, 2, 3])
        await prepared.write(np.array([4, 6, 8, 0]), None, np.array([0, 100, 200, 0]), 5, to=to)
        await here.others[0].counter(5).wait(2)
        await here.others[2].counter(5).wait(2)
        await round_trips(here.hub, here.others[1])
        assert here.others[1].counter(5).value == 0
        assert not here.memories[1].any()
        assert np.array_equal(here.memories[0][100:106], here.source[:6])
        assert here.memories[0].sum() == here.source[:6].sum()
        assert np.array_equal(here.memories[2][[*range(4), *range(200, 208)]], here.source[[*range(4), *range(8)]])


@each_provider
async def test_each_write_counts_on_an_immediate_of_its_own(provider):
    async with star(provider, 3) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        await prepared.write(np.array([8, 0, 8]), imm=np.array([5, 6, (1 << 28) - 1]))
        await prepared.write(np.array([8, 8]), imm=array.array("Q", [7, 5]), to=np.array([2, 0]))
        for other, imms in zip(here.others, ({5: 2}, {6: 1}, {(1 << 28) - 1: 1, 7: 1}), strict=True):
            for imm, count in imms.items():
                await other.counter(imm).wait(count)
            assert other.statistics().immediates == sum(imms.values())


@each_provider
async def test_without_an_immediate_a_length_of_nothing_posts_nothing(provider):
    async with star(provider, 2) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        before = here.hub.statistics().posted
        await prepared.write(np.zeros(2, np.int64))
        await prepared.write(np.zeros(0, np.int64), to=np.zeros(0, np.int64))
        assert here.hub.statistics().posted == before
        await prepared.write(np.array([8, 0]))
        assert np.array_equal(here.memories[0][:8], here.source[:8])
        empty = here.hub.prepare_scatter(here.group, [])
        await empty.write(np.zeros(0, np.uint64), imm=4)
        assert here.others[0].counter(4).value == 0


@pytest.mark.anyio
@each_provider
@each_progress
async def test_pages_go_where_their_numbers_say_and_each_counts(provider, progress):
    async with star(provider, 3, progress=progress) as here:
        prepared = here.hub.prepare_pages(here.group, here.targets, PAGE, dst_stride=PAGE + 8)
        assert prepared.page_bytes == PAGE
        draw = np.random.default_rng(2)
        pages, room = SIZE // PAGE, (SIZE - PAGE) // (PAGE + 8) + 1
        counts = np.array([70, 0, 33])
        near = draw.integers(0, pages, 103)
        far = np.concatenate([draw.permutation(room)[:70], draw.permutation(room)[:33]]).astype(np.uint64)
        await prepared.write(near, far, 6, counts=counts)
        for who, begin, end in ((0, 0, 70), (2, 70, 103)):
            await here.others[who].counter(6).wait(end - begin)
            for one, other in zip(near[begin:end], far[begin:end].astype(int), strict=True):
                at = other * (PAGE + 8)
                assert np.array_equal(here.memories[who][at : at + PAGE], here.source[one * PAGE : (one + 1) * PAGE])
        await round_trips(here.hub, here.others[1])
        assert here.others[1].counter(6).value == 0
        assert not here.memories[1].any()


@each_provider
async def test_pages_of_one_target_need_no_counts(provider):
    async with star(provider, 1) as here:
        prepared = here.hub.prepare_pages(here.group, here.targets, PAGE)
        order = np.random.default_rng(3).permutation(SIZE // PAGE)
        await prepared.write(order, order)
        assert np.array_equal(here.memories[0], here.source)
        await prepared.write(order[:0], order[:0], 7)
        assert here.others[0].counter(7).value == 0


@each_provider
@each_progress
async def test_several_requests_of_one_are_under_way_at_once(provider, progress):
    """Each has numbers of its own; the arrays are the caller's again at once."""
    async with star(provider, 2, progress=progress) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        lengths, places = np.full(2, 1024), np.zeros(2, np.int64)
        transfers = []
        for number in range(SIZE // 1024):
            places[:] = number * 1024
            transfers.append(prepared.submit(lengths, places, places, 8))
            lengths[:], places[:] = -1, -1
            lengths[:] = 1024
        for transfer in transfers:
            await transfer
        for other, memory in zip(here.others, here.memories, strict=True):
            await other.counter(8).wait(len(transfers))
            assert other.counter(8).value == 0
            assert np.array_equal(memory, here.source)
        assert here.region.memory.in_flight == 0


@each_provider
async def test_a_lost_member_is_named_and_nothing_is_started(provider):
    async with star(provider, 3) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        pages = here.hub.prepare_pages(here.group, here.targets, PAGE)
        await here.others[1].aclose()
        await here.group[1].wait_closed()
        numbers = np.arange(3)
        for submit in (
            lambda: prepared.submit(np.full(3, 8), imm=1),
            lambda: pages.submit(numbers, numbers, 1, counts=np.ones(3, np.int64)),
        ):
            with pytest.raises(aiote.PeerError, match="closed") as caught:
                submit()
            assert str(here.others[1].address) in str(caught.value)
        assert here.untouched
        await prepared.submit(np.full(2, 8), imm=1, to=np.array([2, 0]))
        await pages.submit(numbers[:2], numbers[:2], 1, counts=np.array([1, 0, 1]))
        await here.others[0].counter(1).wait(2)
        await here.others[2].counter(1).wait(2)
        assert here.others[0].counter(1).value == here.others[2].counter(1).value == 0
        with pytest.raises(aiote.PeerError, match="closed"):
            here.hub.prepare_scatter(here.group, here.targets)


@each_provider
async def test_a_member_that_dies_under_way_is_the_error_and_the_others_are_served(provider):
    # More than is on its way at a time: a NIC would otherwise have it all there before the member dies.
    size = 24 << 20
    async with star(provider, 2, size) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        transfer = prepared.submit(np.full(2, size), imm=1, to=np.array([1, 0]))
        here.others[1].abort()
        await here.others[0].counter(1).wait(1)
        assert np.array_equal(here.memories[0], here.source)
        with pytest.raises(aiote.TransferError, match="prepared scatter to 2 targets: target 0 with peer") as caught:
            await transfer
        assert str(here.others[1].address) in str(caught.value)
        assert caught.value.confirmed_bytes >= size


@pytest.mark.anyio
@each_provider
async def test_a_cancelled_request_lets_go_of_all_memory(provider):
    size = 32 << 20
    async with star(provider, 2, size) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(prepared.write, np.full(2, size), None, None, 1)
                await anyio.sleep(0)
                scope.cancel()
        assert scope.cancelled_caught
        assert here.region.memory.in_flight == 0
        await here.region.aclose()
        await until(lambda: here.hub.statistics().outstanding == 0)


@each_provider
async def test_a_region_that_is_closed_is_an_error_and_never_a_write(provider):
    async with star(provider, 1) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        pages = here.hub.prepare_pages(here.group, here.targets, PAGE)
        under_way = prepared.submit(np.array([8]))
        await here.region.aclose()
        await under_way
        here.memories[0][:8] = 0
        with pytest.raises(aiote.ClosedError, match="region is closed"):
            prepared.submit(np.array([8]), imm=1)
        with pytest.raises(aiote.ClosedError, match="region is closed"):
            await pages.write(np.array([0]), np.array([0]), 1)
        await round_trips(here.hub, here.others[0])
        assert here.untouched
        assert here.others[0].counter(1).value == 0
        await here.hub.aclose()
        with pytest.raises(aiote.ClosedError, match="engine is closed"):
            prepared.submit(np.array([8]))


@each_provider
async def test_a_lease_that_is_revoked_ends_what_was_prepared(provider):
    async with star(provider, 2) as here:
        memory = here.others[0].register(bytearray(8))
        async with memory.lease(slice(0, 8), here.hub.address) as lease:
            targets = [ScatterTarget(here.region, here.hub.attach(lease.descriptor)), here.targets[1]]
            prepared = here.hub.prepare_scatter(here.group, targets)
            await prepared.write(np.array([8, 8]), imm=1)
            assert bytes(memory) == bytes(here.source[:8])
            assert here.region.memory.in_flight == 0
        with pytest.raises(aiote.TransferError, match="revoked") as caught:
            prepared.submit(np.array([8, 8]), imm=1)
        assert isinstance(caught.value.cause, aiote.LeaseRevokedError)
        assert caught.value.transfer.done()
        with pytest.raises(aiote.LeaseRevokedError):
            here.hub.prepare_scatter(here.group, targets)
        # Who leaves that target out is not concerned.
        await prepared.write(np.array([8]), imm=1, to=np.array([1]))
        await here.others[1].counter(1).wait(2)
        await here.others[0].counter(1).wait(1)
        assert here.others[0].counter(1).value == here.others[1].counter(1).value == 0


@each_provider
async def test_a_revocation_waits_for_what_is_under_way_through_the_lease(provider):
    size = 24 << 20
    async with star(provider, 1, size) as here:
        memory = np.zeros(size, np.uint8)
        lease = here.others[0].register(memory).lease(slice(0, size), here.hub.address)
        prepared = here.hub.prepare_scatter(here.group, [ScatterTarget(here.region, here.hub.attach(lease.descriptor))])
        transfer = prepared.submit(np.array([size]), imm=1)
        await lease.revoke()
        after = memory.copy()
        ended = (await asyncio.gather(transfer, return_exceptions=True))[0]
        assert ended is None or "revoked" in str(ended)
        assert np.array_equal(memory, after), "nothing came after the revocation"
        await round_trips(here.hub, here.others[0])
        assert np.array_equal(memory, after)


async def test_requests_beyond_the_limit_wait_or_are_refused():
    async with star("socket", 2, max_transfers=4) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        lengths = np.array([8, 0])
        held = [prepared.submit(lengths, imm=2) for _ in range(4)]
        with pytest.raises(aiote.QueueFull, match="await engine.room"):
            prepared.submit(lengths, imm=2)
        await asyncio.gather(*(prepared.write(lengths, imm=2) for _ in range(20)))
        for transfer in held:
            await transfer
        # The room that was waited for is the task's, though others stand in the queue behind it.
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(prepared.write, lengths, None, None, 2)
            await here.hub.room_for(here.group)
            prepared.submit(lengths, imm=2)
        for other in here.others:
            await other.counter(2).wait(33)
            assert other.counter(2).value == 0


WRONG_SCATTERS = {
    "got list": ([8, 8],),
    "lengths has 0 numbers": (None,),
    "format 'd'": (np.ones(2),),
    "format 'i'": (np.ones(2, np.int32),),
    "format '>q'": (np.ones(2, ">i8"),),
    "got 2 of format": (np.ones((2, 1), np.int64),),
    "lengths has 3 numbers: expected one for each of 2 targets": (np.ones(3, np.int64),),
    "local_offsets has 1 numbers": (np.ones(2, np.int64), np.zeros(1, np.int64)),
    "remote_offsets has 3 numbers": (np.ones(2, np.int64), None, np.zeros(3, np.int64)),
    "write 1: local range 0[+]-1 leaves": (np.array([1, -1]),),
    "write 1: local range -1[+]1 leaves": (np.ones(2, np.int64), np.array([0, -1])),
    "write 0: remote range -5[+]1 leaves": (np.ones(2, np.int64), None, np.array([-5, 0])),
    "write 0: local range 65529[+]8 leaves target 0's 65536": (np.array([8, 8]), np.array([SIZE - 7, 0])),
    "write 1: remote range 65537[+]0": (np.zeros(2, np.int64), None, np.array([0, SIZE + 1])),
    "write 1: local range 18446744073709551615[+]1": (np.ones(2, np.int64), np.array([0, 2**64 - 1], np.uint64)),
    "write 1: local range 8[+]18446744073709551612": (np.array([0, 2**64 - 4], np.uint64), np.array([0, 8])),
    "to.1. is 2, expected a target from 0 to 1": (np.ones(2, np.int64), None, None, None, np.array([0, 2])),
    "to.0. is -1, expected a target from 0 to 1": (np.ones(1, np.int64), None, None, None, np.array([-1])),
    "lengths: MaskedArray has a mask": (np.ma.ones(2, np.int64),),
    "the immediate is 268435456": (np.ones(2, np.int64), None, None, 1 << 28),
    "imm.1. is 268435456, expected from 0": (np.ones(2, np.int64), None, None, np.array([0, 1 << 28])),
    "imm.0. is -1, expected from 0": (np.ones(2, np.int64), None, None, np.array([-1, 3])),
    "imm has 1 numbers: expected one for each of 2 targets": (np.ones(2, np.int64), None, None, np.array([3])),
    "imm: .* of format 'i'": (np.ones(2, np.int64), None, None, np.ones(2, np.int32)),
    "imm: .* got str": (np.ones(2, np.int64), None, None, "7"),
}
WRONG_PAGES = {
    "local_pages: .*got list": ([0], np.zeros(1, np.int64), None),
    "remote_pages: .*format 'i'": (np.zeros(1, np.int64), np.zeros(1, np.int32), None),
    "1 local pages, but 2 remote": (np.zeros(1, np.int64), np.zeros(2, np.int64), np.array([1, 0])),
    "0 local pages, but 1 remote": (None, np.zeros(1, np.int64), np.array([1, 0])),
    "0 counts: expected one for each of 2 targets": (np.zeros(1, np.int64), np.zeros(1, np.int64), None),
    "3 counts: expected one for each of 2 targets": (np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([1, 0, 0])),
    "sum of the counts is not 2": (np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([1, 2])),
    "sum of the counts is not 1": (np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([2, -1])),
    "local page 1 is 128, expected 0 to 127 in target 1": (
        np.array([0, 128]),
        np.zeros(2, np.int64),
        np.ones(2, int),
    ),
    "remote page 0 is -1": (np.zeros(2, np.int64), np.array([-1, 0]), np.ones(2, np.int64)),
    "local page 0 is 18446744073709551615": (np.array([2**64 - 1], np.uint64), np.array([1]), np.array([1, 0])),
}


async def test_wrong_arrays_are_refused_before_anything_is_posted():
    async with star("socket", 2) as here:
        scatter = here.hub.prepare_scatter(here.group, here.targets)
        pages = here.hub.prepare_pages(here.group, here.targets, PAGE)
        before = here.hub.statistics().posted
        for text, given in WRONG_SCATTERS.items():
            *arrays, imm, to = (*given, None, None, None, None)[:5]
            with pytest.raises(aiote.UsageError, match=text):
                scatter.submit(*arrays, imm, to=to)
        for text, (near, far, counts) in WRONG_PAGES.items():
            with pytest.raises(aiote.UsageError, match=text):
                await pages.write(near, far, 1, counts=counts)
        assert here.hub.statistics().posted == before
        assert here.untouched
        assert here.region.memory.in_flight == 0


async def test_arrays_that_are_longer_than_memory_are_refused():
    """One without strides of its own has any length, and takes none."""
    async with star("socket", 2) as here:
        pages = here.hub.prepare_pages(here.group, here.targets[:1], PAGE)
        for count in (1 << 58, (1 << 60) - 1, (1 << 60) - 26):
            many = np.broadcast_to(np.zeros(1, np.int64), (count,))
            with pytest.raises(aiote.UsageError, match=f"{count} pages are too many"):
                pages.submit(many, many, 1)


async def test_any_buffer_of_64_bit_integers_will_do():
    async with star("socket", 2) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        strided = np.arange(8)[::4][::-1]
        unaligned = np.frombuffer(b"x" + np.array([16, 32]).tobytes(), np.uint8)[1:].view(np.int64)
        for lengths in (array.array("Q", [4, 0]), (ctypes.c_int64 * 2)(4, 0), memoryview(np.array([4, 0])), strided):
            await prepared.write(lengths, unaligned, unaligned, 3)
            await here.others[0].counter(3).wait(1)
            await here.others[1].counter(3).wait(1)
            assert np.array_equal(here.memories[0][16:20], here.source[16:20])
            assert here.memories[0].sum() == here.source[16:20].sum()
            assert not here.memories[1].any()
            here.memories[0][:] = 0


async def test_wrong_targets_are_refused():
    async with star("socket", 2) as here, opened("socket") as stranger:
        region, remote = here.targets[0]
        frozen = across(here.hub, here.others[0], b"read-only")
        cases = {
            "outside the group": ScatterTarget(region, across(here.hub, stranger, bytearray(8))),
            "expected ScatterTarget": 7,
            "Region as source": ScatterTarget(b"raw", remote),
            "another engine": ScatterTarget(stranger.register(b"8 bytes."), remote),
            "read-only": ScatterTarget(region, frozen),
        }
        for text, bad in cases.items():
            for prepare in (here.hub.prepare_scatter, lambda *given: here.hub.prepare_pages(*given, PAGE)):
                with pytest.raises(aiote.UsageError, match=text):
                    prepare(here.group, [here.targets[1], bad])
        with pytest.raises(aiote.UsageError, match="PeerGroup"):
            here.hub.prepare_scatter([here.others[0].address], here.targets)
        for page, stride in ((0, None), (-1, None), (1 << 62, None), (8, -1), ("8", None)):
            with pytest.raises(aiote.UsageError, match="page_bytes"):
                here.hub.prepare_pages(here.group, here.targets, page, src_stride=stride)
        short = here.hub.prepare_pages(here.group, [ScatterTarget(region[:8], remote)], PAGE)
        with pytest.raises(aiote.UsageError, match="too short for a page"):
            short.submit(np.array([0]), np.array([0]))
        same = here.hub.prepare_pages(here.group, here.targets[:1], 8, src_stride=0)
        await same.write(np.array([0, 5]), np.array([0, 1]))
        assert np.array_equal(here.memories[0][:16], np.tile(here.source[:8], 2))
        assert "2 targets" in repr(here.hub.prepare_scatter(here.group, here.targets))
        assert f"{PAGE} bytes" in repr(short)
