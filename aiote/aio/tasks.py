"""Run tasks beside the body of an `async with`, and end them with the body.

A plain task group would wrap the body's exception in an exception group; here an error is raised as it is.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.lowlevel

from .loops import LoopTask, current_loop

__all__ = ["TaskScope", "plain_errors", "report_callback_error", "run_background_tasks", "run_shielded"]


class TaskScope:
    """The tasks that run beside a body until the body ends. Made by `run_background_tasks`.

    The tasks are the loop's own and belong to no cancel scope. So they keep running when a scope around the body is
    cancelled, because the body may shield its shutdown and rely on them meanwhile. Such a task also costs a fifth of a
    task in a task group.
    """

    def __init__(self, end_body: Callable[[], None]) -> None:
        self.failures: list[Exception] = []
        self._end_body = end_body
        self._loop = current_loop()
        self._tasks: set[LoopTask] = set()

    def start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a function as one more task; its failure ends the body and is raised from the `async with`."""
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
        """Cancel all tasks and wait until they have ended. Cancelling the wait loses nothing: call it again."""
        while self._tasks:
            # Let new tasks take their first step. asyncio would never begin a task that is cancelled before that, and
            # the task could not release what it was given.
            await anyio.lowlevel.checkpoint()
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            for task in tasks:
                await task.join()


@asynccontextmanager
async def run_background_tasks(*functions: Callable[[], Awaitable[None]]) -> AsyncIterator[TaskScope]:
    """Run functions beside the body and cancel them at its end. Entering does not wait.

    Enter and leave it in the same task, because a cancel scope spans the body. The first error of the body or of a
    function is raised as it is.
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
            await run_shielded(tasks.close)
    if tasks.failures:
        raise tasks.failures[0]


async def run_shielded(step: Callable[[], Awaitable[object]]) -> None:
    """Await a step until it completes, even if the wait is cancelled; then raise the last cancellation.

    A shielded scope delays anyio's cancellations, but a plain `task.cancel()` or `asyncio.timeout` interrupts the step.
    This function then calls the step again, so the step must be able to continue where it stopped. The step must also
    bound its own duration.
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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Within a `with`, raise the first error of an exception group in place of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def report_callback_error(error: BaseException) -> None:
    """Report the exception of a user's callback to `sys.excepthook`; it does not end the code that called it."""
    sys.excepthook(type(error), error, error.__traceback__)
