"""Writes cut in stripes, over the largest message and over rails: the bytes are exact, and each write counts one."""

from __future__ import annotations

import numpy as np
import pytest

import aiote
from support.engines.opening import across, each_progress, each_provider, linked, noise, opened, pair, until

pytestmark = pytest.mark.libfabric

LARGEST = 1000
SIZES = [
    1,
    LARGEST - 1,
    LARGEST,
    LARGEST + 1,
    3 * LARGEST - 1,
    16 * LARGEST - 1,
    16 * LARGEST,
    16 * LARGEST + 1,
    17 * LARGEST,
    50 * LARGEST + 7,
]
"""Up to 16 stripes carry the immediate; beyond that a part goes first without."""


async def check(left: aiote.Engine, right: aiote.Engine, size: int) -> int:
    """Write, count and read so many bytes, see that they are exact, and return how many messages the write took."""
    source, target = noise(size), np.full(size + 2, 0xEE, np.uint8)
    remote = across(left, right, target)[1 : size + 1]
    region = left.register(source)
    await left.connect(right.address)
    posted = left.statistics().posted
    transfer = left.submit_write_imm(region, remote, 7)
    await right.counter(7).wait(1)
    # At the count all is there, whether or not the sender has heard of it.
    assert np.array_equal(target[1:-1], source)
    await transfer
    posted = left.statistics().posted - posted
    assert target[0] == target[-1] == 0xEE
    assert right.counter(7).value == 0
    back = np.zeros(size, np.uint8)
    await left.read(remote, left.register(back))
    assert np.array_equal(back, source)
    target[:] = 0
    await left.write(region, remote)
    assert np.array_equal(target[1:-1], source)
    return posted


@each_provider
@each_progress
async def test_a_write_over_the_largest_message_arrives_and_counts_once(provider, progress):
    async with linked(provider, progress=progress, largest_message=LARGEST) as (left, right):
        for size in SIZES:
            assert await check(left, right, size) == -(-size // LARGEST)
        assert right.counter(7).value == 0


@pytest.mark.parametrize("rails", [2, 3])
@each_progress
async def test_a_write_over_several_rails_arrives_and_counts_once(rails, progress):
    """Every write of at least two stripes' bytes is spread; the count is that of the writes."""
    async with linked("tcp", ["lo"] * rails, progress=progress, stripe_bytes=100) as (left, right):
        assert len(left.rails) == len(right.rails) == rails
        for size, stripes in ((1, 1), (100, 1), (199, 1), (200, 2), (299, 2), (300, rails), (100_001, rails)):
            assert await check(left, right, size) == stripes


async def test_a_write_over_several_rails_and_the_largest_message_counts_once():
    async with linked("tcp", ["lo", "lo"], largest_message=LARGEST, stripe_bytes=100) as (left, right):
        for size in SIZES:
            assert await check(left, right, size) == max(-(-size // LARGEST), min(2, size // 100 or 1))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (3, 2), (4, 1)])
async def test_sides_with_different_numbers_of_rails_write_to_each_other(ours, theirs):
    """Neither side has to know how many NICs the other has: one write, one count, either way."""
    async with opened("tcp", ["lo"] * ours, stripe_bytes=100) as left:
        async with opened("tcp", ["127.0.0.1"] * theirs, stripe_bytes=100) as right:
            for size in (1, 777, 50_001):
                await check(left, right, size)
                await check(right, left, size)
            await left.send(right.address, b"hello")
            assert (await right.recv()).data == b"hello"


async def test_each_side_splits_by_its_own_largest_message():
    async with opened("tcp", largest_message=100) as left, opened("tcp", largest_message=7777) as right:
        assert await check(left, right, 20_000) == 200
        assert await check(right, left, 20_000) == 3


@each_provider
async def test_striped_pages_count_one_each(provider):
    """Each page is cut alike and counts one."""
    async with linked(provider, largest_message=100) as (left, right):
        for page in (99, 100, 101, 250, 1700):
            source, target = noise(page * 12), np.zeros(page * 12, np.uint8)
            order = np.random.default_rng(page).permutation(12)
            src = aiote.Pages(left.register(source), order, page)
            dst = aiote.Pages(across(left, right, target), range(12), page)
            transfer = left.submit_write_pages(src, dst, 5)
            await right.counter(5).wait(12)
            assert np.array_equal(target.reshape(12, page), source.reshape(12, page)[order])
            await transfer
            assert right.counter(5).value == 0


@each_provider
async def test_many_striped_writes_on_one_immediate_count_exactly(provider):
    """Whatever order the stripes of different writes come in, the sum is exact."""
    async with linked(provider, largest_message=64) as (left, right):
        source, target = noise(1000), np.zeros(1000, np.uint8)
        local, remote = left.register(source), across(left, right, target)
        sizes = [1 + 7 * i % 900 for i in range(200)]
        transfers = [left.submit_write_imm(local[:size], remote[:size], 7) for size in sizes]
        for transfer in transfers:
            await transfer
        await right.counter(7).wait(len(sizes))
        assert right.counter(7).value == 0
        await until(lambda: right.statistics().counters == 0)


async def test_the_provider_s_own_largest_message_is_kept():
    """A bound above what the provider takes changes nothing."""
    async with pair("tcp", largest_message=1 << 62) as (left, right):
        assert await check(left, right, 100_000) == 1
