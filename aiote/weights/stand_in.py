"""Stand-ins for arrays: NumPy makes views of them, and only their shapes and strides count.

A stand-in is an array of bytes almost without memory. Its elements must never be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["offset_of", "owner", "stand_in"]

BYTE = np.zeros(1, np.uint8)
FIRST = int(BYTE.__array_interface__["data"][0])


def stand_in(shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return an array of bytes with this shape and these strides, in elements. Only its first element has memory."""
    return np.lib.stride_tricks.as_strided(BYTE, shape, strides)


def offset_of(view: Any) -> int:
    """Return the element of a stand-in at which a view of it begins."""
    return int(view.__array_interface__["data"][0]) - FIRST


def owner(array: Any) -> Any:
    """Return the object that owns an array's memory. All views of the same stand-in have the same owner."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array
