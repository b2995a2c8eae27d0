"""Carry the control connection: TCP, with TLS if a context is given, around the state machine in `core.control`.

One task reads and one task writes, so any code can send a message without waiting. If the peer does not read, the
connection keeps at most `MAX_UNSENT` bytes; one more message ends the connection.

To plain TCP the connection writes through a `ControlSocket`, past the stream. Heartbeats then need neither task, and
stay in order with the other frames.
"""

from __future__ import annotations

import os
import socket
import ssl
from asyncio.trsock import TransportSocket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream, TaskGroup
from anyio.streams.tls import TLSStream

from ..core.address import Address
from ..core.control import ControlError, ControlProtocol, Event, MessageReceived
from ..core.control_frames import Bye, Heartbeat, SessionMessage, encode
from ..errors import PeerError, PeerRefusedError
from ..rails import ControlSocket
from .loops import EventLoop, LoopTask, report
from .waiting import Condition

__all__ = ["ControlConnection", "ControlListener", "PendingConnection", "dial"]

BACKLOG = 1024
MAX_UNSENT = 1 << 20
READ_BYTES = 65536
ACCEPT_PAUSES_S = 0.05, 1.0
"""The first and the longest pause after a failed accept, in seconds; each pause is twice the one before."""
MAX_UNAUTHENTICATED = 256
"""The most unauthenticated connections. One more ends the oldest, so silent connections cannot fill the process."""
TOO_MANY = "too many connections that have not proven themselves"
TLS_FAILURES = (OSError, ssl.SSLError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class ControlConnection:
    """A stream and its protocol. `on_event` is called with each event, in order; `on_end` once, with the reason.

    `linger` is how long this side waits for the peer's last message after its own, in seconds.
    """

    def __init__(self, loop: EventLoop, stream: ByteStream, protocol: ControlProtocol, name: str) -> None:
        self.protocol = protocol
        self.name = name
        self.on_event: Callable[[Event], None] | None = None
        self.on_end: Callable[[str], None] | None = None
        self.reason = ""
        self.linger = 0.0
        self._loop = loop
        self._stream = stream
        self._socket: ControlSocket | None = None
        self._outgoing = Condition(loop)
        self._changed = Condition(loop)
        self._unsent = bytearray()
        self._ended = False
        self._stopped_reading = False
        self._farewell = False
        self._hung_up = False
        self._tasks: list[LoopTask] = []

    def start(self) -> None:
        """Start the tasks that read and write."""
        self._socket = plain_socket(self._stream)
        self._tasks = [
            self._loop.spawn(self._read, name=f"aiote control {self.name} read"),
            self._loop.spawn(self._write, name=f"aiote control {self.name} write"),
        ]

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def has_peer_left(self) -> bool:
        """Whether the peer has closed its endpoints: it does so before it says Bye or hangs up."""
        return self._farewell or self._hung_up

    def send(self, message: SessionMessage) -> None:
        """Queue a message. This has no effect if the connection has ended or is not authenticated."""
        if not self._ended and self.protocol.is_authenticated:
            self.protocol.send(message)
            self.flush()

    def flush(self) -> None:
        """Give the protocol's bytes to the writing task; end the connection if more than MAX_UNSENT are unsent."""
        data = self.protocol.data_to_send()
        if not data:
            return  # most received messages need no answer, so do not wake the writer in vain
        self._queue(data)
        if len(self._unsent) > MAX_UNSENT:
            self.end("it does not read what we send it")

    def _queue(self, data: bytes) -> None:
        self._unsent += data
        if self._socket is not None:
            self._socket.busy = True
        self._outgoing.wake_all()

    def carry_heartbeats(self) -> ControlSocket | None:
        """Return a socket through which native code sends and hears heartbeats from now on, until the connection ends.

        Returns None if the stream is not plain TCP.
        """
        seals = self.protocol.seals
        if self._socket is None or self._ended or seals is None:
            return None
        self._socket.carry(encode(Heartbeat()), *seals, self._queue)
        self._socket.wake_after_read(self.protocol.is_within_frame)
        return self._socket

    def end(self, reason: str) -> None:
        """Mark the connection as ended and call `on_end`. `aclose` still tries to send the queued bytes. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self.reason = reason
        if self._socket is not None:
            self._socket.carry_none()
        self._outgoing.wake_all()
        if self.on_end is not None:
            self.on_end(reason)

    async def wait_for_bye(self) -> bool:
        """Wait for the peer's Bye for at most `linger` seconds after this side's Bye; tell whether it came.

        A peer says Bye when its endpoints are closed. A `Failed` says nothing about them.
        """
        with anyio.move_on_after(self.linger, shield=True):
            await self._changed.until(lambda: self._farewell or self._stopped_reading)
        return self._farewell

    async def aclose(self, patience: float = 0.2) -> None:
        """Send the queued bytes in at most `patience` seconds, wait up to `linger` seconds for the peer, and close."""
        self.end("closed by this side")
        with anyio.CancelScope(shield=True):
            try:
                # The writer ends by itself when all is sent. Cancelling it before would lose the last message.
                with anyio.move_on_after(patience):
                    for task in self._tasks[1:]:
                        await task.join()
                with anyio.move_on_after(self.linger):
                    await self._changed.until(lambda: not self.linger or self._stopped_reading)
                for task in self._tasks:
                    task.cancel()
                    await task.join()
            finally:
                # The shield does not stop a plain Task.cancel, which an engine that is being closed calls on its tasks.
                await self._close_stream(patience)

    async def _close_stream(self, patience: float) -> None:
        if self._socket is not None:
            self._socket.close()
        with anyio.move_on_after(patience):
            try:
                await self._stream.aclose()
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
                pass
            return
        await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            while not self.protocol.is_over:
                data = await self._stream.receive(READ_BYTES)
                self._emit(self.protocol.receive(data))
                self.flush()
                if self._socket is not None:
                    self._socket.wake_after_read(self.protocol.is_within_frame)
                if self.protocol.is_over:
                    self.end("it ended the connection")
        except anyio.EndOfStream:
            self._eof()
        except ControlError as error:
            self._emit(error.events)
            self.flush()
            self.end(f"it broke the protocol: {error}")
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as error:
            self._hung_up = isinstance(error.__cause__ or error, ConnectionResetError)
            self.end(f"the connection broke: {describe(error)}")
        finally:
            self._stopped_reading = True
            self._changed.wake_all()

    def _emit(self, events: Iterable[Event]) -> None:
        for event in events:
            self._farewell = self._farewell or (isinstance(event, MessageReceived) and isinstance(event.message, Bye))
            if self.on_event is not None:
                self.on_event(event)

    def _eof(self) -> None:
        self._hung_up = True
        try:
            self.protocol.receive_eof()
        except ControlError as error:
            self.end(str(error))
        else:
            self.end("it closed the connection")

    async def _write(self) -> None:
        try:
            while True:
                if self._unsent and self._socket is not None:
                    await self._write_to(self._socket)
                elif self._unsent:
                    data = bytes(self._unsent)
                    self._unsent.clear()
                    await self._stream.send(data)
                elif self._ended:
                    return
                else:
                    if self._socket is not None:
                        # After the last message there are no heartbeats either.
                        self._socket.busy = not self.protocol.is_authenticated
                    await self._outgoing.wait()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as error:
            self.end(f"the connection broke: {describe(error)}")

    async def _write_to(self, plain: ControlSocket) -> None:
        """Write what the socket takes now, or wait until it takes more."""
        sent = plain.send(self._unsent)
        del self._unsent[:sent]
        if not sent:
            # The stream's own descriptor belongs to its transport, and asyncio watches no such descriptor for others.
            mine = os.dup(plain.fileno())
            try:
                await anyio.wait_writable(mine)
            finally:
                os.close(mine)


def plain_socket(stream: ByteStream) -> ControlSocket | None:
    """Return the socket of a stream of plain TCP; None for another stream, or if no descriptor is left."""
    if not isinstance(stream, SocketStream):
        return None
    raw = stream.extra(SocketAttribute.raw_socket)
    # Other loops' sockets (uvloop's) keep their number when their transport closes them.
    follows = isinstance(raw, socket.socket | TransportSocket)
    try:
        return ControlSocket(raw, duplicate=not follows)
    except OSError:
        return None


def describe(error: BaseException) -> str:
    """Return a text about what broke a stream: the text of the system's error, even if anyio has wrapped it."""
    if isinstance(error, anyio.EndOfStream):
        return "it hung up"
    cause = error.__cause__ or error
    return str(cause) or type(cause).__name__


async def dial(address: Address, context: ssl.SSLContext | None) -> ByteStream:
    """Connect to an engine's control port. Raises PeerError with the reason."""
    try:
        stream = await anyio.connect_tcp(address.host, address.port)
    except OSError as error:
        cause: Any = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        cause = cause.__cause__ or cause
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        kind = PeerRefusedError if isinstance(cause, ConnectionRefusedError) else PeerError
        raise kind(str(address), f"its control port cannot be reached: {cause}") from error
    if context is None:
        return stream
    try:
        return await TLSStream.wrap(stream, hostname=address.host, ssl_context=context, standard_compatible=False)
    except BaseException as error:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)
        if isinstance(error, TLS_FAILURES):
            raise PeerError(str(address), f"the TLS handshake with it failed: {describe(error)}") from error
        raise


