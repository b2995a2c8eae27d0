"""The time to hand a request for many peers to the rails: scatters and pages, made anew and prepared.

All engines are in this process. Over `null`, a rail that ends every operation at once and moves no bytes, only aiote's
own time is measured; over other rails the figures include the rail's posting. The two ways take turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import aiote
from aiote.bench.order_statistics import percentile
from aiote.testing import NULL_NIC, Fabric

__all__ = ["NULL", "PostingRecord", "measure_posting"]

NULL = "null"
IMM = 1
WARM = 20
"""Requests before the first one that counts."""
Submit = Callable[[], aiote.Transfer]


@dataclass(frozen=True, slots=True)
class PostingRecord:
    """One figure: `unit` is us of a submit call to `peers` peers, or ns of a page until its request is over."""

    rail: str
    op: str
    peers: int
    prepared: bool
    runs: int
    unit: str
    median: float
    least: float
    verified: bool | None


@dataclass(frozen=True, slots=True)
class Star:
    """An engine, the group that it writes to, and the memory on both sides."""

    hub: aiote.Engine
    group: aiote.PeerGroup
    source: np.ndarray[Any, np.dtype[np.uint8]]
    region: aiote.Region
    memories: list[np.ndarray[Any, np.dtype[np.uint8]]]
    remotes: list[aiote.RemoteRegion]


@asynccontextmanager
async def _star(rail: str, peers: int, nbytes: int) -> AsyncIterator[Star]:
    """Open an engine and `peers` peers with `nbytes` of memory each."""
    async with AsyncExitStack() as stack:
        fabric = stack.enter_context(Fabric(model=NULL_NIC)) if rail == NULL else None
        config = aiote.EngineConfig(message_pool=2)

        async def opened() -> aiote.Engine:
            opening = fabric.open_engine(config=config) if fabric else aiote.open_engine(rail, config=config)
            return await stack.enter_async_context(opening)

        hub = await opened()
        others = [await opened() for _ in range(peers)]
        group = await hub.peer_group([other.address for other in others])
        source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        memories = [np.zeros(nbytes, np.uint8) for _ in others]
        remotes = [
            hub.attach(other.register(memory).descriptor) for other, memory in zip(others, memories, strict=True)
        ]
        yield Star(hub, group, source, hub.register(source), memories, remotes)


async def _turns(ways: Sequence[Submit], runs: int, *, whole: bool) -> list[list[int]]:
    """Return the nanoseconds of each way: of its submit calls, or (`whole`) until each transfer is over."""
    times: list[list[int]] = [[] for _ in ways]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for run in range(-WARM, runs):
            for way, taken in zip(ways, times, strict=True):
                begun = time.perf_counter_ns()
                transfer = way()
                submitted = time.perf_counter_ns()
                await transfer
                if run >= 0:
                    taken.append((time.perf_counter_ns() if whole else submitted) - begun)
    finally:
        if collecting:
            gc.enable()
    return times


async def measure_posting(rail: str, peers: int, pages: int, size: int, runs: int) -> list[PostingRecord]:
    """Measure scatters of `size` bytes to each of `peers` peers, or (`pages`) page writes to one. Raises AioteError."""
    async with _star(rail, peers, size * max(pages, 1)) as star:
        ways = _page_ways(star, pages, size) if pages else _scatter_ways(star, size)
        times = await _turns(ways, runs, whole=bool(pages))
        arrived = all(np.array_equal(memory, star.source) for memory in star.memories)
    verified = None if rail == NULL else arrived
    op, unit, scale = ("pages", "ns/page", 1 / pages) if pages else ("scatter", "us", 1e-3)
    return [
        PostingRecord(
            rail, op, peers, prepared, runs, unit, percentile(taken, 50) * scale, min(taken) * scale, verified
        )
        for prepared, taken in zip((False, True), times, strict=True)
    ]


def _scatter_ways(star: Star, size: int) -> list[Submit]:
    targets = [aiote.ScatterTarget(star.region, remote) for remote in star.remotes]
    prepared = star.hub.prepare_scatter(star.group, targets)
    lengths = np.full(len(targets), size, np.int64)
    offsets = np.zeros(len(targets), np.int64)
    return [
        lambda: star.hub.submit_scatter(star.group, targets, IMM),
        lambda: prepared.submit(lengths, offsets, offsets, IMM),
    ]


def _page_ways(star: Star, pages: int, size: int) -> list[Submit]:
    # In this order no page follows its neighbour, so that each page takes a message if the rail does not gather.
    order = np.arange(pages, dtype=np.int64) * 7919 % pages if pages % 7919 else np.arange(pages, dtype=np.int64)
    remote = star.remotes[0]
    prepared = star.hub.prepare_pages(star.group, [aiote.ScatterTarget(star.region, remote)], size)
    return [
        lambda: star.hub.submit_write_pages(
            aiote.Pages(star.region, order, size), aiote.Pages(remote, order, size), IMM
        ),
        lambda: prepared.submit(order, order, IMM),
    ]
