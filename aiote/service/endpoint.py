"""Exchange calls on one engine: read its messages, dispatch their frames, and keep a link to each peer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
from msgspec.msgpack import Decoder
from numpy.typing import NDArray

import aiote

from ..aio import Condition, EventLoop, LoopTask, Waiter, current_loop, report_callback_error, run, wake
from ..observe.status_page import ServiceStatus, report_services
from ..transfers import Access, Registrations, SharedRegistration
from .codec import LONG_BODY, decode
from .frames import (
    MAGIC,
    Ask,
    CallFrame,
    CallStatus,
    Cancel,
    Credit,
    End,
    Frame,
    Free,
    Grant,
    HelloFrame,
    Items,
    Return,
    unpack,
)
from .link import Link
from .memory import IDLE_S, Budget
from .sending import FRAME_BYTES, LEAST_MESSAGE, FrameSender

__all__ = ["CallEndpoint", "CallHandler", "Limits"]

SHARED = frozenset({"Health/1.check"})
"""Methods that every server has; the first server answers them for all servers of the engine."""
MAX_KEPT = 32
"""The most registrations that are kept for the next call: each of them costs the NIC resources."""
TURN = 128
"""After this many frames (one message may hold a thousand), the reader lets the tasks run that the frames woke."""
THREADS = 2
"""How many threads work for all peers on what would block the event loop. With more, the loop would wait longer for its
turn to run Python code.
"""
TURN_BYTES = 64 << 10
"""After messages of this many bytes, too: frames may hold items of streams, which are decoded when they arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that one engine spends on calls.

    slots: calls of one peer in flight, running or waiting; the peer's further calls wait at the peer. calls: calls that
    run here at a time; one peer may run 64 of them, and more while it runs fewer than there are free places. queue:
    calls that wait here for a running call to end; when the queue is full, a call is refused with BusyError, from the
    peer with the most queued calls first. message_bytes: the largest message without its arrays; its decoded objects
    may take at most 24 times as much.

    peer_bytes and total_bytes bound memory, for one peer and for all peers: of arrays in flight (peer_bytes counts each
    direction by itself), of the decoded objects of running calls, and of waiting calls and answers that the peer has
    not taken. The last are charged to an engine's identity, whatever its connections; when all of total_bytes is used,
    the identity with the most is disconnected.

    stream_items, stream_bytes: how far a stream may be ahead of its reader. kept_bytes: callers' arrays that stay
    registered for their next call.
    """

    slots: int = 1024
    calls: int = 4096
    queue: int = 4096
    message_bytes: int = 4 << 20
    peer_bytes: int = 256 << 20
    total_bytes: int = 2 << 30
    stream_items: int = 256
    stream_bytes: int = 1 << 20
    kept_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("queue", "kept_bytes") else 1
            most = {"slots": 1 << 16, "stream_items": 1 << 24}.get(field.name, 1 << 48)
            if type(value) is not int or not least <= value <= most:
                raise aiote.UsageError(f"{field.name}={value!r}: expected an integer from {least} to {most}")


def frames_of(data: bytes) -> Iterator[Frame]:
    """Yield a message's frames. The first step raises ValueError if the bytes do not encode frames."""
    yield from unpack(data)


class CallHandler(Protocol):
    """An object that answers the calls of some methods."""

    @property
    def methods(self) -> Collection[str]: ...
    def call(self, link: Link, frame: CallFrame) -> None: ...
    def status(self) -> ServiceStatus: ...