def bind_sockets(addresses: Sequence[tuple[int, tuple[Any, ...]]]) -> list[socket.socket]:
    """Return sockets that listen at these addresses (family and address), all on the same port. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for family, (host, port, *rest) in addresses:
            bare, _, zone = host.partition("%")
            if zone:
                # anyio appends the interface's number to the host, but bind takes the number only as a separate field.
                host, rest = bare, [0, int(zone) if zone.isdigit() else socket.if_nametoindex(zone)]
            sockets.append(one := socket.socket(family, socket.SOCK_STREAM))
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((host, port or sockets[0].getsockname()[1], *rest))
            one.listen(BACKLOG)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


class PendingConnection:
    """An unauthenticated connection; `end` is called with the reason when the connection has to make room."""

    def __init__(self) -> None:
        self.end: Callable[[str], object] = lambda _reason: None


class ControlListener:
    """The engine's own control port.

    `on_connection` is called with each connection and owns its stream; `on_failure` with the reason of a connection
    that failed before. A connection is pending from the moment it is accepted until `mark_authenticated` is called. A
    TLS handshake may take `timeout` seconds.
    """

    def __init__(
        self,
        loop: EventLoop,
        context: ssl.SSLContext | None,
        on_connection: Callable[[ByteStream, PendingConnection], Any],
        on_failure: Callable[[str], None],
        timeout: float,
    ) -> None:
        self._loop = loop
        self._context = context
        self._on_connection = on_connection
        self._on_failure = on_failure
        self._timeout = timeout
        self._listeners: list[SocketListener] = []
        self._task: LoopTask | None = None
        self._fresh: set[ByteStream] = set()
        self._pending: dict[PendingConnection, None] = {}
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Bind each address of the host, and begin to accept connections. Raises OSError."""
        # Do not use anyio.create_tcp_listener: it resolves with AI_ADDRCONFIG, which refuses 127.0.0.1 on a machine
        # whose NICs have no IPv4 address at that moment.
        found: Sequence[Any]
        try:
            # Parse an address here. Resolve a name in a thread, because the system may ask a server for it.
            at_once = socket.AI_PASSIVE | socket.AI_NUMERICHOST
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=at_once)
        except socket.gaierror:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = bind_sockets(sorted({(int(family), address) for family, _, _, _, address in found}))
        try:
            while sockets:
                self._listeners.append(await SocketListener.from_socket(sockets[0]))
                del sockets[0]
        except BaseException:
            for raw in sockets:
                raw.close()
            self._close_sockets()
            raise
        self.port = int(self._listeners[0].extra(SocketAttribute.local_port))
        self._task = self._loop.spawn(self._serve, name="aiote control listener", after=self._close_sockets)

    async def _serve(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for listener in self._listeners:
                    group.start_soon(self._accept, listener, group)
        finally:
            # A handler that was cancelled before its first step never owned its stream.
            with anyio.CancelScope(shield=True):
                for stream in self._fresh:
                    await anyio.aclose_forcefully(stream)

    async def _accept(self, listener: SocketListener, group: TaskGroup) -> None:
        pause, said = ACCEPT_PAUSES_S[0], ""
        while True:
            try:
                stream = await listener.accept()
            except Exception as error:
                # The port stays open, whatever the error is (no descriptor is left, the client or the network is gone).
                # A connection that waits for a descriptor fails again at each attempt; report that once.
                if describe(error) != said:
                    said = describe(error)
                    self._on_failure(f"its connection could not be accepted: {said}")
                await anyio.sleep(pause)
                pause = min(2 * pause, ACCEPT_PAUSES_S[1])
                continue
            pause, said = ACCEPT_PAUSES_S[0], ""
            self._fresh.add(stream)
            group.start_soon(self._handle, stream)

    async def _handle(self, stream: ByteStream) -> None:
        self._fresh.discard(stream)
        pending = PendingConnection()
        self._pending[pending] = None
        if len(self._pending) > MAX_UNAUTHENTICATED:
            # End the oldest pending connection, so that a flood of them cannot keep a real peer out.
            oldest = next(iter(self._pending))
            self.mark_authenticated(oldest)
            oldest.end(TOO_MANY)
        try:
            secured = await self._secure(stream, pending)
            if secured is not None:
                await self._on_connection(secured, pending)
        except Exception as error:
            # The failure of one connection, even by an error in this engine, must not end the listener.
            report(error)
        finally:
            self.mark_authenticated(pending)

    def mark_authenticated(self, pending: PendingConnection) -> None:
        """Stop counting a connection as unauthenticated. Idempotent."""
        self._pending.pop(pending, None)

    async def _secure(self, stream: ByteStream, pending: PendingConnection) -> ByteStream | None:
        """Return the stream, with TLS around it if there is a context; close it and return None if TLS failed."""
        if self._context is None:
            return stream
        reason = f"its TLS handshake was not over within {self._timeout} s"

        def end(why: str) -> None:
            nonlocal reason
            reason = why
            scope.cancel()

        try:
            with anyio.move_on_after(self._timeout) as scope:
                pending.end = end
                return await TLSStream.wrap(
                    stream, server_side=True, ssl_context=self._context, standard_compatible=False
                )
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)
            if not isinstance(error, TLS_FAILURES):
                raise
            reason = f"its TLS handshake failed: {describe(error)}"
        else:
            await anyio.aclose_forcefully(stream)
        self._on_failure(reason)
        return None

    async def close(self) -> None:
        """Stop accepting, and wait until the port is closed."""
        if self._task is not None:
            self._stop()
            await self._task.join()
        for listener in self._listeners:
            await listener.aclose()

    def abandon(self) -> None:
        """Stop accepting without waiting; the port is closed as soon as the loop has stopped watching it."""
        if self._task is not None:
            self._stop()
            if self._task.has_ended:
                self._close_sockets()

    def _stop(self) -> None:
        assert self._task is not None
        if not self._task.has_ended:
            for listener in self._listeners:
                self._loop.forget_readable(listener.extra(SocketAttribute.raw_socket).fileno())
            self._task.cancel()

    def _close_sockets(self) -> None:
        for listener in self._listeners:
            listener.extra(SocketAttribute.raw_socket).close()
