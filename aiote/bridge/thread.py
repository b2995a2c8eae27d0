"""Run an engine and its own event loop on a thread: start it, admit calls to it, and end it with all its calls."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..aio import report
from ..errors import ClosedError, UsageError
from .calls import Call, wait_refused
from .promise import Promise, until_done
from .registered_memory import EngineRegistrations

if TYPE_CHECKING:
    import aiote

    from ..engine import Opening
    from ..rails import Core
    from .moves import ThreadTransfer

__all__ = ["EngineThread", "make_closed_error"]

EXIT_S = 2.0
"""How long the exit of the interpreter waits for calls to drain and peers to be told, before it aborts the engine."""


def make_closed_error() -> ClosedError:
    """Return the error for operations on a closed bridge, and for the calls that its close has ended."""
    return ClosedError("the bridge is closed")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if it is installed, because that saves 1 to 2 us a turn (docs/performance.md)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Thread(threading.Thread):
    """The thread of a bridge's engine; a type of its own, so that any of them can be recognised."""


class EngineThread:
    """An engine, its loop and its thread, from `start` to `stop`.

    `opened` is done when the engine is open or could not be opened, `ended` when the thread ends.
    """

    def __init__(self, opening: Opening, kept_bytes: int, previous: EngineThread | None) -> None:
        self.opening, self.kept_bytes = opening, kept_bytes
        self.opened: Promise[None] = Promise()
        self.ended: Promise[None] = Promise()
        self.users = 0
        self.stopping = self.inherited = False
        self.engine: aiote.Engine
        self.memory: EngineRegistrations
        self.core: Core
        self.transfers: set[ThreadTransfer] = set()
        self.eventfds: list[Any] = []
        self.loop = new_loop()
        self._previous = previous
        # Reentrant, because a signal handler may call this object while its thread holds the lock.
        self._lock = threading.RLock()
        self._calls: set[Call[Any]] = set()
        self._stopped = asyncio.Event()
        self._thread = _Thread(target=self._main, name="aiote bridge", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system has no more threads."""
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def wait_opened(self) -> None:
        """Wait until the engine is open. Raises the error of opening it.

        Raises UsageError on the thread of a bridge, because the engine before has to end first, on that thread.
        """
        if not self.opened.done() and isinstance(threading.current_thread(), _Thread):
            raise wait_refused()
        self.opened.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        # Do not compare the thread's number: a later thread may get the same one.
        return threading.current_thread() is self._thread

    def require_parent(self) -> None:
        """Raise UsageError in a forked child process, because the thread does not run there."""
        if self.inherited:
            raise UsageError(
                "this bridge belongs to the parent process: after a fork, acquire another one in the child"
            )

    def admit(self, call: Call[Any]) -> None:
        """Begin a call on the loop; if this is stopping, end the call with ClosedError."""
        with self._lock:
            if not self.stopping:
                self._calls.add(call)
                self.loop.call_soon_threadsafe(call.begin)
                return
        call.end(make_closed_error())

    def forget(self, call: Call[Any]) -> None:
        """Record that a call has ended."""
        with self._lock:
            self._calls.discard(call)

    def calls_of(self, owner: object | None = None) -> list[Call[Any]]:
        """Return the unfinished calls, all of them or those of one owner."""
        with self._lock:
            return [call for call in self._calls if owner is None or call.owner is owner]

    async def end_calls(self, owner: object | None = None) -> None:
        """Cancel the unfinished calls and transfers, all or those of one owner, and wait until they have ended."""
        transfers = [one for one in tuple(self.transfers) if owner is None or one.owner is owner]
        for transfer in transfers:
            transfer.cancel()
        while calls := self.calls_of(owner):
            for call in calls:
                call.stop(make_closed_error())
            for call in calls:
                await until_done(call)
        for transfer in transfers:
            await transfer.end()

    def stop(self) -> None:
        """Begin to end the engine and its thread; `ended` is done when they have ended. Idempotent."""
        with self._lock:
            self.stopping = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._stopped.set)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def stop_at_exit(self) -> None:
        """End the thread at the interpreter's exit: wait EXIT_S, then abort the engine and wait EXIT_S once more."""
        self.stop()
        self._thread.join(EXIT_S)
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._abort)
        self._thread.join(EXIT_S)

    def _abort(self) -> None:
        if self.opened.done():
            self.engine.abort()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    def _main(self) -> None:
        try:
            if self._previous is not None:
                self._previous.join()
                self._previous = None
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._live())
        except BaseException as error:
            if not self.opened.done():
                self.opened.settle(error)
            elif not isinstance(error, asyncio.CancelledError):
                report(error)
        finally:
            self.stop()
            for call in self.calls_of():
                call.end(make_closed_error())
            self.eventfds.clear()
            self.ended.settle(None)

    async def _live(self) -> None:
        self.engine = await self.opening
        async with self.engine:
            self.core = self.engine._runtime.core
            self.memory = EngineRegistrations(self.engine, self.kept_bytes)
            self.opened.settle(None)
            await self._stopped.wait()
            await self.end_calls()
            await self.memory.aclose()
