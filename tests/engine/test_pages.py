"""Paged writes: every page to its place, one count a page, checked once and before anything is posted."""

from __future__ import annotations

import array

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import (
    PATIENCE_S,
    across,
    each_memory,
    each_progress,
    each_provider,
    linked,
    noise,
    pair,
    until,
)

pytestmark = pytest.mark.libfabric

PAGE = 256


def copied(
    source: np.ndarray, src: aiote.Pages, target: np.ndarray, dst: aiote.Pages, src_index, dst_index
) -> np.ndarray:
    """Return what the target must be after these pages were written: the plain reference."""
    expected = target.copy()
    for i, j in zip(src_index, dst_index, strict=True):
        begin, end = int(src.offset + i * src.stride), int(dst.offset + j * dst.stride)
        expected[end : end + dst.page_bytes] = source[begin : begin + src.page_bytes]
    return expected


@pytest.mark.anyio
@each_memory
@each_progress
async def test_pages_go_where_they_belong(provider, progress):
    """A layer of a cache on both sides, with other distances and other places."""
    async with pair(provider, progress=progress) as (left, right):
        source, target = noise(PAGE * 64), np.zeros(PAGE * 200, np.uint8)
        random = np.random.default_rng(2)
        src_index, dst_index = random.permutation(20), random.permutation(60)[:20]
        src = aiote.Pages(left.register(source), src_index, PAGE, stride=3 * PAGE, offset=PAGE)
        dst = aiote.Pages(across(left, right, target), dst_index, PAGE, stride=3 * PAGE + 8, offset=24)
        assert len(src) == len(dst) == 20
        expected = copied(source, src, target, dst, src_index, dst_index)
        await left.write_pages(src, dst, 9)
        await right.counter(9).wait(20)
        assert np.array_equal(target, expected)
        assert right.counter(9).value == 0


@pytest.mark.anyio
@each_memory
@each_progress
@pytest.mark.parametrize("page", [1, 300, 20_000])
async def test_pages_are_read_from_where_they_belong(provider, progress, page):
    """Each page comes to its place and nothing else is touched, several requests at once."""
    async with pair(provider, progress=progress, largest_message=9000) as (left, right):
        source, target = noise(page * 100), np.zeros(page * 130 + 500, np.uint8)
        random = np.random.default_rng(2)
        far, near = right.register(source, "read"), left.register(target, "local")
        theirs, places = random.permutation(49), random.permutation(60)[:49]
        expected, transfers = target.copy(), []
        for part in (slice(0, 17), slice(17, 49), slice(49, 49)):
            src = aiote.Pages(left.attach(far.descriptor), theirs[part], page, stride=2 * page, offset=page)
            dst = aiote.Pages(near, places[part], page, stride=2 * page + 8, offset=5)
            for i, j in zip(theirs[part], places[part], strict=True):
                expected[5 + j * dst.stride :][:page] = source[page + i * src.stride :][:page]
            transfers.append(left.submit_read_pages(src, dst))
        for transfer in transfers:
            await transfer
        assert np.array_equal(target, expected)
        assert str(transfers[1]) == f"<Transfer read_pages of 32 pages of {page} bytes, over>"


async def test_reads_of_pages_are_checked():
    async with pair("local") as (left, right):
        memory = np.zeros(64, np.uint8)
        own, shut = left.register(memory), left.attach(right.register(memory, "write").descriptor)
        remote = left.attach(right.register(b"x" * 64).descriptor)
        for src, dst, text in [
            (aiote.Pages(own, [0], 8), aiote.Pages(own, [0], 8), "src.region must be a RemoteRegion"),
            (aiote.Pages(shut, [0], 8), aiote.Pages(own, [0], 8), "cannot be read"),
            (aiote.Pages(remote, [0], 8), aiote.Pages(left.register(b"y" * 8), [0], 8), "read-only"),
            (aiote.Pages(remote, [0, 1], 8), aiote.Pages(own, [0], 8), "2 source pages, but 1"),
        ]:
            with pytest.raises(aiote.UsageError, match=text):
                await left.read_pages(src, dst)


