"""Counts of immediates, awaited."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .aio import wake
from .errors import ClosedError, UsageError
from .rails import CounterHandle, CounterWait

if TYPE_CHECKING:
    from types import TracebackType

    from .aio import Waiter
    from .engine import Engine

__all__ = ["Counter"]


class Counter:
    """The count of one immediate. Made by `Engine.counter`; a context manager that frees the immediate.

    Counts that arrived before the counter was made are there; several counters of one immediate share one count.
    Leaving the context (or `close`) drops what was counted and not consumed, when no other counter of the same
    immediate is open.
    """

    def __init__(self, engine: Engine, handle: CounterHandle) -> None:
        self._engine = engine
        self._handle = handle
        self._waiters: set[Waiter] = set()
        self._closed = False

    @property
    def imm(self) -> int:
        """The immediate's value, 28 bits."""
        return self._handle.imm

    @property
    def value(self) -> int:
        """Whole writes that arrived and were not consumed."""
        return self._handle.value

    async def wait(self, n: int = 1) -> None:
        """Wait until n writes have arrived, and consume them.

        Several waits on one immediate are served in order. A cancelled wait consumes nothing. Raises
        UsageError for n that is not an integer from 0 to 2**40, ClosedError when the counter or the engine is
        closed before or meanwhile.
        """
        await self.wait_unless(n, None)

    async def wait_unless(self, n: int, lost: Callable[[], BaseException | None] | None) -> None:
        """Wait as `wait` does, or until `wake_waits` is called and `lost` returns an error, which is raised then."""
        waiting = self._handle.begin(n) or self._handle.begin(self._checked(n))
        if waiting is None:
            raise UsageError(f"wait({n!r}): the counter of immediate {self.imm:#x} takes no waits")
        while not waiting.satisfied:
            error = lost() if lost is not None else None
            if error is not None:
                self._withdraw(waiting)
                raise error
            waiter = waiting.waiter = self._engine.loop.waiter()
            self._waiters.add(waiter)
            try:
                await waiter
            except BaseException:
                self._withdraw(waiting)
                raise
            finally:
                self._waiters.discard(waiter)
            if not waiting.satisfied and (lost is None or self._closed or self._engine.closed):
                # The counter or the engine was closed under it.
                self._withdraw(waiting)
                self._require_open()
                break
        waiting.take()

    def wake_waits(self) -> None:
        """Have the waits that may be given up look again whether they are."""
        for waiter in tuple(self._waiters):
            wake(waiter)

    def release(self) -> None:
        """Let go of the count without dropping what it has."""
        self._handle.close()

    def _checked(self, n: object) -> int:
        """Return the number as a plain one. Raises what keeps a wait for it from being queued."""
        if not isinstance(n, int) or not 0 <= n <= 1 << 40:
            raise UsageError(f"wait({n!r}): expected the number of writes to wait for, an integer from 0 to 2**40")
        self._require_open()
        return int(n)

    def _withdraw(self, waiting: CounterWait) -> None:
        """End a wait, and look soon: what it leaves may be enough for the next in line."""
        waiting.cancel()
        self._engine.kick()

    def _require_open(self) -> None:
        self._engine.require_open()
        if self._closed:
            raise ClosedError(f"the counter of immediate {self.imm:#x} is closed")

    def __aiter__(self) -> Counter:
        """Iterate over arrivals: each step waits for one write, consumes it and gives the immediate's value."""
        return self

    async def __anext__(self) -> int:
        await self.wait(1)
        return self.imm

    def close(self) -> None:
        """Free the immediate: waits end with ClosedError, what was not consumed is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for waiter in tuple(self._waiters):
            wake(waiter)
        self._handle.close(discard=True)

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Counter {self.imm:#x}, {'closed' if self._closed else self.value}>"
