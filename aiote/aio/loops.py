"""One interface to two event loops.

One task awaits a `Waiter` once, and `set_result` wakes it. A `LoopTask` runs beside the engine's user and belongs to no
scope of theirs, so an engine may be opened in one task and closed in another (as test fixtures do). `report` shows the
failures of a `LoopTask`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UsageError
from ..rails import NativeAlarm, NativeWaiter, OwnLoop

if TYPE_CHECKING:
    import trio

__all__ = ["EventLoop", "LoopTask", "Waiter", "current_loop"]


class Waiter(Protocol):
    """An object that one task awaits until `set_result` is called."""

    def set_result(self, value: Any, /) -> None: ...
    def done(self) -> bool: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...


class LoopTask(Protocol):
    """A coroutine that the engine runs for itself."""

    def cancel(self) -> None:
        """Ask the task to end. A second call has no effect."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the task has ended, or its loop has."""
        ...

    async def join(self) -> None:
        """Wait until the task has ended; the task's own failure is not raised here."""
        ...


class Alarm(Protocol):
    """A timer that wakes a loop by a descriptor, so it costs nothing in the loop's other turns."""

    def set(self, seconds: float) -> None:
        """Set the timer: call the function after `seconds`, and no longer at the time set before."""
        ...

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        ...


class EventLoop(Protocol):
    """The parts of an event loop that the layers above use."""

    name: str
    own: OwnLoop
    """Tells native code whether this loop runs the caller."""

    def require_here(self) -> None:
        """Raise UsageError unless this loop runs the caller, or the caller is on its thread and no loop runs there."""

    def waiter(self) -> Waiter: ...
    def spawn(
        self,
        function: Callable[..., Coroutine[Any, Any, None]],
        *args: Any,
        name: str,
        after: Callable[[], object] | None = None,
    ) -> LoopTask: ...
    def call_soon(self, function: Callable[[], object]) -> None: ...
    def call_from_thread(self, function: Callable[[], object]) -> None: ...
    def forget_readable(self, fd: int) -> None: ...
    def on_readable(self, fd: int, function: Callable[[], object]) -> Callable[[], object]: ...
    def time(self) -> float: ...
    def alarm(self, function: Callable[[], object]) -> Alarm | None: ...


def current_loop() -> EventLoop:
    """Return the event loop that runs the calling task. Raises UsageError outside of one."""
    try:
        return AsyncioLoop(asyncio.get_running_loop())
    except RuntimeError:
        pass
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return TrioLoop()
    raise UsageError("no event loop is running: open the engine in a coroutine of asyncio or trio")


def require_loop(expected: object, running: object, thread: int) -> None:
    """Raise UsageError unless the expected loop runs the caller, or the caller is on its thread without any loop."""
    if running is expected or (running is None and threading.get_ident() == thread):
        return
    where = "outside of an event loop" if running is None else "from another event loop"
    if threading.get_ident() != thread:
        where += f", on thread {threading.current_thread().name}"
    raise UsageError(
        f"the engine belongs to one event loop, and was called {where}: call it there, or share one engine between "
        "threads and loops by aiote.bridge"
    )


def report(error: BaseException) -> None:
    """Report an error of the engine to `sys.excepthook`; the error should not happen, and must not end the user's
    tasks.
    """
    sys.excepthook(type(error), error.with_traceback(error.__traceback__), error.__traceback__)


class AsyncioTask:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._asked = False

    def cancel(self) -> None:
        # A second cancellation would interrupt the cleanup that the first one started.
        if not self._asked and not self.has_ended:
            self._asked = True
            self._task.cancel()

    @property
    def has_ended(self) -> bool:
        return self._task.done() or self._task.get_loop().is_closed()

    async def join(self) -> None:
        if self._task is not asyncio.current_task():
            await asyncio.wait([self._task])


class AsyncioAlarm:
    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        self._loop = loop
        self._function = function
        self._timer = NativeAlarm()
        self.set = self._timer.set
        try:
            loop.add_reader(self._timer.fd, self._ring)
        except BaseException:
            self._timer.close()
            raise

    def _ring(self) -> None:
        self._timer.clear()
        self._function()

    def close(self) -> None:
        if self._timer.fd >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._timer.fd)
        self._timer.close()


