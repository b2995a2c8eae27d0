"""Measure what the driver's own functions cost on this GPU, by its plainest calls: what aiote's figures stand beside.

    python tools/gpu/calls.py [--standin]

Rates are of copies queued on one stream, GB/s of bytes copied (a copy within the GPU reads and writes each). Times of
calls are medians, less that of a call which does nothing, in us.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
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
    found["a copy of 64 B, its word, until the host sees it"] = round(
        until_seen(driver, stream, device, pinned, word), 2
    )
    begun = time.perf_counter()
    slots = driver.made("cuMemHostAlloc", ctypes.c_size_t(8 << 20), 0)
    found["cuMemHostAlloc 8 MiB"] = round((time.perf_counter() - begun) * 1e6, 1)
    driver.cuMemFreeHost(slots)
    return found


def until_seen(driver: Driver, stream: Any, device: Any, pinned: Any, word: Any) -> float:
    """Return the median time of a queued copy and the word behind it, polled by the host."""
    seen = ctypes.c_uint32.from_address(pinned.value + 64)
    number = 0

    def once() -> None:
        nonlocal number
        number += 1
        driver.cuMemcpyAsync(pinned, device, ctypes.c_size_t(64), stream)
        driver.cuStreamWriteValue32_v2(stream, ctypes.c_uint64(word.value + 64), number, 0)
        while seen.value != number:
            pass

    return took(once)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--standin", action="store_true", help="ask the stand-in for the driver, whose figures mean nothing"
    )
    path, least = LIBRARY, LEAST
    if parser.parse_args().standin:
        sys.path.insert(0, str(SUPPORT))
        import standin_cuda

        path, least = os.environ.get("AIOTE_LIBCUDA") or standin_cuda.standin_path(), LEAST_ON_STANDIN
    driver = Driver(path)
    copied, times = rates(driver, least), calls(driver)
    for name, value in {**copied, **times}.items():
        print(f"{name:50} {value:10.2f}", flush=True)
    best = {kind: max(rate for name, rate in copied.items() if name.startswith(kind)) for kind in ("D2D", "D2H", "H2D")}
    measured = ", ".join(f"{kind} {rate:.0f} GB/s" for kind, rate in best.items())
    print("RESULT", json.dumps({"claim": "calls", "ok": True, "measured": measured, "detail": {**copied, **times}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
