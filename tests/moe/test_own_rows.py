"""Answers of a rank's own experts: the sum takes them from `batch.y`, and gives the bits of a copy."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.moe import kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_of_two_arrays_are_summed_as_those_of_one(dtype, weighted):
    rng = np.random.default_rng(3)
    nbytes = 40 * (4 if dtype == "float32" else 2)
    rows, own = (rng.integers(0, 256, (count, nbytes + pad)).astype(np.uint8) for count, pad in ((7, 16), (5, 48)))
    places = rng.integers(-1, 12, (30, 4)).astype(np.int32)
    weights = rng.standard_normal((30, 4)).astype(np.float32) if weighted else None
    together = np.concatenate((rows[:, :nbytes], own[:, :nbytes]))
    want, got = np.zeros((30, nbytes), np.uint8), np.zeros((30, nbytes), np.uint8)
    kernels.combine(want, together, places, weights, dtype, False)
    split = np.where(places >= 7, -2 - (places - 7), places).astype(np.int32)
    kernels.combine(got, rows, split, weights, dtype, False, own=own)
    assert (want == got).all()
    # Without a second array every place below 0 is none.
    kernels.combine(want, rows, np.where(places >= 7, -1, places).astype(np.int32), weights, dtype, False)
    kernels.combine(got, rows, split, weights, dtype, False)
    assert (want == got).all()