@each_memory
@pytest.mark.parametrize(("largest", "most"), [(1000, 3000), (1 << 21, 9000)], ids=["cut", "gathered"])
async def test_pages_of_random_sizes_strides_and_offsets_arrive_where_they_belong(provider, largest, most):
    """Sizes, strides and offsets at random, of slices too, several requests in flight."""
    random = np.random.default_rng(3)
    async with linked(provider, largest_message=largest) as (left, right):
        for round_ in range(10):
            requests = []
            for imm in range(4):
                page = int(random.integers(1, most))
                count = int(random.integers(0, 30))
                source, target = noise(100_000, round_), np.zeros(400_000, np.uint8)
                src_stride, dst_stride = int(random.integers(0, 2 * page)), page + int(random.integers(0, 100))
                places = (90_000 - page) // src_stride if src_stride else 1 << 40
                src_index = random.integers(0, places, count)
                dst_index = random.permutation((390_000 - page) // dst_stride)[:count]
                src_index = src_index[: len(dst_index)]
                src = aiote.Pages(left.register(source)[5:99_000], src_index, page, src_stride, 7)
                dst = aiote.Pages(across(left, right, target)[9:], dst_index, page, dst_stride, 11)
                expected = copied(source[5:], src, target[9:], dst, src_index, dst_index)
                requests.append((left.submit_write_pages(src, dst, imm), imm, len(src), target[9:], expected))
            for transfer, imm, count, got, expected in requests:
                await right.counter(imm).wait(count)
                assert np.array_equal(got, expected)
                await transfer
        await until(lambda: right.statistics().counters == 0)


INDICES = {
    "list": [3, 0, 2],
    "tuple": (3, 0, 2),
    "int64": np.array([3, 0, 2]),
    "int32": np.array([3, 0, 2], np.int32),
    "uint64": np.array([3, 0, 2], np.uint64),
    "uint8": np.array([3, 0, 2], np.uint8),
    "strided": np.array([3, 9, 0, 9, 2, 9])[::2],
    "array": array.array("q", [3, 0, 2]),
    "shorts": array.array("h", [3, 0, 2]),
    "bytes": bytes([3, 0, 2]),
    "generator": (i for i in (3, 0, 2)),
    "numpy-integers": [np.int16(3), np.uint8(0), 2],
}


@pytest.mark.parametrize("kind", INDICES)
async def test_indices_of_every_kind_are_taken(kind):
    async with linked("tcp") as (left, right):
        target = np.zeros(40, np.uint8)
        source = np.repeat(np.arange(4, dtype=np.uint8), 10)
        src = aiote.Pages(left.register(source), INDICES[kind], 10)
        await left.write_pages(src, aiote.Pages(across(left, right, target), range(3), 10))
        assert target.reshape(4, 10)[:, 0].tolist() == [3, 0, 2, 0]


async def test_indices_may_be_changed_at_once():
    """They are copied when the Pages are made: neither before nor after the submission does a change matter."""
    async with linked("tcp") as (left, right):
        target = np.zeros(40, np.uint8)
        indices = np.array([0, 1], np.int64)
        src = aiote.Pages(left.register(np.full(40, 5, np.uint8)), [0, 1], 10)
        dst = aiote.Pages(across(left, right, target), indices, 10)
        indices[:] = 2
        transfer = left.submit_write_pages(src, dst)
        indices[:] = 3
        await transfer
        assert target.tolist() == [5] * 20 + [0] * 20


@each_provider
async def test_pages_serve_many_requests(provider):
    async with linked(provider) as (left, right):
        source, target = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
        src = aiote.Pages(left.register(source), range(10), 100)
        dst = aiote.Pages(across(left, right, target), range(10), 100)
        counter = right.counter(1)
        for value in range(1, 5):
            source[:] = value
            await left.write_pages(src, dst, 1)
            await counter.wait(10)
            assert (target == value).all()
        for transfer in [left.submit_write_pages(src, dst, 1) for _ in range(5)]:
            await transfer
        await counter.wait(50)


@pytest.mark.anyio
@each_memory
@each_progress
async def test_no_pages_at_all_are_over_at_once(provider, progress):
    """Before and after the peer is connected; nothing is counted."""
    async with pair(provider, progress=progress) as (left, right):
        src = aiote.Pages(left.register(bytearray(8)), [], 8)
        dst = aiote.Pages(across(left, right, bytearray(8)), np.array([], np.int64), 8)
        with anyio.fail_after(PATIENCE_S):
            for _ in range(2):
                await left.write_pages(src, dst, 1)
            transfer = left.submit_write_pages(src, dst)
            await transfer
        assert transfer.total_bytes == 0
        assert right.counter(1).value == 0


@each_memory
async def test_one_source_page_goes_to_a_hundred_target_pages(provider):
    async with linked(provider) as (left, right):
        target = np.zeros(5000, np.uint8)
        src = aiote.Pages(left.register(noise(50)), np.zeros(100, np.int64), 50)
        await left.write_pages(src, aiote.Pages(across(left, right, target), range(100), 50), 1)
        await right.counter(1).wait(100)
        assert np.array_equal(target, np.tile(noise(50), 100))


@each_provider
async def test_twenty_thousand_pages_arrive_in_one_await(provider):
    """Far more than any queue holds: one request, one count a page."""
    count = 20_000
    async with linked(provider) as (left, right):
        source, target = noise(count * 16), np.zeros(count * 16, np.uint8)
        order = np.random.default_rng(5).permutation(count)
        src = aiote.Pages(left.register(source), order, 16)
        await left.write_pages(src, aiote.Pages(across(left, right, target), order[::-1].copy(), 16), 1)
        await right.counter(1).wait(count)
        expected = np.zeros_like(target).reshape(count, 16)
        expected[order[::-1]] = source.reshape(count, 16)[order]
        assert np.array_equal(target, expected.reshape(-1))


async def test_a_small_write_does_not_wait_behind_a_million_pages():
    """Requests to one peer take turns."""
    async with linked("tcp") as (left, right):
        source, target = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
        local, remote = left.register(source), across(left, right, target)
        indices = np.zeros(1_000_000, np.int64)
        pages = left.submit_write_pages(aiote.Pages(local, indices, 8), aiote.Pages(remote, indices, 8))
        await left.write(local[8:16], remote[8:16])
        assert not pages.done()
        pages.cancel()
        with pytest.raises(aiote.TransferError, match="write_pages of 1000000 pages of 8 bytes: cancelled"):
            await pages


BAD_PAGES = [
    ([0], 0, None, 0, "page_bytes must be positive"),
    ([0], -8, None, 0, "page_bytes must be positive"),
    ([0], 8, -1, 0, "the others not negative"),
    ([0], 8, None, -1, "the others not negative"),
    ([0, 1, 13], 8, None, 0, r"page 2 \(index 13\) covers bytes 104 to 112, outside of the region's 100"),
    ([0, -1], 8, None, 0, r"page 1 \(index -1\) covers bytes -8 to 0, outside"),
    ([0], 101, None, 0, r"page 0 \(index 0\) covers bytes 0 to 101, outside"),
    ([0], 8, None, 93, r"page 0 \(index 0\) covers bytes 93 to 101, outside"),
    ([0, 1 << 62], 8, 8, 0, r"page 1 \(index 4611686018427387904\) covers"),
    ([1 << 63], 8, None, 0, "integers that fit in 64 bits, got list"),
    ([0.5], 8, None, 0, "page indices must be integers .*, got list"),
    (["0"], 8, None, 0, "page indices must be integers"),
    (np.array([0.0]), 8, None, 0, "page indices must be integers .*, got ndarray"),
    (None, 8, None, 0, "page indices must be integers .*, got NoneType"),
    (7, 8, None, 0, "page indices must be integers .*, got int"),
    ([[0, 1]], 8, None, 0, "page indices must be integers"),
    (np.zeros((2, 2), np.int64), 8, None, 0, "page indices must be integers"),
]


@pytest.mark.parametrize(("indices", "page_bytes", "stride", "offset", "says"), BAD_PAGES)
async def test_bad_pages_are_refused(indices, page_bytes, stride, offset, says):
    async with pair("tcp") as (left, right):
        for region in (left.register(bytearray(100)), across(left, right, bytearray(100))):
            with pytest.raises(aiote.UsageError, match=says):
                aiote.Pages(region, indices, page_bytes, stride, offset)


async def test_pages_that_do_not_match_are_refused():
    async with linked("tcp") as (left, right):
        local, remote = left.register(bytearray(100)), across(left, right, bytearray(100))
        with pytest.raises(aiote.UsageError, match="2 source pages, but 3 target pages: expected as many"):
            left.submit_write_pages(aiote.Pages(local, [0, 1], 8), aiote.Pages(remote, [0, 1, 2], 8))
        with pytest.raises(aiote.UsageError, match="source pages of 8 bytes, target pages of 9: expected one length"):
            left.submit_write_pages(aiote.Pages(local, [0], 8), aiote.Pages(remote, [0], 9))
        with pytest.raises(aiote.UsageError, match=r"src\.region must be a Region"):
            left.submit_write_pages(aiote.Pages(remote, [0], 8), aiote.Pages(remote, [0], 8))
        with pytest.raises(aiote.UsageError, match=r"dst\.region must be a RemoteRegion"):
            left.submit_write_pages(aiote.Pages(local, [0], 8), aiote.Pages(local, [0], 8))
        with pytest.raises(aiote.UsageError, match="the immediate is -1"):
            left.submit_write_pages(aiote.Pages(local, [0], 8), aiote.Pages(remote, [0], 8), -1)


async def test_pages_of_what_is_no_region_are_refused():
    async with pair("tcp") as (left, _):
        for thing in (bytearray(100), None, left.address):
            with pytest.raises(aiote.UsageError, match=r"Pages: region must be a Region or a RemoteRegion, got"):
                aiote.Pages(thing, [0], 8)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((8.0,), "page_bytes is 8.0, expected an integer"),
        (("8",), "page_bytes is '8', expected an integer"),
        ((None,), "page_bytes is None, expected an integer"),
        ((8, 1.5), "stride is 1.5, expected an integer"),
        ((8, 8, "0"), "offset is '0', expected an integer"),
    ],
)
async def test_page_sizes_strides_and_offsets_that_are_no_integers_are_refused(numbers, says):
    async with pair("tcp") as (left, _):
        region = left.register(bytearray(100))
        with pytest.raises(aiote.UsageError, match=says):
            aiote.Pages(region, [0], *numbers)


async def test_pages_of_a_region_that_was_closed_are_refused():
    async with linked("tcp") as (left, right):
        region = left.register(bytearray(100))
        src = aiote.Pages(region, [0], 8)
        await region.aclose()
        with pytest.raises(aiote.ClosedError, match="the region is closed"):
            left.submit_write_pages(src, aiote.Pages(across(left, right, bytearray(8)), [0], 8))


async def test_page_indices_are_copies_of_their_own():
    async with linked("tcp") as (left, right):
        first = aiote.Pages(left.register(b"0123456789"), [1, 0], 5)
        target = bytearray(10)
        remote = across(left, right, target)
        transfer = left.submit_write_pages(first, aiote.Pages(remote, [0, 1], 5))
        del first
        await transfer
        assert target == b"5678901234"
