"""Arrays with what connectors ask of torch's tensors, for tests without torch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class Tensor(np.ndarray):
    """An array with what a tensor is asked for, but its storage."""

    device = SimpleNamespace(type="cpu")

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return self.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.flags.c_contiguous)

    def data_ptr(self) -> int:
        return self.ctypes.data


def tensor(count: int, value: int = 0) -> Tensor:
    """Return a tensor of so many bytes."""
    return np.full(count, value, np.uint8).view(Tensor)
