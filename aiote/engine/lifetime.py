"""The life of an engine: left open at the exit, dropped, carried into a forked child."""

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
    """Close what was left open: a native thread must not outlive the interpreter, and a provider's memory not its
    library.
    """
    for engine in tuple(_live):
        engine._lifetime.dropped(engine)


class Lifetime:
    """Whether an engine was opened and closed, how its parts are closed, and who waits for that."""

    page: StatusPage | None = None

    def __init__(self, runtime: Runtime, links: ConnectionTable, regions: Regions, nic_events: NicEvents) -> None:
        self._runtime, self._links, self._regions, self._nic_events = runtime, links, regions, nic_events
        self._opened = False
        self._closed = False
        self._waiters: set[Waiter] = set()
        # Where it was made, for whoever forgets to close it; only in development mode, for it costs a millisecond.
        self._made_at = "".join(traceback.format_stack()[:-3]) if sys.flags.dev_mode else ""

    def show(self, engine: Engine) -> None:
        """Have `aiote top` show the engine while it is open."""
        self.page = StatusPage(engine)

    def opened(self, engine: Engine) -> None:
        """Take note that the engine has to be closed, and have the interpreter's exit do it."""
        self._opened = True
        _live.add(engine)
        # For as long as the event loop runs: a program may keep no more of an engine than its peers and regions.
        self._runtime.owner = engine
        rails = ", ".join(rail.name for rail in engine.rails)
        self._runtime.events.emit("engine.opened", address=str(engine.address), rails=rails)
        if self.page is not None:
            self.page.follow(self._runtime.events)

    def beat(self, now: float) -> None:
        """Take note that the engine's heartbeats are told, at a time."""
        if self.page is not None:
            self.page.beat(now)

    async def wait_closed(self) -> None:
        """Wait until everything is closed."""
        self._runtime.loop.require_here()
        while not self._closed:
            waiter = self._runtime.loop.waiter()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def close(self) -> None:
        """Close everything, or wait for whoever does; see `Engine.aclose`."""
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
        """Close everything at once, and tell the peers nothing that they were not told. Idempotent."""
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
        self._tell()

    def _tell(self) -> None:
        """Say that everything is closed."""
        if self._opened and not self._closed:
            self._runtime.events.emit("engine.closed", address=str(self._runtime.address))
        self._closed = True
        self._runtime.owner = None
        for waiter in tuple(self._waiters):
            wake(waiter)

    def dropped(self, engine: Engine) -> None:
        """Close an engine that nobody closed, from any thread, and say so; a forked child leaves it to its parent."""
        if self._closed or self._runtime.inherited:
            return
        if self._opened:
            made = (
                f"; it was opened at:\n{self._made_at}"
                if self._made_at
                else " (python -X dev tells where it was opened)"
            )
            warnings.warn(f"{engine!r} was never closed{made}", ResourceWarning, source=engine, stacklevel=2)
        self.end()
