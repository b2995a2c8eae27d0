"""A service and its caller, the same in every library: the calls, what is checked of them, and how they are measured.

A worker gives `main` two things: how to serve, and a `Calls` of its library. As `serve` it prints the address and
serves until its standard input ends; as `call ADDRESS` it measures the cases that it is asked for, and prints a JSON
object. Every byte count is checked, and of every array each 4096th byte.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

STEP = 4096
CONCURRENT = 1000
ITEMS = 100_000
SIZES = {"4K": 4 << 10, "1M": 1 << 20, "64M": 64 << 20}
_filled: dict[tuple[int, int], Any] = {}


def filled(nbytes: int, value: int) -> Any:
    """Return an array of one value, made once."""
    if (nbytes, value) not in _filled:
        _filled[nbytes, value] = np.full(nbytes, value, np.uint8)
    return _filled[nbytes, value]


def digest(array: Any) -> int:
    """Return what stands for an array's bytes."""
    return int(array[::STEP].sum(dtype=np.int64)) + array.nbytes


class Calls(ABC):
    """A client of one library."""

    @abstractmethod
    async def empty(self) -> None:
        """Call a method that does nothing."""

    @abstractmethod
    async def send(self, array: Any) -> int:
        """Send an array; the method returns its digest."""

    @abstractmethod
    async def fetch(self, nbytes: int, value: int) -> Any:
        """Have an array of one value returned."""

    @abstractmethod
    def count(self, items: int) -> AsyncIterator[int]:
        """Iterate over a stream of numbers."""

    @abstractmethod
    async def cpu(self) -> float:
        """Return the CPU seconds of the server's process."""


class Numbered(Calls):
    """A client that pairs answers with requests by a number: a library has to `transmit`, and to call `answered`."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, Any] = {}

    @abstractmethod
    async def transmit(self, head: tuple[Any, ...], array: Any) -> None:
        """Send a request: its number, a name, arguments, and an array."""

    def answered(self, number: int, result: Any, data: Any) -> None:
        """Hand an answer to whoever waits for it."""
        waiting = self._waiting[number]
        if isinstance(waiting, asyncio.Queue):
            waiting.put_nowait(result)
        else:
            del self._waiting[number]
            waiting.set_result((result, data))

    async def _call(self, name: str, *arguments: Any, array: Any = b"") -> tuple[Any, Any]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self.transmit((number, name, *arguments), array)
        found: tuple[Any, Any] = await future
        return found

    async def empty(self) -> None:
        await self._call("empty")

    async def send(self, array: Any) -> int:
        return int((await self._call("send", array=array))[0])

    async def fetch(self, nbytes: int, value: int) -> Any:
        return np.frombuffer((await self._call("fetch", nbytes, value))[1], np.uint8)

    async def count(self, items: int) -> AsyncIterator[int]:
        number = next(self._numbers)
        queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._waiting[number] = queue
        await self.transmit((number, "count", items), b"")
        while (item := await queue.get()) is not None:
            yield item
        del self._waiting[number]

    async def cpu(self) -> float:
        return float((await self._call("cpu"))[0])


async def repeated(seconds: float, call: Callable[[], Awaitable[object]]) -> list[float]:
    """Call again and again for so long, and return how long each took."""
    took: list[float] = []
    over = time.perf_counter() + seconds
    while not took or time.perf_counter() < over:
        began = time.perf_counter()
        await call()
        took.append(time.perf_counter() - began)
    return took


async def case_empty(calls: Calls, seconds: float) -> dict[str, float]:
    took = sorted(await repeated(seconds, calls.empty))
    return {"calls": len(took), "p50_us": took[len(took) // 2] * 1e6, "p99_us": took[len(took) * 99 // 100] * 1e6}


async def case_concurrent(calls: Calls, seconds: float) -> dict[str, float]:
    over, done = time.perf_counter() + seconds, 0

    async def one() -> None:
        nonlocal done
        while time.perf_counter() < over:
            await calls.empty()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONCURRENT)))
    return {"calls": done, "calls_per_s": done / (time.perf_counter() - began)}


async def case_send(calls: Calls, seconds: float, nbytes: int) -> dict[str, float]:
    async def call() -> None:
        if await calls.send(filled(nbytes, 7)) != digest(filled(nbytes, 7)):
            raise AssertionError("the server has got other bytes")

    return _speed(nbytes, await repeated(seconds, call))


async def case_fetch(calls: Calls, seconds: float, nbytes: int) -> dict[str, float]:
    async def call() -> None:
        if digest(await calls.fetch(nbytes, 9)) != digest(filled(nbytes, 9)):
            raise AssertionError("other bytes have come")

    return _speed(nbytes, await repeated(seconds, call))


def _speed(nbytes: int, took: list[float]) -> dict[str, float]:
    took.sort()
    median = took[len(took) // 2]
    return {"calls": len(took), "p50_us": median * 1e6, "gb_per_s": nbytes / median / 1e9}


async def case_stream(calls: Calls, _seconds: float) -> dict[str, float]:
    began, total = time.perf_counter(), 0
    async for item in calls.count(ITEMS):
        total += item
    if total != ITEMS * (ITEMS - 1) // 2:
        raise AssertionError("other items have come")
    return {"calls": 1, "items_per_s": ITEMS / (time.perf_counter() - began)}


CASES: dict[str, Callable[[Calls, float], Awaitable[dict[str, float]]]] = {
    "empty": case_empty,
    "concurrent": case_concurrent,
    "stream": case_stream,
}
for _name, _nbytes in SIZES.items():
    CASES[f"send {_name}"] = lambda calls, seconds, nbytes=_nbytes: case_send(calls, seconds, nbytes)
    CASES[f"fetch {_name}"] = lambda calls, seconds, nbytes=_nbytes: case_fetch(calls, seconds, nbytes)


async def measure(calls: Calls, names: list[str], seconds: float) -> dict[str, dict[str, float]]:
    """Measure cases one after the other, each after a few calls that warm up, with the CPU time of both sides."""
    found = {}
    for name in names:
        await CASES[name](calls, 0.0 if "64M" in name or name == "stream" else 0.05)
        mine, theirs = time.process_time(), await calls.cpu()
        row = await CASES[name](calls, seconds)
        used = time.process_time() - mine + await calls.cpu() - theirs
        found[name] = {**row, "cpu_us": used / row["calls"] * 1e6}
    return found


def over_with_input() -> asyncio.Event:
    """Return an event that is set when the standard input ends: the parent is gone, or wants an end."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(event.set)

    threading.Thread(target=watch, daemon=True).start()
    return event


def main(
    serve: Callable[[str], Awaitable[None]],
    call: Callable[[str, str, Callable[[Calls], Awaitable[None]]], Awaitable[None]],
    run: Callable[[Any], object] = asyncio.run,
) -> None:
    """Be one side: `serve(transport)` prints its address, `call(transport, address, body)` calls `body` on a client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("serve", "call"))
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("--transport", choices=("local", "tcp"), default="local")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--variant", default="")
    arguments = parser.parse_args()
    if arguments.role == "serve":
        run(serve(arguments.transport))
        return

    async def body(calls: Calls) -> None:
        print(json.dumps(await measure(calls, arguments.cases.split(","), arguments.seconds)), flush=True)

    run(call(arguments.transport, arguments.address, body))
