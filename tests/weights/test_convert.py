"""Casts and block quantization: against a formula written out, and other libraries, in slices and odd shapes."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.weights import convert

NUMBERS = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}
E4M3 = ml_dtypes.float8_e4m3fn


@pytest.fixture(params=["ml_dtypes", pytest.param("torch", marks=pytest.mark.needs_torch)])
def library(request, monkeypatch):
    """Convert by one library alone."""
    if request.param == "torch":
        import torch

        monkeypatch.setitem(sys.modules, "torch", torch)
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)


def random_values(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(NUMBERS[dtype])


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def by_formula(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Quantize block by block, as the formula says."""
    rows, columns = values.shape[-2:]
    flat = values.reshape(-1, rows, columns).astype(np.float32)
    scales = np.zeros((len(flat), -(-rows // block[0]), -(-columns // block[1])), np.float32)
    out = np.zeros(flat.shape, E4M3)
    for matrix, high, wide in np.ndindex(scales.shape):
        box = (
            matrix,
            slice(high * block[0], (high + 1) * block[0]),
            slice(wide * block[1], (wide + 1) * block[1]),
        )
        largest = np.abs(flat[box]).max()
        scales[matrix, high, wide] = largest / np.float32(448.0) if largest > 0 else 1.0
        out[box] = (flat[box] / scales[matrix, high, wide]).astype(E4M3)
    return out, scales


@given(
    st.integers(0, 1 << 30),
    st.sampled_from(list(NUMBERS)),
    st.lists(st.integers(1, 3), max_size=1),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([(1, 1), (4, 4), (16, 32), (128, 128)]),
    st.sampled_from([64, 1000, 1 << 20]),
)
def test_quantized_elements_and_scales_are_those_of_the_formula(seed, dtype, outer, inner, block, slice_bytes):
    values = random_values(seed, (*outer, *inner), dtype)
    expected, scales = by_formula(values, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "SLICE_BYTES", slice_bytes)
        out, made = np.empty(values.size, np.uint8), np.empty(scales.size * 4, np.uint8)
        convert.quantize(raw(values), dtype, values.shape, block, (out, "F8_E4M3"), (made, "F32"))
    assert np.array_equal(made.view(np.float32).reshape(scales.shape), scales)
    assert np.array_equal(out, raw(expected))


def test_a_block_of_zeros_and_the_greatest_values_stay_finite():
    values = np.zeros((256, 128), np.float32)
    values[128:] = np.float32(3e38)
    out, made = np.empty(values.size, np.uint8), np.empty(8, np.uint8)
    convert.quantize(raw(values), "F32", values.shape, (128, 128), (out, "F8_E4M3"), (made, "F32"))
    scales = made.view(np.float32)
    assert scales[0] == 1.0
    back = out.view(E4M3).astype(np.float64).reshape(256, 128)
    assert np.all(back[:128] == 0)
    assert np.all(back[128:] == 448.0)


def test_numbers_are_rounded_as_by_other_libraries(library):
    """Every 41st of those that have a number in F8_E4M3, all around each tie, and what is too large for it or none."""
    near = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = np.unique((near[1:127] + near[:126]) / 2)
    several = [np.arange(0x3900_0000, 0x4400_0000, 41, np.uint32).view(np.float32), near, ties]
    several += [np.nextafter(ties, np.float32(end)) for end in (0, 1000)]
    several.append(np.array([0.0, 1e-45, 1e-38, np.inf, 1e38], np.float32))
    values = np.concatenate([sign * one for one in several for sign in (np.float32(1), np.float32(-1))])
    if torch := sys.modules.get("torch"):
        # It makes the greatest number of what is too large, which no block has after the division by its scale.
        values = values[np.abs(values) <= 464]
        expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    else:
        expected = values.astype(E4M3).view(np.uint8)
    assert np.array_equal(convert._e4m3(values.copy()), expected)


def test_a_type_that_is_not_rounded_here_is_quantized_by_ml_dtypes():
    values = random_values(1, (30, 20), "BF16")
    expected = np.abs(values.astype(np.float32)).max() / np.float32(57344.0)
    out, made = np.empty(values.size, np.uint8), np.empty(4, np.uint8)
    convert.quantize(raw(values), "BF16", values.shape, (128, 128), (out, "F8_E5M2"), (made, "F32"))
    assert made.view(np.float32) == expected
    assert np.array_equal(out, raw((values.astype(np.float32) / expected).astype(ml_dtypes.float8_e5m2)))


@pytest.mark.parametrize(
    ("dtype", "to"), [("F32", "BF16"), ("BF16", "F32"), ("F32", "F16"), ("F16", "F64"), ("I64", "I32")]
)
def test_casts_give_the_bytes_of_the_types(library, dtype, to):
    count = 3 * convert.SLICE_BYTES // 4 // 2
    kind, other = convert.dtype_of(dtype), convert.dtype_of(to)
    values = np.arange(count) if dtype == "I64" else np.random.default_rng(5).standard_normal(count)
    values = values.astype(kind)
    out = np.empty(count * other.itemsize, np.uint8)
    convert.cast(raw(values), dtype, out, to)
    assert np.array_equal(out, raw(values.astype(other)))
