"""Measure how soon Python sees what a kernel changes: `python tools/gpu/values.py [--standin]`.

A kernel waits for a while and then stores a number in a `WatchedValue`. The time from before its launch until the
number is seen, less the kernel's wait, is taken two ways, in turns: by `engine.watch`, and by a loop that loads the
value and does nothing else, which sees it as soon as a host can. What is told is the median of the one less the median
of the other; the launch and the store's way over the bus are in both. *Spinning* has `spin_us` of a second and kernels
that wait 100 us; *asleep* has 0 and kernels that wait 3 to 6 ms, so that the engine looks as seldom as it ever does.

The last arm has a captured graph that adds 1 to each byte of an array, late, and then `counter += 1` by cupy: when the
change is seen all bytes have to be that number's. On the stand-in kernels are launched instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import anyio
import numpy as np
from device import Gpu, RealGpu, Report, parser, say

import aiote
from aiote.gpu import WatchedValue

SECONDS = 20.0
SIZE = 1 << 20
LATE_US = 200
MOST_US = {"spinning": 5.0, "asleep": 1100.0}
WARM = 20


class Bumps:
    """A value, and kernels that store the next number in it; a number is from 1 to 200."""

    def __init__(self, gpu: Gpu, word: WatchedValue) -> None:
        self.gpu, self.word, self.stream = gpu, word, gpu.stream()
        self.lent = word.device
        self.number = 0

    def launch(self, us: int) -> tuple[int, float]:
        """Launch a kernel; return its number and when that was."""
        self.number = self.number % 200 + 1
        begin = time.perf_counter()
        self.gpu.store(self.lent, self.number, us, self.stream)
        return self.number, begin

    def polled(self, us: int) -> float:
        """Return how long it takes until a loop sees it, without the kernel's wait."""
        number, begin = self.launch(us)
        word, until = self.word, begin + 5
        while word.value != number:
            if time.perf_counter() > until:
                raise TimeoutError("a kernel's store was not seen within 5 s")
        return time.perf_counter() - begin - us / 1e6

    async def watched(self, changes: Any, us: int) -> float:
        """Return how long it takes until the coroutine that awaits it goes on, without the kernel's wait."""
        number, begin = self.launch(us)
        while (await anext(changes))[1] != number:  # what was polled before is told, too
            pass
        return time.perf_counter() - begin - us / 1e6


async def latencies(gpu: Gpu, settings: dict[str, Any], wait: Callable[[int], int], count: int, until: float) -> Any:
    """Measure both ways, in turns."""
    config = aiote.EngineConfig(**settings)
    watched, polled = [], []
    async with aiote.open_engine("local", config=config) as engine:
        with WatchedValue() as word:
            bumps, changes = Bumps(gpu, word), engine.watch(word)
            for number in range(count + WARM):
                took = await bumps.watched(changes, wait(number))
                gpu.synchronize(bumps.stream)
                alone = bumps.polled(wait(number))
                gpu.synchronize(bumps.stream)
                if number >= WARM:
                    watched.append(took * 1e6)
                    polled.append(alone * 1e6)
                if time.monotonic() > until and number > 2 * WARM:
                    break
            await changes.aclose()
            del bumps
    found = {
        "changes": len(watched),
        "watch us": round(median(watched), 1),
        "loop us": round(median(polled), 1),
        "median us": round(median(watched) - median(polled), 1),
        "p90 us": round(float(np.percentile(watched, 90)) - median(polled), 1),
    }
    say(f"   {found}")
    return found


