"""A future that another thread completes, and two ways to wait until it is done, even if the wait is interrupted.

A signal handler may raise at any step of the main thread. The locks of a `concurrent.futures.Future` are written in
Python: an interruption between two of their steps leaves a lock held for ever. The next thread that needs the lock then
hangs, and this is the bridge's thread, which ends the transfers of all callers. So waits for a `Promise` use only the
system's locks. A Promise writes the state of the base class only for `concurrent.futures.wait` and `as_completed`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

import anyio

from ..aio import Condition, current_loop, report

__all__ = ["Promise", "outlast", "until_done"]

T = TypeVar("T")
LOOK_S = 0.5
"""The longest delay until a waiting thread notices a signal, or an end without a wake-up, in seconds."""


def nothing() -> None:
    """Do nothing."""


class Promise(futures.Future[T]):
    """A `concurrent.futures.Future` whose waits may be interrupted at any step; `settle` makes it done.

    `settle` first wakes the waiting threads. Then it runs the callbacks of `add_done_callback`, on the calling thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._listeners: list[Callable[[Any], object]] = []
        # Reentrant, because a signal handler may call this object while its thread holds the lock.
        self._guard = threading.RLock()
        self._ending = threading.Lock()
        self._ending.acquire()

    def settle(self, error: BaseException | None, result: T | None = None) -> None:
        """Make this done, with an error or a result. A second call has no effect."""
        with self._guard:
            if self._outcome is not None:
                return
            self._outcome = result, error
        self._ending.release()
        self._publish(error, result)
        for function in self._listeners:
            self._tell(function)

    def _publish(self, error: BaseException | None, result: T | None) -> None:
        """Wake threads that wait by `concurrent.futures`, unless an interrupted one of them still holds the lock."""
        if not self._condition.acquire(timeout=LOOK_S):
            return
        try:
            if isinstance(error, futures.CancelledError):
                super().cancel()
                self.set_running_or_notify_cancel()
            elif error is not None:
                self.set_exception(error)
            else:
                self.set_result(result)  # type: ignore[arg-type]
        finally:
            self._condition.release()

    def _tell(self, function: Callable[[Any], object]) -> None:
        try:
            function(self)
        except Exception as error:
            report(error)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Call a function with this when it is done; at once if it is done already."""
        with self._guard:
            if self._outcome is None:
                self._listeners.append(function)
                return
        self._tell(function)

    def done(self) -> bool:
        """Tell whether this has ended, with a result or an error."""
        return self._outcome is not None

    def cancelled(self) -> bool:
        """Tell whether this has ended by cancellation."""
        return self._outcome is not None and isinstance(self._outcome[1], futures.CancelledError)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end and return its result, or raise its error. Raises TimeoutError after `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # Otherwise the error's traceback would refer to the error itself.
                del error
        return self._outcome[0]  # type: ignore[index,return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error, if any. Raises TimeoutError, and CancelledError if cancelled."""
        if not self.wait_within(timeout):
            raise TimeoutError(f"the call did not end within {timeout} s; it continues, so wait again or cancel it")
        assert self._outcome is not None
        error = self._outcome[1]
        if isinstance(error, futures.CancelledError):
            raise futures.CancelledError
        return error

    def wait_within(self, timeout: float | None) -> bool:
        """Wait in this thread until this is done; return False after `timeout` seconds. Raises what interrupts the
        wait.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = end - time.monotonic()
            # Limit the sleep: Python handles a signal that came just before the sleep only after it. And one of several
            # waiting threads may be interrupted before it has released the lock to the next.
            if self._ending.acquire(timeout=min(max(left, 0), LOOK_S)):
                self._ending.release()
            elif left <= 0:
                break
        return self._outcome is not None


def outlast(
    promise: Promise[Any],
    begin: Callable[[], object] = nothing,
    on_interrupt: Callable[[], object] = nothing,
    timeout: float | None = None,
) -> bool:
    """Call `begin`, and wait in this thread until a promise is done; return False after `timeout` seconds.

    When the wait is interrupted, this calls `on_interrupt`, which must not wait, and raises the interruption after the
    promise is done.
    """
    try:
        begin()
        return promise.wait_within(timeout)
    except BaseException:
        while not promise.done():
            # After several interruptions (Ctrl-C pressed repeatedly), the first one is raised.
            with suppress(BaseException):
                on_interrupt()
                promise.wait_within(None)
        raise


async def until_done(
    promise: Promise[Any], begin: Callable[[], object] = nothing, on_interrupt: Callable[[], object] = nothing
) -> None:
    """Call `begin`, and wait on the running loop until a promise is done; raise an interruption only after that.

    A cancellation interrupts the wait, or a signal handler does: trio raises KeyboardInterrupt in the waiting main
    task. When the wait is interrupted, this calls `on_interrupt`, which must not wait.
    """
    loop = current_loop()
    over = Condition(loop)

    def tell(_: object) -> None:
        # A loop that has ended has no waiting tasks.
        with suppress(RuntimeError):
            loop.call_from_thread(over.wake_all)

    promise.add_done_callback(tell)
    interruption: BaseException
    try:
        begin()
        await over.until(promise.done)
        return
    except BaseException as error:
        interruption = error
    while not promise.done():
        try:
            on_interrupt()
            if isinstance(interruption, GeneratorExit):
                # The loop has ended, so an await would never return.
                break
            with anyio.CancelScope(shield=True):
                await over.wait()
        except BaseException as error:
            # Raise Ctrl-C rather than a cancellation.
            if isinstance(interruption, anyio.get_cancelled_exc_class()) or isinstance(error, GeneratorExit):
                interruption = error
    raise interruption
