"""Convert elements on their way to a target: casts, and quantization by blocks with one scale for each block.

A block's scale is its largest magnitude divided by the greatest finite value of the type, as for DeepSeek-V3's weights
(`weight_scale_inv`). A quantized element is the value divided by the scale, rounded to nearest even. This module rounds
to F8_E4M3 itself, on the bits of 32-bit numbers: 1 GiB/s of BF16 a core, 15 times as fast as ml_dtypes. torch quantizes
1.4 GiB/s, but uses all cores at once: if several ranks share the cores, torch's threads wait for each other, 10 ms a
call. Casts use torch if the program has loaded it. All ways give the same bytes (tests/weights/test_convert.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dtypes import ITEMSIZE, ML_DTYPES, NUMPY, dtype_of
from .rank_memory import Bytes

__all__ = ["cast", "quantize", "temporary_bytes"]

E4M3_MAX = 448.0
SLICE_BYTES = 1 << 20
"""Conversions process slices of about this many bytes of 32-bit numbers: these fit the cache and take little memory."""


def temporary_bytes(shape: tuple[int, ...], block: tuple[int, int] | None) -> int:
    """Return the most bytes that a conversion of an array holds besides its input and its output.

    With a `block` the conversion is a quantization, otherwise a cast.
    """
    elements = math.prod(shape)
    if block is None:
        return min(elements, SLICE_BYTES // 4) * 8
    rows, columns = shape[-2:]
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    at_once = min(high, _blocks_at_once(columns, block[0]))
    # For a slice, rounded up to whole blocks: 32-bit numbers, their codes, an intermediate array, signs and a mask.
    return at_once * wide * math.prod(block) * 14 + math.prod(shape[:-2]) * high * wide * 16


def cast(source: Bytes, dtype: str, target: Bytes, to: str) -> None:
    """Convert dense elements from one type to another. `source` and `target` are the elements' bytes.

    A value that is too large for the target type becomes infinite, or NaN if the type has no infinity.
    """
    torch = _torch(dtype, to)
    step = SLICE_BYTES // 4
    count = source.nbytes // ITEMSIZE[dtype]
    for first in range(0, count, step):
        some = source[first * ITEMSIZE[dtype] : (first + step) * ITEMSIZE[dtype]]
        there = target[first * ITEMSIZE[to] : (first + step) * ITEMSIZE[to]]
        if torch is not None:
            _tensor(torch, there, to).copy_(_tensor(torch, some, dtype))
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                there.view(dtype_of(to))[:] = some.view(dtype_of(dtype)).astype(dtype_of(to))


def quantize(
    source: Bytes,
    dtype: str,
    shape: tuple[int, ...],
    block: tuple[int, int],
    target: tuple[Bytes, str],
    scales: tuple[Bytes, str],
) -> None:
    """Quantize a dense array by blocks of its two innermost dimensions; blocks begin at index 0 of each.

    `target` and `scales` are each a pair of bytes and a type. `target` takes the elements in the same order, `scales`
    takes ceil(extent / block) scales for each of the two dimensions. A block of zeros has scale 1.
    """
    rows, columns = shape[-2:]
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    matrices = math.prod(shape[:-2])
    made = np.empty((matrices, high, wide), np.float32)
    size, out = ITEMSIZE[dtype], ITEMSIZE[target[1]]
    for matrix, first, last in _slices(matrices, rows, columns, block[0]):
        start, stop = (matrix * rows + first) * columns, (matrix * rows + last) * columns
        some, there = source[start * size : stop * size], target[0][start * out : stop * out]
        where = made[matrix, first // block[0] : -(-last // block[0])]
        _quantized(some, dtype, columns, block, there, to=target[1], scales=where)
    cast(made.reshape(-1).view(np.uint8), "F32", scales[0], scales[1])


def _blocks_at_once(columns: int, high: int) -> int:
    return max(1, SLICE_BYTES // 4 // (columns * high))


def _slices(matrices: int, rows: int, columns: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield runs of rows that consist of whole blocks, as (matrix, first row, end)."""
    step = high * _blocks_at_once(columns, high)
    for matrix in range(matrices):
        for first in range(0, rows, step):
            yield matrix, first, min(first + step, rows)


def _quantized(
    some: Bytes, dtype: str, columns: int, block: tuple[int, int], there: Bytes, *, to: str, scales: NDArray[np.float32]
) -> None:
    high, wide = scales.shape
    values = np.zeros((high * block[0], wide * block[1]), np.float32)
    count = len(there) // (columns * ITEMSIZE[to])
    if dtype == "BF16":
        bits = values.view(np.uint32)
        bits[:count, :columns] = some.view(np.uint16).reshape(count, columns)
        bits <<= 16
    else:
        values[:count, :columns] = some.view(dtype_of(dtype)).reshape(count, columns)
    # Reduce one dimension after the other: numpy's inner loop then runs over a whole row, not over a block's short row.
    largest = np.abs(values).reshape(high, block[0], -1).max(axis=1).reshape(high, wide, -1).max(axis=2)
    scales[:] = _scales(largest, E4M3_MAX if to == "F8_E4M3" else float(_ml_finfo(dtype_of(to)).max))
    blocks = values.reshape(high, block[0], wide, block[1])
    blocks /= scales[:, None, :, None]
    if to == "F8_E4M3":
        there.reshape(count, columns)[:] = _e4m3(values)[:count, :columns]
    else:
        there.view(dtype_of(to)).reshape(count, columns)[:] = values[:count, :columns].astype(dtype_of(to))


def _e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return numbers as bytes of F8_E4M3, rounded to nearest even. Overwrites `values`.

    A normal number loses 20 bits of its fraction and gets another bias. A subnormal number is rounded to a multiple of
    2 ** -9 by adding 2 ** 14, whose last place is 2 ** -9. A number that is too large becomes NaN.
    """
    bits = values.view(np.uint32)
    signs = (bits >> 24).astype(np.uint8)
    signs &= 0x80
    bits &= 0x7FFF_FFFF
    subnormal = values < 2.0**-6
    code = bits >> 20
    code &= 1
    code += bits
    code += np.uint32((0x7_FFFF - (120 << 23)) & 0xFFFF_FFFF)
    code >>= 20
    values += np.float32(2.0**14)
    bits &= 0x1F
    np.copyto(code, bits, where=subnormal)
    np.minimum(code, 0x7F, out=code)
    signs |= code.astype(np.uint8)
    return signs


def _scales(largest: Any, greatest: float) -> Any:
    # Divide in this order with torch and with numpy, so that both give the same last bit.
    return np.where(largest > 0, largest / np.float32(greatest), np.float32(1.0))


def _ml_finfo(dtype: np.dtype[Any]) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call, unused-ignore]


def _torch(*names: str) -> Any:
    """Return torch if the program has loaded it and it has these types, else None."""
    torch = sys.modules.get("torch")
    known = torch is not None and all(hasattr(torch, ML_DTYPES.get(name, NUMPY.get(name, ""))) for name in names)
    return torch if known else None


def _tensor(torch: Any, data: Bytes, dtype: str) -> Any:
    return torch.from_numpy(data).view(getattr(torch, ML_DTYPES.get(dtype) or NUMPY[dtype]))
