"""The thread that an engine and an event loop of its own live on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..aio import report
from ..errors import ClosedError, UsageError
from .calls import Call, wait_refused
from .promise import Promise, until_done
from .registered_memory import Memory

if TYPE_CHECKING:
    import aiote

    from ..engine import Opening
    from ..rails import Core
    from .moves import Move

__all__ = ["EngineThread", "closed"]

EXIT_S = 2.0
"""So long the interpreter's exit waits for calls to drain and for peers to be told; then the engine is aborted."""


def closed() -> ClosedError:
    """Return the error of what a closed bridge is asked for, and of calls that it has ended."""
    return ClosedError("the bridge is closed")


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's where it is installed, which saves 1 to 2 us a turn (docs/performance.md)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Thread(threading.Thread):
    """The thread of some bridge."""


class EngineThread:
    """An engine, its loop and its thread, from `start` to `stop`. `opened` and `ended` are done when it is."""

    def __init__(self, opening: Opening, kept_bytes: int, previous: EngineThread | None) -> None:
        self.opening, self.kept_bytes = opening, kept_bytes
        self.opened: Promise[None] = Promise()
        self.ended: Promise[None] = Promise()
        self.users = 0
        self.stopping = self.inherited = False
        self.engine: aiote.Engine
        self.memory: Memory
        self.core: Core
        self.moves: set[Move] = set()
        self.bells: list[Any] = []
        self.loop = new_loop()
        self._previous = previous
        # Reentrant: a signal handler may call us where we hold it.
        self._lock = threading.RLock()
        self._calls: set[Call[Any]] = set()
        self._stopped = asyncio.Event()
        self._thread = _Thread(target=self._main, name="aiote bridge", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where the system has no more of them."""
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def wait_opened(self) -> None:
        """Wait until the engine is open. Raises what opening it did, and UsageError on the thread of a bridge: the
        engine before has to end first.
        """
        if not self.opened.done() and isinstance(threading.current_thread(), _Thread):
            raise wait_refused()
        self.opened.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        # Not by its number, which a later thread may have.
        return threading.current_thread() is self._thread

    def require_parent(self) -> None:
        """Raise UsageError in a child of a fork, where the thread does not run."""
        if self.inherited:
            raise UsageError("this bridge belongs to the parent process: acquire one of the child's own after a fork")

    def admit(self, call: Call[Any]) -> None:
        """Have a call begin, or end it with ClosedError."""
        with self._lock:
            if not self.stopping:
                self._calls.add(call)
                self.loop.call_soon_threadsafe(call.begin)
                return
        call.end(closed())

    def forget(self, call: Call[Any]) -> None:
        """Take note that a call has ended."""
        with self._lock:
            self._calls.discard(call)

    def calls_of(self, owner: object | None = None) -> list[Call[Any]]:
        """Return the calls under way, all or those of one owner."""
        with self._lock:
            return [call for call in self._calls if owner is None or call.owner is owner]

    async def end_calls(self, owner: object | None = None) -> None:
        """Cancel the calls under way, all or those of one owner, and wait until they have ended."""
        moves = [one for one in tuple(self.moves) if owner is None or one.owner is owner]
        for move in moves:
            move.cancel()
        while calls := self.calls_of(owner):
            for call in calls:
                call.stop(closed())
            for call in calls:
                await until_done(call)
        for move in moves:
            await move.end()

    def stop(self) -> None:
        """Have it end; `ended` is done then. Idempotent."""
        with self._lock:
            self.stopping = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._stopped.set)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def stop_at_exit(self) -> None:
        """End it within the time that an exit may take."""
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
                call.end(closed())
            self.bells.clear()
            self.ended.settle(None)

    async def _live(self) -> None:
        self.engine = await self.opening
        async with self.engine:
            self.core = self.engine._runtime.core
            self.memory = Memory(self.engine, self.kept_bytes)
            self.opened.settle(None)
            await self._stopped.wait()
            await self.end_calls()
            await self.memory.aclose()
