"""Coroutines that other threads, or other event loops, have running beside the engine.

A `Call` is done when its task has ended, not when it was asked to: a cancelled transfer drains first, and its buffer is
the NIC's until then. `concurrent.futures.Future` says so only of what it calls running, which it refuses to cancel; so
a call stays pending there, and becomes cancelled when the task has ended so.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import anyio

from ..errors import UsageError
from .promise import Promise, outlast, until_done

__all__ = ["Call", "wait_refused"]

T = TypeVar("T")


def wait_refused() -> UsageError:
    """Return the error of what would wait on the thread that has to end it."""
    return UsageError("this is the bridge's own thread, which would wait for itself: use the form with await")


class Host(Protocol):
    """The thread that calls run on."""

    loop: asyncio.AbstractEventLoop

    @property
    def is_current(self) -> bool: ...

    def admit(self, call: Call[Any]) -> None:
        """Have `begin` called on the loop, or refuse the call."""

    def forget(self, call: Call[Any]) -> None:
        """Take note that a call has ended."""


class Call(Promise[T]):
    """A coroutine that runs beside the engine: a `concurrent.futures.Future` that is done when its task has ended.

    `cancel()`, from any thread, asks the task to end and returns at once; `wait()` in `concurrent.futures` and
    `result()` last until it has, by when no NIC uses what its transfers used. `result(timeout)` only stops waiting.
    Callbacks of `add_done_callback` run on the engine's thread, where waiting for a call raises UsageError.
    `asyncio.wrap_future` does not wait for a cancelled call: use `await bridge.run(...)`. In the child of a fork it is
    never done.
    """

    def __init__(
        self,
        host: Host,
        owner: object,
        work: Coroutine[Any, Any, T],
        timeout: float | None = None,
        *,
        firm: bool = False,
    ) -> None:
        """Prepare it; nothing runs. A `firm` one is not cancelled."""
        super().__init__()
        self.owner = owner
        self._host, self._work, self._timeout, self._firm = host, work, timeout, firm
        self._task: asyncio.Task[tuple[T | None, BaseException | None]] | None = None
        self._started = self._asked = False
        self._reason: Exception | None = None

    def start(self) -> None:
        """Have it run; once more does nothing."""
        if not self._started:
            # In this order: a start that is interrupted is repeated.
            self._host.admit(self)
            self._started = True

    def cancel(self) -> bool:
        """Ask the task to end; False when it has ended. It may still end well, as an `asyncio.Task` may."""
        if self.done() or self._firm:
            return False
        self.stop(None)
        return True

    def stop(self, reason: Exception | None) -> None:
        """Cancel it, firm or not; where that ends it, it fails with `reason`."""
        # A loop that is closed has ended every call.
        with suppress(RuntimeError):
            self._host.loop.call_soon_threadsafe(self._stop, reason)

    def begin(self) -> None:
        """Start the task; on the loop's thread."""
        if self.done():
            self._host.forget(self)
        elif self._task is None:
            # Not in the caller's context: there anyio may have been told that this is trio.
            self._task = self._host.loop.create_task(
                self._run(), name=f"aiote bridge: {self._work!r}", context=contextvars.Context()
            )
            self._task.add_done_callback(self._ended)

    def _stop(self, reason: Exception | None) -> None:
        if self.done() or self._asked:
            # A second cancellation would interrupt what the first made it do.
            return
        self._asked, self._reason = True, reason
        if self._task is None:
            self.end(reason or futures.CancelledError())
        else:
            self._task.cancel()

    async def _run(self) -> tuple[T | None, BaseException | None]:
        # These two would end the loop, and everybody's calls; here they are an error as any other.
        try:
            with anyio.move_on_after(self._timeout):
                return await self._work, None
            return None, TimeoutError(f"it was not over within {self._timeout} s, and was cancelled")
        except (KeyboardInterrupt, SystemExit) as error:
            return None, error

    def _ended(self, task: asyncio.Task[tuple[T | None, BaseException | None]]) -> None:
        if task.cancelled():
            self.end(self._reason or futures.CancelledError())
        elif (error := task.exception()) is not None:
            self.end(error)
        else:
            result, error = task.result()
            self.end(error, result)

    def end(self, error: BaseException | None, result: T | None = None) -> None:
        """Make it done, the task having ended or never begun; on the loop's thread, or where that has none."""
        if self.done():
            return
        if self._task is None or self._task.done():
            # The coroutine may never have begun.
            self._work.close()
        self._host.forget(self)
        self.settle(error, result)

    def require_elsewhere(self) -> None:
        """Raise UsageError on the bridge's own thread, unless it is done."""
        if not self.done() and self._host.is_current:
            raise wait_refused()

    def _interrupted(self) -> None:
        """End it, as whoever waits for it was interrupted; a firm one goes on, and may not have begun."""
        if self._firm:
            self.start()
        else:
            self.cancel()

    def wait_within(self, timeout: float | None) -> bool:
        """Wait as a `Promise` does. Raises UsageError on the bridge's own thread."""
        self.require_elsewhere()
        return super().wait_within(timeout)

    def wait_ended(self, timeout: float | None = None, begin: Callable[[], object] | None = None) -> bool:
        """Start it, wait in this thread until it has ended; False after `timeout` seconds, and it goes on.

        Whatever interrupts the wait (Ctrl-C, the exception of another signal handler) cancels it, and is raised once it
        has ended. begin: does more than `start`, and that. Raises UsageError on the bridge's own thread.
        """
        self.require_elsewhere()
        return outlast(self, begin or self.start, self._interrupted, timeout)

    def wait(self, begin: Callable[[], object] | None = None) -> T:
        """Wait as `wait_ended` does, for as long as it takes, and return the result."""
        self.wait_ended(None, begin)
        return self.result()

    async def join(self, begin: Callable[[], object] | None = None) -> T:
        """Start it, wait on the running loop until it has ended, and return its result.

        Whatever interrupts the wait (a cancellation, Ctrl-C) cancels it, and is raised once it has ended. begin: as of
        `wait_ended`.
        """
        await until_done(self, begin or self.start, self._interrupted)
        return self.result()
