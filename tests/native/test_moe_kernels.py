"""The native kernels give what their twins in NumPy give, bit for bit, with AVX2 and in plain C."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiote.moe import kernels
from aiote_native.kernels.moe import use_avx2
from support import machine
from support.moe import twins as moe_twins

# Five tests: together more than ten thousand shapes.
many = settings(max_examples=2500) if machine.LONG else settings()
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def memory(rng: np.random.Generator, rows: int, nbytes: int) -> NDArray[np.uint8]:
    """Return rows of bytes with any stride, which begin at any address."""
    pad, start = (int(number) for number in rng.integers(0, 5, 2))
    whole: NDArray[np.uint8] = rng.integers(0, 256, rows * (nbytes + pad) + start + 1, np.uint8)
    return whole[start : start + rows * (nbytes + pad)].reshape(rows, nbytes + pad)[:, :nbytes]


def ids_of(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> Any:
    """Return ids: some that are no experts, some named more than once."""
    return rng.integers(-2, experts + 2, (tokens, top_k)).astype(rng.choice([np.int32, np.int64]))


seeds = st.integers(0, 1 << 32)


@many
@given(seeds, st.integers(0, 9), st.integers(1, 9), st.integers(1, 700), st.integers(1, 6), st.booleans())
def test_numbers_of_rows_and_of_copies(seed, tokens, top_k, experts, ranks, by_rank):
    ids = ids_of(np.random.default_rng(seed), tokens, top_k, experts)
    shape = experts, -(-experts // ranks), ranks
    ours, theirs = np.empty((2, tokens, top_k), np.int32)
    found = kernels.number_rows(ids, *shape, by_rank, ours)
    expected = moe_twins.numbered(ids, *shape, by_rank, theirs)
    assert ours.tolist() == theirs.tolist()
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


@many
@given(seeds, st.integers(0, 7), st.integers(1, 5), st.integers(1, 70), st.integers(0, 9), st.booleans())
def test_rows_are_packed(seed, tokens, top_k, width, scales, by_rank):
    rng = np.random.default_rng(seed)
    at = np.empty((tokens, top_k), np.int32)
    rows, copies = kernels.number_rows(ids_of(rng, tokens, top_k, 6), 6, 2, 3, by_rank, at)
    sent = copies if by_rank else rows.reshape(3, 2).sum(1)
    first, last = int(sent[0]), int(sent[0] + sent[1])
    x, beside, tail = memory(rng, tokens, width), memory(rng, tokens, scales), memory(rng, tokens, 4 + 8 * top_k)
    row = width + scales + tail.shape[1] + 3
    sides = [memory(rng, tokens * top_k, row), memory(rng, last - first, row)]
    twins = [side.copy() for side in sides]
    behind = {"scales": beside, "tail": tail, "scales_at": width, "tail_at": width + scales}
    kernels.pack(*sides, first, last, at, x, **behind)
    moe_twins.pack(*twins, first, last, at, x, **behind)
    assert [side.tobytes() for side in sides] == [twin.tobytes() for twin in twins]


@many
@given(seeds, st.integers(1, 40), st.integers(0, 6))
def test_runs_are_copied(seed, width, count):
    rng = np.random.default_rng(seed)
    source, to = memory(rng, 30, width), memory(rng, 30, width)
    runs = np.stack((np.arange(count) * 5, rng.integers(0, 26, count), rng.integers(0, 5, count)), 1).astype(np.int64)
    nbytes = int(rng.integers(1, width + 1))
    twin = to.copy()
    kernels.copy_runs(to, source, runs, nbytes)
    moe_twins.copy_runs(twin, source, runs, nbytes)
    assert to.tobytes() == twin.tobytes()


@many
@given(seeds, st.integers(0, 9), st.integers(1, 5), st.integers(0, 4), st.integers(1, 33))
def test_copies_are_unfolded(seed, copies, top_k, held, width):
    rng = np.random.default_rng(seed)
    source, ids = memory(rng, copies, width), rng.integers(-1, 8, (copies, top_k)).astype(np.int32)
    base, room = np.arange(held, dtype=np.int64) * 6, rng.integers(0, 7, held).astype(np.int64)
    results = []
    to = memory(rng, 6 * held, width)
    for unfold in (kernels.unfold, moe_twins.unfold):
        rows, places, seen = to.copy(), np.empty((copies, top_k), np.int32), np.zeros(held, np.int64)
        unfold(rows, source, width, ids, 3, base, room=room, places=places, seen=seen)
        results.append((rows.tobytes(), places.tolist(), seen.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("avx2", [True, False])
@pytest.mark.parametrize("dtype", BITS)
@many
@given(seed=seeds, tokens=st.integers(0, 4), top_k=st.integers(1, 9), hidden=st.integers(1, 130), how=st.integers(0, 3))
def test_sums(avx2, dtype, seed, tokens, top_k, hidden, how):
    """Of any bits: infinities, NaN with any payload, denormals, halves that round to even."""
    rng = np.random.default_rng(seed)
    nbytes = hidden * BITS[dtype]().itemsize
    rows = memory(rng, 12, nbytes)
    if how & 1:
        values = (rng.standard_normal((12, hidden)) * 2.0 ** rng.integers(-30, 18)).astype(np.float32)
        rows = moe_twins.rounded(values, dtype)
    places = rng.integers(-1, 12, (tokens, top_k)).astype(np.int32)
    weights = rng.choice([0.0, -0.0, 1.0, math.nan, math.inf, 0.37, -1e-40, 3e38], (tokens, top_k)).astype(np.float32)
    if how & 1:
        weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    out = memory(rng, tokens, nbytes)
    twin = out.copy()
    use_avx2(avx2)
    try:
        kernels.combine(out, rows, places, weights if how & 2 else None, dtype, bool(seed & 1))
    finally:
        use_avx2(True)
    moe_twins.combine(twin, rows, places, weights if how & 2 else None, dtype, bool(seed & 1))
    assert out.tobytes() == twin.tobytes()


@pytest.mark.parametrize("avx2", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_two_bytes_is_read_and_rounded(avx2, dtype):
    """Each by itself, and with a part of it on top, which makes numbers halfway between two and beside that."""
    rows = np.arange(1 << 16).astype(np.uint16).reshape(1, -1).view(np.uint8)
    for part in (0.0, 2.0**-8, 2.0**-9, -(2.0**-9), 2.0**-11, 2.0**-12, 3 * 2.0**-13):
        weights, places = np.array([[1, part]], np.float32), np.zeros((1, 2), np.int32)
        sums, twin = np.zeros_like(rows), np.zeros_like(rows)
        use_avx2(avx2)
        try:
            kernels.combine(sums, rows, places, weights, dtype, False)
        finally:
            use_avx2(True)
        moe_twins.combine(twin, rows, places, weights, dtype, False)
        assert sums.tobytes() == twin.tobytes()
