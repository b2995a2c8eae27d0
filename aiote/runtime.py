"""The base of every part of an engine: its event loop, settings, rails with the native core, and its open state.

A `Runtime` must not know transfers or peers. The parts above share one `Runtime`, and reach each other only through it.
With it they spawn tasks, emit events, ask for progress, and refuse work once the engine is closed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .aio import Driver, current_loop, wake
from .core.address import Address
from .core.control import SINCE
from .core.control_frames import ShareRequest
from .errors import ClosedError, UsageError
from .host import bind_host, host_identity
from .observe import Events
from .rails import BeatCounts, RailSet, after_fork

if TYPE_CHECKING:
    from .aio import LoopTask, Waiter
    from .config import EngineConfig
    from .observe import WaitTimes
    from .rails import Core, PeerLink, SourceRange

__all__ = ["Runtime"]

_forks = 0
_last_incarnation = 0


def _in_child() -> None:
    global _forks
    _forks += 1
    after_fork()


os.register_at_fork(after_in_child=_in_child)


def next_incarnation() -> int:
    """Return the number of a new incarnation, larger than all before: the time in nanoseconds since 1970."""
    global _last_incarnation
    _last_incarnation = max(_last_incarnation + 1, time.time_ns())
    return _last_incarnation


class Runtime:
    """The state that all parts of one engine share. Opening it opens the rails; progress begins with `start`."""

    def __init__(self, provider: str, rails: tuple[str, ...] | None, config: EngineConfig) -> None:
        """Open the rails and the native core, or nothing. Raises FabricError and UsageError."""
        self.config = config
        self.loop = current_loop()
        self.events = Events()
        self.heartbeats = BeatCounts()
        self.waiters: set[Waiter] = set()
        """The waiters that the close of the engine wakes, whatever they wait for."""
        self.wait_times: WaitTimes | None = None
        """What times the waits on counts and watched values that sleep, if anything does."""
        self.owner: object = None
        """An object that must live for as long as the event loop watches the core."""
        self.sources: dict[SourceRange, set[tuple[bytes, int]]] = {}
        """The incarnations of engines that may count on a range of immediates, also over later connections."""
        self._tasks: dict[LoopTask, None] = {}
        self._enough_tasks = 0
        self._driver: Driver | None = None
        self.kick: Callable[[], None] = lambda: None
        """Make the event loop progress the core soon."""
        self._epoch = _forks
        self._closing = False
        host, self.host_id = bind_host(config), host_identity()
        identity = config.identity or secrets.token_bytes(16)
        # The port is known when the engine listens.
        self.address = Address(host, config.port or 1, identity, next_incarnation())
        self.rail_set = RailSet(provider, rails, host=host, **config.of_rail_set)
        assert self.rail_set.core is not None
        self.core: Core = self.rail_set.core
        self.core.own_loop = self.loop.own

    def start(self, on_round: Callable[[list[PeerLink]], list[Waiter]]) -> None:
        """Start progress on the event loop; `on_round` gets the peers that failed, after each collection."""
        self._driver = Driver(self.loop, self.core, on_round)
        self.kick = self._driver.kick

    # Open or closed.

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child, so that the engine belongs to its parent."""
        return self._epoch != _forks

    @property
    def closed(self) -> bool:
        """Whether the engine is closed or being closed."""
        return self._closing

    def require_here(self) -> None:
        """Raise UsageError outside of the engine's own event loop, and in a forked child."""
        if self.inherited:
            raise UsageError("this engine belongs to the parent process: after a fork, open another one in the child")
        self.loop.require_here()

    def require_open(self) -> None:
        """Raise ClosedError when the engine is closed, UsageError outside of its own event loop and process."""
        if self._epoch == _forks and not self._closing and self.core.is_at_home():
            return
        self.require_here()
        if self._closing:
            raise ClosedError("the engine is closed")

    def begin_close(self) -> bool:
        """Refuse work from now on; return False if the close had already begun."""
        first = not self._closing
        self._closing = True
        self.core.closing = True
        return first

    # Shared by the parts.

    def spawn(self, function: object, *args: object, name: str) -> None:
        """Run a coroutine function as a task of the engine, which is cancelled when the engine closes."""
        if len(self._tasks) >= self._enough_tasks:
            # Prune only now and then, because a thousand leases that end at once have a task each.
            self._tasks = {task: None for task in self._tasks if not task.has_ended}
            self._enough_tasks = 2 * len(self._tasks) + 1
        self._tasks[self.loop.spawn(function, *args, name=name)] = None  # type: ignore[arg-type]

    def add_source(self, source_range: SourceRange, key: tuple[bytes, int]) -> None:
        """Let an engine's incarnation count on a range of immediates, over its present and future links."""
        self.sources.setdefault(source_range, set()).add(key)
        for link in self.core.peers:
            # Use the session (`tag`) and not the connection, because a link that is being joined has no connection yet.
            if getattr(link.tag, "peer_key", None) == key:
                source_range.allow(link)

    def admit_source(self, key: tuple[bytes, int], link: PeerLink) -> None:
        """Let an incarnation count over a new link on its ranges, before any immediate arrives over the link."""
        for source_range, keys in self.sources.items():
            if key in keys:
                source_range.allow(link)

    def shares_memory(self, host_id: bytes, version: int) -> bool:
        """Tell whether engines of that host that speak that version of the control protocol can share memory with this
        one. Simulated engines never do.
        """
        simulated = any(rail.provider == "sim" for rail in self.rail_set.rails)
        return version >= SINCE[ShareRequest] and host_id == self.host_id and not simulated

    def rail_name(self, rail: int) -> str:
        """Return the name of a rail by its index, or an empty string if there is none."""
        return self.rail_set.rails[rail].name if 0 <= rail < len(self.rail_set.rails) else ""

    def rail_index(self, rail: str | int) -> int:
        """Return the position of a rail. Raises UsageError if no rail has that name or number."""
        names = [one.name for one in self.rail_set.rails]
        position = names.index(rail) if rail in names else rail
        if isinstance(position, int) and 0 <= position < len(names):
            return position
        raise UsageError(f"rail={rail!r}: expected one of {', '.join(names)}, or a number from 0 to {len(names) - 1}")

    def outer_counts(self) -> dict[str, object]:
        """Return the counts that are kept outside of the native core."""
        return {
            "heartbeats_sent": self.heartbeats.sent,
            "heartbeats_heard": self.heartbeats.heard,
            "events": self.events.counted,
            "failed": tuple(self.events.failed(rail.name) for rail in self.rail_set.rails),
        }

    def time_rails(self, every: int) -> None:
        """Measure the time of one work request in `every`; see `Engine.time_rails`."""
        self.require_open()
        if not isinstance(every, int) or not 0 <= every < 1 << 32:
            raise UsageError(f"every={every!r}: expected 1 (each work request) or more, or 0 for none")
        self.core.time_rails(every)

    def time_waits(self, times: WaitTimes | None) -> None:
        """Time waits with `times`, or with None no more; see `Engine.time_waits`."""
        self.require_open()
        self.wait_times = times

    # The end.

    def cancel_tasks(self) -> None:
        """Cancel every task of the engine, without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def join_tasks(self) -> None:
        """Wait until every task of the engine has ended."""
        for task in tuple(self._tasks):
            await task.join()
        self._tasks.clear()

    async def stop(self) -> None:
        """Stop making progress."""
        if self._driver is not None:
            await self._driver.stop()

    def detach(self) -> None:
        """Stop making progress, without waiting for a task."""
        if self._driver is not None:
            self._driver.detach()

    def close(self) -> None:
        """Close core and rails, and wake all waiters; the caller has closed links and regions before. Idempotent."""
        self.rail_set.close()
        for waiter in tuple(self.waiters):
            wake(waiter)
