"""Where the memory is that a soak registers: the host's, or a GPU's, on the stand-in for CUDA's driver."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np

import aiote
from support.gpu import standin_cuda
from support.gpu.standin_cuda import GpuArray, adopted, launched, lender_of, synchronized

KINDS = ("host", "cuda")
_devices = itertools.count()
_on_gpu = False


def zeros(nbytes: int) -> Any:
    """Return an array of bytes, all 0, as the host sees them; those of a GPU in no order with its streams."""
    return GpuArray(nbytes, next(_devices) % 2).seen if _on_gpu else np.zeros(nbytes, np.uint8)


def full(nbytes: int, value: int) -> Any:
    array = zeros(nbytes)
    array[:] = value
    return array


def use_gpus() -> None:
    """Have memory on GPUs from here on, by the stand-in that AIOTE_LIBCUDA names; start what it keeps for good."""
    global _on_gpu
    path = os.environ["AIOTE_LIBCUDA"]
    standin_cuda.standin_path = lambda: path
    standin_cuda.driver().standin_pace(1, 1)
    _on_gpu = True
    for device in range(2):
        first = GpuArray(64, device)
        launched(first, 0, 0, None, device)
        synchronized(None, device)


def lent(engine: aiote.Engine) -> aiote.Engine:
    """Have an engine register arrays as what they show: of a GPU's memory that memory, of the host's as if a GPU's."""
    if _on_gpu:
        register, slowly, device = engine.register, engine.register_async, next(_devices) % 2

        def lender(array: Any) -> Any:
            found = lender_of(array)
            return adopted(array, device) if found is array else found

        engine.register = lambda array, *more: register(lender(array), *more)  # type: ignore[method-assign]
        engine.register_async = lambda array, *more: slowly(lender(array), *more)  # type: ignore[method-assign]
    return engine
