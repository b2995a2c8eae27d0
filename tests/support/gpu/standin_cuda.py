"""The stand-in for the CUDA driver (standin/cuda.c), its memory as arrays, and what only tests may ask of it.

With AIOTE_TESTS_ON_GPU=1 a real GPU is in its place (`hardware_cuda`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from support.checkout.compiled import shared_by_all
from support.gpu.hardware_cuda import LIBRARY, ON_GPU, Hardware, Window, needs_device

SOURCE = Path(__file__).parent / "standin" / "cuda.c"
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700


@functools.cache
def standin_path() -> str:
    """Compile the stand-in, unless that was done, and return its path."""
    return LIBRARY if ON_GPU else str(shared_by_all(SOURCE, f"-Wl,-soname,{LIBRARY}"))


@functools.cache
def driver() -> Any:
    """Load it with both devices' primary contexts active, as a process with an array library has them."""
    if ON_GPU:
        loaded: Any = Hardware()
        checked(loaded.cuInit(0))
        return loaded
    loaded = ctypes.CDLL(standin_path())
    counts = ("calls", "copies", "pending", "synchronizations", "events", "memories", "contexts", "blocked")
    for name in (*counts, "violations", "opened", "open", "flushes", "synchronous", "segments", "pinned"):
        getattr(loaded, f"standin_{name}").restype = ctypes.c_uint64
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
        needs_device(device)
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
        if ON_GPU:
            return Window(self, functools.partial(on_device, self.device))
        return np.asarray(Seen(self, self._alias))

    def __del__(self) -> None:
        if not hasattr(self, "address"):
            return
        with contextlib.suppress(AssertionError), on_device(self.device) as cuda:
            cuda.cuMemFree_v2(ctypes.c_uint64(self.address))


SEGMENT = 2 << 20
"""The least that memory of `cuMemCreate` has."""


class SegmentedArray(GpuArray):
    """Bytes of memory of `cuMemCreate` in segments side by side, as torch's expandable ones are."""

    def __init__(self, nbytes: int, device: int = 0, *, segment: int = SEGMENT, shareable: bool = True) -> None:
        self.nbytes, self.device = nbytes, device
        self.segment = segment
        self.count = -(-max(nbytes, 1) // segment)
        self.address = 0
        address, size = ctypes.c_uint64(), ctypes.c_size_t(segment)
        kind = (ctypes.c_int * 8)(1, int(shareable), 1, device)
        access = (ctypes.c_int * 3)(1, device, 3)
        with on_device(device) as cuda:
            whole = ctypes.c_size_t(self.count * segment)
            checked(cuda.cuMemAddressReserve(ctypes.byref(address), whole, ctypes.c_size_t(0), ctypes.c_uint64(0), 0))
            self.address = address.value
            for number in range(self.count):
                handle = ctypes.c_uint64()
                checked(cuda.cuMemCreate(ctypes.byref(handle), size, kind, ctypes.c_uint64(0)))
                at = ctypes.c_uint64(self.address + number * segment)
                checked(cuda.cuMemMap(at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0)))
                checked(cuda.cuMemRelease(handle))
            checked(cuda.cuMemSetAccess(address, whole, access, ctypes.c_size_t(1)))
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def __del__(self) -> None:
        with contextlib.suppress(AssertionError), on_device(self.device) as cuda:
            for number in range(self.count):
                at = ctypes.c_uint64(self.address + number * self.segment)
                cuda.cuMemUnmap(at, ctypes.c_size_t(self.segment))
            cuda.cuMemAddressFree(ctypes.c_uint64(self.address), ctypes.c_size_t(self.count * self.segment))


