"""Close an engine: by its caller, at the interpreter's exit, or when it is dropped; never in a forked child."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING

from ..aio import wake
from ..observe import StatusPage

if TYPE_CHECKING:
    from ..aio import Waiter
    from ..links import ConnectionTable, NicEvents
    from ..runtime import Runtime
    from ..transfers import Regions
    from .engine import Engine

__all__ = ["Lifetime"]

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


os.register_at_fork(after_in_child=_live.clear)


@atexit.register
def _at_exit() -> None:
    """Close the engines that were left open, because a native thread must not outlive the interpreter, and a
    provider's memory must not outlive its library.
    """
    for engine in tuple(_live):
        engine._lifetime.close_dropped(engine)


class Lifetime:
    """The state of an engine (opened, closed), the order in which its parts are closed, and the tasks that wait."""

    page: StatusPage | None = None

    def __init__(self, runtime: Runtime, links: ConnectionTable, regions: Regions, nic_events: NicEvents) -> None:
        self._runtime, self._links, self._regions, self._nic_events = runtime, links, regions, nic_events
        self._opened = False
        self._closed = False
        self._waiters: set[Waiter] = set()
        # The warning about an engine left open names this place. Only in development mode: it costs a millisecond.
        self._made_at = "".join(traceback.format_stack()[:-3]) if sys.flags.dev_mode else ""

    def show(self, engine: Engine) -> None:
        """Make a status page, so that `aiote top` shows the engine while it is open."""
        self.page = StatusPage(engine)

    def record_opened(self, engine: Engine) -> None:
        """Record that the engine is open, so that the interpreter's exit closes it if its owner does not."""
        self._opened = True
        _live.add(engine)
        # Keep the engine alive while the event loop runs: a program may hold only its peers and regions.
        self._runtime.owner = engine
        rails = ", ".join(rail.name for rail in engine.rails)
        self._runtime.events.emit("engine.opened", address=str(engine.address), rails=rails)
        if self.page is not None:
            self.page.follow(self._runtime.events)

    def beat(self, now: float) -> None:
        """Write the status page if it is due; the engine calls this after its heartbeats, with the time `now`."""
        if self.page is not None:
            self.page.beat(now)

    async def wait_closed(self) -> None:
        """Wait until the engine is closed completely."""
        self._runtime.loop.require_here()
        while not self._closed:
            waiter = self._runtime.loop.waiter()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def close(self) -> None:
        """Close everything, or wait for the caller that is already closing it; see `Engine.aclose`."""
        if self._runtime.inherited:
            return
        self._runtime.require_here()
        if not self._runtime.begin_close():
            return await self.wait_closed()
        try:
            await self._links.close("its engine was closed")
            await self._regions.finish()
            await self._runtime.stop()
        finally:
            self.end()

    def end(self) -> None:
        """Close everything at once, without a message to the peers. Idempotent."""
        self._runtime.begin_close()
        self._runtime.detach()
        self._nic_events.close()
        if self.page is not None:
            self.page.remove()
        self._links.abandon("the engine was aborted")
        self._links.close_links()
        self._regions.close()
        self._runtime.close()
        self._links.inbox.end()
        self._record_closed()

    def _record_closed(self) -> None:
        """Record that everything is closed, emit the event, and wake the tasks that wait for it."""
        if self._opened and not self._closed:
            self._runtime.events.emit("engine.closed", address=str(self._runtime.address))
        self._closed = True
        self._runtime.owner = None
        for waiter in tuple(self._waiters):
            wake(waiter)

    def close_dropped(self, engine: Engine) -> None:
        """Close an engine that its owner left open and warn about it; callable from any thread. A forked child leaves
        the engine to its parent.
        """
        if self._closed or self._runtime.inherited:
            return
        if self._opened:
            made = (
                f"; it was opened at:\n{self._made_at}"
                if self._made_at
                else " (python -X dev tells where it was opened)"
            )
            warnings.warn(
                f"{engine!r} was never closed{made}",
                ResourceWarning,
                source=engine,
                stacklevel=2,
            )
        self.end()
