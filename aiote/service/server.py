"""Serve methods: run the calls of other engines as tasks of this engine, and bound and queue them."""

from __future__ import annotations

import contextvars
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

import aiote

from ..aio import Condition, run_shielded
from ..observe.status_page import LONGEST_TEXT, ServiceStatus
from .definition import Method, Service, method, methods_of
from .endpoint import SHARED, CallEndpoint, Limits
from .frames import CallFrame, CallStatus, Number
from .interceptors import Interceptor
from .link import Link, kept_bytes
from .running import Running

__all__ = ["Health", "HealthStatus", "Server", "serve"]

EACH = 64
"""One engine may run up to this many calls while a place is free. Beyond that, it starts another call only while it
runs fewer calls than there are free places.
"""


class HealthStatus(msgspec.Struct, frozen=True):
    """The state of an engine's servers: whether all take new calls, how many calls run, and how many wait."""

    serving: bool
    running: Number
    queued: Number


class Health(Service):
    """The service that every serving engine answers in addition to its own."""

    @method(idempotent=True)
    async def check(self) -> HealthStatus:
        """Return the state of the engine's servers."""
        raise NotImplementedError


class _Health(Health):
    name = "Health"

    def __init__(self, endpoint: CallEndpoint) -> None:
        self._endpoint = endpoint

    @method(idempotent=True)
    async def check(self) -> HealthStatus:
        servers = [server for server in self._endpoint.servers if isinstance(server, Server)]
        serving = not any(server.draining for server in servers)
        # Do not count this very call.
        return HealthStatus(serving, sum(one.running for one in servers) - 1, sum(one.queued for one in servers))


