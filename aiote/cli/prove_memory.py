"""The memory that `aiote prove` moves: this host's, or a GPU's, whose bytes are looked at through a copy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["CupyMemory", "HostMemory", "Memory", "TorchMemory", "gpu_memory"]


class Memory(Protocol):
    """Makes arrays of bytes, fills them and reads them back. `name` is what the report calls it."""

    name: str

    def filled(self, data: Any) -> Any: ...
    def bytes_of(self, array: Any) -> Any: ...
    def fill(self, array: Any, data: Any) -> None: ...


class HostMemory:
    """Memory of NumPy."""

    name = "host"

    def filled(self, data: Any) -> Any:
        return np.array(data, np.uint8)

    def bytes_of(self, array: Any) -> Any:
        return array.copy()

    def fill(self, array: Any, data: Any) -> None:
        array[:] = data


class CupyMemory:
    """Memory of a GPU, by cupy. Every step ends with the device at rest, for aiote waits for no stream."""

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
    """Memory of a GPU, by torch."""

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


def gpu_memory() -> Memory | str:
    """Return memory of the GPU here, by cupy or else by torch; where neither reaches one, a sentence that says why."""
    reasons = []
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            return CupyMemory(cupy)
        reasons.append("cupy finds no GPU")
    except ImportError:
        reasons.append("cupy is not installed")
    except Exception as error:  # cupy's own, of a kind that is known only where cupy is
        reasons.append(f"cupy: {error}")
    try:
        import torch
    except ImportError:
        return "; ".join([*reasons, "torch is not installed"])
    return TorchMemory(torch) if torch.cuda.is_available() else "; ".join([*reasons, "torch finds no GPU"])
