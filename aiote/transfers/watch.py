"""Watched values: wait until a value in memory changes.

This module must not know who changes the value.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ..aio import wake
from ..errors import UsageError
from ..rails import AcquiredBuffer, ValueWatch, acquire, read_value

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["Changes", "watch"]


def watch(runtime: Runtime, value: Any) -> Changes:
    """Check the value and return the iterator over its changes; see `Engine.watch`."""
    runtime.require_open()
    try:
        buffer = acquire(value)
        ValueWatch(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"watch: {error}") from error
    if buffer.device not in ("cpu", "cuda_host"):
        raise UsageError(
            f"watch: the value is in memory of {buffer.device!r}, which this process cannot read; "
            "use pinned host memory"
        )
    return Changes(runtime, buffer, read_value(buffer))


class Changes(AsyncIterator[tuple[int, int]]):
    """The changes of a value as (old, new). A loop over them may be left at any time and resumed later.

    The value's memory is held until `aclose`, or until this object is garbage-collected.
    """

    def __init__(self, runtime: Runtime, buffer: AcquiredBuffer, old: int) -> None:
        self._runtime = runtime
        self._buffer = buffer
        self._old = old
        self._waiting = 0
        self._closed = False

    async def __anext__(self) -> tuple[int, int]:
        if self._closed:
            raise StopAsyncIteration
        self._waiting += 1
        try:
            new = await _next_change(self._runtime, self._buffer, self._old)
        finally:
            self._waiting -= 1
            self._release()
        old, self._old = self._old, new
        return old, new

    async def aclose(self) -> None:
        """Give the value's memory back as soon as no task waits for its change. Idempotent."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._closed and not self._waiting:
            self._buffer.release()


async def _next_change(runtime: Runtime, buffer: AcquiredBuffer, old: int) -> int:
    runtime.require_open()
    watched = ValueWatch(buffer)
    waiter = runtime.loop.waiter()
    watched.on_over = lambda _watched: wake(waiter)
    times = runtime.wait_times
    began = times.begin() if times is not None else 0
    runtime.core.watch(watched, old)
    runtime.waiters.add(waiter)
    runtime.kick()
    try:
        await waiter
    finally:
        runtime.waiters.discard(waiter)
        watched.cancel()
    runtime.require_open()
    if began and times is not None:
        times.end("value", began)
    return watched.new
