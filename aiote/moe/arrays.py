"""Views of the user's arrays as lines of bytes, and of memory as arrays for the user: NumPy's, and torch's on the CPU.

This module never imports torch, because a caller that has a tensor has already imported it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

import aiote

from ..core.masked_arrays import require_unmasked
from .config import ITEMSIZES

__all__ = ["Bytes", "elements", "lines", "plain", "same_memory", "zeros"]

Bytes = NDArray[np.uint8]
ALIGNED = 64
RAW = {1: "uint8", 2: "uint16", 4: "uint32"}


def zeros(nbytes: int) -> Bytes:
    """Return zeroed memory that begins at a multiple of 64; pages that are never touched cost no memory."""
    memory = np.zeros(nbytes + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return memory[start : start + nbytes]


def _describe_array(what: str, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """Return where an array lies, its shape, its strides in bytes, and the name of its type."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise aiote.UsageError(
                f"{what}: the array is on {array.device}; open the group with open_group(device=...) for "
                "arrays of a GPU"
            )
        size = array.element_size()
        strides = tuple(size * stride for stride in array.stride())
        return array.data_ptr(), tuple(array.shape), strides, str(array.dtype).removeprefix("torch.")
    require_unmasked(what, array)
    if not isinstance(array, np.ndarray):
        raise aiote.UsageError(f"{what}: expected a NumPy array or a torch tensor, got {type(array).__name__}")
    return array.ctypes.data, array.shape, array.strides, array.dtype.name


def lines(what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Bytes:
    """Return an array as lines of bytes (rows, bytes), in place: one line for each slice along its last dimension.

    The last dimension must be contiguous; other strides must not be negative. None in `shape` allows any length. The
    array must have the type `dtype`, or, as raw bytes, the unsigned type of the same size. Raises UsageError.
    """
    address, found, strides, name = _describe_array(what, array)
    size = ITEMSIZES[dtype]
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    if not fits or name not in (dtype, RAW[size]):
        wanted = ", ".join("any" if one is None else str(one) for one in shape)
        raise aiote.UsageError(f"{what}: expected {dtype} of shape ({wanted}), got {name} {found}")
    if 0 in found:
        return np.zeros((int(np.prod(found[:-1])), found[-1] * size), np.uint8)
    if found[-1] > 1 and strides[-1] != size:
        raise aiote.UsageError(f"{what}: expected contiguous rows, got strides {strides}")
    rest = list(zip(found[:-1], strides[:-1], strict=True))
    if min((stride for _, stride in rest), default=0) < 0:
        raise aiote.UsageError(f"{what}: its strides {strides} are negative, expected strides from 0 on")
    extent = sum((length - 1) * stride for length, stride in rest) + found[-1] * size
    memory = (ctypes.c_uint8 * extent).from_address(address)
    view = np.ndarray((*found[:-1], found[-1] * size), np.uint8, memoryview(memory), 0, (*strides[:-1], 1))
    return view if view.ndim == 2 else view.reshape(-1, view.shape[-1])


def plain(what: str, array: Any, shape: tuple[int, int], names: tuple[str, ...]) -> NDArray[Any]:
    """Return a small array of numbers as a NumPy array, without a copy. Raises UsageError for another shape or type."""
    _, found, _, name = _describe_array(what, array)
    if found != shape or name not in names:
        raise aiote.UsageError(f"{what}: expected {' or '.join(names)} of shape {shape}, got {name} {found}")
    return array if isinstance(array, np.ndarray) else np.asarray(array.detach().numpy())


def same_memory(array: Any, rows: Bytes) -> bool:
    """Return whether lines of bytes begin at the same address as `rows` and have the same strides."""
    return bool(array.ctypes.data == rows.ctypes.data and array.strides == rows.strides)


def _of_device(rows: Any, at: int, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """Return elements of contiguous lines in a GPU's memory; the length of a line is a multiple of 16 bytes."""
    if hasattr(like, "data_ptr"):
        torch = sys.modules["torch"]
        whole = torch.as_tensor(rows, device=like.device).view(getattr(torch, dtype))
    else:
        kind = getattr(like, "dtype", None)
        whole = rows.view(kind if kind is not None and kind.name == dtype else _raw(dtype))
    lines = whole[: int(np.prod(shape[:-1], dtype=np.int64))]
    return lines.reshape(*shape[:-1], whole.shape[-1])[..., at : at + shape[-1]]


def _raw(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype if _native(dtype) else RAW[ITEMSIZES[dtype]])


def elements(rows: Any, at: int, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """Return a view of the elements that begin at byte `at` of each row, as an array of the kind of `like`.

    If NumPy lacks the type, the elements have the type of `like`, provided that this is named `dtype`, else the
    unsigned type of the same size.
    """
    size = ITEMSIZES[dtype]
    if not isinstance(rows, np.ndarray):
        return _of_device(rows, at // size, shape, dtype, like)
    strides = [rows.strides[0]]
    for length in reversed(shape[1:-1]):
        strides.insert(0, strides[0] * length)
    raw = as_strided(rows[:, at:], (*shape[:-1], shape[-1] * size), (*strides, 1))
    if hasattr(like, "data_ptr"):
        torch = sys.modules["torch"]
        return torch.from_numpy(raw).view(getattr(torch, dtype))
    kind = like.dtype if like.dtype.name == dtype else _raw(dtype)
    return raw.view(kind)


def _native(dtype: str) -> bool:
    return dtype in ("float16", "float32", "int32", "int8", "uint8")