class CallEndpoint:
    """The calls on one engine, in both directions. `CallEndpoint.of` returns it; it ends with the engine."""

    _known: ClassVar[weakref.WeakKeyDictionary[aiote.Engine, CallEndpoint]] = weakref.WeakKeyDictionary()

    def __init__(self, engine: aiote.Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.loop: EventLoop = current_loop()
        # anyio's own function would look up the running loop each time, which takes a sixth of an empty call.
        self.deadline = anyio.lowlevel.current_token().backend_class.current_effective_deadline
        self.servers: list[CallHandler] = []
        # Around every call of the engine, outside of those of single clients and servers (interceptors.py).
        self.client_interceptors: tuple[Any, ...] = ()
        self.server_interceptors: tuple[Any, ...] = ()
        self.budget = Budget(limits.total_bytes, limits.peer_bytes)
        self.registrations = Registrations(limits.kept_bytes, MAX_KEPT)
        self.messages = self.message_bytes = self.array_bytes = self.unknown = 0
        self._links: dict[aiote.Peer, Link] = {}
        self._served: dict[str, CallHandler] = {}
        self._sweeper: LoopTask | None = None
        self._forget = engine.listen_events(self._on_event)
        self._over = Condition(self.loop)
        self._threads: anyio.CapacityLimiter | None = None
        self._part: Link | None = None  # the link whose message is being read
        self.reading = self._direct = self._due = False
        self._unsent: list[FrameSender] = []
        report_services(engine, self)
        self.loop.spawn(self._listen, name="aiote service: messages")

    @classmethod
    def of(cls, engine: aiote.Engine, limits: Limits | None = None) -> CallEndpoint:
        """Return the endpoint of an engine; the first call makes it.

        Raises UsageError if other limits were set before, and for an engine whose message_bytes are too few for calls;
        ClosedError for a closed engine.
        """
        if not isinstance(engine, aiote.Engine):
            raise aiote.UsageError(f"expected an Engine, got {type(engine).__name__}")
        if engine.closed:
            raise aiote.ClosedError("the engine is closed")
        found = cls._known.get(engine)
        if found is None:
            least = engine.config.message_bytes
            if least < LEAST_MESSAGE:
                raise aiote.UsageError(f"message_bytes={least} of the engine: services need at least {LEAST_MESSAGE}")
            found = cls._known[engine] = cls(engine, limits or Limits())
        elif limits is not None and limits != found.limits:
            raise aiote.UsageError(
                "this engine has other limits of calls already: give the same Limits to all services and "
                "clients of an engine"
            )
        return found

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in one of THREADS threads. Cancelling waits for its end."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(THREADS)
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)

    async def decode(self, decoder: Decoder[Any], body: bytes, take: Callable[[int, int], memoryview]) -> Any:
        """Decode a long value in a thread; `codec.decode` has the arguments. Cancelling waits for the thread's end."""
        # A thread that copies arrays leaves the loop its turn, so there is no need to limit these.
        copies = len(body) < LONG_BODY
        return await (anyio.to_thread.run_sync if copies else self.in_thread)(decode, decoder, body, take)

    def link_to(self, peer: aiote.Peer) -> Link:
        """Return the link to a peer, made if there is none yet; a link to a lost peer is ended already."""
        link = self._links.get(peer)
        if link is None:
            link = Link(self, peer)
            if peer.lost:
                link.end(peer.reason)
            else:
                self._links[peer] = link
        return link

    def add_server(self, server: CallHandler) -> None:
        """Let a server answer the calls of its methods. Raises UsageError if one of them is served already."""
        served = sorted(name for name in server.methods if name in self._served and name not in SHARED)
        if served:
            raise aiote.UsageError(
                f"{', '.join(served)}: this engine serves these methods already; give the service another "
                "name or version"
            )
        self.servers.append(server)
        self._find_servers()

    def remove_server(self, server: CallHandler) -> None:
        """Stop a server's methods from being served."""
        self.servers.remove(server)
        self._find_servers()

    def _find_servers(self) -> None:
        self._served = {name: server for server in reversed(self.servers) for name in server.methods}

    def service_states(self) -> list[ServiceStatus]:
        """Return the state of each server, in the order in which they began; `aiote top` shows them."""
        return [server.status() for server in self.servers]

    def check_message(self, nbytes: int) -> None:
        """Raise UsageError if a message of `nbytes` bytes, not counting its arrays, is too long."""
        if nbytes > self.limits.message_bytes:
            raise aiote.UsageError(
                f"a value of {nbytes} bytes without its arrays: expected at most {self.limits.message_bytes} "
                "(Limits.message_bytes); put large data in arrays"
            )

    # Messages.

    async def _listen(self) -> None:
        stop = self.engine.listen_messages(self._read, self._over.wake_all)
        try:
            await self._over.until(lambda: self.engine.closed)
        finally:
            stop()
            self._close()

    def _read(self) -> None:
        """Take messages in a callback of the loop. No task runs meanwhile, so the tasks that they wake run at once."""
        if self.reading or self._due:
            return
        self.reading = self._direct = again = True
        try:
            again = self._read_some()
        finally:
            self.reading = self._direct = False
            unsent, self._unsent = self._unsent, []
            if again:
                # Schedule one continuation only: the engine calls this as well, and each call would start its own.
                self._due = True
                self.loop.call_soon(self._go_on)
            self._flush(unsent)

    def _go_on(self) -> None:
        self._due = False
        self._read()

    def _flush(self, senders: list[FrameSender]) -> None:
        """Send the unsent frames; if an interrupt ends this early, the loop's next turn sends the rest."""
        try:
            while senders:
                senders[-1].flush()
                senders.pop()
        finally:
            for sender in senders:
                self.loop.call_soon(sender.flush)

    def _read_some(self) -> bool:
        """Take up to TURN frames, from messages of about TURN_BYTES; tell whether there may be more."""
        left = TURN
        while left > 0:
            if self._part is None:
                try:
                    message = self.engine.recv_nowait()
                except aiote.ClosedError:
                    return False
                if message is None:
                    return False
                left -= 1 + len(message.data) * TURN // TURN_BYTES  # messages without frames count as well
                link = self._link_of(message)
                if link is None:
                    self.unknown += 1
                    continue
                link.incoming, self._part = frames_of(message.data), link
                continue
            count = self._take(self._part, self._part.incoming, left)
            if count < left:
                self._part = None
            left -= count
        return True

    def wake(self, waiter: Waiter) -> None:
        """Wake a task; if messages are being read and no task runs, the task runs before this returns."""
        if not self._direct:
            wake(waiter)
            return
        self._direct = False
        try:
            run(waiter)
        finally:
            self._direct = True

    def flush_later(self, sender: FrameSender) -> None:
        """Send frames after the present messages are read, or, if none are, in the loop's next turn."""
        if self.reading:
            self._unsent.append(sender)
        else:
            self.loop.call_soon(sender.flush)

    def _link_of(self, message: aiote.Message) -> Link | None:
        # Ignore a lost peer without a link: none of its calls are known here.
        if message.data[:1] != MAGIC or (message.source not in self._links and message.source.lost):
            return None
        return self.link_to(message.source)

    def _take(self, link: Link, frames: Iterator[Frame], most: int) -> int:
        """Handle up to `most` of a message's frames; return their number, less than `most` at the message's end."""
        count = 0
        try:
            for frame in islice(frames, most):
                count += 1
                self._dispatch(link, frame)
        except (ValueError, KeyError, aiote.UsageError) as error:
            link.peer.disconnect(f"what it says of its calls cannot be: {error}"[:200])
        except Exception as error:
            # This is an error of this engine. Report it here, and only disconnect the peer.
            report_callback_error(error)
            link.peer.disconnect("this side failed")
        else:
            return count
        # The rest of the message does not count any more.
        link.incoming = iter(())
        return 0

    def _dispatch(self, link: Link, frame: Frame) -> None:
        match frame:
            case CallFrame():
                self._call(link, frame)
            case End():
                link.values.hold_pieces(frame.pieces)
                link.on_end(frame)
            case Items():
                link.values.hold_pieces(frame.pieces)
                link.on_items(frame)
            case Credit():
                running = link.running.get(frame.slot)
                if running is not None and running.generation == frame.generation:
                    running.credit(frame.taken)
            case Cancel():
                self._cancel(link, frame)
            case Ask():
                link.values.on_ask(frame)
            case Grant():
                link.values.on_grant(frame)
            case Free():
                link.values.on_free(frame)
            case Return():
                link.values.on_return(frame)
            case HelloFrame():
                link.receive_hello(frame)
                for call in link.unpark():
                    self._call(link, call)

    def _call(self, link: Link, frame: CallFrame) -> None:
        if link.ending:
            return
        if link.hello is None:
            # The call has overtaken the HelloFrame.
            link.park(frame)
            return
        if frame.slot >= self.limits.slots or frame.slot in link.running or frame.slot in link.frames.unsent.ends:
            raise ValueError(f"a call in slot {frame.slot}, which is in use or out of range")
        if frame.generation <= link.arrived.get(frame.slot, 0):
            raise ValueError(f"call {frame.generation} in slot {frame.slot} was sent before")
        link.arrived[frame.slot] = frame.generation
        link.values.hold_pieces(frame.pieces)
        if link.early.pop(frame.slot, 0) == frame.generation:
            self.refuse(link, frame, CallStatus.CANCELLED)
        elif (server := self._served.get(frame.method)) is None:
            served = f"it serves {', '.join(sorted(self._served))}" if self._served else ""
            self.refuse(link, frame, CallStatus.NOT_SERVED, served[:400])
        else:
            server.call(link, frame)

    def refuse(self, link: Link, frame: CallFrame, status: int, text: str = "") -> None:
        """End a call that did not run."""
        link.values.release(frame.pieces)
        body = text.encode()[:500]
        link.frames.unsent.ends.add(frame.slot)
        link.frames.post(End(frame.slot, frame.generation, status, body, []), FRAME_BYTES + len(body))

    def _cancel(self, link: Link, frame: Cancel) -> None:
        """Cancel a call. If the call has not arrived yet, it is answered as cancelled when it arrives."""
        running = link.running.get(frame.slot)
        if running is None or frame.generation > running.generation:
            if frame.slot >= self.limits.slots:
                raise ValueError(f"a cancellation in slot {frame.slot}, which is out of range")
            if frame.generation > link.arrived.get(frame.slot, 0):
                link.early[frame.slot] = frame.generation
        elif running.generation == frame.generation:
            running.cancel()

    # Idle memory.

    def watch_memory(self) -> None:
        """Start the task that gives idle memory back, unless it runs; it ends when no segments are left."""
        if self._sweeper is None:
            self._sweeper = self.loop.spawn(self._sweep, name="aiote service: give memory back")

    async def _sweep(self) -> None:
        try:
            while True:
                await anyio.sleep(IDLE_S)
                more = [link.values.sweep() for link in tuple(self._links.values())]
                if not any(more):
                    break
        finally:
            self._sweeper = None

    # The end.

    def _on_event(self, event: aiote.Event) -> None:
        if event.name != "peer.lost":
            return
        for peer, link in tuple(self._links.items()):
            if peer.lost and not link.lost and not link.ending:
                link.ending = True
                self.loop.spawn(self._end, link, name="aiote service: a peer was lost")

    async def _end(self, link: Link) -> None:
        """Handle the last messages of a lost peer, then end its link."""
        # `_read` may have paused within a message. This handles the rest, so `_read` finds no more frames in it.
        await self._take_all(link, link.incoming)
        async for message in link.peer.messages():
            if message.data[:1] == MAGIC:
                await self._take_all(link, frames_of(message.data))
        self._links.pop(link.peer, None)
        self._forget_link(link, link.peer.reason)
        await link.values.lent_memory.close()
        await link.values.staging.close()

    async def _take_all(self, link: Link, frames: Iterator[Frame]) -> None:
        """Handle a message's frames, and let other tasks run after each TURN of them, and at its end."""
        count = TURN
        while count == TURN:
            count = self._take(link, frames, TURN)
            await anyio.lowlevel.checkpoint()

    def hold(self, array: NDArray[Any], *, filled: bool = False) -> SharedRegistration:
        """Return the registration of an array, a kept one or a new one; the caller gives it back by `let_go`.

        A peer can be given write access to an array that is `filled`, but never read access.
        """
        access: Access = "write" if filled else "local"
        key = (array.__array_interface__["data"][0], array.nbytes, array.flags.writeable, access)
        held = self.registrations.hold(key)
        return held or self.registrations.add(key, self.engine.register(array, access))

    def let_go(self, held: SharedRegistration) -> None:
        """Give a registration back; if there is room, it is kept for the next call, otherwise it is closed."""
        for region in self.registrations.let_go(held):
            self.loop.spawn(region.aclose, name="aiote service: close a registration")

    def _close(self) -> None:
        """End all links, because the engine is closed."""
        self._forget()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._known.pop(self.engine, None)
        for link in tuple(self._links.values()):
            self._forget_link(link, "the engine is closed")
        self._links.clear()

    def _forget_link(self, link: Link, reason: str) -> None:
        link.end(reason)
        for running in tuple(link.running.values()):
            running.cancel()
