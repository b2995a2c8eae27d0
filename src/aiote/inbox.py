"""Messages that arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aio import EventLoop, Signal
from .errors import ClosedError

if TYPE_CHECKING:
    from .peer import Peer
    from .rails import Core

__all__ = ["Inbox", "Message"]


MOST_DEPARTED = 256
"""Lost peers whose messages are kept; the messages of the one lost first are dropped for one more."""
DEPARTED_BYTES = 64 << 20
"""Bytes of messages that are kept of lost peers, all together."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message: `source` is the peer that sent it, `data` its bytes, the receiver's own."""

    source: Peer
    data: bytes


class Messages(AsyncIterator[Message]):
    """The messages as an iterator that ends with the engine. It holds nothing: a loop may be left at any time."""

    def __init__(self, receive: Callable[[], Awaitable[Message]]) -> None:
        self._receive = receive

    async def __anext__(self) -> Message:
        try:
            return await self._receive()
        except ClosedError:
            raise StopAsyncIteration from None


class Inbox:
    """The messages of all peers. They stay in the peers' pools until somebody takes them, which is what makes senders
    wait. Of lost peers, which cannot wait, so many are kept as the limits above allow; `dropped` counts the others.
    """

    def __init__(self, loop: EventLoop, core: Core) -> None:
        self._core = core
        self._peers: deque[Peer] = deque()
        self._departed: deque[deque[Message]] = deque()
        self._departed_bytes = 0
        self.dropped = 0
        self._arrived = Signal(loop)
        self._early = False

    def add(self, peer: Peer) -> None:
        """Take messages of this peer from now on."""
        self._peers.append(peer)
        self.arrived()

    def remove(self, peer: Peer) -> None:
        """Keep what a lost peer had sent; its pool is gone."""
        if peer in self._peers:
            self._peers.remove(peer)
        kept: deque[Message] = deque()
        while peer.link is not None and (data := peer.link.take_message()) is not None:
            kept.append(Message(peer, data))
            self._departed_bytes += len(data)
        if kept:
            self._departed.append(kept)
        while len(self._departed) > MOST_DEPARTED or self._departed_bytes > DEPARTED_BYTES:
            oldest = self._departed.popleft()
            self._departed_bytes -= sum([len(message.data) for message in oldest])
            self.dropped += len(oldest)
        self.arrived()

    def counted(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Return the core's counts with what it does not know: messages of lost peers, kept and dropped."""
        return {**counts, "inbox": counts["inbox"] + self.departed, "dropped": self.dropped}

    @property
    def departed(self) -> int:
        """How many messages of lost peers are kept."""
        return sum(map(len, self._departed))

    def take(self) -> Message | None:
        """Take one message, peers in turn; None when there is none."""
        if self._departed:
            message = self._departed[0].popleft()
            self._departed_bytes -= len(message.data)
            if not self._departed[0]:
                self._departed.popleft()
            return message
        for _ in range(len(self._peers)):
            peer = self._peers[0]
            self._peers.rotate(-1)
            if peer.link is not None and (data := peer.link.take_message()) is not None:
                return Message(peer, data)
        self._early = self._core.inbox > 0
        return None

    def arrived(self) -> None:
        """Wake as many receivers as there are messages."""
        ready = self._core.inbox
        if self._early:
            # Some have come from peers that are still being connected: nobody can take those yet, so they wake nobody.
            ready = sum([peer.link.messages for peer in self._peers if peer.link is not None])
        for _ in range(min(len(self._arrived), ready + self.departed)):
            self._arrived.wake_one()

    def end(self) -> None:
        """Wake everyone, for the engine is closed."""
        self._arrived.set()

    async def wait(self) -> None:
        """Sleep until there may be a message."""
        self._core.expect_messages(1)
        try:
            await self._arrived.wait()
        finally:
            if not self._core.closed:
                self._core.expect_messages(-1)
