"""The GPU kernels of `aiote.moe`, compiled by g++ over the emulation of CUDA in `tests/moe/emulation`."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiote.moe.device import SOURCE
from support import TESTS
from support.checkout.compiled import kept

FOLDER = TESTS / "moe" / "emulation"
LIBRARY = ("-fPIC", "-shared", "-fsanitize=undefined", "-fno-sanitize-recover=all")
# ThreadSanitizer knows no fences, and says so; it is not to know those of the emulation.
THREADS = ("-g", "-fsanitize=thread", "-Wno-tsan", "-DCUDA_ON_CPU_THREADS")
ORDERED = re.compile(r"__sync\w+\(|load_acquire\(|store_release\(|add_acq_rel\(")


def aligned(length: int, dtype: type[Any]) -> NDArray[Any]:
    """Return zeros that begin at a multiple of 64."""
    nbytes = length * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes].view(dtype)


def compiled(name: str, *flags: str) -> Path:
    """Compile the emulation, unless that was done, and return the file."""
    compiler = [*shlex.split(os.environ.get("CXX") or "g++"), "-std=c++17", "-O1", "-ffp-contract=off", *flags]
    command = [*compiler, f'-DKERNELS="{SOURCE}"', FOLDER / "emulation.cpp", "-lpthread"]
    return kept(name, command, [SOURCE, *sorted(FOLDER.glob("*.h"))])


def ordering_lines() -> list[int]:
    """Return every line of the kernels that has a barrier, an acquire or a release, but for their definitions."""
    definitions, kernels = SOURCE.read_text().split("#endif", 1)
    first = definitions.count("\n") + 1
    return [number for number, line in enumerate(kernels.split("\n"), first) if ORDERED.search(line)]


class Emulation:
    """The library, as `GpuKernels` takes it. `order` is the order of the fibres."""

    interface = "__array_interface__"
    threads = 256

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.source.restype = ctypes.c_size_t
        self.order = 0

    def zeros(self, length: int, dtype: type[Any]) -> Any:
        return np.zeros(length, dtype)

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        return aligned(length, dtype)

    def fetch(self, array: Any) -> NDArray[Any]:
        return np.array(array)

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        values = (ctypes.c_longlong * len(arguments))(*arguments)
        size = ctypes.c_size_t(shared)
        assert self._library.launch(name.encode(), blocks, threads, size, self.order, values) == 0

    def play(self, without: int, order: int) -> int | None:
        """Play the scenarios without what orders memory in a line; return a digest of all results, None for a hang."""
        digest = ctypes.c_uint64()
        return digest.value if self._library.play(without, order, ctypes.byref(digest)) else None

    def source(self) -> bytes:
        """Return the bytes of the kernels that were compiled."""
        begin = ctypes.c_char_p()
        length = self._library.source(ctypes.byref(begin))
        return ctypes.string_at(begin, length)


class DeviceArray:
    """An array that only kernels reach, as a GPU's is: it describes itself to them, and NumPy cannot read it."""

    def __init__(self, memory: NDArray[Any]) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.memory.__array_interface__, "strides": self.memory.strides}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.memory.dtype

    @property
    def size(self) -> int:
        return self.memory.size

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        raise TypeError("this array is in a GPU's memory")

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, key: Any) -> DeviceArray:
        return DeviceArray(self.memory[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.memory[key] = value.memory if isinstance(value, DeviceArray) else value

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.memory.reshape(*shape))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.memory.view(dtype))


class Arrays:
    """The arrays of a GPU that is none."""

    def array(self, source: Any) -> DeviceArray:
        """Return an array of the GPU's."""
        return DeviceArray(np.array(source))

    def zeros(self, length: int, dtype: type[Any]) -> Any:
        return DeviceArray(aligned(length, dtype))

    def host(self, length: int, dtype: type[Any]) -> NDArray[Any]:
        return aligned(length, dtype)


class EmulatedGpu(Arrays):
    """A GPU that runs kernels one after another, when it comes to that: in a thread, behind whoever has launched them.

    `hold` keeps it from running any, as other work on the stream does.
    """

    interface = "__cuda_array_interface__"
    threads = 256

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._launched: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._going = threading.Event()
        self._going.set()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._launched.get()) is not None:
            self._going.wait()
            try:
                if self.failure is None:
                    work()
            except BaseException as error:
                self.failure = error
            self._launched.task_done()

    def close(self) -> None:
        self._going.set()
        self._launched.put(None)
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def hold(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def fetch(self, array: Any) -> NDArray[Any]:
        self._launched.join()
        return np.array(array.memory)

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: list[int]) -> None:
        # Few blocks: each emulated thread costs a stack.
        self._launched.put(lambda: self._emulation.launch(name, min(blocks, 2), threads, shared, arguments))
