"""Tasks that run beside the body of an `async with`, and end with it.

A bare task group would wrap what the body raises in an exception group; here an error comes out as it is.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from ..aio import LoopTask, Signal, current_loop

__all__ = ["Bell", "TaskScope", "beside", "report", "to_the_end"]


class Bell:
    """Something that several tasks wait for, again and again; `ring` wakes those that wait now.

    A `Signal` of the loop on which somebody first waits, so that it can be made where there is none.
    """

    __slots__ = ("_signal",)

    def __init__(self) -> None:
        self._signal: Signal | None = None

    def ring(self) -> None:
        """Wake all that wait."""
        if self._signal is not None:
            self._signal.set()

    async def wait(self) -> None:
        """Sleep until the next ring. Cancelling loses nothing: look at the condition again."""
        if self._signal is None:
            self._signal = Signal(current_loop())
        await self._signal.wait()


class TaskScope:
    """The tasks that run beside a body, until its end. Made by `beside`.

    Not only until a scope around them is cancelled: the body may shield its shutdown, and relies on them meanwhile. So
    they are the loop's own tasks, in no scope; such a one costs a fifth of a task group's, too.
    """

    def __init__(self, end_body: Callable[[], None]) -> None:
        self.failures: list[Exception] = []
        self._end_body = end_body
        self._loop = current_loop()
        self._tasks: set[LoopTask] = set()

    def start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run one more; its failure ends the body, and is raised from the `async with`."""
        task = self._loop.spawn(
            self._run, function, args, name="aiote: beside a body", after=lambda: self._tasks.discard(task)
        )
        self._tasks.add(task)

    async def _run(self, function: Callable[..., Awaitable[None]], args: tuple[object, ...]) -> None:
        try:
            await function(*args)
        except Exception as error:
            self.failures.append(error)
            self._end_body()

    async def close(self) -> None:
        """Cancel them all, and return when they have ended. Cancelling the wait loses nothing."""
        while self._tasks:
            # asyncio does not even begin what is cancelled before its first step, and what has to be given back stays.
            await anyio.lowlevel.checkpoint()
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            for task in tasks:
                await task.join()


@asynccontextmanager
async def beside(*functions: Callable[[], Awaitable[None]]) -> AsyncIterator[TaskScope]:
    """Run functions beside the body and cancel them at its end. Entering does not wait.

    Entered and left in the same task, for a cancel scope spans the body. The first error, be it the body's or a
    function's, is raised as it is.
    """
    with anyio.CancelScope() as scope:
        tasks = TaskScope(scope.cancel)
        for function in functions:
            tasks.start(function)
        try:
            yield tasks
        except Exception as error:
            tasks.failures.append(error)
        finally:
            await to_the_end(tasks.close)
    if tasks.failures:
        raise tasks.failures[0]


async def to_the_end(step: Callable[[], Awaitable[object]]) -> None:
    """Await a step, however often that is cancelled, and raise the cancellation when it is over.

    A shielded scope holds up anyio's cancellations, but not a bare `task.cancel()` or `asyncio.timeout`. The step is
    called again then, so it must be one that can go on where it was. It has to be bounded by itself.
    """
    interruption: BaseException | None = None
    while True:
        try:
            with anyio.CancelScope(shield=True):
                await step()
            break
        except anyio.get_cancelled_exc_class() as error:
            interruption = error
    if interruption is not None:
        raise interruption


def report(error: BaseException) -> None:
    """Say loudly that a callback of the user's failed; it does not take down what called it."""
    sys.excepthook(type(error), error, error.__traceback__)
