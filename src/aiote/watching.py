"""Words in memory whose change is awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .aio import wake
from .errors import UsageError
from .rails import Buffer, Watch, acquire, read_word

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Changes", "watch"]


def watch(engine: Engine, word: Any) -> Changes:
    """Check the word and return the iterator over its changes."""
    try:
        buffer = acquire(word)
        Watch(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"watch: {error}") from error
    if buffer.device not in ("cpu", "cuda_host"):
        raise UsageError(
            f"watch: the word is in memory of {buffer.device!r}, which this process cannot read; use pinned host memory"
        )
    return Changes(engine, buffer, read_word(buffer))


class Changes(AsyncIterator[tuple[int, int]]):
    """The changes of a word as (old, new). A loop over them may be left at any time and gone on with later.

    The word's memory is held until `aclose`, or until nobody has this object any more.
    """

    def __init__(self, engine: Engine, buffer: Buffer, old: int) -> None:
        self._engine = engine
        self._buffer = buffer
        self._old = old
        self._waiting = 0
        self._closed = False

    async def __anext__(self) -> tuple[int, int]:
        if self._closed:
            raise StopAsyncIteration
        self._waiting += 1
        try:
            new = await _next_change(self._engine, self._buffer, self._old)
        finally:
            self._waiting -= 1
            self._release()
        old, self._old = self._old, new
        return old, new

    async def aclose(self) -> None:
        """Give the word's memory back, as soon as nobody waits for its change. Idempotent."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._closed and not self._waiting:
            self._buffer.release()


async def _next_change(engine: Engine, buffer: Buffer, old: int) -> int:
    engine.require_open()
    watched = Watch(buffer)
    waiter = engine.loop.waiter()
    watched.on_over = lambda _watched: wake(waiter)
    engine.core.watch(watched, old)
    engine.waiting.add(waiter)
    engine.kick()
    try:
        await waiter
    finally:
        engine.waiting.discard(waiter)
        watched.cancel()
    engine.require_open()
    return watched.new
