"""TCP without a network: the connections of one event loop, in memory. Each piece of bytes has the same latency.

Listening sockets are real, so that they have real ports, but no connection arrives through them. A connection to a
listener of this loop is a pair of transports; a connection to any other address is refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["MemoryServer", "MemorySocket", "MemoryTransport", "Ports"]

LATENCY_S = 25e-6
RETRY_S = 1.0
MAX_UNREAD = 1 << 18
"""The number of unread bytes above which the transport asks the writer to pause."""
FIRST_PORT = 40_000
ANY = ("0.0.0.0", "::", "")


class MemorySocket:
    """A stand-in for the socket of a transport: it has addresses, and ignores options."""

    def __init__(self, transport: MemoryTransport, own: Any, peer: Any) -> None:
        self.transport = transport
        self.family = socket.AF_INET6 if len(own) > 2 else socket.AF_INET
        self.type = socket.SOCK_STREAM
        self.proto = 0
        self._addresses = own, peer

    def setsockopt(self, *_arguments: Any) -> None:
        """Ignore the option."""

    def getsockname(self) -> Any:
        return self._addresses[0]

    def getpeername(self) -> Any:
        return self._addresses[1]

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.transport.abort()


class MemoryTransport(asyncio.Transport):
    """One end of a connection. None on the wire marks the end of the written bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: Any, peer: Any) -> None:
        socket_ = MemorySocket(self, own, peer)
        super().__init__({"socket": socket_, "sockname": own, "peername": peer})
        self.socket = socket_
        self.other: MemoryTransport = self
        self._loop = loop
        self._protocol: Any = None
        self._wire: deque[bytes | None] = deque()
        self._arrived: deque[bytes | None] = deque()
        self._paused = False
        self._asked_to_pause = False
        self._unread = 0
        self._written_eof = False
        self._closing = False
        self._partitioned = False
        self._held_count = 0

    def begin(self, protocol: Any) -> None:
        """Set the protocol, and deliver the bytes that have arrived before."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._loop.call_soon(self._deliver)

    # The transport interface of asyncio.

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._paused

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._loop.call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, because the limit applies to the unread bytes at the other end."""

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        if self._closing or self._written_eof or not data:
            return
        self._send(bytes(data))
        self._unread += len(data)
        if self._unread > MAX_UNREAD and not self._asked_to_pause:
            self._asked_to_pause = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        if not self._written_eof:
            self._written_eof = True
            self._send(None)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Close at once. The written bytes still arrive, and then the end."""
        if not self._closing:
            self.write_eof()
            self._end(None)

    # The transport of bytes to the other end.

    def _send(self, data: bytes | None) -> None:
        self._wire.append(data)
        self._loop.call_later(LATENCY_S, self._carry)

    def _carry(self) -> None:
        if self._partitioned:
            self._held_count += 1
            return
        data = self._wire.popleft()
        if not self.other._closing:
            self.other._arrived.append(data)
            self.other._deliver()
        elif data is not None and not self._closing:
            self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def partition(self) -> None:
        """Hold the bytes written from here on, as a partitioned network does."""
        self._partitioned = True

    def heal(self) -> None:
        """Deliver the held bytes, and end the partition."""
        self._partitioned = False
        held, self._held_count = self._held_count, 0
        for _ in range(held):
            self._loop.call_later(LATENCY_S, self._carry)

    def _deliver(self) -> None:
        while self._arrived and not self._paused and not self._closing and self._protocol is not None:
            data = self._arrived.popleft()
            if data is not None:
                self.other._was_read(len(data))
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def _was_read(self, count: int) -> None:
        self._unread -= count
        if self._asked_to_pause and self._unread <= MAX_UNREAD // 2 and not self._closing:
            self._asked_to_pause = False
            self._protocol.resume_writing()

    def _end(self, error: Exception | None) -> None:
        self._closing = True
        self._arrived.clear()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)


class MemoryListener:
    """A listener at one address: the connections to accept, and the tasks that wait for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Any) -> None:
        self.address = address
        self.partitioned = False
        self._loop = loop
        self._fresh: deque[MemoryTransport] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()

    def offer(self, transport: MemoryTransport) -> None:
        self._fresh.append(transport)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def next(self) -> MemoryTransport:
        while not self._fresh:
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            await waiter
        return self._fresh.popleft()

    def close(self) -> None:
        while self._fresh:
            self._fresh.popleft().abort()


