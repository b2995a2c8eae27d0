"""Measure what seeing an engine costs: the same transfers with it and without, in turns, in one process.

usage: run.py observe [--provider local] [--pairs 40] [--operations 400]
       run.py observe --count N [--arm NAME] [--load NAME]  # N operations and no more, to count instructions of

An arm is switched on and off on the same two engines, in the order off on on off, and each `on` is divided by its own
`off`: CPU time of the process for an operation, both engines together. What happens now and then (a page that is
written, a scrape) is measured by itself and told as a share of a CPU at its rate.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

import aiote
from aiote.bench.order_statistics import Spread, paired_ratio
from aiote.observe.latency import Latencies
from aiote.observe.prometheus import EngineCollector
from aiote.observe.status_page import PERIOD_S, StatusPage
from aiote.observe.tracing import trace_transfers

KIB = 1 << 10
SCRAPE_S = 15.0

Load = Callable[[], Awaitable[object]]
Switch = Callable[[], object]


def rails(engine: Any) -> Switch:
    """Time one work request in 16, and one wait in 16 that sleeps."""
    return Latencies(engine).close


def verbs(engine: Any) -> Switch:
    """Time one await in 16 as well."""
    return Latencies(engine, verbs=True).close


def spans(engine: Any) -> Switch:
    """Be ready for spans, while nobody records one."""
    return trace_transfers(engine)


ARMS: dict[str, Callable[[Any], Switch]] = {"rails": rails, "verbs": verbs, "spans": spans}


def loads(left: Any, right: Any) -> dict[str, tuple[Load, int]]:
    """Return what is done, and how many of it are as long as one small write, roughly."""
    here, there = left.register(bytearray(4 << 20)), right.register(bytearray(4 << 20))
    remote = left.attach(there.descriptor)
    pages = aiote.Pages(here, range(64), 16 * KIB), aiote.Pages(remote, range(64), 16 * KIB)
    arrivals, back = left.counter(2), right.attach(here.descriptor)

    async def awaited() -> None:
        """Sleep until a write of the other engine has arrived."""
        write = asyncio.ensure_future(right.write_imm(there[: 4 * KIB], back[: 4 * KIB], 2))
        await arrivals.wait(1)
        await write

    return {
        "write 4 KiB": (lambda: left.write(here[: 4 * KIB], remote[: 4 * KIB]), 1),
        "wait for 4 KiB": (awaited, 2),
        "write 64 KiB": (lambda: left.write(here[: 64 * KIB], remote[: 64 * KIB]), 2),
        "64 pages of 16 KiB": (lambda: left.write_pages(*pages, 1), 20),
        "write 4 MiB": (lambda: left.write(here, remote), 40),
    }


async def slice_of(load: Load, operations: int) -> float:
    """Return the CPU time of one operation in nanoseconds."""
    began = time.process_time_ns()
    for _ in range(operations):
        await load()
    return (time.process_time_ns() - began) / operations


async def ratio(load: Load, operations: int, pairs: int, engine: Any, arm: Callable[[Any], Switch]) -> Spread:
    """Return on divided by off, of so many pairs."""
    on, off = [], []
    for number in range(pairs):
        for wanted in (False, True) if number % 2 else (True, False):
            stop = arm(engine) if wanted else lambda: None
            (on if wanted else off).append(await slice_of(load, operations))
            stop()
    return paired_ratio(on, off)


def cost_us(function: Callable[[], object]) -> float:
    """Return the CPU time of a call in microseconds, the median of 200."""
    found = []
    for _ in range(200):
        began = time.process_time_ns()
        function()
        found.append((time.process_time_ns() - began) / 1000)
    return statistics.median(found)


async def report(left: Any, right: Any, given: argparse.Namespace) -> None:
    """Print every figure."""
    print(f"{'':22}" + "".join(f"{name:>26}" for name in ARMS))
    for name, (load, weight) in loads(left, right).items():
        operations = max(10, given.operations // weight)
        await slice_of(load, operations)
        cells = [await ratio(load, operations, given.pairs, left, arm) for arm in ARMS.values()]
        print(f"{name:22}" + "".join(f"{each.median:10.3f} ({each.least:.2f} to {each.most:.2f})" for each in cells))
    registry = CollectorRegistry()
    registry.register(EngineCollector(left, latencies=Latencies(left, verbs=True)))
    page = StatusPage(left)
    for name, function, period in (
        ("a page is written", page.write, PERIOD_S),
        ("a scrape", lambda: generate_latest(registry), SCRAPE_S),
    ):
        us = cost_us(function)
        print(f"{name}: {us:.0f} us of CPU, every {period:g} s: {us / period * 1e-4:.4f} % of a CPU")
    page.remove()


async def main() -> None:
    """Open two engines, and measure or only write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="local")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--operations", type=int, default=400)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--load", default="write 4 KiB", help='for --count; "wait for 4 KiB", ...')
    given = parser.parse_args()
    async with aiote.open_engine(given.provider, status_page=False) as left:
        async with aiote.open_engine(given.provider, status_page=False) as right:
            await left.connect(right.address)
            if not given.count:
                await report(left, right, given)
                return
            if given.arm:
                ARMS[given.arm](left)
            await slice_of(loads(left, right)[given.load][0], given.count)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
