"""Received messages, from arrival until a receiver takes them.

This module owns the order in which receivers are woken and served. It must not know how messages travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..aio import Condition, EventLoop, wake
from ..errors import ClosedError, PeerError, UsageError
from ..rails import check_elements, deliver

if TYPE_CHECKING:
    from ..aio import Waiter
    from ..rails import Core, PeerLink
    from ..runtime import Runtime
    from .owner import Destination
    from .peer import Peer

__all__ = ["Inbox", "Message"]


MAX_DEPARTED = 256
"""Lost peers whose messages are kept; beyond this, the messages of the peer that was lost first are dropped."""
DEPARTED_BYTES = 64 << 20
"""Bytes of messages of lost peers that are kept, all peers together."""


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """A message: `source` is the peer that sent it, `data` its bytes, which the receiver owns."""

    source: Peer
    data: bytes

    def __repr__(self) -> str:
        # Leave out the data, which may be long or secret.
        return f"<Message of {len(self.data)} bytes from {self.source.address}>"


def writable(buffer: object) -> memoryview:
    """Return a view of memory that a message can be copied into; the caller releases it. Raises UsageError."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"recv_into: {type(buffer).__name__} gives no buffer: {error}") from None
    try:
        check_elements(buffer, view.format)
        if view.readonly or not view.c_contiguous:
            raise ValueError("expected a buffer that is writable and contiguous")
    except ValueError as error:
        view.release()
        raise UsageError(f"recv_into: {error}") from None
    return view


class Messages(AsyncIterator[Message]):
    """Iterate over messages until the engine is closed or, for one peer's messages, that peer is lost.

    The iterator holds no resource, so a loop may be left at any time.
    """

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive

    async def __anext__(self) -> Message:
        try:
            return await self._receive()
        except (ClosedError, PeerError):
            raise StopAsyncIteration from None


