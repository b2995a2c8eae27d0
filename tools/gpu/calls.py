"""Measure what the driver's own functions cost on this GPU, by its plainest calls: what aiote's figures stand beside.

    python tools/gpu/calls.py [--standin] [--batches]

Rates are of copies queued on one stream, GB/s of bytes copied (a copy within the GPU reads and writes each). Times of
calls are medians, less that of a call which does nothing, in us. *In turns* two processes have the GPU copy 64 bytes,
each as soon as the other's copy was seen by its host: what a round trip between them cannot be faster than.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
LIBRARY = "libcuda.so.1"
SIZES = {"256K": 256 << 10, "1M": 1 << 20, "16M": 16 << 20, "64M": 64 << 20}
LEAST = 1 << 30
LEAST_ON_STANDIN = 4 << 20
CALLS = 300


class Driver:
    """The driver's functions, each of which has to succeed, in the primary context of the first GPU."""

    def __init__(self, path: str) -> None:
        self._cuda = ctypes.CDLL(path)
        self.context = ctypes.c_void_p()
        self.cuInit(0)
        self.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0)
        self.cuCtxPushCurrent_v2(self.context)

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._cuda, name)

        def called(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise OSError(f"{name} returned {code}")

        return called

    def named(self, *names: str) -> Any:
        """Return the first function that there is, which returns its code. Raises AttributeError."""
        for name in names:
            if hasattr(self._cuda, name):
                return getattr(self._cuda, name)
        raise AttributeError(names[0])

    def made(self, name: str, *arguments: Any) -> Any:
        """Return what a function makes: an address, or a handle."""
        value = ctypes.c_uint64()
        getattr(self, name)(ctypes.byref(value), *arguments)
        return value


def rates(driver: Driver, least: int) -> dict[str, float]:
    """Return GB/s by kind and size, each of so many bytes at least."""
    stream = driver.made("cuStreamCreate", 1)
    largest = ctypes.c_size_t(max(SIZES.values()))
    device = [driver.made("cuMemAlloc_v2", largest) for _ in range(2)]
    pinned = driver.made("cuMemHostAlloc", largest, 0)
    copies = {
        "D2D": (device[1], device[0]),
        "D2H": (pinned, device[0]),
        "H2D": (device[0], pinned),
    }
    found = {}
    for name, size in SIZES.items():
        for kind, (to, origin) in copies.items():
            count = max(2, min(2000, least // size))
            taken = []
            for _ in range(4):
                begun = time.perf_counter()
                for _ in range(count):
                    driver.cuMemcpyAsync(to, origin, ctypes.c_size_t(size), stream)
                driver.cuStreamSynchronize(stream)
                taken.append(time.perf_counter() - begun)
            found[f"{kind} {name}"] = round(count * size / median(taken[1:]) / 1e9, 2)
    for memory in device:
        driver.cuMemFree_v2(memory)
    driver.cuMemFreeHost(pinned)
    return found


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_type", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    ]


IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
PAGES = 512


def batches(driver: Driver) -> dict[str, float]:
    """Return GB/s of pages in any order, copied one by one and by one call; nothing of a driver before 12.8."""
    try:
        batch = driver.named("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
    except AttributeError:
        return {}
    stream, found = driver.made("cuStreamCreate", 1), {}
    for name, size in {"16K": 16 << 10, "64K": 64 << 10}.items():
        memory = [driver.made("cuMemAlloc_v2", ctypes.c_size_t(PAGES * size)) for _ in range(2)]
        numbers = ctypes.c_uint64 * PAGES
        to = numbers(*(memory[1].value + at * 7 % PAGES * size for at in range(PAGES)))
        origin = numbers(*(memory[0].value + at * size for at in range(PAGES)))
        sizes = (ctypes.c_size_t * PAGES)(*[size] * PAGES)
        attributes, first = Attributes(order=IN_STREAM_ORDER), ctypes.c_size_t(0)
        given = [to, origin, sizes, ctypes.c_size_t(PAGES), ctypes.byref(attributes), ctypes.byref(first)]
        given += [ctypes.c_size_t(1), *([] if batch.__name__.endswith("_v2") else [ctypes.byref(ctypes.c_size_t())])]

        def by_one_call(given: list[Any] = given) -> None:
            code = batch(*given, stream)
            if code:
                raise OSError(f"{batch.__name__} returned {code}")
            driver.cuStreamSynchronize(stream)

        def one_by_one(to: Any = to, origin: Any = origin, size: int = size) -> None:
            for at in range(PAGES):
                driver.cuMemcpyAsync(
                    ctypes.c_uint64(to[at]), ctypes.c_uint64(origin[at]), ctypes.c_size_t(size), stream
                )
            driver.cuStreamSynchronize(stream)

        found[f"pages of {name} by one call"] = round(PAGES * size / took(by_one_call, 50) / 1e3, 2)
        found[f"pages of {name} one by one"] = round(PAGES * size / took(one_by_one, 20) / 1e3, 2)
        for each in memory:
            driver.cuMemFree_v2(each)
    return found


def took(call: Callable[[], object], count: int = CALLS) -> float:
    """Return the median of the microseconds that a call takes."""
    times = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begun)
    return median(times) / 1000


def calls(driver: Driver) -> dict[str, float]:
    """Return microseconds by function."""
    stream, event = driver.made("cuStreamCreate", 1), driver.made("cuEventCreate", 2)
    device = driver.made("cuMemAlloc_v2", ctypes.c_size_t(4 << 20))
    pinned = driver.made("cuMemHostAlloc", ctypes.c_size_t(4096), 3)
    word = driver.made("cuMemHostGetDevicePointer_v2", pinned, 0)
    version, status, depth = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    nothing = took(lambda: driver.cuDriverGetVersion(ctypes.byref(version)))
    size = ctypes.c_size_t(64)
    timed: dict[str, Callable[[], object]] = {
        "cuEventRecord": lambda: driver.cuEventRecord(event, stream),
        "cuEventQuery": lambda: driver.cuEventQuery(event),
        "cuStreamQuery": lambda: driver.cuStreamQuery(stream),
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(stream, ctypes.byref(status)),
        "cuStreamWriteValue32": lambda: driver.cuStreamWriteValue32_v2(stream, word, 1, 0),
        "cuMemcpyAsync 64 B": lambda: driver.cuMemcpyAsync(pinned, device, size, stream),
        "cuCtxPushCurrent and Pop": lambda: (
            driver.cuCtxPushCurrent_v2(driver.context),
            driver.cuCtxPopCurrent_v2(ctypes.byref(depth)),
        ),
    }
    found = {}
    for name, call in timed.items():
        driver.cuStreamSynchronize(stream)
        found[name] = round(took(call) - nothing, 2)
        driver.cuStreamSynchronize(stream)
    found["a copy of 64 B, its word, until the host sees it"] = round(took(copying(driver)), 2)
    begun = time.perf_counter()
    slots = driver.made("cuMemHostAlloc", ctypes.c_size_t(8 << 20), 0)
    found["cuMemHostAlloc 8 MiB"] = round((time.perf_counter() - begun) * 1e6, 1)
    driver.cuMemFreeHost(slots)
    return found


def copying(driver: Driver) -> Callable[[], None]:
    """Return what has the GPU copy 64 bytes to the host's memory, and a word behind them, until the host sees that."""
    stream = driver.made("cuStreamCreate", 1)
    device = driver.made("cuMemAlloc_v2", ctypes.c_size_t(4096))
    pinned = driver.made("cuMemHostAlloc", ctypes.c_size_t(4096), 3)
    word = ctypes.c_uint64(driver.made("cuMemHostGetDevicePointer_v2", pinned, 0).value + 64)
    seen, number = ctypes.c_uint32.from_address(pinned.value + 64), 0
    seen.value = 0

    def once() -> None:
        nonlocal number
        number += 1
        driver.cuMemcpyAsync(pinned, device, ctypes.c_size_t(64), stream)
        driver.cuStreamWriteValue32_v2(stream, word, number, 0)
        while seen.value != number:
            pass

    return once


class Turns:
    """One of two processes that have the GPU copy in turns; they tell each other in a file that both map."""

    ROUNDS, LIMIT_S = 500, 15.0

    def __init__(self, driver: Driver, path: str, first: bool) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4096)
        words = [ctypes.c_uint64.from_buffer(self._memory, at) for at in (0, 64)]
        self.mine, self.theirs = words if first else words[::-1]
        self.copy = copying(driver)
        self.copy()

    def await_turn(self, number: int) -> None:
        until = time.monotonic() + self.LIMIT_S
        while self.theirs.value < number:
            if time.monotonic() > until:
                raise TimeoutError(f"the other process did not copy within {self.LIMIT_S:g} s")

    def take(self) -> float:
        """Be the first; return the median of a round, in us."""
        times = []
        self.await_turn(1)  # it has come up
        for number in range(2, self.ROUNDS):
            begun = time.perf_counter_ns()
            self.copy()
            self.mine.value = number
            self.await_turn(number)
            times.append(time.perf_counter_ns() - begun)
        return median(times) / 1000

    def follow(self) -> None:
        """Be the second."""
        self.mine.value = 1
        for number in range(2, self.ROUNDS):
            self.await_turn(number)
            self.copy()
            self.mine.value = number


def in_turns(driver: Driver, path: str, standin: bool) -> dict[str, float]:
    """Return the time of a round of two processes, and that of two copies of one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        command = [sys.executable, __file__, "--turn", file.name, "--driver", path, *["--standin"] * standin]
        with subprocess.Popen(command) as other:
            try:
                both = Turns(driver, file.name, first=True).take()
            finally:
                other.kill()
    copy = copying(driver)
    return {"a round of two processes in turns": round(both, 1), "two copies of one": round(2 * took(copy), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--standin", action="store_true", help="ask the stand-in for the driver, whose figures mean nothing"
    )
    parser.add_argument("--batches", action="store_true", help="measure pages alone, one by one and by one call")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--driver", default=LIBRARY, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    path, least = chosen.driver, LEAST
    if chosen.turn:
        Turns(Driver(path), chosen.turn, first=False).follow()
        return 0
    if chosen.standin:
        sys.path.insert(0, str(TESTS))
        from support.gpu import standin_cuda

        path, least = os.environ.get("AIOTE_LIBCUDA") or standin_cuda.standin_path(), LEAST_ON_STANDIN
    driver = Driver(path)
    if chosen.batches:
        found = batches(driver)
        text = ", ".join(f"{name} {rate:.4g} GB/s" for name, rate in found.items())
        print("RESULT", json.dumps({"claim": "batches", "ok": True, "measured": text or "none", "detail": found}))
        return 0
    copied, times = rates(driver, least), calls(driver)
    times |= in_turns(driver, path, chosen.standin)
    for name, value in {**copied, **times}.items():
        print(f"{name:50} {value:10.2f}", flush=True)
    best = {kind: max(rate for name, rate in copied.items() if name.startswith(kind)) for kind in ("D2D", "D2H", "H2D")}
    measured = ", ".join(f"{kind} {rate:.0f} GB/s" for kind, rate in best.items())
    print("RESULT", json.dumps({"claim": "calls", "ok": True, "measured": measured, "detail": {**copied, **times}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
