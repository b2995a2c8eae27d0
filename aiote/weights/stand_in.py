"""Arrays of bytes without memory, of which NumPy makes views: only shapes and strides count, and nobody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["offset_of", "owner", "stand_in"]

BYTE = np.zeros(1, np.uint8)
FIRST = int(BYTE.__array_interface__["data"][0])


def stand_in(shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return an array of this shape with these strides, in elements, all but one of which lie in no memory."""
    return np.lib.stride_tricks.as_strided(BYTE, shape, strides)


def offset_of(view: Any) -> int:
    """Return where a view of a stand-in begins, in elements of that."""
    return int(view.__array_interface__["data"][0]) - FIRST


def owner(array: Any) -> Any:
    """Return what has an array's memory: two views have one of the same stand-in."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array
