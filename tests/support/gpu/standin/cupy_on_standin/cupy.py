"""As much of cupy as two examples and `aiote prove` use, over the stand-in for the driver: kernels are late, the host
sees no bytes. With STANDIN_DAMAGE=short or early, the driver is damaged on purpose.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[4]))
from support.gpu.standin_cuda import Adopted, checked, driver, on_device, standin_path, synchronized

os.environ["AIOTE_LIBCUDA"] = standin_path()
DAMAGES = {"": 0, "short": 1, "early": 2}
driver().standin_damage(DAMAGES[os.environ.get("STANDIN_DAMAGE", "")])
__version__ = "on the stand-in"
uint8 = np.uint8
LATE_US = 3000
_current: list[int | None] = [None]


class ndarray(Adopted):
    """An array of a device."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory)
        self.memory = memory

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, ndarray):
            self.memory[key] = value.memory
            return
        part = self.memory[key]
        start = part.ctypes.data - self.memory.ctypes.data
        with on_device(0) as cuda:
            where, size = ctypes.c_uint64(self.address + start), ctypes.c_size_t(part.nbytes)
            checked(cuda.standin_kernel(ctypes.c_void_p(_current[-1]), where, size, value, LATE_US))


def zeros(shape: tuple[int, ...], kind: type) -> ndarray:
    return ndarray(np.zeros(shape, kind))


def asarray(array: Any) -> ndarray:
    return ndarray(np.array(array))


def asnumpy(array: ndarray) -> Any:
    synchronized(None)
    return array.memory.copy()


class Stream:
    """A stream of the stand-in's, which stays for good."""

    def __init__(self, *, non_blocking: bool = False) -> None:
        made = ctypes.c_void_p()
        with on_device(0) as driver_calls:
            checked(driver_calls.cuStreamCreate(ctypes.byref(made), int(non_blocking)))
        self.ptr = made.value

    def __enter__(self) -> Stream:
        _current.append(self.ptr)
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()


class Device:
    """The first device of the stand-in's."""

    id = 0

    def synchronize(self) -> None:
        synchronized(None)


runtime = types.SimpleNamespace(
    getDeviceCount=lambda: int(os.environ.get("GPUS", "2")),
    getDeviceProperties=lambda number: {"name": b"stand-in"},
)
cuda = types.SimpleNamespace(Device=Device, Stream=Stream, runtime=runtime)
