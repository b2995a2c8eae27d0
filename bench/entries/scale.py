"""Measure how an engine grows: with peers and rails in virtual time, with regions and pages over a real rail.

`make scale` opens a hub and ten thousand peers on the simulated network, all in this process, so a figure is of both
ends; ARGS="peers --count 1000 --rails 2" sets how many. `run.py scale memory --provider local` needs no network.
`run.py many-peers` measures real peers.
"""

from __future__ import annotations

import argparse
import resource
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np

import aiote
from aiote.testing import Fabric, run

PAGE = resource.getpagesize()
SMALL = 64
DESCRIPTORS = 5, 2
"""What a simulated engine takes, and what each rail of its connection does, both ends together."""
OTHER_DESCRIPTORS = 64


class Growth:
    """The process's resident memory, descriptors and CPU time since this was made, per thing of `count`."""

    def __init__(self, what: str, count: int) -> None:
        self._what, self._count = what, count
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return resident, len(list(Path("/proc/self/fd").iterdir())), time.process_time()

    def show(self) -> None:
        """Print one line."""
        kept, opened, spent = (
            (now - before) / self._count for now, before in zip(self._now(), self._began, strict=True)
        )
        print(f"{self._what}: {kept:.0f} bytes, {opened:.2f} descriptors, {spent * 1e6:.2f} us of CPU each", flush=True)


async def peers(fabric: Fabric, count: int) -> None:
    """Open and connect peers one after another, then have each write once."""
    async with fabric.open_engine() as hub, AsyncExitStack() as stack:
        grown = Growth(f"{count} engines", count)
        others = [await stack.enter_async_context(fabric.open_engine()) for _ in range(count)]
        grown.show()
        grown, since = Growth(f"{count} connections, both ends", count), anyio.current_time()
        for each in others:
            await each.connect(hub.address)
        grown.show()
        print(f"  one after another: {anyio.current_time() - since:.3f} s of virtual time")
        grown = Growth(f"{count} counted writes, one from each", count)
        with hub.counter(1) as counter:
            for each in others:
                await each.write_imm(None, hub.address, 1)
            await counter.wait(count)
        grown.show()


def allow_descriptors(count: int, rails: int) -> None:
    """Raise this process's limit to what so many peers take; explain and end if the system does not allow that."""
    needed = count * (DESCRIPTORS[0] + DESCRIPTORS[1] * rails) + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise SystemExit(
            f"error: {count} simulated peers take {needed} descriptors, and the limit here is {hard}. Raise it "
            f"(ulimit -Hn), ask for fewer (--count), or run this in a guest: docs/howto/sizing.md"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


async def memory(provider: str, regions: int, pages: int) -> None:
    """Register regions of a page, then write so many pages by one request."""
    async with aiote.open_engine(provider) as left, aiote.open_engine(provider) as right:
        await left.connect(right.address)
        array = np.zeros(regions * PAGE, np.uint8)
        grown = Growth(f"{provider}: {regions} regions", regions)
        held = [left.register(array[place : place + PAGE]) for place in range(0, len(array), PAGE)]
        grown.show()
        print(f"  a descriptor to hand out: {len(held[0].descriptor)} bytes")
        for region in held:
            await region.aclose()
        source, target = left.register(np.ones(PAGE, np.uint8)), right.register(np.zeros(PAGE, np.uint8))
        remote, places = left.attach(target.descriptor), np.zeros(pages, np.int64)
        for turn in ("first", "second"):
            grown = Growth(f"{provider}: {pages} pages of {SMALL} bytes in one request, {turn} time", pages)
            here, there = aiote.Pages(source, places, SMALL), aiote.Pages(remote, places, SMALL)
            await left.write_pages(here, there, 2)
            with right.counter(2) as counter:
                await counter.wait(pages)
            grown.show()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how an engine grows.")
    parser.add_argument("what", choices=("peers", "memory"), nargs="?", default="peers")
    parser.add_argument("--count", type=int, default=10_000, help="peers (default: 10000)")
    parser.add_argument("--rails", type=int, default=1, help="of each engine (default: 1)")
    parser.add_argument("--provider", default="local")
    parser.add_argument("--regions", type=int, default=10_000)
    parser.add_argument("--pages", type=int, default=1_000_000)
    given = parser.parse_args()
    if given.what == "peers":
        allow_descriptors(given.count, given.rails)
        run(lambda fabric: peers(fabric, given.count), rails=given.rails, limit=1e6)
    else:
        anyio.run(memory, given.provider, given.regions, given.pages)


if __name__ == "__main__":
    main()
