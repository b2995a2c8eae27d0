"""Make progress on the event loop.

Adaptive mode: the loop watches the core's one descriptor. When the descriptor is readable or something was submitted,
the driver does a round, and further rounds as long as the core asks for them; then the loop may sleep. After turns
without news the core's idle thread makes progress (aiote_native/engine/core.pyx), and makes the descriptor readable
when there is news.
Thread mode: the native thread makes progress and wakes the loop through an eventfd, once for everything that completed
since the loop last looked.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .loops import AsyncioLoop, EventLoop, LoopTask, Waiter

if TYPE_CHECKING:
    from ..rails import Core, PeerLink

__all__ = ["Driver"]


_cores: dict[int, set[Core]] = {}
"""The cores of each event loop of asyncio's kind, by the loop's number."""

BLIND_S = 0.01
"""How often the driver polls under trio if the system cannot watch more descriptors."""


class Driver:
    """Makes progress on one core, on one event loop.

    After each collection of completions, the core calls `on_round` with the peers that failed; `on_round` returns the
    waiters to wake.
    """

    def __init__(self, loop: EventLoop, core: Core, on_round: Callable[[list[PeerLink]], list[Waiter]]) -> None:
        self._core = core
        self._on_round = on_round
        self._loop = loop
        self._running = True
        self._sleeping = False
        self._collecting = False
        self._more = False
        self._task: LoopTask | None = None
        # Of all rounds: without it, asyncio would copy the context of whoever asked for one.
        self._context = contextvars.copy_context()
        # The core calls this when it starts something by itself. It does not while `awake`: a round will follow anyway.
        core.on_submit = self.kick
        self._asyncio = loop.loop if isinstance(loop, AsyncioLoop) else None
        if self._asyncio is not None:
            try:
                self._asyncio.add_reader(core.fd, self._readable)
            except NotImplementedError:
                raise UsageError(
                    "this event loop cannot watch file descriptors (a proactor?): use asyncio's selector loop"
                ) from None
            self._join()
        else:
            core.awake = True
            self._task = loop.spawn(self._run_trio, name="aiote progress")

    def _join(self) -> None:
        """Record this core as one of its loop's cores. With several of them, each does only one round per turn."""
        others = _cores.setdefault(id(self._asyncio), set())
        others.add(self._core)
        for core in others:
            core.shares = len(others) > 1

    def _leave_loop(self) -> None:
        others = _cores.get(id(self._asyncio), set())
        others.discard(self._core)
        for core in others:
            core.shares = len(others) > 1
        if not others:
            _cores.pop(id(self._asyncio), None)

    def kick(self) -> None:
        """Make progress soon, because something was submitted."""
        if not self._running:
            return
        if self._core.threaded:
            # Collect what completed at once, so that the native thread need not wake the loop for it.
            self._collect()
        elif self._asyncio is not None:
            if not self._core.awake:
                self._core.awake = True
                self._asyncio.call_soon(self._round, context=self._context)
        elif self._sleeping:
            self._core.wake()

    def _readable(self) -> None:
        # The loop may have seen the descriptor readable before its last turn left progress to the idle thread.
        if not self._core.awake and not self._core.left_alone:
            self._round()
        else:
            self._core.take_wakeups()

    def _round(self) -> None:
        if not self._running:
            return
        if self._core.threaded:
            self._collect(direct=True)
            return
        again = True
        try:
            again = self._core.run_turn(self._on_round)
        finally:
            # An interrupt raised in a task may or may not end the loop. If it does not, the next round has to come.
            if again and self._running and not self._core.awake and self._asyncio is not None:
                self._core.awake = True
                self._asyncio.call_soon(self._round, context=self._context)

    def _collect(self, *, direct: bool = False) -> None:
        # A completion may start what waited for it, which calls `kick`. Collect that in this loop, without recursion.
        # Run tasks only in the first collection: their new transfers may complete at once and run more tasks,
        # endlessly.
        self._more = True
        if self._collecting:
            return
        self._collecting = True
        try:
            while self._more and self._running:
                self._more = False
                self._core.reap(direct=direct, on_round=self._on_round)
                direct = False
        finally:
            self._collecting = False

    async def _run_trio(self) -> None:
        import trio

        lowlevel: Any = trio.lowlevel
        while self._running:
            again = False if self._core.threaded else self._core.progress()
            self._collect()
            if again:
                await lowlevel.cancel_shielded_checkpoint()
                continue
            self._sleeping, self._core.awake = True, False
            try:
                await lowlevel.wait_readable(self._core.fd)
            except OSError:
                await trio.sleep(BLIND_S)
            self._sleeping, self._core.awake = False, True

    async def stop(self) -> None:
        """Stop watching the descriptor and making progress, and wait until the driver's task has ended."""
        self.detach()
        if self._task is not None:
            self._task.cancel()
            await self._task.join()

    def detach(self) -> None:
        """Stop watching the descriptor without waiting for a task; used for an engine that is dropped."""
        if self._running:
            self._running = False
            self._core.on_submit = None
            if self._asyncio is not None:
                self._leave_loop()
                if not self._asyncio.is_closed():
                    self._asyncio.remove_reader(self._core.fd)
                if not self._core.threaded:
                    self._core.stop_thread()
            elif self._task is not None:
                # During this call trio stops watching the descriptor. If the descriptor were closed before, trio would
                # go on watching its number, and the next engine with that number could not watch it.
                self._task.cancel()
