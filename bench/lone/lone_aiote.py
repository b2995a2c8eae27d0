"""One transfer at a time between two engines of a host, as they come: a row of `make bench-lone`.

    lone_aiote.py PROVIDER write|read BYTES REPEATS hot|cold PAUSE_US engine|bridge

The target is a process of its own. Prints the times in microseconds, and what both have spent, as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import aiote
from aiote import bridge

REGION = 256 << 20
WARM = 5


def memory() -> mmap.mmap:
    """Return memory of small pages that is there, as lone.c has it."""
    found = mmap.mmap(-1, REGION, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, REGION, mmap.PAGESIZE):
        found[page] = 1
    return found


def spent() -> tuple[float, int]:
    """Return the seconds of processor time and the sleeps of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nvcsw


async def target(provider: str) -> None:
    """Lend memory until the standard input ends; say what that has cost from the first line on."""
    async with aiote.open_engine(provider) as engine:
        region = engine.register(memory())
        print(region.descriptor.hex(), flush=True)
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        await lines.readline()
        before = spent()
        await lines.readline()
        after = spent()
        print(json.dumps([after[0] - before[0], after[1] - before[1]]), flush=True)


class Row:
    """One row: what is moved, how often, and the times."""

    def __init__(self, op: str, nbytes: str, repeats: str, memory_is: str, pause_us: str) -> None:
        self.op, self.nbytes, self.repeats = op, int(nbytes), int(repeats)
        self.slots = REGION // self.nbytes if memory_is == "cold" else 1
        self.pause = int(pause_us) * 1e-6
        self.us: list[float] = []

    def span(self, number: int) -> slice:
        """Return where the bytes of a transfer are, on both sides."""
        start = number % self.slots * self.nbytes
        return slice(start, start + self.nbytes)

    def took(self, number: int, start: float) -> None:
        """Keep a time, from the first transfer behind the warm ones on."""
        if number >= WARM:
            self.us.append((time.perf_counter() - start) * 1e6)


async def on_engine(row: Row, provider: str, descriptor: bytes, begin: Callable[[], None]) -> None:
    """Transfer on an event loop of asyncio's."""
    async with aiote.open_engine(provider) as engine:
        here, there = engine.register(memory()), engine.attach(descriptor)
        for number in range(WARM + row.repeats):
            if number == WARM:
                begin()
            span = row.span(number)
            start = time.perf_counter()
            await (engine.write(here[span], there[span]) if row.op == "write" else engine.read(there[span], here[span]))
            row.took(number, start)
            if row.pause:
                await asyncio.sleep(row.pause)


def on_bridge(row: Row, provider: str, descriptor: bytes, begin: Callable[[], None]) -> None:
    """Transfer in this thread, with the engine on the bridge's."""
    with bridge.acquire(provider) as own, own.register(memory()) as registration:
        here, there = registration.region, own.attach(descriptor)
        for number in range(WARM + row.repeats):
            if number == WARM:
                begin()
            span = row.span(number)
            start = time.perf_counter()
            own.write(here[span], there[span]) if row.op == "write" else own.read(there[span], here[span])
            row.took(number, start)
            if row.pause:
                time.sleep(row.pause)


def source(provider: str, *row: str, way: str) -> None:
    """Start a target, transfer, and print what both say."""
    made, before = Row(*row), [(0.0, 0)]
    command = [sys.executable, "-P", __file__, "target", provider]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        descriptor = bytes.fromhex(other.stdout.readline())

        def begin() -> None:
            other.stdin.write("begin\n")
            other.stdin.flush()
            before[0] = spent()

        if way == "bridge":
            on_bridge(made, provider, descriptor, begin)
        else:
            asyncio.run(on_engine(made, provider, descriptor, begin))
        after = spent()
        other.stdin.write("end\n")
        other.stdin.flush()
        theirs: list[Any] = json.loads(other.stdout.readline())
        other.stdin.close()
    said = {"us": made.us, "source_s": after[0] - before[0][0], "switches": after[1] - before[0][1]}
    print(json.dumps({**said, "target_s": theirs[0], "target_switches": theirs[1]}))


if __name__ == "__main__":
    if sys.argv[1] == "target":
        asyncio.run(target(sys.argv[2]))
    else:
        source(*sys.argv[1:-1], way=sys.argv[-1])
