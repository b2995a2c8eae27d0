"""Bridges for tests, and what is run on them."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import PATIENCE_S


@contextmanager
def bridge_to(provider: str = "local", **settings: Any) -> Iterator[bridges.Bridge]:
    """Acquire a bridge as the first of the process, and give it back in a thread that may wait for it."""
    bridge = bridges.acquire(provider, **settings)
    try:
        yield bridge
    finally:
        # A test that has failed may not have let its own end.
        for work in Stubborn.made:
            work.may_end.set()
        Stubborn.made.clear()
        aside(bridge.close)


@contextmanager
def memory_elsewhere(
    provider: str,
    nbytes: int,
    imm: int | None = None,
    on_count: Callable[[aiote.Engine], Awaitable[None]] | None = None,
    **settings: Any,
) -> Iterator[tuple[bytes, np.ndarray, queue.SimpleQueue[int]]]:
    """Yield the descriptor of memory of an engine in a thread of its own, the memory, and a queue that has an item for
    each count of an immediate, once `on_count` has returned.
    """
    memory, told, over = np.zeros(nbytes, np.uint8), threading.Event(), threading.Event()
    found: list[bytes] = []
    counts = queue.SimpleQueue[int]()

    async def count(engine: aiote.Engine, imm: int) -> None:
        with engine.counter(imm) as counter:
            while True:
                await counter.wait(1)
                if on_count is not None:
                    await on_count(engine)
                counts.put(1)

    async def live() -> None:
        async with aiote.open_engine(provider, config=aiote.EngineConfig(**settings)) as engine:
            found.append(engine.register(memory).descriptor)
            async with anyio.create_task_group() as group:
                if imm is not None:
                    group.start_soon(count, engine, imm)
                told.set()
                while not over.is_set():
                    await asyncio.sleep(0.005)
                group.cancel_scope.cancel()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    try:
        assert told.wait(PATIENCE_S)
        yield found[0], memory, counts
    finally:
        over.set()
        thread.join()


def aside(function: Any, *arguments: Any) -> Any:
    """Call a function in a thread of its own, as the hosts of bridges do, and return or raise what it does."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.extend((function(*arguments), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=call, name="host")
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), f"{function} hangs"
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def drop(held: list[Any]) -> None:
    """Drop what a list has, of which something is a bridge that nobody else holds."""
    with pytest.warns(ResourceWarning, match="garbage-collected without close"):
        _collected(held)


def _collected(held: list[Any]) -> None:
    held.clear()
    gc.collect()


class Work:
    """A transfer: once it has begun it takes turns of the loop, and its drain one more."""

    def __init__(self, endless: bool = False) -> None:
        self.begun = self.ended = False
        self._endless = endless

    async def run(self) -> int:
        self.begun = True
        try:
            await asyncio.sleep(1e6 if self._endless else 0)
            return 7
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(0)
            finally:
                # No shield keeps a task's own cancellation out, which may come as late as here.
                self.ended = True


class Stubborn:
    """A coroutine that takes its time when it is cancelled, as a transfer does that drains."""

    made: ClassVar[list[Stubborn]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    async def run(self) -> None:
        """Wait for ever; once cancelled until `may_end`."""
        self.begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()
            with anyio.CancelScope(shield=True):
                while not self.may_end.is_set():
                    await anyio.sleep(0.001)
            self.ended = True

    def until(self, event: threading.Event) -> None:
        """Wait for one of its events."""
        assert event.wait(PATIENCE_S)


async def value(result: Any, turns: int = 1) -> Any:
    """Return something after some turns of the loop."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return result


async def write_to(engine: aiote.Engine, source: aiote.Region, descriptor: bytes, first: int = 0) -> None:
    """Write a region to a peer's memory, from one byte of it on."""
    await engine.write(source, engine.attach(descriptor)[first : first + len(source)])


def call_and_leave(results: Any) -> None:
    """Call in a process of its own, and leave the rest to its exit."""
    bridge = bridges.acquire("local")
    bridge.submit(asyncio.sleep(1e6))
    results.put(bridge.call(value(4)))


def press_ctrl_c(bridge: bridges.Bridge, work: Stubborn, times: int) -> None:
    """Press it, in a thread, so often while the work is under way; then let the work end."""
    work.until(work.begun)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        work.until(work.cancelled)
        # Slower than the handling of the last one: which is a step of Python, and can be interrupted as any other.
        bridge.call(value(0, turns=100))
    work.may_end.set()
