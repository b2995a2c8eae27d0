"""A future of another thread, and the two ways to wait for it until it is done, whatever interrupts that.

A signal handler may raise at any step of the main thread. The locks of a `concurrent.futures.Future` are made in
Python: an interruption between two of their steps leaves one locked for ever, and the next thread that needs it hangs,
which is the one that ends everybody's transfers. So a `Promise` is waited for with locks of the system's alone. It
writes the base class's state for `concurrent.futures.wait` and `as_completed` only.
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

from ..aio import Signal, current_loop, report

__all__ = ["Promise", "outlast", "until_done"]

T = TypeVar("T")
LOOK_S = 0.5
"""How late a thread that waits hears of a signal, or of an end that was not told, at most."""


def nothing() -> None:
    """Do nothing."""


class Promise(futures.Future[T]):
    """A `concurrent.futures.Future` whose waits may be interrupted anywhere; `settle` makes it done.

    Callbacks of `add_done_callback` run on the thread that settles it, the last one after waiting threads were woken.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._listeners: list[Callable[[Any], object]] = []
        # Reentrant: a signal handler may call us where we hold it.
        self._guard = threading.RLock()
        self._ending = threading.Lock()
        self._ending.acquire()

    def settle(self, error: BaseException | None, result: T | None = None) -> None:
        """Make it done, with an error or a result. Once more does nothing."""
        with self._guard:
            if self._outcome is not None:
                return
            self._outcome = result, error
        self._ending.release()
        self._publish(error, result)
        for function in self._listeners:
            self._tell(function)

    def _publish(self, error: BaseException | None, result: T | None) -> None:
        """Tell those who wait by `concurrent.futures`, unless one of them was interrupted and has kept the lock."""
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
        """Have a function called with this when it is done; at once where it is."""
        with self._guard:
            if self._outcome is None:
                self._listeners.append(function)
                return
        self._tell(function)

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._outcome is not None

    def cancelled(self) -> bool:
        """Tell whether it has ended as cancelled."""
        return self._outcome is not None and isinstance(self._outcome[1], futures.CancelledError)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end and return its result, or raise its error. Raises TimeoutError after `timeout` seconds."""
        error = self.exception(timeout)
        if error is not None:
            try:
                raise error
            finally:
                # Or the error's traceback would refer to itself.
                del error
        return self._outcome[0]  # type: ignore[index,return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return its error, if any. Raises TimeoutError, and CancelledError as `result` does."""
        if not self.wait_within(timeout):
            raise TimeoutError(f"it was not over within {timeout} s, and goes on")
        assert self._outcome is not None
        error = self._outcome[1]
        if isinstance(error, futures.CancelledError):
            raise futures.CancelledError
        return error

    def wait_within(self, timeout: float | None) -> bool:
        """Wait in this thread until it is done; False after so many seconds. Raises whatever interrupts it."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = end - time.monotonic()
            # With a limit: Python looks at a signal that came just before this sleeps when it wakes, not sooner. And
            # one of several who wait may be interrupted before it has given the lock to the next.
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
    """Call `begin`, and wait in this thread until a promise is done; False after `timeout` seconds.

    Whatever interrupts that is raised when it is done; `on_interrupt` is told of it, and must not wait.
    """
    try:
        begin()
        return promise.wait_within(timeout)
    except BaseException:
        while not promise.done():
            # However often it is pressed, the first is raised.
            with suppress(BaseException):
                on_interrupt()
                promise.wait_within(None)
        raise


async def until_done(
    promise: Promise[Any], begin: Callable[[], object] = nothing, on_interrupt: Callable[[], object] = nothing
) -> None:
    """Call `begin`, and wait on the running loop until a promise is done; whatever interrupts that is raised then.

    A cancellation interrupts it, or a signal handler: trio raises KeyboardInterrupt where the main task waits.
    `on_interrupt` is told of it, and must not wait.
    """
    loop = current_loop()
    over = Signal(loop)

    def tell(_: object) -> None:
        # A loop that has ended runs no task that waits.
        with suppress(RuntimeError):
            loop.call_from_thread(over.set)

    promise.add_done_callback(tell)
    interruption: BaseException
    try:
        begin()
        while not promise.done():
            await over.wait()
        return
    except BaseException as error:
        interruption = error
    while not promise.done():
        try:
            on_interrupt()
            if isinstance(interruption, GeneratorExit):
                # The loop has ended: an await would never return.
                break
            with anyio.CancelScope(shield=True):
                await over.wait()
        except BaseException as error:
            # Ctrl-C says more than a cancellation.
            if isinstance(interruption, anyio.get_cancelled_exc_class()) or isinstance(error, GeneratorExit):
                interruption = error
    raise interruption
