"""The control connection's bytes: TCP, with TLS where a context is given, around the state machine in `core.control`.

Reading and writing are tasks of their own, so a message can be sent from anywhere without waiting. A connection whose
peer does not read holds at most `MAX_UNSENT` bytes; one more message ends it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketListener, TaskGroup
from anyio.streams.tls import TLSStream

from ..core.address import Address
from ..core.control import ControlError, ControlProtocol, Event, MessageReceived
from ..core.control_frames import Bye, SessionMessage
from ..errors import PeerError, PeerRefusedError
from .loops import EventLoop, LoopTask, report
from .waiting import Signal

__all__ = ["ControlConnection", "ControlListener", "PendingConnection", "dial"]

BACKLOG = 1024
MAX_UNSENT = 1 << 20
READ_BYTES = 65536
ACCEPT_PAUSES_S = 0.05, 1.0
"""After a connection that could not be accepted: the first pause, and the longest; each is twice the one before."""
MAX_UNAUTHENTICATED = 256
"""Connections that have not proven themselves yet; one more ends the oldest, so silent ones cannot fill the process."""
TOO_MANY = "too many connections that have not proven themselves"
TLS_FAILURES = (OSError, ssl.SSLError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class ControlConnection:
    """A stream and its protocol. Events go to `on_event`, in order; `on_end` is called once, with the reason.

    `linger` is how many seconds the peer's last message is waited for after our own.
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
        self._outgoing = Signal(loop)
        self._changed = Signal(loop)
        self._unsent = bytearray()
        self._ended = False
        self._deaf = False
        self._farewell = False
        self._hung_up = False
        self._tasks: list[LoopTask] = []

    def start(self) -> None:
        """Begin to read and write."""
        self._tasks = [
            self._loop.spawn(self._read, name=f"aiote control {self.name} read"),
            self._loop.spawn(self._write, name=f"aiote control {self.name} write"),
        ]

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def left(self) -> bool:
        """Whether the peer has closed its endpoints: it said Bye or hung up, which comes after that."""
        return self._farewell or self._hung_up

    def send(self, message: SessionMessage) -> None:
        """Queue a message; nothing happens on a connection that has ended."""
        if not self._ended and self.protocol.authenticated:
            self.protocol.send(message)
            self.flush()

    def flush(self) -> None:
        """Have the protocol's bytes written."""
        data = self.protocol.data_to_send()
        if not data:
            return  # after most of what is received; the writer would be woken for nothing
        self._unsent += data
        if len(self._unsent) > MAX_UNSENT:
            self.end("it does not read what we send it")
        self._outgoing.set()

    def end(self, reason: str) -> None:
        """Say that the connection is over; what was to be sent is still tried by `aclose`."""
        if self._ended:
            return
        self._ended = True
        self.reason = reason
        self._outgoing.set()
        if self.on_end is not None:
            self.on_end(reason)

    async def agreed(self) -> bool:
        """Wait for the peer's Bye, for at most `linger` seconds after ours; whether it came.

        A peer says Bye when its endpoints are closed. A `Failed` says nothing of them.
        """
        with anyio.move_on_after(self.linger, shield=True):
            while not self._farewell and not self._deaf:
                await self._changed.wait()
        return self._farewell

    async def aclose(self, patience: float = 0.2) -> None:
        """Send what is left, for at most `patience` seconds, and close."""
        self.end("closed by this side")
        with anyio.CancelScope(shield=True):
            try:
                # The writer ends by itself when all is sent. Cancelled before, it would take the last message with it.
                with anyio.move_on_after(patience):
                    for task in self._tasks[1:]:
                        await task.join()
                with anyio.move_on_after(self.linger):
                    while self.linger and not self._deaf:
                        await self._changed.wait()
                for task in self._tasks:
                    task.cancel()
                    await task.join()
            finally:
                # The shield does not keep off a bare Task.cancel, which an engine that is closed gives to its tasks.
                await self._close_stream(patience)

    async def _close_stream(self, patience: float) -> None:
        with anyio.move_on_after(patience):
            try:
                await self._stream.aclose()
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
                pass
            return
        await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            while not self.protocol.over:
                data = await self._stream.receive(READ_BYTES)
                self._emit(self.protocol.receive(data))
                self.flush()
                if self.protocol.over:
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
            self._deaf = True
            self._changed.set()

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
                if self._unsent:
                    data = bytes(self._unsent)
                    self._unsent.clear()
                    await self._stream.send(data)
                elif self._ended:
                    return
                else:
                    await self._outgoing.wait()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as error:
            self.end(f"the connection broke: {describe(error)}")


