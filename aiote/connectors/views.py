"""Tensors' memory as bytes; torch is not imported here."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["bytes_at"]


def bytes_at(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a contiguous CPU tensor's bytes where they lie, of any dtype; the caller keeps the tensor meanwhile.

    Not by `tensor.numpy()`, after which a storage cannot be resized any more.
    """
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))