class Adopted:
    """Memory of the host as a device's: what lends it sees the bytes, aiote has an address that it cannot touch."""

    def __init__(self, array: Any, device: int = 0) -> None:
        self.view = memoryview(array)
        self.shape, self.typestr = (self.view.nbytes,), "|u1"
        if isinstance(array, np.ndarray):
            self.shape, self.typestr = array.shape, array.dtype.str
        self.device = device
        flat = np.frombuffer(self.view, np.uint8)
        address = ctypes.c_uint64()
        with on_device(device) as cuda:
            where, size = ctypes.c_void_p(flat.ctypes.data), ctypes.c_size_t(flat.nbytes)
            checked(cuda.standin_adopt(ctypes.byref(address), where, size))
        self.address = address.value
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (self.address, self.view.readonly),
        }

    def __del__(self) -> None:
        if not hasattr(self, "address"):
            return
        with contextlib.suppress(AssertionError), on_device(self.device) as cuda:
            cuda.cuMemFree_v2(ctypes.c_uint64(self.address))


def adopted(array: Any, device: int = 0) -> Any:
    """Return an array's bytes as memory of a device; as it is what is no array of the host's."""
    try:
        view = memoryview(array)
    except TypeError:
        return array
    return Adopted(array, device) if view.nbytes and view.contiguous else array


def gpu_copy(array: Any, device: int = 0) -> GpuArray:
    """Return device memory with the bytes of an array."""
    view = memoryview(array)
    flat = np.frombuffer(view, np.uint8)
    made = GpuArray(flat.nbytes, device, readonly=view.readonly)
    made.seen[:] = flat
    return made


def lender_of(array: Any) -> Any:
    """Return the device memory that an array shows the bytes of, or else the array."""
    shown = array if isinstance(array, Window) else getattr(array, "base", None)
    return shown.owner if isinstance(shown, Seen | Window) else array


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep every copy that was not done from being done."""
    driver().standin_hold(1)
    try:
        yield
    finally:
        driver().standin_hold(0)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep every kernel that was not run from being run."""
    driver().standin_hold(2)
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
def failing(name: str, after: int = 0, code: int = OUT_OF_MEMORY) -> Iterator[None]:
    """Have the call of that name fail once, after so many that do not."""
    driver().standin_fail(name.encode(), after, code)
    try:
        yield
    finally:
        driver().standin_fail(b"", 0, 0)


@contextlib.contextmanager
def broken(device: int = 0) -> Iterator[None]:
    """Break a device: every call in its contexts fails, and nothing that was queued is done."""
    driver().standin_break(device, ILLEGAL_ADDRESS)
    try:
        yield
    finally:
        driver().standin_break(device, 0)


@contextlib.contextmanager
def new_stream(device: int = 0, *, blocking: bool = False) -> Iterator[int]:
    """Make a stream and give its address; it ends when it has done what it was given."""
    made = ctypes.c_void_p()
    with on_device(device) as cuda:
        checked(cuda.cuStreamCreate(ctypes.byref(made), 0 if blocking else 1))
    try:
        yield made.value or 0
    finally:
        with on_device(device) as cuda:
            cuda.cuStreamDestroy_v2(made)


def launched(to: Any, value: int, us: int, stream: int | None, device: int = 0) -> None:
    """Launch a kernel that after so many microseconds fills memory with a value."""
    with on_device(device) as cuda:
        where, size = ctypes.c_uint64(to.address), ctypes.c_size_t(to.nbytes)
        checked(cuda.standin_kernel(ctypes.c_void_p(stream), where, size, value, us))


def synchronized(stream: int | None, device: int = 0) -> None:
    """Wait for a stream."""
    with on_device(device) as cuda:
        checked(cuda.cuStreamSynchronize(ctypes.c_void_p(stream)))


@contextlib.contextmanager
def captured(stream: int, device: int = 0) -> Iterator[Callable[[], bool]]:
    """Have what a stream is given captured; what is yielded tells whether somebody broke the capture."""
    with on_device(device) as cuda:
        cuda.standin_capture(ctypes.c_void_p(stream), 1)

    def is_broken() -> bool:
        status = ctypes.c_int()
        with on_device(device) as cuda:
            checked(cuda.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)))
        return status.value == 2

    try:
        yield is_broken
    finally:
        with on_device(device) as cuda:
            cuda.standin_capture(ctypes.c_void_p(stream), 0)


def pending() -> int:
    """Return how many copies were queued and are not done."""
    return int(driver().standin_pending())
