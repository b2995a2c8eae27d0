"""An asyncio event loop whose time is virtual.

It is asyncio's own selector loop, with a selector that never sleeps. When no descriptor is ready and no callback is
due, time advances to the next timer or the next event of a simulated network, whichever is first. If there is neither,
every task waits for an event that cannot come; the loop then raises StandstillError at once.

While a thread of the executor or of `anyio.to_thread` works, the loop waits in real time: virtual time stands still.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import anyio.to_thread

from ..rails.sim import World
from .streams import MemoryServer, MemorySocket, Ports

__all__ = ["StandstillError", "VirtualLoop"]

SECOND = 1_000_000_000


class StandstillError(RuntimeError):
    """Every task waits, no timer is set and no operation is in flight: the program would hang for ever."""


class VirtualSelector(selectors.BaseSelector):
    """Poll the system's selector without waiting; `advance(timeout)` advances time if no descriptor is ready.

    Ready descriptors are returned in the order of their registration, independent of the descriptors' numbers.
    """

    def __init__(self, advance: Callable[[float | None], bool]) -> None:
        self._real = selectors.DefaultSelector()
        self._advance = advance
        self._order: dict[int, int] = {}
        self._registered = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._real.register(fileobj, events, data)
        self._registered += 1
        self._order[key.fd] = self._registered
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._real.unregister(fileobj)
        self._order.pop(key.fd, None)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            # If a thread works, wait for it in real time. Otherwise time has advanced, which may have made descriptors
            # ready.
            ready = self._real.select(0 if self._advance(timeout) else None)
        ready.sort(key=lambda item: self._order[item[0].fd])
        return ready


_run_sync = anyio.to_thread.run_sync
_RUNNING: list[VirtualLoop] = []
"""The loops that run, each in a thread of its own; while there are any, `run_counted` replaces anyio's function."""
_RUNNING_LOCK = threading.Lock()


async def run_counted(function: Any, *args: Any, limiter: anyio.CapacityLimiter | None = None, **more: Any) -> Any:
    """Do as `anyio.to_thread.run_sync`, by `VirtualLoop.run_in_thread` on a virtual loop."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # trio's
        loop = None
    if isinstance(loop, VirtualLoop):
        return await loop.run_in_thread(function, limiter, *args, **more)
    return await _run_sync(function, *args, limiter=limiter, **more)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Simulated networks can be attached to its time; TCP connections are in memory.

    After `limit` seconds the loop raises TimeoutError once, so that cleanup code can still run.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._now = 0
        self._jobs = 0
        self._worlds: list[World] = []
        self._ports: Ports | None = None
        super().__init__(VirtualSelector(self._move_on))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the seconds of virtual time since the loop was made."""
        return self._now / SECOND

    def attach(self, world: World) -> None:
        """Drive a simulated network by this loop's time."""
        world.advance(self._now)
        self._worlds.append(world)

    def _move_on(self, timeout: float | None) -> bool:
        """Advance time to the next event; return False while a thread works, because its work takes real time."""
        if self._jobs:
            return False
        due = [next_time for world in self._worlds if not world.closed and (next_time := world.next_time()) >= 0]
        if timeout is not None:
            due.append(max(self._now + 1, math.ceil(self._now + timeout * SECOND)))
        if not due:
            raise StandstillError(
                "virtual time stands still: every task waits, and no timer or operation is left that could wake one"
            )
        if min(due) > self._limit * SECOND:
            limit, self._limit = self._limit, math.inf
            raise TimeoutError(f"the program did not end within {limit} s of virtual time (limit)")
        self._now = max(self._now, min(due))
        for world in self._worlds:
            if not world.closed:
                world.advance(self._now)
        return True

    def run_forever(self) -> None:
        """Run as asyncio's loops do, and count the threads of `anyio.to_thread` too, which are not the executor's."""
        with _RUNNING_LOCK:
            _RUNNING.append(self)
            anyio.to_thread.run_sync = run_counted  # type: ignore[assignment]
        try:
            super().run_forever()
        finally:
            with _RUNNING_LOCK:
                _RUNNING.remove(self)
                if not _RUNNING:
                    anyio.to_thread.run_sync = _run_sync

    async def run_in_thread(self, function: Any, limiter: anyio.CapacityLimiter | None, *args: Any, **more: Any) -> Any:
        """Do as `anyio.to_thread.run_sync`. Time stands still while the thread works, but not in a wait for `limiter`,
        which a task without a thread may hold.
        """
        async with limiter or anyio.to_thread.current_default_thread_limiter():
            self._jobs += 1
            try:
                return await _run_sync(function, *args, limiter=anyio.CapacityLimiter(1), **more)
            finally:
                self._jobs -= 1

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        future.add_done_callback(self._job_ended)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """Wait for the executor's threads, in real time."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self._jobs -= 1

    def _job_ended(self, _future: Any) -> None:
        self._jobs -= 1

    # Connections.

    @property
    def ports(self) -> Ports:
        if self._ports is None:
            self._ports = Ports(self)
        return self._ports

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> tuple[Any, Any]:
        """Connect to a listener of this loop; a given socket is used as it is. Raises OSError."""
        if host is None:
            return await super().create_connection(protocol_factory, host, port, **more)
        if more.get("ssl"):
            raise NotImplementedError(
                "asyncio's own TLS is not supported over connections in memory; the engines' TLS is"
            )
        return await self.ports.connect(protocol_factory, str(host), int(port))

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> MemoryServer:
        """Listen in memory. Raises NotImplementedError for TLS and for a given socket."""
        if more.get("ssl") or more.get("sock"):
            raise NotImplementedError("a server in memory accepts neither ssl nor sock")
        return self.ports.serve(protocol_factory, str(host or "127.0.0.1"), int(port or 0))

    async def sock_accept(self, sock: socket.socket) -> tuple[Any, Any]:
        transport = await self.ports.listener_of(sock).next()
        return transport.socket, transport.socket.getpeername()

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **more: Any) -> tuple[Any, Any]:
        if not isinstance(sock, MemorySocket):
            return await super().connect_accepted_socket(protocol_factory, sock, **more)
        protocol = protocol_factory()
        sock.transport.begin(protocol)
        return sock.transport, protocol

    def remove_reader(self, fd: Any) -> bool:
        if self._ports is not None:
            self._ports.forget_descriptor(fd if isinstance(fd, int) else fd.fileno())
        return bool(super().remove_reader(fd))

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
        """Resolve addresses and localhost at once; other names take a thread."""
        name = host.decode() if isinstance(host, bytes) else host
        more["flags"] = more.get("flags", 0) | socket.AI_NUMERICHOST
        try:
            return socket.getaddrinfo("127.0.0.1" if name == "localhost" else name, port, **more)
        except socket.gaierror:
            more["flags"] &= ~socket.AI_NUMERICHOST
            return await super().getaddrinfo(host, port, **more)
