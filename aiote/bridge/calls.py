"""Coroutines that other threads, or other event loops, have running beside the engine.

A `Call` is done when its task has ended, not when it was asked to: a cancelled transfer drains first, and its buffer is
the NIC's until then. `concurrent.futures.Future` says so only of what it calls running, which it refuses to cancel; so
a call stays pending there, and becomes cancelled when the task has ended so.

A thread that waits for a call may be interrupted by a signal at any step. The locks of a Future, made in Python, are
lost then, and everybody who needs them hangs; so `wait` uses none of them before the end, but a lock of the system's.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import anyio

from ..aio import Signal, current_loop, insist

__all__ = ["Call", "until_done"]

T = TypeVar("T")
LOOK_S = 0.5
"""How late a thread that waits for a call hears of a signal at most."""


class Host(Protocol):
    """The thread that calls run on."""

    loop: asyncio.AbstractEventLoop

    def admit(self, call: Call[Any]) -> None:
        """Have `begin` called on the loop, or refuse the call."""

    def forget(self, call: Call[Any]) -> None:
        """Take note that a call has ended."""


class Call(futures.Future[T]):
    """A coroutine that runs beside the engine: a `concurrent.futures.Future` that is done when its task has ended.

    `cancel()`, from any thread, asks the task to end and returns at once; `wait()` in `concurrent.futures` and
    `result()` last until it has, by when no NIC uses what its transfers used. `result(timeout)` only stops waiting.
    Callbacks of `add_done_callback` run on the engine's thread. `asyncio.wrap_future` does not wait for a cancelled
    call: use `await bridge.run(...)`. In the child of a fork it is never done.
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
        self._started = self._asked = self._over = self._finished = False
        self._reason: Exception | None = None
        self._ending = threading.Lock()
        self._ending.acquire()

    def start(self) -> None:
        """Have it run; once more does nothing."""
        if not self._started:
            self._started = True
            self._host.admit(self)

    def cancel(self) -> bool:
        """Ask the task to end; False when it has ended. It may still end well, as an `asyncio.Task` may."""
        if self._over or self._firm:
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
        if not self._over:
            # Not in the caller's context: there anyio may have been told that this is trio.
            self._task = self._host.loop.create_task(
                self._run(), name=f"aiote bridge: {self._work!r}", context=contextvars.Context()
            )
            self._task.add_done_callback(self._ended)

    def _stop(self, reason: Exception | None) -> None:
        if self._over or self._asked:
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
            with anyio.fail_after(self._timeout):
                return await self._work, None
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
        if self._over:
            return
        if self._task is None or self._task.done():
            # The coroutine may never have begun.
            self._work.close()
        self._over = True
        self._host.forget(self)
        if isinstance(error, futures.CancelledError):
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type]
        self._finished = True
        self._ending.release()

    def wait(self) -> T:
        """Start it, wait in this thread until it has ended, and return its result.

        Whatever interrupts the wait (Ctrl-C, the exception of another signal handler) cancels it, and is raised once it
        has ended.
        """
        interruption: BaseException | None = None
        while not self._finished:
            try:
                if interruption is not None:
                    self.cancel()
                self.start()
                # With a limit: Python looks at a signal that came just before this sleeps when it wakes, not sooner.
                # Nobody else waits for the lock, so it need not be given back.
                self._ending.acquire(timeout=LOOK_S)
            except BaseException as error:
                interruption = interruption or error
        if interruption is not None:
            raise interruption
        return self.result()

    async def join(self) -> T:
        """Start it, wait on the running loop until it has ended, and return its result; cancelled, it is cancelled, and
        the wait lasts until it has ended.
        """
        self.start()
        await until_done(self, self.cancel)
        return self.result()


async def until_done(future: futures.Future[Any], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Wait on the running loop until a future of another thread is done; a cancellation is told, and raised then."""
    loop = current_loop()
    over = Signal(loop)

    def tell(_: object) -> None:
        # Nobody waits on a loop that has ended.
        with suppress(RuntimeError):
            loop.call_from_thread(over.set)

    future.add_done_callback(tell)
    try:
        while not future.done():
            await over.wait()
    except GeneratorExit:
        # The loop has ended under us: nothing can be awaited any more.
        on_cancel()
        raise
    except anyio.get_cancelled_exc_class():
        on_cancel()
        await insist(loop, future.done, over.wait, math.inf)
        raise