class Inbox:
    """The messages of all peers.

    Messages stay in their peer's pool until a receiver takes them; a full pool is the back-pressure on the sender. The
    pool of a lost peer is freed, so its messages are copied and kept up to the limits above; `dropped` counts the
    messages beyond these limits.
    """

    def __init__(self, loop: EventLoop, core: Core) -> None:
        self._core = core
        self._peers: deque[Destination] = deque()
        self._departed: deque[deque[Message]] = deque()
        self._departed_bytes = 0
        self.dropped = 0
        self._loop = loop
        self._arrived = Condition(loop)
        self._selective: dict[Destination, Condition] = {}
        self._has_early = False
        self._listener: Callable[[], object] | None = None
        self._over: Callable[[], object] | None = None
        self._is_call_due = False

    def add(self, peer: Destination) -> None:
        """Receive messages of this peer from now on."""
        self._peers.append(peer)
        self.wake_receivers()

    def remove(self, peer: Destination) -> None:
        """Keep the messages that a lost peer had sent, because its pool goes away."""
        if peer in self._peers:
            self._peers.remove(peer)
        kept: deque[Message] = deque()
        while peer.link is not None and (data := peer.link.take_message()) is not None:
            kept.append(Message(peer.peer, data))
            self._departed_bytes += len(data)
        if kept:
            self._departed.append(kept)
        while len(self._departed) > MAX_DEPARTED or self._departed_bytes > DEPARTED_BYTES:
            oldest = self._departed.popleft()
            self._departed_bytes -= sum([len(message.data) for message in oldest])
            self.dropped += len(oldest)
        self.wake_receivers()

    def add_counts(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the core's counts plus what the core does not know: the kept and dropped messages of lost peers."""
        return {**counts, "inbox": counts["inbox"] + self.departed_messages, "dropped": self.dropped}

    @property
    def departed_messages(self) -> int:
        """The number of messages of lost peers that are kept."""
        return sum(map(len, tuple(self._departed)))

    def take_message(self) -> Message | None:
        """Take one message, first of the lost peers, then of the others in turn; None when there is none."""
        found = self._take(None)
        return None if found is None else Message(*found)

    def take_into(self, buffer: memoryview) -> tuple[int, Peer] | None:
        """Copy one message into a buffer; return its length and its sender. Raises UsageError if it is too long."""
        found = self._take(buffer)
        return None if found is None else (found[1], found[0])

    async def receive_into(self, runtime: Runtime, buffer: object) -> tuple[int, Peer]:
        """Copy the next message into a buffer; see `Engine.recv_into`."""
        with writable(buffer) as view:
            while True:
                runtime.require_open()
                found = self.take_into(view)
                runtime.kick()
                if found is not None:
                    return found
                await self.wait()

    def _take(self, buffer: memoryview | None) -> tuple[Peer, Any] | None:
        if not (self._core.inbox or self._departed):
            return None
        if self._departed:
            return self._take_kept(self._departed[0], buffer)
        for _ in range(len(self._peers)):
            peer = self._peers[0]
            self._peers.rotate(-1)
            if peer.link is not None and (data := self._take_of(peer.link, buffer)) is not None:
                return peer.peer, data
        self._has_early = self._core.inbox > 0
        if self._has_early:
            # These messages cannot be taken yet, so the core must not call the listener for them. `receivers` calls it
            # when they can be taken.
            self._core.on_messages = None
        return None

    def take_from(self, peer: Destination, buffer: memoryview | None = None) -> tuple[Peer, Any] | None:
        """Take one message of a peer, lost or not, or copy it into a buffer; None when there is none."""
        if peer.link is not None and (data := self._take_of(peer.link, buffer)) is not None:
            return peer.peer, data
        kept = next((each for each in self._departed if each[0].source is peer.peer), None)
        return None if kept is None else self._take_kept(kept, buffer)

    def _take_of(self, link: PeerLink, buffer: memoryview | None) -> bytes | int | None:
        if buffer is None:
            return link.take_message()
        try:
            return link.take_message(buffer)
        except ValueError as error:
            raise self._too_long(error) from None

    def _too_long(self, error: ValueError) -> UsageError:
        # The wake-up for this message was used up; another receiver may have room for it.
        self.wake_receivers()
        return UsageError(f"recv_into: {error}; the message stays, so call again with a buffer that is long enough")

    def _take_kept(self, kept: deque[Message], buffer: memoryview | None) -> tuple[Peer, Any]:
        message = kept[0]
        try:
            data = deliver(message.data, buffer)
        except ValueError as error:
            raise self._too_long(error) from None
        kept.popleft()
        self._departed_bytes -= len(message.data)
        if not kept:
            self._departed.remove(kept)
        return message.source, data

    def wake_receivers(self) -> None:
        """Wake as many receivers as there are messages, and the listener, if any."""
        for waiter in self.receivers():
            wake(waiter)

    def receivers(self) -> list[Waiter]:
        """Schedule the listener, if any, and return the receivers that the caller has to wake.

        These are as many as there are messages, and those that wait for one peer that has a message or is lost.
        """
        woken: list[Waiter] = []
        ready = self._core.inbox
        if self._has_early:
            # Messages from peers that are still being connected cannot be taken yet, so they wake no receiver.
            ready = sum([peer.link.messages for peer in self._peers if peer.link is not None])
        if self._listener is not None and ready + self.departed_messages and not self._is_call_due:
            self._is_call_due = True
            self._loop.call_soon(self._call_listener)
        for _ in range(min(len(self._arrived), ready + self.departed_messages)):
            self._arrived.wake_one(woken.append)
        for peer, signal in self._selective.items():
            if peer.lost or (peer.link is not None and peer.link.messages):
                signal.wake_all(woken.append)
        return woken

    def listen(self, listener: Callable[[], object], over: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` in the event loop whenever messages may be taken, and `over` when the engine is closed.

        Returns a function that stops these calls. There is one listener, which takes all messages; raises UsageError
        for a second one.
        """
        if self._listener is not None:
            raise UsageError(
                "listen_messages: this engine has a listener already; call the function that "
                "listen_messages returned to stop it"
            )

        stopped = False

        def stop() -> None:
            nonlocal stopped
            if not stopped:
                stopped = True
                self._listener = self._over = self._core.on_messages = None
                if not self._core.closed:
                    self._core.expect_messages(-1)

        self._listener, self._over = listener, over
        self._core.on_messages = listener
        self._core.expect_messages(1)
        self.wake_receivers()
        return stop

    def _call_listener(self) -> None:
        self._is_call_due = False
        if self._listener is not None:
            self._core.on_messages = self._listener
            self._listener()

    def end(self) -> None:
        """Wake all receivers, because the engine is closed."""
        if self._over is not None:
            self._over()
        self._arrived.wake_all()
        for signal in self._selective.values():
            signal.wake_all()

    def wait(self) -> Awaitable[None]:
        """Sleep until there may be a message."""
        return self._wait(self._arrived)

    async def wait_for(self, peer: Destination) -> None:
        """Sleep until there may be a message of this peer, or the peer is lost."""
        signal = self._selective.setdefault(peer, Condition(self._loop))
        try:
            await self._wait(signal)
        finally:
            # A new signal may be stored by now, if a receiver that was woken together with this one waits again.
            if not len(signal) and self._selective.get(peer) is signal:
                del self._selective[peer]

    async def _wait(self, signal: Condition) -> None:
        self._core.expect_messages(1)
        try:
            await signal.wait()
        finally:
            if not self._core.closed:
                self._core.expect_messages(-1)
