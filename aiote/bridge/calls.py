"""Run coroutines on the engine's event loop for other threads or other event loops.

A `Call` is done when its task has ended, not when the task was asked to end: a cancelled transfer drains first, and the
NIC owns its buffer until then. A `concurrent.futures.Future` that is marked as running refuses to be cancelled, and one
that is not is cancelled at once. So a call stays pending in the base class, and becomes cancelled only when its task
has ended by cancellation.
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
    """Return the error for a wait on the thread that has to end what is waited for."""
    return UsageError(
        "called on the bridge's own thread, which would wait for itself: await the asynchronous form instead"
    )


class Host(Protocol):
    """The thread that calls run on."""

    loop: asyncio.AbstractEventLoop

    @property
    def is_current(self) -> bool: ...

    def admit(self, call: Call[Any]) -> None:
        """Schedule the call's `begin` on the loop, or refuse the call."""

    def forget(self, call: Call[Any]) -> None:
        """Record that a call has ended."""


class Call(Promise[T]):
    """A coroutine on the engine's event loop: a `concurrent.futures.Future` that is done when its task has ended.

    `cancel()`, from any thread, asks the task to end and returns at once. `concurrent.futures.wait` and `result()` wait
    until the task has ended; then no NIC uses the memory of its transfers any more. A timeout of `result(timeout)` ends
    the wait, not the call. Callbacks of `add_done_callback` run on the engine's thread, where waiting for a call raises
    UsageError. `asyncio.wrap_future` does not wait for a cancelled call: use `await bridge.run(...)`. In a forked child
    process, a call is never done.
    """

    def __init__(
        self,
        host: Host,
        owner: object,
        work: Coroutine[Any, Any, T],
        timeout: float | None = None,
        *,
        uncancellable: bool = False,
    ) -> None:
        """Prepare the call without starting it. `cancel` and interruptions do not cancel an `uncancellable` call."""
        super().__init__()
        self.owner = owner
        self._host, self._work, self._timeout, self._uncancellable = host, work, timeout, uncancellable
        self._task: asyncio.Task[tuple[T | None, BaseException | None]] | None = None
        self._started = self._asked = False
        self._reason: Exception | None = None

    def start(self) -> None:
        """Start the call. A second call of this method has no effect."""
        if not self._started:
            # In this order, because an interrupted start is repeated.
            self._host.admit(self)
            self._started = True

    def cancel(self) -> bool:
        """Ask the task to end; return False if the call is done or uncancellable. The call may still succeed."""
        if self.done() or self._uncancellable:
            return False
        self.stop(None)
        return True

    def stop(self, reason: Exception | None) -> None:
        """Cancel even an uncancellable call. If that ends it, its error is `reason`, or a cancellation without one."""
        # A closed loop has ended every call.
        with suppress(RuntimeError):
            self._host.loop.call_soon_threadsafe(self._stop, reason)

    def begin(self) -> None:
        """Start the task. Runs on the loop's thread."""
        if self.done():
            self._host.forget(self)
        elif self._task is None:
            # Not in the caller's context, because anyio may have recorded trio as the running library there.
            self._task = self._host.loop.create_task(
                self._run(), name=f"aiote bridge: {self._work!r}", context=contextvars.Context()
            )
            self._task.add_done_callback(self._ended)

    def _stop(self, reason: Exception | None) -> None:
        if self.done() or self._asked:
            # A second cancellation would interrupt the cleanup that the first one started.
            return
        self._asked, self._reason = True, reason
        if self._task is None:
            self.end(reason or futures.CancelledError())
        else:
            self._task.cancel()

    async def _run(self) -> tuple[T | None, BaseException | None]:
        # KeyboardInterrupt and SystemExit would end the loop and all calls. Here they are errors like any other.
        try:
            with anyio.move_on_after(self._timeout):
                return await self._work, None
            return None, TimeoutError(f"the call did not end within {self._timeout} s and was cancelled")
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
        """Make the call done: its task has ended or never began. Runs on the loop's thread, if the loop still runs."""
        if self.done():
            return
        if self._task is None or self._task.done():
            # Close the coroutine, because it may never have begun.
            self._work.close()
        self._host.forget(self)
        self.settle(error, result)

    def require_elsewhere(self) -> None:
        """Raise UsageError on the bridge's own thread, unless the call is done."""
        if not self.done() and self._host.is_current:
            raise wait_refused()

    def _interrupted(self) -> None:
        """Cancel the call, because the wait for it was interrupted. An uncancellable call continues; start it if it
        has not begun.
        """
        if self._uncancellable:
            self.start()
        else:
            self.cancel()

    def wait_within(self, timeout: float | None) -> bool:
        """Wait as `Promise.wait_within` does. Raises UsageError on the bridge's own thread."""
        self.require_elsewhere()
        return super().wait_within(timeout)

    def wait_ended(self, timeout: float | None = None, begin: Callable[[], object] | None = None) -> bool:
        """Start the call and wait in this thread until it has ended. Return False after `timeout` seconds; it
        continues.

        An interruption of the wait (Ctrl-C, the exception of another signal handler) cancels the call and is raised
        after the call has ended. begin: a function that calls `start` and does more. Raises UsageError on the bridge's
        own thread.
        """
        self.require_elsewhere()
        return outlast(self, begin or self.start, self._interrupted, timeout)

    def wait(self, begin: Callable[[], object] | None = None) -> T:
        """Wait as `wait_ended` does, without a timeout, and return the result or raise the error."""
        self.wait_ended(None, begin)
        return self.result()

    async def join(self, begin: Callable[[], object] | None = None) -> T:
        """Start the call, wait on the running loop until it has ended, and return its result or raise its error.

        An interruption of the wait (a cancellation, Ctrl-C) cancels the call and is raised after the call has ended.
        begin: as for `wait_ended`.
        """
        await until_done(self, begin or self.start, self._interrupted)
        return self.result()