class AsyncioLoop:
    name = "asyncio"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiter: Callable[[], Waiter] = functools.partial(NativeWaiter, loop, asyncio.CancelledError)
        self.own = OwnLoop(asyncio._get_running_loop, loop)
        self._thread = threading.get_ident()
        self.time = loop.time
        # The loop refers to its tasks weakly, but the engine's own tasks must live until they have ended.
        self._tasks: set[asyncio.Task[None]] = set()

    def require_here(self) -> None:
        """Raise UsageError if another loop or another thread calls."""
        require_loop(self.loop, asyncio._get_running_loop(), self._thread)

    def call_soon(self, function: Callable[[], object]) -> None:
        self.loop.call_soon(function)

    def call_from_thread(self, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread, from another thread. Raises RuntimeError if the loop has ended."""
        self.loop.call_soon_threadsafe(function)

    def forget_readable(self, fd: int) -> None:
        """Stop watching a descriptor; call this before cancelling the task that waits for it.

        Otherwise asyncio could accept a connection for a task that is cancelled in the same turn, and no code would own
        that connection.
        """
        if not self.loop.is_closed():
            self.loop.remove_reader(fd)

    def on_readable(self, fd: int, function: Callable[[], object]) -> Callable[[], object]:
        """Call a function whenever a descriptor is readable; it must read. Call the returned function to stop that."""
        self.loop.add_reader(fd, function)
        return functools.partial(self.forget_readable, fd)

    def alarm(self, function: Callable[[], object]) -> Alarm | None:
        """Return a timer that calls a function, or None. Without a timer, the caller uses the loop's own timers.

        It is None if the loop's own timers are as cheap (uvloop's), if the loop's clock is not the system's, or if the
        system has no more timers; in the last case waiting only costs more.
        """
        if getattr(type(self.loop), "time", None) is not asyncio.BaseEventLoop.time:
            return None
        try:
            return AsyncioAlarm(self.loop, function)
        except OSError:
            return None

    def spawn(
        self,
        function: Callable[..., Coroutine[Any, Any, None]],
        *args: Any,
        name: str,
        after: Callable[[], object] | None = None,
    ) -> LoopTask:
        """Run a coroutine in a task of its own; `after` is called when the task has ended, even if it never began."""
        task = self.loop.create_task(function(*args), name=name)
        # An engine that was never closed warns once by itself; asyncio would warn about each of its tasks.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if after is not None:
            task.add_done_callback(lambda _task: after())
        return AsyncioTask(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report(error)


class TrioWaiter:
    """A one-shot event with a value."""

    __slots__ = ("_done", "_task", "_trio", "_value")

    def __init__(self, module: Any) -> None:
        self._trio = module
        self._done = False
        self._value: Any = None
        self._task: Any = None

    def set_result(self, value: Any, /) -> None:
        self._done = True
        self._value = value
        if self._task is not None:
            task, self._task = self._task, None
            self._trio.lowlevel.reschedule(task)

    def done(self) -> bool:
        return self._done

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self._done:
            return self._value
        lowlevel = self._trio.lowlevel
        self._task = lowlevel.current_task()

        def abort(_raise_cancel: Any) -> Any:
            self._task = None
            return lowlevel.Abort.SUCCEEDED

        await lowlevel.wait_task_rescheduled(abort)
        return self._value


class TrioTask:
    def __init__(self, module: Any) -> None:
        self.scope = module.CancelScope()
        self.over = module.Event()

    def cancel(self) -> None:
        self.scope.cancel()

    @property
    def has_ended(self) -> bool:
        return bool(self.over.is_set())

    async def join(self) -> None:
        await self.over.wait()


class TrioLoop:
    name = "trio"

    def __init__(self) -> None:
        import trio

        self._trio: Any = trio
        self._token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.own = OwnLoop(self._running, self._token)
        self._thread = threading.get_ident()

    def _running(self) -> object:
        try:
            return self._trio.lowlevel.current_trio_token()
        except RuntimeError:
            return None

    def require_here(self) -> None:
        """Raise UsageError if another run of trio or another thread calls."""
        require_loop(self._token, self._running(), self._thread)

    def waiter(self) -> Waiter:
        return TrioWaiter(self._trio)

    def forget_readable(self, fd: int) -> None:
        """Do nothing: under trio the waiting task itself accepts the connection."""

    def on_readable(self, fd: int, function: Callable[[], object]) -> Callable[[], object]:
        """Call a function whenever a descriptor is readable; it must read. Call the returned function to stop that."""

        async def watch() -> None:
            while True:
                try:
                    await self._trio.lowlevel.wait_readable(fd)
                except OSError:
                    # The system cannot watch more descriptors. The bytes stay readable, so try again later.
                    await self._trio.sleep(1)
                    continue
                function()

        return self.spawn(watch, name="aiote readable").cancel

    def time(self) -> float:
        return float(self._trio.current_time())

    def alarm(self, function: Callable[[], object]) -> Alarm | None:
        """Return None, because trio's own timers are as cheap."""
        return None

    def call_soon(self, function: Callable[[], object]) -> None:
        self._token.run_sync_soon(function)

    call_from_thread = call_soon

    def spawn(
        self,
        function: Callable[..., Coroutine[Any, Any, None]],
        *args: Any,
        name: str,
        after: Callable[[], object] | None = None,
    ) -> LoopTask:
        task = TrioTask(self._trio)

        async def run() -> None:
            # A system task must not raise, because that would end the whole run.
            try:
                with task.scope:
                    await function(*args)
            except Exception as error:
                report(error)
            finally:
                task.over.set()
                if after is not None:
                    after()

        self._trio.lowlevel.spawn_system_task(run, name=name, context=contextvars.copy_context())
        return task
