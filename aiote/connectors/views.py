"""Views of tensors' memory as bytes. This module does not import torch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["bytes_at"]


def bytes_at(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a view of a contiguous CPU tensor's bytes, for any dtype. The caller keeps the tensor while it uses them.

    It does not call `tensor.numpy()`, because the tensor's storage can no longer be resized after that.
    """
    return np.ctypeslib.as_array((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()))