class Server:
    """The server that `serve` runs. `calls` counts the calls that it started, `refused` those that did not run."""

    def __init__(
        self, endpoint: CallEndpoint, services: Sequence[Service], interceptors: Sequence[Interceptor]
    ) -> None:
        self.endpoint = endpoint
        self.interceptors = tuple(interceptors)
        self.draining = self._closed = False
        self.calls = self.refused = 0
        self._methods: dict[str, tuple[Method, Callable[..., Any]]] = {}
        for service in (_Health(endpoint), *services):
            for one in methods_of(type(service)):
                if one.name in self._methods:
                    raise aiote.UsageError(f"{one.name} is served twice: give one of the services another name")
                self._methods[one.name] = (one, getattr(service, one.attribute))
        self._running: set[Running] = set()
        self._running_of = Counter[bytes]()
        self._queues: dict[bytes, deque[Running]] = {}
        self._queued = 0
        self._changed = Condition(endpoint.loop)
        # Calls run in the context of `serve`, not in the context in which this engine's endpoint was made.
        self.context = contextvars.copy_context()

    @property
    def methods(self) -> Collection[str]:
        """The names of the methods that this server answers."""
        return self._methods.keys()

    @property
    def running(self) -> int:
        """The number of calls that run now."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """The number of calls that wait in the queue."""
        return self._queued

    def status(self) -> ServiceStatus:
        """Return the names of the services, without `Health`, and the state that `aiote top` shows."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in self._methods if name not in SHARED)
        return ServiceStatus(", ".join(names)[:LONGEST_TEXT], not self.draining, self.running, self.queued)

    def call(self, link: Link, frame: CallFrame) -> None:
        """Start a call, queue it or refuse it."""
        limits = self.endpoint.limits
        known = self._methods[frame.method]
        if self.draining and not isinstance(known[1].__self__, _Health):  # type: ignore[attr-defined]
            self._refuse(link, frame, CallStatus.DRAINING)
        elif self._may_start(link):
            self._admit(link, frame, known, self._start)
        elif self.queued < limits.queue or self._make_room(link, kept_bytes(frame)):
            self._admit(link, frame, known, self._enqueue)
        else:
            self._refuse(link, frame, CallStatus.BUSY, f"{limits.calls} calls run, {limits.queue} wait")

    def _admit(
        self, link: Link, frame: CallFrame, known: tuple[Method, Callable[..., Any]], take: Callable[[Running], None]
    ) -> None:
        try:
            running = Running(self, link, frame, *known)
        except BlockingIOError as error:
            self._refuse(link, frame, CallStatus.BUSY, str(error))
            return
        take(running)

    def _may_start(self, link: Link) -> bool:
        """Tell whether a call of a peer may run now: some places stay free for peers that run fewer calls."""
        budget, free = self.endpoint.budget, self.endpoint.limits.calls - len(self._running)
        held = self._running_of[link.identity]
        return free > 0 and held < max(EACH, free) and link.share.waiting <= budget.peer

    def _enqueue(self, running: Running) -> None:
        running.queued = True
        running.link.running[running.frame.slot] = running
        self._queues.setdefault(running.link.identity, deque()).append(running)
        self._queued += 1

    def _make_room(self, link: Link, nbytes: int) -> bool:
        """Refuse the last call of the identity with the most calls in the queue; tell whether this made room.

        Return False if no other identity has at least two calls more in the queue than this peer, or if this peer's
        share has no room for `nbytes`.
        """
        if link.share.waiting + nbytes > self.endpoint.budget.peer:
            return False
        own = len(self._queues.get(link.identity, ()))
        greediest = max(self._queues.values(), key=len, default=None)
        if greediest is None or len(greediest) <= own + 1:
            return False
        self.refused += 1
        greediest[-1].stop(CallStatus.BUSY)
        return True

    def _refuse(self, link: Link, frame: CallFrame, status: int, text: str = "") -> None:
        self.refused += 1
        self.endpoint.refuse(link, frame, status, text)

    def _start(self, running: Running) -> None:
        self.calls += 1
        running.queued = False
        self._running.add(running)
        self._running_of[running.link.identity] += 1
        running.link.running[running.frame.slot] = running
        running.start()

    def record_end(self, running: Running) -> None:
        """Record that a call has ended, and start waiting calls. Called once for each call."""
        identity = running.link.identity
        if running.queued:
            self._dequeue(identity, running)
        elif running in self._running:
            self._running.remove(running)
            self._running_of[identity] -= 1
            if not self._running_of[identity]:
                del self._running_of[identity]
        self.start_waiting()
        if not self._running:
            self._changed.wake_all()

    def start_waiting(self) -> None:
        """Start the queued calls that may run now."""
        while not self._closed and (after := self._next()) is not None:
            self._dequeue(after.link.identity, after)
            self._start(after)

    def _dequeue(self, identity: bytes, running: Running) -> None:
        queue = self._queues[identity]
        queue.remove(running)
        self._queued -= 1
        if not queue:
            del self._queues[identity]

    def _next(self) -> Running | None:
        """Return the next queued call: the first one of the identity with the fewest running calls; None for none."""
        if len(self._running) >= self.endpoint.limits.calls:
            return None
        best: Running | None = None
        fewest = math.inf
        for identity, queue in self._queues.items():
            held = self._running_of[identity]
            if held < fewest and self._may_start(queue[0].link):
                best, fewest = queue[0], held
                if held == 0:
                    break  # no count is smaller, and thousands of identities may wait
        return best

    async def drain(self) -> None:
        """Take no new calls, and wait until the running and queued calls have ended. The caller's scope bounds the
        wait.

        New calls are refused with DrainingError; a client of several members then takes another member.
        """
        self.draining = True
        await self._changed.until(lambda: not (self._running or self._queues))

    async def close(self) -> None:
        """Cancel every call and wait until all have ended.

        Callers of running calls get CallLostError, callers of queued calls get DrainingError.
        """
        self.draining = self._closed = True
        for running in [one for queue in self._queues.values() for one in queue]:
            running.stop(CallStatus.DRAINING)
        for running in tuple(self._running):
            running.stop(CallStatus.STOPPED)
        await self._changed.until(lambda: not self._running)


@asynccontextmanager
async def serve(
    engine: aiote.Engine, *services: Service, interceptors: Sequence[Interceptor] = (), limits: Limits | None = None
) -> AsyncIterator[Server]:
    """Serve objects to other engines for the length of an `async with`; calls run as tasks beside the body.

    `limits` bound the resources that the engine spends on calls. They belong to the engine, hold for the calls that it
    makes as well, and are set once. `interceptors` run around each call; the first one is outermost. At the end,
    running calls are cancelled; `await server.drain()` before the end lets them complete. An engine may serve several
    times, each time other services. Raises UsageError if the annotations of a service cannot be used, if the engine
    serves it already, or if `limits` differ from those that were set before.
    """
    endpoint = CallEndpoint.of(engine, limits)
    server = Server(endpoint, services, interceptors)
    endpoint.add_server(server)
    try:
        yield server
    finally:
        endpoint.remove_server(server)
        await run_shielded(server.close)
