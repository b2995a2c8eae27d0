"""A GPU as the programs of this folder use it: cupy's, or the tests' stand-in for the driver, on which they run whole.

What the stand-in measures means nothing. A stream is `None`, the legacy default one, or what `stream()` made.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
TESTS = Path(__file__).parents[2] / "tests"
KERNELS = Path(__file__).with_name("kernels.cu")
THREADS = 256


class Gpu(Protocol):
    """What both have. Kernels that take `us` are late by so many microseconds."""

    name: str
    real: bool

    def array(self, *shape: int) -> Any:
        """Return zeroed bytes of the GPU's memory."""
        ...

    def stream(self, *, blocking: bool = False) -> Any:
        """Make a stream, which stays until `close`."""
        ...

    def fill(self, array: Any, value: int, us: int, stream: Any) -> None:
        """Launch a kernel that fills an array with a byte."""
        ...

    def store(self, lent: Any, value: int, us: int, stream: Any) -> None:
        """Launch a kernel that stores a number, of less than 256, in what a WatchedValue lends."""
        ...

    def differing(self, array: Any, value: int, stream: Any) -> int:
        """Count by a kernel, launched now, the bytes that have another value; wait for it."""
        ...

    def read(self, array: Any) -> Bytes:
        """Return all bytes, flat."""
        ...

    def write(self, array: Any, data: Bytes) -> None:
        """Set all bytes, and wait until they are there."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait for what a stream has to do."""
        ...

    def breaks(self, us: int, by_address: bool, stream: Any) -> None:
        """Have a kernel break the context."""
        ...

    def close(self) -> None:
        """Give all back."""
        ...


