"""Measure what `stream=` costs at submission: `python tools/gpu/streams.py [--standin]`.

The time of the call `submit_write_imm` from memory of the GPU, with the arms in turns: nothing to wait for (-1), a
stream with nothing to do, the default stream, and a stream whose kernel is under way. Each transfer is awaited before
the next. The figure is the median of a stream with nothing to do over that of -1; what a busy one costs is told.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import anyio
import numpy as np
from device import Gpu, Report, parser, say

import aiote

IMM = 7
SIZES = (8, 65_536)
MOST_US = 5.0
WARM = 50
BUSY_US = 60
SECONDS = 20.0


async def one_size(gpu: Gpu, engines: tuple[aiote.Engine, aiote.Engine], size: int, count: int, until: float) -> Any:
    """Return the times of each arm, in microseconds."""
    left, right = engines
    source, target, slow = gpu.array(size), np.zeros(size, np.uint8), gpu.array(size)
    regions = left.register(source), right.register(target)
    remote, counter = left.attach(regions[1].descriptor), right.counter(IMM)
    idle, busy = gpu.stream(), gpu.stream()
    arms: dict[str, Any] = {"-1": -1, "idle": idle, "default": None, "busy": busy}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(count + WARM):
        for name, stream in arms.items():
            if name == "busy":
                gpu.fill(slow, number % 250, BUSY_US, busy)
            begin = time.perf_counter_ns()
            transfer = left.submit_write_imm(regions[0], remote, IMM, stream=stream)
            took = time.perf_counter_ns() - begin
            await transfer
            await counter.wait(1)
            if number >= WARM:
                times[name].append(took / 1000)
        if time.monotonic() > until and number > 2 * WARM:
            break
    for region in regions:
        await region.aclose()
    return times


def told(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, nine of ten, and how much more than without each median is."""
    base = median(times["-1"])
    found: dict[str, Any] = {"submissions": len(times["-1"])}
    for name, taken in times.items():
        ninth = float(np.percentile(taken, 90))
        found[name] = {"median us": round(median(taken), 2), "p90 us": round(ninth, 2)}
        found[name]["more us"] = round(median(taken) - base, 2)
        say(f"   {name:8} median {median(taken):7.2f} us, p90 {ninth:7.2f} us, {median(taken) - base:+.2f} us")
    return found


async def measured(gpu: Gpu, report: Report, count: int) -> int:
    kinds = [(provider, size) for provider in ("local", "socket") for size in SIZES]
    for number, (provider, size) in enumerate(kinds):
        until = time.monotonic() + report.left / (len(kinds) - number)
        name = f"{provider}, {size} B"
        with report.arm(name), anyio.fail_after(until - time.monotonic() + 8):
            async with aiote.open_engine(provider) as left, aiote.open_engine(provider) as right:
                await left.connect(right.address)
                report.detail[name] = told(await one_size(gpu, (left, right), size, count, until))
    more = {name: found["idle"]["more us"] for name, found in report.detail.items()}
    text = ", ".join(f"{value:+.1f} us ({name})" for name, value in more.items())
    ok = len(more) == len(kinds) and (not gpu.real or all(value <= MOST_US for value in more.values()))
    return report.end(text or "failed", ok)


def main() -> int:
    options = parser("Measure what stream= costs at submission.", SECONDS)
    options.add_argument("--count", type=int, help="submissions of each arm (default: 4000; 100 on the stand-in)")
    arguments = options.parse_args()
    report = Report("`stream=` at submission: at most 5 us more than without", arguments.seconds)
    count = arguments.count or (100 if arguments.standin else 4000)
    return report.run(arguments.standin, measured, count)


if __name__ == "__main__":
    sys.exit(main())