class Graph:
    """Late additions to an array and one to a value behind them, in a captured graph, or as the stand-in can do it."""

    def __init__(self, gpu: Gpu, word: WatchedValue) -> None:
        self.gpu, self.word, self.stream = gpu, word, gpu.stream()
        self.array = gpu.array(SIZE)
        self.lent = word.device
        self.graph: Any = None
        if isinstance(gpu, RealGpu):
            self.counter = gpu.cupy.asarray(self.lent)
            with self.stream:
                self._given(gpu)  # whatever is loaded at its first launch
                self.stream.synchronize()
                self.stream.begin_capture()
                self._given(gpu)
                self.graph = self.stream.end_capture()
            self.stream.synchronize()

    def _given(self, gpu: RealGpu) -> None:
        gpu.launch("bump_bytes", 16, (self.array, np.uint64(SIZE), np.uint64(LATE_US)), self.stream)
        self.counter += 1

    def launch(self) -> None:
        if self.graph is not None:
            self.graph.launch(self.stream)
            return
        self.gpu.fill(self.array, self.word.value + 1, LATE_US, self.stream)
        self.gpu.store(self.lent, self.word.value + 1, 0, self.stream)

    async def rounds(self, engine: aiote.Engine, count: int, until: float) -> dict[str, Any]:
        """Launch it often; count the rounds in which not all bytes were there when the change was seen."""
        reader, changes, wrong, done = self.gpu.stream(), engine.watch(self.word), 0, 0
        for _ in range(count):
            before = self.word.value
            self.launch()
            _, now = await anext(changes)
            wrong += now != before + 1 or self.gpu.differing(self.array, now % 256, reader) != 0
            done += 1
            self.gpu.synchronize(self.stream)
            if time.monotonic() > until:
                break
        await changes.aclose()
        return {"rounds": done, "wrong": wrong, "by": "a graph" if self.graph is not None else "kernels"}


async def graphs(gpu: Gpu, count: int, until: float) -> dict[str, Any]:
    async with aiote.open_engine("local") as engine:
        with WatchedValue() as word:
            graph = Graph(gpu, word)
            found = await graph.rounds(engine, count, until)
            del graph
    say(f"   {found}")
    return found


async def measured(gpu: Gpu, report: Report) -> int:
    few = 1 if gpu.real else 20
    arms: list[tuple[str, dict[str, Any], Callable[[int], int], int]] = [
        ("spinning", {"spin_us": 1_000_000}, lambda _: 100, 3000 // few),
        ("spinning, thread", {"spin_us": 1_000_000, "progress": "thread"}, lambda _: 100, 2000 // few),
        ("asleep", {"spin_us": 0}, lambda number: 3000 + number * 37 % 3001, 400 // few),
        ("asleep, thread", {"spin_us": 0, "progress": "thread"}, lambda number: 3000 + number * 37 % 3001, 300 // few),
    ]
    for number, (name, settings, wait, count) in enumerate(arms):
        seconds = report.left / (len(arms) + 1 - number)
        with report.arm(name), anyio.fail_after(seconds + 5):
            report.detail[name] = await latencies(gpu, settings, wait, count, time.monotonic() + seconds)
    with report.arm("a captured graph"), anyio.fail_after(report.left + 5):
        count = 2000 if gpu.real else 100
        report.detail["graph"] = await graphs(gpu, count, time.monotonic() + report.left)
    found = {name: report.detail.get(name, {}).get("median us") for name in MOST_US}
    graph = report.detail.get("graph", {"rounds": 0, "wrong": 1})
    kept = all(found[name] is not None and (not gpu.real or found[name] <= most) for name, most in MOST_US.items())
    text = ", ".join(f"{value} us {name}" for name, value in found.items())
    behind = f"{graph['wrong']} of {graph['rounds']} changes by graphs seen before what they are behind"
    return report.end(f"median {text}; {behind}", kept and graph["rounds"] > 0 and not graph["wrong"])


def main() -> int:
    arguments = parser("Measure how soon Python sees what a kernel changes.", SECONDS).parse_args()
    report = Report("a kernel's change until Python sees it: median 5 us spinning, 1.1 ms asleep", arguments.seconds)
    return report.run(arguments.standin, measured)


if __name__ == "__main__":
    sys.exit(main())
