"""Messages over the engine: whole ones in, whole ones out."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator

import aiote
from aiote.cli.demo import wire

__all__ = ["Mail"]


class Mail:
    """Sends and receives `wire` messages through an engine. One receiver at a time; any number of senders."""

    def __init__(self, engine: aiote.Engine) -> None:
        self._engine = engine
        self._assembler = wire.Assembler()
        self._numbers = itertools.count()

    async def send(self, peer: aiote.Peer, message: wire.Message) -> None:
        """Send a message, in as many frames as it takes; raises PeerError if the peer is gone."""
        for frame in wire.split(wire.encode(message), next(self._numbers) & 0xFFFFFFFF):
            await self._engine.send(peer, frame)

    async def receive(self) -> AsyncGenerator[tuple[aiote.Peer, wire.Message], None]:
        """Yield each message with the peer it came from; raises WireError at bytes that are none."""
        while True:
            arrived = await self._engine.recv()
            data = self._assembler.feed(str(arrived.source.address), bytes(arrived.data))
            if data is not None:
                yield arrived.source, wire.decode(data)
