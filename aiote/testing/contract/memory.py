"""The memory that the contract's checks move: this host's, or a GPU's, whose bytes are examined through a copy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["ArrayMemory", "CupyMemory", "HostMemory", "TorchMemory", "gpu_memory"]


class ArrayMemory(Protocol):
    """Makes arrays of bytes, fills them and reads them back. `name` is its name in the report."""

    name: str

    def filled(self, data: Any) -> Any: ...
    def bytes_of(self, array: Any) -> Any: ...
    def fill(self, array: Any, data: Any) -> None: ...


class HostMemory:
    """Host memory in NumPy arrays."""

    name = "host"

    def filled(self, data: Any) -> Any:
        return np.array(data, np.uint8)

    def bytes_of(self, array: Any) -> Any:
        return array.copy()

    def fill(self, array: Any, data: Any) -> None:
        array[:] = data


class CupyMemory:
    """GPU memory in cupy arrays. Every method leaves the device idle, because aiote does not wait for any stream."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        number = cupy.cuda.Device().id
        self.name = f"cupy {cupy.__version__}, {cupy.cuda.runtime.getDeviceProperties(number)['name'].decode()}"

    def filled(self, data: Any) -> Any:
        array = self._cupy.asarray(data)
        self._cupy.cuda.Device().synchronize()
        return array

    def bytes_of(self, array: Any) -> Any:
        return self._cupy.asnumpy(array)

    def fill(self, array: Any, data: Any) -> None:
        array[:] = self._cupy.asarray(data)
        self._cupy.cuda.Device().synchronize()


class TorchMemory:
    """GPU memory in torch tensors."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.name = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"

    def filled(self, data: Any) -> Any:
        tensor = self._torch.from_numpy(np.array(data, np.uint8)).cuda()
        self._torch.cuda.synchronize()
        return tensor

    def bytes_of(self, array: Any) -> Any:
        return array.cpu().numpy()

    def fill(self, array: Any, data: Any) -> None:
        array.copy_(self._torch.from_numpy(np.array(data, np.uint8)))
        self._torch.cuda.synchronize()


def gpu_memory() -> ArrayMemory | str:
    """Return memory of this machine's GPU by cupy, or else by torch. If neither reaches a GPU, return why, as text."""
    reasons = []
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return CupyMemory(cupy)
        reasons.append("cupy finds no GPU")
    except ImportError:
        reasons.append("cupy is not installed")
    except Exception as error:  # cupy's own exception types are known only if cupy is installed
        reasons.append(f"cupy: {error}")
    try:
        import torch
    except ImportError:
        return "; ".join([*reasons, "torch is not installed"])
    return TorchMemory(torch) if torch.cuda.is_available() else "; ".join([*reasons, "torch finds no GPU"])
