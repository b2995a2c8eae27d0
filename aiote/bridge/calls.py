"""Coroutines that other threads, or other event loops, have running beside the engine.

A `Call` is done when its task has ended, not when it was asked to: a cancelled transfer drains first, and its buffer is
the NIC's until then. `concurrent.futures.Future` says so only of what it calls running, which it refuses to cancel; so
a call stays pending there, and becomes cancelled when the task has ended so.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import anyio

from ..aio import Signal, current_loop, insist

__all__ = ["Call", "until_done"]

T = TypeVar("T")


class Host(Protocol):
    """The thread that calls run on."""

    loop: asyncio.AbstractEventLoop

    def admit(self, call: Call[Any]) -> None:
        """Have `begin` called on the loop, or end the call with an error."""


class Call(futures.Future[T]):
    """A coroutine that runs beside the engine: a `concurrent.futures.Future` that is done when its task has ended.

    `cancel()`, from any thread, asks the task to end and returns at once; `wait()` in `concurrent.futures` and
    `result()` last until it has, by when no NIC uses what its transfers used. `result(timeout)` only stops waiting.
    Callbacks of `add_done_callback` run on the engine's thread. `asyncio.wrap_future` does not wait for a cancelled
    call: use `await bridge.run(...)`. It is no argument to anything in a child of a fork.
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
            self._started = True
            self._host.admit(self)

    def cancel(self) -> bool:
        """Ask the task to end; False when it has ended. It may still end well, as an `asyncio.Task` may."""
        return not self._firm and self.stop(None)

    def stop(self, reason: Exception | None) -> bool:
        """Cancel it; where that ends it, it fails with `reason`."""
        if self.done():
            return False
        # A loop that is closed has ended every call.
        with suppress(RuntimeError):
            self._host.loop.call_soon_threadsafe(self._stop, reason)
        return True

    def refuse(self, error: BaseException) -> None:
        """End it with an error, its task having ended or never begun."""
        if self._task is None:
            self._work.close()
        if not self.done():
            self.set_exception(error)

    def begin(self) -> None:
        """Start the task; on the loop's thread."""
        if not self.done():
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
            self._cancelled()
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
            self._cancelled()
            return
        error = task.exception()
        result = None
        if error is None:
            result, error = task.result()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)  # type: ignore[arg-type]

    def _cancelled(self) -> None:
        self._work.close()
        if self._reason is not None:
            self.set_exception(self._reason)
        else:
            super().cancel()
            self.set_running_or_notify_cancel()

    def wait(self) -> T:
        """Start it, wait in this thread until it has ended, and return its result.

        Whatever interrupts the wait (Ctrl-C, the exception of another signal handler) cancels it, and is raised once it
        has ended.
        """
        interruption: BaseException | None = None
        while not self.done():
            try:
                if interruption is not None:
                    self.cancel()
                self.start()
                futures.wait([self])
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
    except anyio.get_cancelled_exc_class():
        on_cancel()
        await insist(loop, future.done, over.wait, math.inf)
        raise
    except GeneratorExit:
        # The loop has ended under us: nothing can be awaited any more.
        on_cancel()
        raise
