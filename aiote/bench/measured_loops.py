"""The measured loops on aiote's public API, as a user would write them: a coroutine for each outstanding request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import anyio
import numpy as np

import aiote
import aiote.gpu
from aiote.bench.order_statistics import LatencySummary
from aiote.bench.work import HUGE_BYTES, PAGE_STEP, Work, pattern

__all__ = ["COUNTED", "ENDED", "Arena", "initiate", "serve"]

COUNTED = 1
ENDED = 2
Words = np.ndarray[Any, np.dtype[np.uint64]]


def _allocate_aligned(nbytes: int) -> Words:
    """Allocate zeroed memory that begins at the start of a huge page."""
    memory = np.zeros(nbytes + HUGE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_BYTES
    return memory[start : start + nbytes].view(np.uint64)


class Arena:
    """The registered memory of one side, and the attached memory of the other side.

    `words` is host memory. If the bytes are in GPU memory, they are filled from `words` and copied to it for a
    comparison.
    """

    def __init__(self, engine: aiote.Engine, nbytes: int, memory: str = "host") -> None:
        self.engine = engine
        self.words = _allocate_aligned(nbytes)
        self.gpu = aiote.gpu.allocate(nbytes) if memory == "cuda" else None
        self.region = engine.register(self.words if self.gpu is None else self.gpu)
        self.remote: aiote.RemoteRegion | None = None

    def meet(self, descriptor: bytes) -> None:
        """Attach the other side's arena by its descriptor."""
        self.remote = self.engine.attach(descriptor)

    @property
    def peer_memory(self) -> aiote.RemoteRegion:
        """The other side's arena."""
        assert self.remote is not None
        return self.remote

    def bind_verb(self, verb: Callable[..., Any]) -> Callable[..., Any]:
        """Return a verb for this arena. No kernel is pending on GPU memory here, so the verb waits for no stream."""
        return verb if self.gpu is None else partial(verb, stream=-1)

    def prepare(self, work: Work, *, fills: bool) -> None:
        """Fill the arena with the run's pattern, or clear the part that the run will write to."""
        if work.used > self.words.nbytes:
            raise ValueError(f"the run needs {work.used} bytes, the arena has {self.words.nbytes}")
        if work.size <= 0 or work.size % 8 or work.window <= 0 or work.count <= 0:
            raise ValueError("a run needs a window, a count and a size in whole words")
        if work.op == "send" and self.gpu is not None:
            raise ValueError("messages are of host memory")
        words = work.used // 8
        self.words[:words] = pattern(work.seed, words) if fills else 0
        if self.gpu is not None:
            aiote.gpu.copy(self.gpu, self.words)

    def verify(self, work: Work) -> bool:
        """Tell whether the run's bytes are in their places."""
        words = work.used // 8
        if self.gpu is not None:
            aiote.gpu.copy(self.words, self.gpu)
        if work.op == "send":
            # Messages come in any order, so each slot may hold any of them.
            sent = {pattern(work.seed, work.size // 8, slot * work.size // 8).tobytes() for slot in range(work.slots)}
            return all(self.words.view(np.uint8)[self.slot(work, slot)].tobytes() in sent for slot in range(work.slots))
        expected = pattern(work.seed, words)
        if work.op == "pages":
            pages = expected.reshape(work.slots, work.pages, work.size // 8)
            there = self.words[:words].reshape(pages.shape)
            return bool(np.array_equal(there[:, np.arange(work.pages) * PAGE_STEP % work.pages], pages))
        return bool(np.array_equal(self.words[:words], expected))

    def slot(self, work: Work, slot: int) -> slice:
        """Return the bytes of a slot."""
        return slice(slot * work.request_bytes, (slot + 1) * work.request_bytes)


def _request(arena: Arena, work: Work, slot: int) -> tuple[Callable[..., Awaitable[None]], tuple[Any, ...]]:
    """Return the verb of a slot's requests, and its arguments, which are the same each time."""
    engine, where = arena.engine, arena.slot(work, slot)
    here, there = arena.region[where], arena.peer_memory[where]
    if work.op == "read":
        return arena.bind_verb(engine.read), (there, here)
    if work.op == "send":
        return engine.send, (there.owner, arena.words.view(np.uint8)[where].tobytes())
    if work.op == "pages":
        order = np.arange(work.pages)
        target = aiote.Pages(there, order * PAGE_STEP % work.pages, work.size)
        return arena.bind_verb(engine.write_pages), (aiote.Pages(here, order, work.size), target, COUNTED)
    return arena.bind_verb(engine.write), (here, there)


async def _stream(arena: Arena, work: Work) -> None:
    async def lane(slot: int) -> None:
        verb, arguments = _request(arena, work, slot)
        for _ in range(slot, work.count, work.window):
            await verb(*arguments)

    async with anyio.create_task_group() as group:
        for slot in range(work.slots):
            group.start_soon(lane, slot)


async def _round_trips(arena: Arena, work: Work) -> list[float]:
    engine, where = arena.engine, arena.slot(work, 0)
    here, there = arena.region[where], arena.peer_memory[where]
    submit = arena.bind_verb(engine.submit_write_imm)
    times: list[float] = []
    # The answer shows that a write has arrived. Its own completion is no part of a round trip, here and in the C loop.
    transfers: deque[aiote.Transfer] = deque()
    with engine.counter(COUNTED) as counter:
        before = time.perf_counter_ns()
        for _ in range(work.count):
            transfers.append(submit(here, there, COUNTED))
            await counter.wait(1)
            now = time.perf_counter_ns()
            times.append((now - before) / 1000)
            before = now
    await _await_all(transfers)
    return times


async def _await_all(transfers: Iterable[aiote.Transfer]) -> None:
    for transfer in transfers:
        await transfer


async def initiate(arena: Arena, work: Work) -> dict[str, Any]:
    """Do the work, report its end to the target, and return the result."""
    result: dict[str, Any] = {}
    begun, cpu = time.perf_counter(), time.process_time()
    if work.op == "latency":
        times = await _round_trips(arena, work)
        result["seconds"] = time.perf_counter() - begun
        result.update(LatencySummary.of(times).fields())
    else:
        await _stream(arena, work)
        result["seconds"] = time.perf_counter() - begun
    await arena.engine.write_imm(None, arena.peer_memory, ENDED)
    result["cpu"] = time.process_time() - cpu
    result["verified"] = work.op != "read" or arena.verify(work)
    return result


async def _answer(arena: Arena, work: Work) -> None:
    engine, where = arena.engine, arena.slot(work, 0)
    here, there = arena.region[where], arena.peer_memory[where]
    submit = arena.bind_verb(engine.submit_write_imm)
    transfers: deque[aiote.Transfer] = deque()
    with engine.counter(COUNTED) as counter:
        for _ in range(work.count):
            await counter.wait(1)
            transfers.append(submit(here, there, COUNTED))
    await _await_all(transfers)


async def _receive(arena: Arena, work: Work) -> None:
    slots = [arena.words.view(np.uint8)[arena.slot(work, slot)] for slot in range(work.slots)]
    for number in range(work.count):
        await arena.engine.recv_into(slots[number % work.slots])


async def serve(arena: Arena, work: Work) -> dict[str, Any]:
    """Be the target of the work until it is over, and return the result."""
    begun, cpu = time.perf_counter(), time.process_time()
    with arena.engine.counter(ENDED) as ended, arena.engine.counter(COUNTED) as counted:
        if work.op == "latency":
            await _answer(arena, work)
        elif work.op == "send":
            await _receive(arena, work)
        elif work.op == "pages":
            await counted.wait(work.count * work.pages)
        await ended.wait(1)
        result: dict[str, Any] = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
        result["verified"] = work.op in ("read", "latency") or arena.verify(work)
    return result
