"""The tasks of a worker on its event loop, and the ways in which an await is cancelled there.

A life's tasks run beside whoever started them, not in a scope of theirs. On asyncio (uvloop too) each is a plain
`asyncio.Task`, so `cancel` is asyncio's own: one exception, thrown in once. On trio it is a child of the worker's
nursery in a cancel scope of its own, so `cancel` holds for every await in it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any, Protocol

import anyio


class Task(Protocol):
    """What both kinds of tasks can do."""

    def cancel(self) -> object: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def add_done_callback(self, function: Callable[[Any], object], /) -> object: ...


async def plain(awaitable: Awaitable[None]) -> None:
    await awaitable


class AsyncioTasks:
    """Tasks of asyncio and uvloop."""

    ways = ("transfer.cancel", "task.cancel", "asyncio.timeout", "wait_for", "anyio scope")
    """In which an await can be cancelled."""
    from_outside = "task.cancel"
    """The way in which another task does it."""
    timeout = staticmethod(asyncio.timeout)
    group = staticmethod(asyncio.TaskGroup)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside the caller."""
        return asyncio.ensure_future(work)

    async def begun(self, task: asyncio.Task[None]) -> None:
        """Wait until a task is in its first await."""
        await asyncio.sleep(0)

    async def wait(self, tasks: Iterable[Any]) -> None:
        """Wait until all these have ended; their errors are not raised here. Cancelled, it cancels none of them."""
        await asyncio.wait(set(tasks))

    async def await_by(self, way: str, awaitable: Awaitable[None], delay: float) -> None:
        """Await something, and cancel that after the delay where this is the way."""
        match way:
            case "asyncio.timeout":
                async with asyncio.timeout(delay):
                    await awaitable
            case "wait_for":
                await asyncio.wait_for(plain(awaitable), delay)
            case "anyio scope":
                with anyio.move_on_after(delay):
                    await awaitable
            case _:
                await awaitable

    def current(self) -> object:
        """Return the coroutine of the calling task."""
        task = asyncio.current_task()
        return None if task is None else task.get_coro()

    def coroutines(self) -> list[object]:
        """Return those of all tasks."""
        return [task.get_coro() for task in asyncio.all_tasks()]


class TrioTask:
    """A task of trio, as asyncio has them."""

    def __init__(self, trio: ModuleType, work: Coroutine[Any, Any, None]) -> None:
        self.begun = trio.Event()
        self.over = trio.Event()
        self._scope = trio.CancelScope()
        self._work = work
        self._error: BaseException | None = None
        self._looked_at = False
        self._callbacks: list[Callable[[TrioTask], object]] = []

    async def run(self) -> None:
        """Do the work, and raise what it raises."""
        try:
            with self._scope:
                self.begun.set()
                await self._work
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.over.set()
            for function in self._callbacks:
                function(self)

    async def run_apart(self) -> None:
        """Do the work, and keep its error for whoever asks."""
        try:
            await self.run()
        except Exception:
            return

    def cancel(self) -> None:
        self._scope.cancel()

    def done(self) -> bool:
        return self.over.is_set()

    def cancelled(self) -> bool:
        return self.over.is_set() and self._scope.cancelled_caught

    def exception(self) -> BaseException | None:
        self._looked_at = True
        return self._error

    def add_done_callback(self, function: Callable[[TrioTask], object], /) -> None:
        if self.over.is_set():
            function(self)
        else:
            self._callbacks.append(function)

    def __del__(self) -> None:
        if isinstance(self._error, Exception) and not self._looked_at:
            sys.excepthook(type(self._error), self._error, self._error.__traceback__)


class TrioGroup:
    """A nursery, as `asyncio.TaskGroup` is used."""

    def __init__(self, trio: ModuleType, nursery: Any) -> None:
        self.trio, self.nursery = trio, nursery

    def create_task(self, work: Coroutine[Any, Any, None]) -> TrioTask:
        """Start a task whose error ends them all."""
        task = TrioTask(self.trio, work)
        self.nursery.start_soon(task.run)
        return task


class TrioTasks(TrioGroup):
    """Tasks of trio."""

    ways = ("transfer.cancel", "trio.CancelScope", "trio.move_on_after", "trio.fail_after", "anyio scope")
    from_outside = "trio.CancelScope"

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[None]:
        with anyio.fail_after(seconds):
            yield

    @asynccontextmanager
    async def group(self) -> AsyncIterator[TrioGroup]:
        async with self.trio.open_nursery() as nursery:
            yield TrioGroup(self.trio, nursery)

    def start(self, work: Coroutine[Any, Any, None]) -> TrioTask:
        task = TrioTask(self.trio, work)
        self.nursery.start_soon(task.run_apart)
        return task

    async def begun(self, task: TrioTask) -> None:
        await task.begun.wait()

    async def wait(self, tasks: Iterable[Any]) -> None:
        for task in tuple(tasks):
            await task.over.wait()

    async def await_by(self, way: str, awaitable: Awaitable[None], delay: float) -> None:
        match way:
            case "trio.move_on_after":
                with self.trio.move_on_after(delay):
                    await awaitable
            case "trio.fail_after":
                try:
                    with self.trio.fail_after(delay):
                        await awaitable
                except self.trio.TooSlowError:
                    raise TimeoutError from None
            case "anyio scope":
                with anyio.move_on_after(delay):
                    await awaitable
            case _:
                await awaitable

    def current(self) -> object:
        return self.trio.lowlevel.current_task().coro

    def coroutines(self) -> list[object]:
        found, left = [], [self.trio.lowlevel.current_root_task()]
        while left:
            task = left.pop()
            found.append(task.coro)
            left += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        return found


Tasks = AsyncioTasks | TrioTasks


async def end(tasks: Tasks, some: Iterable[Task]) -> None:
    """Cancel tasks and wait until they have ended, whatever cancels the caller meanwhile; no error is raised."""
    some = tuple(some)
    for task in some:
        task.cancel()
    with anyio.CancelScope(shield=True):
        await tasks.wait(some)
    for task in some:
        if not task.cancelled():
            task.exception()


@asynccontextmanager
async def tasks_of(loop: str) -> AsyncIterator[Tasks]:
    """Have tasks on the running event loop, of that name; on trio those that are left are cancelled in the end."""
    if loop != "trio":
        yield AsyncioTasks()
        return
    import trio

    async with trio.open_nursery() as nursery:
        yield TrioTasks(trio, nursery)
        nursery.cancel_scope.cancel()
    # What a task has raised and nobody asked for is told when it goes, and its traceback refers to it.
    gc.collect()