class MemoryServer(asyncio.AbstractServer):
    """The server that `create_server` returns: it accepts connections until it is closed."""

    def __init__(
        self, ports: Ports, listener: MemoryListener, factory: Callable[[], Any], task: asyncio.Task[None]
    ) -> None:
        self._ports = ports
        self._listener = listener
        self._task = task
        self.address = listener.address
        self.sockets: tuple[Any, ...] = ()

    def close(self) -> None:
        self._task.cancel()
        self._ports.forget(self._listener)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._task.get_loop()

    def is_serving(self) -> bool:
        return not self._task.done()

    async def start_serving(self) -> None:
        """Do nothing, because the server already accepts."""

    async def serve_forever(self) -> None:
        await self._task

    async def wait_closed(self) -> None:
        await asyncio.wait([self._task])


class Ports:
    """The listeners and the connections of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[int, tuple[socket.socket | None, MemoryListener]] = {}
        self._next_port = FIRST_PORT
        self._next_key = -1

    def _fresh_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def listener_of(self, listening: socket.socket) -> MemoryListener:
        """Return the listener that represents a listening socket."""
        fd = listening.fileno()
        known = self._listeners.get(fd)
        if known is None or known[0] is not listening:
            self._listeners[fd] = known = (listening, MemoryListener(self._loop, listening.getsockname()))
        return known[1]

    def serve(self, factory: Callable[[], Any], host: str, port: int) -> MemoryServer:
        """Listen at an address without a socket."""
        listener = MemoryListener(self._loop, (host, port or self._fresh_port()))
        self._listeners[self._next_key] = None, listener
        self._next_key -= 1

        async def accept() -> None:
            while True:
                (await listener.next()).begin(factory())

        return MemoryServer(self, listener, factory, self._loop.create_task(accept()))

    def hold(self, port: int, held: bool) -> None:
        """Hold new connections to a port, or let them continue."""
        for _, listener in self._listeners.values():
            if listener.address[1] == port:
                listener.partitioned = held

    def forget(self, listener: MemoryListener) -> None:
        """Close a listener and remove it."""
        listener.close()
        self._listeners = {key: known for key, known in self._listeners.items() if known[1] is not listener}

    def forget_descriptor(self, fd: int) -> None:
        """Remove the listener of a socket, by the socket's descriptor."""
        known = self._listeners.get(fd)
        if known is not None and known[0] is not None and known[0].fileno() in (fd, -1):
            self.forget(known[1])

    def _find(self, host: str, port: int) -> MemoryListener | None:
        for listening, listener in tuple(self._listeners.values()):
            if listening is not None and listening.fileno() < 0:
                self.forget(listener)
            elif listener.address[1] == port and listener.address[0] in (host, *ANY):
                return listener
        return None

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[MemoryTransport, Any]:
        """Connect to a listener of this loop. Raises ConnectionRefusedError if there is none."""
        await asyncio.sleep(LATENCY_S)
        listener = self._find(host, port)
        if listener is None:
            raise ConnectionRefusedError(
                errno.ECONNREFUSED,
                f"no server on this event loop listens at {host} port {port}; in virtual time no other can be reached",
            )
        while listener.partitioned:  # noqa: ASYNC110 - a SYN that nobody answers is sent again
            await asyncio.sleep(RETRY_S)
        own = (host, self._fresh_port())
        near = MemoryTransport(self._loop, own, listener.address)
        far = MemoryTransport(self._loop, listener.address, own)
        near.other, far.other = far, near
        listener.offer(far)
        await asyncio.sleep(LATENCY_S)
        protocol = factory()
        near.begin(protocol)
        return near, protocol
