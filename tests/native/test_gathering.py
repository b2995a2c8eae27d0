"""Pages that share a work request: each is in it once, in order, and an immediate counts for all of them."""

from __future__ import annotations

import dataclasses
import itertools

import anyio
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

import aiote
from aiote.errors import UsageError
from aiote.testing import UNRULY, Fabric, NicModel, run
from aiote_native.engine.posting import plan_gathering
from support.engines.opening import PATIENCE_S, across, linked

PAGE = 16384
PAGES = 64
IMM = 3


@st.composite
def offsets(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Places of pages on both sides, in pages, with runs of neighbours on either side or on both."""
    local, remote = [], []
    for _ in range(draw(st.integers(1, 12))):
        length, near, far = draw(st.integers(1, 9)), draw(st.integers(0, 200)), draw(st.integers(0, 200))
        local += range(near, near + length)
        remote += range(far, far + length) if draw(st.booleans()) else range(far + length, far, -1)
    return local, remote


@given(offsets(), st.integers(1, 5000), st.integers(1, 4), st.integers(1, 40), st.integers(0, 50_000))
@example(([0, 1, 2], [0, 1, 2]), 4096, 4, 32, 1 << 18)
@example(([0, 2, 4, 6, 8], [0, 2, 4, 6, 8]), 4096, 4, 32, 1 << 18)
def test_every_page_is_in_one_request(where, page, max_sge, most, bytes_most):
    """Cut at the pages' ends, the SGEs of all requests are the pages, in their order."""
    local, remote = ([page * number for number in side] for side in where)
    requests = plan_gathering(page, local, remote, max_sge, most, bytes_most)
    pages = [
        (near + at, far + at) for request in requests for near, far, length in request for at in range(0, length, page)
    ]
    assert pages == list(zip(local, remote, strict=True))
    for request in requests:
        lengths = [length for _, _, length in request]
        assert len(request) <= max_sge
        assert sum(lengths) == page or sum(lengths) <= min(bytes_most, most * page)
        # What lies together on both sides is one SGE.
        for (near, far, length), following in itertools.pairwise(request):
            assert following[:2] != (near + length, far + length)
    event(f"{min(len(requests), 3)} requests")


@given(offsets(), st.integers(1, 4))
def test_no_request_ends_early(where, max_sge):
    """One more page would have been one SGE too many, or one page too many."""
    local, remote = ([4096 * number for number in side] for side in where)
    requests = plan_gathering(4096, local, remote, max_sge, 32, 1 << 18)
    for request, following in itertools.pairwise(requests):
        near, far, length = request[-1]
        full = sum(length for _, _, length in request) == 32 * 4096
        assert full or (len(request) == max_sge and following[0][:2] != (near + length, far + length))


async def scattered(left: aiote.Engine, right: aiote.Engine, page: int = PAGE) -> int:
    """Write scattered pages, of which none is beside the next one; return how many work requests that took."""
    random = np.random.default_rng(5)
    content = random.integers(0, 256, (4 * PAGES, page), np.uint8)
    target = np.zeros_like(content)
    here, there = (2 * random.permutation(2 * PAGES)[:PAGES] for _ in range(2))
    source, remote = left.register(content), across(left, right, target)
    pages = [aiote.Pages(region, index, page) for region, index in ((source, here), (remote, there))]
    await left.write_pages(*pages, IMM)  # the first one waits for the connection
    before = left.statistics().posted
    await left.write_pages(*pages, IMM)
    posted = left.statistics().posted - before
    with anyio.fail_after(PATIENCE_S):
        await right.counter(IMM).wait(2 * PAGES)
    assert right.counter(IMM).value == 0
    assert np.array_equal(target[there], content[here])
    untouched = np.setdiff1d(np.arange(4 * PAGES), there)
    assert not target[untouched].any()
    return posted


@pytest.mark.libfabric
@pytest.mark.parametrize("provider", ["tcp", "shm"])
async def test_tcp_and_shm_gather_four_pages_in_a_message(provider):
    async with linked(provider) as (left, right):
        assert await scattered(left, right) <= PAGES // 4 + 8  # and what the connection takes for itself


@pytest.mark.libfabric
async def test_small_pages_over_shm_are_messages_of_their_own():
    """Up to 4 KiB go through shared memory there, which is faster than a system call for four of them."""
    async with linked("shm") as (left, right):
        assert await scattered(left, right, 4096) >= PAGES
        source, target = left.register(bytes(PAGES * 4096)), across(left, right, bytearray(PAGES * 4096))
        before = left.statistics().posted
        await left.write_pages(*(aiote.Pages(region, range(PAGES), 4096) for region in (source, target)))
        # Neighbours are one SGE all the same.
        assert left.statistics().posted - before <= PAGES // 32 + 8


def on_a_fabric(model: NicModel, **settings: object) -> int:
    async def main(fabric: Fabric) -> int:
        left, right = [await fabric.open_engine(**settings) for _ in range(2)]
        posted = await scattered(left, right)
        await left.aclose()
        await right.aclose()
        return posted

    return run(main, 1, model=model)


@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
@pytest.mark.parametrize("max_sge", [1, 2, 3, 4])
def test_a_request_gathers_as_many_pages_as_a_rail_takes(max_sge):
    posted = on_a_fabric(dataclasses.replace(UNRULY, max_sge=max_sge, refusals=0))
    assert -(-PAGES // max_sge) <= posted <= -(-PAGES // max_sge) + PAGES // 32 + 4


@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
def test_round_robin_posts_every_page_by_itself():
    assert on_a_fabric(dataclasses.replace(UNRULY, max_sge=4), schedule="round-robin") >= PAGES


@pytest.mark.parametrize(("remote", "max_sge"), [([0], 4), ([0, 4096], 5), ([0, 4096], 0)])
def test_an_impossible_plan_is_refused(remote, max_sge):
    with pytest.raises(ValueError, match="offsets"):
        plan_gathering(4096, [0, 8192], remote, max_sge, 32, 1 << 18)


@pytest.mark.parametrize("max_sge", [0, 5])
def test_a_nic_of_so_many_sges_is_refused(max_sge):
    with pytest.raises(UsageError, match="expected 1 to 4"):
        NicModel(name="wide", max_sge=max_sge)
