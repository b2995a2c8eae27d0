"""Calls that hold their thread for seconds, each in a thread of its own.

Only for what the system has no other form of, as the pinning of memory has none: the kernel neither tells when it is
done nor takes it back. So a cancelled await lasts until the call has returned, and `undo` gets what it returned.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .loops import EventLoop, current_loop, report
from .waiting import Signal, insist

__all__ = ["ThreadCall", "in_thread"]

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A function that runs in a thread. Its result is the caller's by `result`, or goes to `undo`, never both."""

    def __init__(self, loop: EventLoop, function: Callable[[], T], undo: Callable[[T], object], *, name: str) -> None:
        """Start the thread. Raises RuntimeError where the system has no more of them."""
        self._loop = loop
        self._function = function
        self._undo = undo
        self._unwanted = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._over = Signal(loop)
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
            self._loop.call_from_thread(self._over.set)
        except RuntimeError:
            # The loop has ended, and nobody waits any more.
            return

    def _undone(self) -> None:
        # Whoever takes the result out of the list has it: the thread, or one that gave up only when this was over.
        while self._results:
            try:
                self._undo(self._results.pop())
            except Exception as error:
                # Nobody waits for this any more.
                report(error)

    async def join(self) -> None:
        """Wait until the function has returned, whatever cancels us meanwhile: then what it returned is undone."""
        try:
            await self._returned()
        except BaseException:
            self.abandon()
            try:
                await insist(self._loop, lambda: self.returned, self._over.wait, math.inf)
            finally:
                self.give_up()
            raise

    async def _returned(self) -> None:
        while not self.returned:
            await self._over.wait()

    def abandon(self) -> None:
        """Have the thread undo what the function returns, where it has not returned yet."""
        self._unwanted = True

    def give_up(self) -> None:
        """Undo what it returns; the calling thread stands still until it has."""
        self.abandon()
        self._thread.join()
        self._undone()

    def result(self) -> T:
        """Return what the function has returned, once, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results.pop()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread; a cancellation is raised when it has returned, also a bare `Task.cancel`.

    Where the system has no thread left it is called here, and the loop stands still meanwhile.
    """
    try:
        call = ThreadCall(current_loop(), function, lambda _: None, name="aiote in_thread")
    except RuntimeError:
        return function()
    await call.join()
    return call.result()