class RealGpu:
    """The first GPU, by cupy."""

    real = True

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.name = properties["name"].decode()
        self.module = cupy.RawModule(code=KERNELS.read_text())
        self.count = cupy.zeros(1, cupy.uint32)
        self.kernels: dict[str, Any] = {}
        cupy.cuda.Device(0).synchronize()

    def launch(self, name: str, blocks: int, arguments: tuple[Any, ...], stream: Any, threads: int = THREADS) -> None:
        """Launch one of kernels.cu. Its numbers are NumPy's, of the kernel's own types."""
        if name not in self.kernels:
            self.kernels[name] = self.module.get_function(name)
        with self.cupy.cuda.Stream.null if stream is None else stream:
            self.kernels[name]((blocks,), (threads,), arguments)

    def array(self, *shape: int) -> Any:
        made = self.cupy.zeros(shape, self.cupy.uint8)
        self.cupy.cuda.Device(0).synchronize()
        return made

    def stream(self, *, blocking: bool = False) -> Any:
        return self.cupy.cuda.Stream(non_blocking=not blocking)

    def fill(self, array: Any, value: int, us: int, stream: Any) -> None:
        blocks = max(1, min(16, array.nbytes // 4096))
        self.launch("fill", blocks, (array, np.uint64(array.nbytes), np.uint32(value), np.uint64(us)), stream)

    def store(self, lent: Any, value: int, us: int, stream: Any) -> None:
        address = lent.__cuda_array_interface__["data"][0]
        self.launch("store", 1, (np.uint64(address), np.uint64(value), np.uint64(us)), stream, 1)

    def differing(self, array: Any, value: int, stream: Any) -> int:
        with stream:
            self.count.fill(0)
            self.launch("differing", 32, (array, np.uint64(array.nbytes), np.uint32(value), self.count), stream)
            found = self.cupy.asnumpy(self.count)
        return int(found[0])

    def read(self, array: Any) -> Bytes:
        self.cupy.cuda.Device(0).synchronize()
        return np.asarray(self.cupy.asnumpy(array)).reshape(-1).view(np.uint8)

    def write(self, array: Any, data: Bytes) -> None:
        array.set(np.ascontiguousarray(data).reshape(array.shape))
        self.cupy.cuda.Device(0).synchronize()

    def synchronize(self, stream: Any) -> None:
        (self.cupy.cuda.Stream.null if stream is None else stream).synchronize()

    def breaks(self, us: int, by_address: bool, stream: Any) -> None:
        self.launch("broken", 1, (np.uint64(us), np.uint32(by_address)), stream, 1)

    def close(self) -> None:
        self.cupy.cuda.Device(0).synchronize()


class Part:
    """Some bytes of a GPU, as a kernel of the stand-in takes them."""

    def __init__(self, memory: Any, start: int, nbytes: int) -> None:
        self.address = memory.__cuda_array_interface__["data"][0] + start
        self.nbytes = nbytes


class StandinGpu:
    """The tests' stand-in for the driver. Its kernels fill memory, and nothing else."""

    name = "the stand-in"
    real = False

    def __init__(self) -> None:
        sys.path.insert(0, str(TESTS))
        from support.gpu import standin_cuda  # type: ignore[import-not-found]

        self.standin = standin_cuda
        os.environ["AIOTE_LIBCUDA"] = standin_cuda.standin_path()
        standin_cuda.driver()
        self.stack = ExitStack()

    def array(self, *shape: int) -> Any:
        made = self.standin.GpuArray(int(np.prod(shape)))
        made.__cuda_array_interface__["shape"] = shape
        made.shape = shape
        made.seen[:] = 0
        return made

    def stream(self, *, blocking: bool = False) -> Any:
        return self.stack.enter_context(self.standin.new_stream(blocking=blocking))

    def fill(self, array: Any, value: int, us: int, stream: Any) -> None:
        self.standin.launched(array, value, us, stream)

    def store(self, lent: Any, value: int, us: int, stream: Any) -> None:
        self.standin.launched(Part(lent, 0, 1), value, us, stream)

    def differing(self, array: Any, value: int, stream: Any) -> int:
        return int(np.count_nonzero(array.seen != value))

    def read(self, array: Any) -> Bytes:
        return np.array(array.seen)

    def write(self, array: Any, data: Bytes) -> None:
        array.seen[:] = data.reshape(-1)

    def synchronize(self, stream: Any) -> None:
        self.standin.synchronized(stream)

    def breaks(self, us: int, by_address: bool, stream: Any) -> None:
        time.sleep(us / 1e6)
        self.stack.enter_context(self.standin.broken(0))

    def close(self) -> None:
        self.stack.close()


def opened(standin: bool) -> Gpu:
    """Return the GPU that was asked for."""
    gpu: Gpu = StandinGpu() if standin else RealGpu()
    say(f"on {gpu.name}")
    return gpu


def say(text: str) -> None:
    print(text, flush=True)


def parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every program."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--standin", action="store_true", help="the tests' stand-in, whose figures mean nothing")
    made.add_argument("--seconds", type=float, default=seconds, help=f"in all (default: {seconds:g})")
    return made


def us(seconds: float) -> float:
    """Return microseconds that are fit to be printed."""
    return round(seconds * 1e6, 2)


class Report:
    """What a program has found. One arm that fails ends no other, and is told in the last line."""

    def __init__(self, claim: str, seconds: float) -> None:
        self.claim = claim
        self.end_at = time.monotonic() + seconds
        self.detail: dict[str, Any] = {}
        self.failed: list[str] = []
        self._limit = seconds + 10
        self._timer = threading.Timer(self._limit, self._hung)
        self._timer.daemon = True
        self._timer.start()
        # For who hangs with the interpreter's lock.
        faulthandler.dump_traceback_later(self._limit + 5, exit=True)

    @property
    def left(self) -> float:
        """How many seconds there are, at least one."""
        return max(self.end_at - time.monotonic(), 1.0)

    @contextmanager
    def arm(self, name: str) -> Iterator[None]:
        """Run an arm; print what it raises."""
        say(f"-- {name}")
        try:
            yield
        except Exception as error:
            self._note(name, error)

    def run(self, standin: bool, program: Callable[..., Coroutine[Any, Any, int]], *more: Any) -> int:
        """Run a program with the GPU that was asked for; its last line is printed whatever happens."""
        try:
            return asyncio.run(program(opened(standin), self, *more))
        except Exception as error:
            self._note("outside of the arms", error)
            return self.end("failed", False)

    def end(self, measured: str, ok: bool) -> int:
        """Print the last line; return the exit status."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
        ok = ok and not self.failed
        detail = self.detail | ({"failed": self.failed} if self.failed else {})
        found = {"claim": self.claim, "ok": ok, "measured": measured, "detail": detail}
        say("RESULT " + json.dumps(found, default=str))
        return 0 if ok else 1

    def _note(self, name: str, error: Exception) -> None:
        self.failed.append(f"{name}: {type(error).__name__}: {error}"[:300])
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()

    def _hung(self) -> None:
        faulthandler.dump_traceback(file=sys.stdout)
        self.failed.append(f"nothing had ended after {self._limit:.0f} s")
        self.end("hung", False)
        os._exit(1)


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, 9)