def describe(error: BaseException) -> str:
    """Say what broke a stream: the system's own text, where anyio wrapped them."""
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


def bound(addresses: Sequence[tuple[int, tuple[Any, ...]]]) -> list[socket.socket]:
    """Return sockets that listen at these addresses (family and address), all on one port. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for family, (host, port, *rest) in addresses:
            bare, _, zone = host.partition("%")
            if zone:
                # anyio writes the interface's number there, and bind takes it apart from the host alone.
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
    """A connection that has not proven itself; `end` is called with the reason when it has to make room."""

    def __init__(self) -> None:
        self.end: Callable[[str], object] = lambda _reason: None


class ControlListener:
    """The engine's own control port. Each connection goes to `on_connection`, which owns the stream; `on_failure` hears
    of those that came to nothing before. It is pending from its first byte on, until it is `proven`. A TLS
    handshake may take `timeout` seconds.
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
        """Bind and begin to accept, at each address of the host. Raises OSError."""
        # Not anyio.create_tcp_listener: it resolves with AI_ADDRCONFIG, which refuses 127.0.0.1 on a machine whose
        # NICs have no IPv4 address at that moment.
        found: Sequence[Any]
        try:
            # An address is parsed here. A name takes a thread, because the system may ask a server for it.
            at_once = socket.AI_PASSIVE | socket.AI_NUMERICHOST
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=at_once)
        except socket.gaierror:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets = bound(sorted({(int(family), address) for family, _, _, _, address in found}))
        try:
            while sockets:
                self._listeners.append(await SocketListener.from_socket(sockets[0]))
                del sockets[0]
        except BaseException:
            for raw in sockets:
                raw.close()
            self._shut()
            raise
        self.port = int(self._listeners[0].extra(SocketAttribute.local_port))
        self._task = self._loop.spawn(self._serve, name="aiote control listener", after=self._shut)

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
                # Whatever it is (descriptors that ran out, a client or a network that is gone): the port stays open.
                # A connection that waits for a descriptor fails again each time, which is told once.
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
            # The one that has been silent for longest goes, so that a flood of them cannot keep a real one out.
            oldest = next(iter(self._pending))
            self.proven(oldest)
            oldest.end(TOO_MANY)
        try:
            secured = await self._secure(stream, pending)
            if secured is not None:
                await self._on_connection(secured, pending)
        except Exception as error:
            # One connection's trouble, even a mistake of ours, must not end the listener.
            report(error)
        finally:
            self.proven(pending)

    def proven(self, pending: PendingConnection) -> None:
        """Count a connection among the unauthenticated ones no longer. Idempotent."""
        self._pending.pop(pending, None)

    async def _secure(self, stream: ByteStream, pending: PendingConnection) -> ByteStream | None:
        """Return the stream with TLS around it, if there is to be any; None, and it is closed, where that failed."""
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
        """Accept no more."""
        if self._task is not None:
            self._stop()
            await self._task.join()
        for listener in self._listeners:
            await listener.aclose()

    def abandon(self) -> None:
        """Accept no more, without waiting: the port is closed as soon as the loop lets go of it."""
        if self._task is not None:
            self._stop()
            if self._task.ended:
                self._shut()

    def _stop(self) -> None:
        assert self._task is not None
        if not self._task.ended:
            for listener in self._listeners:
                self._loop.forget_readable(listener.extra(SocketAttribute.raw_socket).fileno())
            self._task.cancel()

    def _shut(self) -> None:
        for listener in self._listeners:
            listener.extra(SocketAttribute.raw_socket).close()
