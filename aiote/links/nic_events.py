"""Events that NICs report by themselves: a port that goes down or comes back, a queue that has failed.

Without them the engine would learn of a lost cable only when the first request has been repeated in vain, a fraction of
a second later. Providers that cannot report such events (libfabric's) are not asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..rails import sharing_error

if TYPE_CHECKING:
    from ..rails import PeerLink, Rail
    from ..runtime import Runtime

__all__ = ["NicEvents"]

DOWN = {"port down": "its port went down", "removed": "the device was removed", "queues failed": "its queues failed"}


class RailListener(Protocol):
    """Hears, for each link, that a rail has failed."""

    def rail_failed(self, link: PeerLink, rail: int, reason: str, queue: int) -> None: ...


class NicEvents:
    """Listens to the rails of one engine until it is closed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stops: list[Callable[[], object]] = []
        try:
            for rail in runtime.rail_set.rails:
                if rail.device.async_fd >= 0:
                    read = functools.partial(self._read, rail)
                    self._stops.append(runtime.loop.on_readable(rail.device.async_fd, read))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening. Idempotent."""
        while self._stops:
            self._stops.pop()()

    def _read(self, rail: Rail) -> None:
        if self._runtime.closed:
            return
        for what, queue in rail.device.events():
            if what == "unshared":
                reason = f"a peer could not open what is shared with it: {sharing_error(queue)}"
                self._runtime.events.emit("memory.staged", rail=rail.name, device="", reason=reason)
            elif what == "port up":
                self._runtime.events.emit("rail.up", rail=rail.name)
            elif what in DOWN:
                self._runtime.events.emit("rail.down", rail=rail.name, reason=DOWN[what])
                self._fail(rail, DOWN[what])
            else:
                self._fail(rail, "its queue pair failed", queue)

    def _fail(self, rail: Rail, reason: str, queue: int = -1) -> None:
        """Fail the channels over a rail, or only the channel that has a queue."""
        for link in tuple(self._runtime.core.peers):
            listener: RailListener = link.tag  # type: ignore[assignment]
            listener.rail_failed(link, rail.index, reason, queue)
