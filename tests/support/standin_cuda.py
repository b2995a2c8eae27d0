"""The stand-in for the CUDA driver (standin/cuda.c), its memory as arrays, and what only tests may ask of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from compiled import shared

SOURCE = Path(__file__).parent / "standin" / "cuda.c"
ILLEGAL_ADDRESS = 700


@functools.cache
def standin_path() -> str:
    """Compile the stand-in, once for the process, and return its path."""
    folder = Path(tempfile.mkdtemp(prefix="aiote-standin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(shared(SOURCE, folder))


@functools.cache
def driver() -> Any:
    """Load it with both devices' primary contexts active, as a process with an array library has them."""
    loaded = ctypes.CDLL(standin_path())
    for name in ("standin_calls", "standin_copies", "standin_pending"):
        getattr(loaded, name).restype = ctypes.c_uint64
    loaded.standin_alias.restype = ctypes.c_void_p
    checked(loaded.cuInit(0))
    for device in range(2):
        checked(loaded.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device))
    return loaded


def checked(code: int) -> None:
    assert code == 0, f"the stand-in returned {code}"


@contextlib.contextmanager
def on_device(device: int) -> Iterator[Any]:
    """Have a device's context current in this thread."""
    cuda, context = driver(), ctypes.c_void_p()
    checked(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    checked(cuda.cuCtxPushCurrent_v2(context))
    try:
        yield cuda
    finally:
        checked(cuda.cuCtxPopCurrent_v2(ctypes.byref(context)))
        checked(cuda.cuDevicePrimaryCtxRelease_v2(device))


class Seen:
    """The bytes of device memory as only a test can see them, for NumPy; it keeps the memory allocated."""

    def __init__(self, owner: GpuArray, alias: int) -> None:
        self.owner = owner
        data = (alias, False)
        self.__array_interface__ = {"version": 3, "shape": (owner.nbytes,), "typestr": "|u1", "data": data}


class GpuArray:
    """Bytes of a device's memory, lent as cupy does it; `seen` are the same bytes through the other mapping."""

    def __init__(self, nbytes: int, device: int = 0, *, readonly: bool = False) -> None:
        self.nbytes = nbytes
        self.device = device
        address = ctypes.c_uint64()
        with on_device(device) as cuda:
            checked(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1))))
        self.address = address.value
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, readonly),
        }

    @functools.cached_property
    def _alias(self) -> int:
        return int(driver().standin_alias(ctypes.c_uint64(self.address)))

    @property
    def seen(self) -> Any:
        """The bytes as they are now, in no order with any stream; writable."""
        return np.asarray(Seen(self, self._alias))

    def __del__(self) -> None:
        if not hasattr(self, "address"):
            return
        with contextlib.suppress(AssertionError), on_device(self.device) as cuda:
            cuda.cuMemFree_v2(ctypes.c_uint64(self.address))


def gpu_copy(array: Any, device: int = 0) -> GpuArray:
    """Return device memory with the bytes of an array."""
    view = memoryview(array)
    flat = np.frombuffer(view, np.uint8)
    made = GpuArray(flat.nbytes, device, readonly=view.readonly)
    made.seen[:] = flat
    return made


def lender_of(array: Any) -> Any:
    """Return the device memory that an array shows the bytes of, or else the array."""
    return array.base.owner if isinstance(getattr(array, "base", None), Seen) else array


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep every copy that was not done from being done."""
    driver().standin_hold(1)
    try:
        yield
    finally:
        driver().standin_hold(0)


@contextlib.contextmanager
def paced(us: int, seed: int = 1) -> Iterator[None]:
    """Have each piece of a copy delayed by up to so many microseconds, drawn from a seed."""
    driver().standin_pace(us, ctypes.c_uint64(seed))
    try:
        yield
    finally:
        driver().standin_pace(20, ctypes.c_uint64(1))


@contextlib.contextmanager
def broken(device: int = 0) -> Iterator[None]:
    """Break a device: every call in its contexts fails, and nothing that was queued is done."""
    driver().standin_break(device, ILLEGAL_ADDRESS)
    try:
        yield
    finally:
        driver().standin_break(device, 0)


def pending() -> int:
    """Return how many copies were queued and are not done."""
    return int(driver().standin_pending())
