"""Messages between the router and the others, on engines whose mailroom they share with the transfer's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiote
from aiote.demo import wire
from aiote.service import Mailroom
from aiote.service.mailroom import Letters

__all__ = ["Mail", "open_mail"]


class Mail(AsyncIterator[tuple[aiote.Peer, wire.Message]]):
    """Sends `wire` messages, and iterates over those that come, with the peers they come from. Made by `open_mail`.

    Iterating raises WireError at bytes that are no message.
    """

    def __init__(self, mailroom: Mailroom, letters: Letters) -> None:
        self.mailroom = mailroom
        self.engine = mailroom.engine
        self._letters = letters

    async def send(self, peer: aiote.Peer, message: wire.Message) -> None:
        """Send a message; raises PeerError if the peer is gone."""
        await self.engine.send(peer, wire.encode(message))

    async def __anext__(self) -> tuple[aiote.Peer, wire.Message]:
        letter = await anext(self._letters)
        return letter.source, wire.decode(bytes(letter.data))


@asynccontextmanager
async def open_mail(provider: str) -> AsyncIterator[Mail]:
    """Open an engine that takes the demo's messages, and its mailroom."""
    config = aiote.EngineConfig(message_bytes=wire.MESSAGE_BYTES)
    async with aiote.open_engine(provider, config=config) as engine, Mailroom(engine) as mailroom:
        with mailroom.queue(wire.KIND) as letters:
            yield Mail(mailroom, letters)
