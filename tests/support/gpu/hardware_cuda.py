"""A real GPU in the place of the stand-in for the driver, for the tests that ask nothing which only that can do.

    AIOTE_TESTS_ON_GPU=1 python -P -m pytest tests/rails -k gpu

It needs cupy. Kernels wait by the GPU's own clock; copies are as late as they are. A test that holds copies back, has
calls fail, counts them, or needs a second GPU is skipped at that point.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

ON_GPU = os.environ.get("AIOTE_TESTS_ON_GPU") == "1"
LIBRARY = "libcuda.so.1"
NEEDLESS = ("standin_reset", "standin_pace")
"""What sets the stand-in alone, so that without it a test means the same."""
KERNEL = r"""
extern "C" __global__ void late_fill(unsigned long long to, unsigned long long length, unsigned int value,
                                     unsigned long long ns) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begun < ns);
    if (length == 8 && to % 8 == 0) {  // as one store: the host may look at a value at any time
        if (threadIdx.x == 0) *(volatile unsigned long long*)to = 0x0101010101010101ull * value;
        return;
    }
    for (unsigned long long i = threadIdx.x; i < length; i += blockDim.x) ((unsigned char*)to)[i] = value;
}
"""


class Hardware:
    """The GPU's driver, with those functions of the stand-in's own that have a like there."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._cuda = ctypes.CDLL(LIBRARY)
        self._kernel = cupy.RawKernel(KERNEL, "late_fill")
        scratch = cupy.zeros(64, np.uint8)
        self.standin_kernel(None, scratch.data.ptr, 64, 1, 0)  # compiles it, which takes longer than a loop may stand
        cupy.cuda.Device().synchronize()

    def __getattr__(self, name: str) -> Any:
        if name in NEEDLESS:
            return lambda *_: 0
        if name.startswith("standin_"):
            pytest.skip(f"{name} is the stand-in's own")
        return getattr(self._cuda, name)

    def standin_hold(self, on: int) -> int:
        """Let go; nothing can be held."""
        return pytest.skip("copies of a GPU cannot be held back") if on else 0

    def standin_kernel(self, stream: Any, to: Any, length: Any, value: int, us: int) -> int:
        """Launch a kernel that waits, then fills memory."""
        number, address, size = (getattr(each, "value", each) or 0 for each in (stream, to, length))
        with warnings.catch_warnings():  # cupy 14.2 would rather have an object, which it asks for this number
            warnings.simplefilter("ignore", DeprecationWarning)
            there = self._cupy.cuda.ExternalStream(number)
        with there:
            arguments = (np.uint64(address), np.uint64(size), np.uint32(value), np.uint64(us * 1000))
            self._kernel((1,), (1024,), arguments)
        return 0

    def standin_capture(self, stream: Any, on: int) -> int:
        """Begin or end the capture of a stream."""
        if on:
            return int(self._cuda.cuStreamBeginCapture_v2(stream, 0))
        graph = ctypes.c_void_p()
        self._cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        return int(self._cuda.cuGraphDestroy(graph)) if graph else 0


def needs_standin() -> None:
    """Skip the test on a GPU."""
    if ON_GPU:
        pytest.skip("only the stand-in can be told to do this")


def needs_device(device: int) -> None:
    """Skip the test on a machine that has not so many GPUs."""
    if not ON_GPU:
        return
    cuda, count = ctypes.CDLL(LIBRARY), ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if device >= count.value:
        pytest.skip(f"cuda:{device} is not there: {count.value} GPU")


class Window:
    """The bytes of an array in a GPU's memory, which are copied when they are looked at and when they are set.

    A setter returns when they are there, behind all that blocking streams have to do.
    """

    def __init__(
        self, owner: Any, here: Callable[[], AbstractContextManager[Any]], shape: tuple[int, ...] | None = None
    ) -> None:
        self.owner = owner
        self.shape = shape or (owner.nbytes,)
        self._here = here

    def reshape(self, *shape: int) -> Window:
        return Window(self.owner, self._here, np.empty(self.nbytes, np.uint8).reshape(*shape).shape)

    @property
    def nbytes(self) -> int:
        return int(self.owner.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = np.empty(self.nbytes, np.uint8)
        self._copied("cuMemcpyDtoH_v2", found.ctypes.data, self.owner.address, self.nbytes)
        found = found.reshape(self.shape)
        return found if dtype is None else found.astype(dtype)

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        numbers = np.arange(self.nbytes).reshape(self.shape)[key].reshape(-1)
        if not len(numbers):
            return
        first, last = int(numbers.min()), int(numbers.max()) + 1
        found = np.asarray(self)
        found[key] = value
        part = found.reshape(-1)[first:last]
        self._copied("cuMemcpyHtoD_v2", self.owner.address + first, part.ctypes.data, last - first)

    def _copied(self, call: str, to: int, origin: int, length: int) -> None:
        if not length:
            return
        with self._here() as cuda:
            code = getattr(cuda, call)(ctypes.c_uint64(to), ctypes.c_uint64(origin), ctypes.c_size_t(length))
            # From pageable memory it returns when the bytes have been read, not when they are there.
            code = code or cuda.cuStreamSynchronize(None)
        assert code == 0, f"{call} returned {code}"

    def __eq__(self, other: object) -> Any:
        return np.asarray(self) == np.asarray(other)

    def __ne__(self, other: object) -> Any:
        return np.asarray(self) != np.asarray(other)

    __hash__ = None  # type: ignore[assignment]

    def __bytes__(self) -> bytes:
        return np.asarray(self).tobytes()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)
