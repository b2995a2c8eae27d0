"""Staging memory and rows: what is lent never overlaps, never exceeds the limit, and comes in turn."""

from __future__ import annotations

import random

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.weights.copies import Copy
from aiote.weights.rank_memory import StagingMemory
from aiote.weights.writes import move, packed, parts_of, rows_of, runs_of
from support.engines.opening import opened
from support.machine import LONG

# What is tried is the same on every loop.
pytestmark = [pytest.mark.anyio] if LONG else []


@pytest.mark.parametrize("seed", range(5 if LONG else 1))
async def test_staging_memory_never_overlaps_and_stays_within_the_limit(seed):
    rng = random.Random(seed)
    async with opened("sim") as engine:
        staging = StagingMemory(engine, 4096)

        async def use(number: int, size: int) -> None:
            async with staging.reserve(size) as (memory, region):
                assert len(memory) == region.nbytes == size
                memory[:] = number % 251
                for _ in range(rng.randrange(5)):
                    await anyio.lowlevel.checkpoint()
                    assert (memory == number % 251).all()
                    assert staging.held <= staging.peak <= 4096

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(100):
                    size = rng.choice((1, 64, 100, 1000, 4000, 4096))
                    group.start_soon(use, number, size)
                    if rng.random() < 0.1:
                        with anyio.move_on_after(0):
                            await use(number, 2000)
        assert staging.held == 0
        assert staging._places.free
        with pytest.raises(aiote.UsageError, match="staging_bytes=4096"):
            async with staging.reserve(4097):
                pass
        await staging.close()


@st.composite
def copies(draw: st.DrawFn) -> tuple[Copy, int, int]:
    """Draw a copy between two arrays that are permuted and have gaps; return it with their sizes in elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))

    def strides() -> tuple[tuple[int, ...], int]:
        order = draw(st.permutations(range(len(shape))))
        found, step = [0] * len(shape), 1
        for dim in order:
            found[dim] = step
            step *= shape[dim] + draw(st.integers(0, 2))
        return tuple(found), step

    (here, size), (there, room) = strides(), strides()
    first, last = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Copy("a", "b", shape, first, here, last, there), first + size, last + room


@given(copies(), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.integers(1, 6))
def test_moving_rows_moves_the_elements_of_their_copy(drawn, itemsize, through, most):
    copy, size, room = drawn
    source = np.arange(size * itemsize, dtype=np.uint32).astype(np.uint8)
    target, expected = np.full(room * itemsize, 255, np.uint8), np.full(room * itemsize, 255, np.uint8)
    for index in np.ndindex(copy.shape):
        start = (copy.source_offset + int(np.dot(index, copy.source_strides))) * itemsize
        end = (copy.target_offset + int(np.dot(index, copy.target_strides))) * itemsize
        expected[end : end + itemsize] = source[start : start + itemsize]
    assert rows_of(copy, itemsize).total == copy.elements * itemsize
    both = packed(copy, itemsize)
    if through and both is not None:
        into, out = both
        between = np.zeros(copy.elements * itemsize, np.uint8)
        move(into, itemsize, source, between)
        assert runs_of(out) < runs_of(copy)
        copy, source = out, between
    for part in parts_of(copy, most):
        assert runs_of(part) <= most
        rows = rows_of(part, itemsize)
        for here, there in zip(rows.source, rows.target, strict=True):
            target[there : there + rows.nbytes] = source[here : here + rows.nbytes]
    assert np.array_equal(target, expected)
