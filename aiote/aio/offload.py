"""Run calls that block their thread for seconds, each in a thread of its own.

Use this only for calls that have no asynchronous form in the system. Pinning memory is one: the kernel does not
announce when it is done, and cannot cancel it. So a cancelled await lasts until the call has returned, and `undo` then
gets the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .loops import EventLoop, current_loop, report
from .waiting import Condition, wait_shielded

__all__ = ["ThreadCall", "in_thread"]

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A function that runs in a thread. Its result goes to the caller of `result` or to `undo`, never to both."""

    def __init__(self, loop: EventLoop, function: Callable[[], T], undo: Callable[[T], object], *, name: str) -> None:
        """Start the thread. Raises RuntimeError if the system has no more threads."""
        self._loop = loop
        self._function = function
        self._undo = undo
        self._unwanted = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._over = Condition(loop)
        self.returned = False
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
            if self._unwanted:
                self._undone()
        except BaseException as error:
            self._error = error
        self.returned = True
        try:
            self._loop.call_from_thread(self._over.wake_all)
        except RuntimeError:
            # The loop has ended, so no task waits any more.
            return

    def _undone(self) -> None:
        # Taking the result out of the list decides who undoes it: this thread, or a caller that gave up after the
        # function had returned.
        while self._results:
            try:
                self._undo(self._results.pop())
            except Exception as error:
                # No caller waits for the result, so the error can only be reported.
                report(error)

    async def join(self) -> None:
        """Wait until the function has returned, even if the wait is cancelled; then undo the result, and raise."""
        try:
            await self._returned()
        except BaseException:
            self.abandon()
            try:
                await wait_shielded(self._loop, lambda: self.returned, self._over.wait, math.inf)
            finally:
                self.give_up()
            raise

    async def _returned(self) -> None:
        await self._over.until(lambda: self.returned)

    def abandon(self) -> None:
        """Let the thread undo the function's result, if the function has not returned yet."""
        self._unwanted = True

    def give_up(self) -> None:
        """Undo the function's result; block the calling thread until the function has returned."""
        self.abandon()
        self._thread.join()
        self._undone()

    def result(self) -> T:
        """Return the function's result, once, or raise its exception; block until the thread has ended."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results.pop()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread. A cancellation, even a plain `Task.cancel`, is raised after the function has
    returned.

    If the system has no thread left, the function is called here and blocks the loop.
    """
    try:
        call = ThreadCall(current_loop(), function, lambda _: None, name="aiote in_thread")
    except RuntimeError:
        return function()
    await call.join()
    return call.result()
