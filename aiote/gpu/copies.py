"""Copy whole arrays between the host and a GPU, or within one GPU."""

from __future__ import annotations

from typing import Any

from aiote_native.cuda.driver import copy_bytes

from ..config import EngineConfig
from ..errors import FabricError, UsageError
from ..rails import StatusError, acquire, open_driver

__all__ = ["copy"]

OF_GPU = ("cuda", "cuda_managed")


def copy(target: Any, source: Any) -> None:
    """Copy all bytes of `source` into `target`, an array of the same length, after the GPU's default stream.

    One of the arrays, or both, must be in GPU memory; both must then be on the same GPU. The call blocks its thread
    until the copy is done, so do not call it in an event loop. Raises UsageError for objects without such memory, a
    read-only target, different lengths and two arrays of the host, FabricError.
    """
    try:
        here, there = acquire(source), acquire(target)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"copy: {error}") from error
    on_gpu = next((one for one in (there, here) if one.device in OF_GPU), None)
    if here.nbytes != there.nbytes or there.readonly or on_gpu is None:
        raise UsageError(
            f"copy: {here.nbytes} bytes of {here.device} to {there.nbytes} {'read-only ' * there.readonly}"
            f"bytes of {there.device}: expected a writable target of the same length, and at least "
            "one of the two on a GPU"
        )
    try:
        open_driver(EngineConfig().libcuda)
        copy_bytes(there.address, here.address, here.nbytes, on_gpu.address)
    except StatusError as error:
        raise FabricError(error.errno or 0, f"{error.operation}: {error.strerror}", operation="copy") from error
    finally:
        here.release()
        there.release()
