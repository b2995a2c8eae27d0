"""Messages that arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .aio import EventLoop, Signal
from .errors import ClosedError

if TYPE_CHECKING:
    from .peer import Peer
    from .rails import Core

__all__ = ["Inbox", "Message"]


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
    wait.
    """

    def __init__(self, loop: EventLoop, core: Core) -> None:
        self._core = core
        self._peers: deque[Peer] = deque()
        self._departed: deque[Message] = deque()
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
        if peer.link is not None:
            while (data := peer.link.take_message()) is not None:
                self._departed.append(Message(peer, data))
        self.arrived()

    def take(self) -> Message | None:
        """Take one message, peers in turn; None when there is none."""
        if self._departed:
            return self._departed.popleft()
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
        for _ in range(min(len(self._arrived), ready + len(self._departed))):
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
