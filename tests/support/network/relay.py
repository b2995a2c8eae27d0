"""Somebody in the middle of a control connection: he sees every byte, keeps them, and may change them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

import aiote

Change = Callable[[bytes], bytes]


class Relay:
    """Carries frames between whoever connects to it and one engine.

    `forth` and `back` change each frame on the way (the four bytes of length and what follows); `said` keeps what was
    let through of every connection, in the order in which it came: to the engine, and from it.
    """

    def __init__(self, target: aiote.Address) -> None:
        self.target = target
        self.forth: Change = bytes
        self.back: Change = bytes
        self.said: list[tuple[list[bytes], list[bytes]]] = []
        self.port = 0

    @property
    def address(self) -> aiote.Address:
        """The engine's address, as it is reached here."""
        return aiote.Address("127.0.0.1", self.port, self.target.identity, self.target.incarnation)

    async def carry(self, client: anyio.abc.SocketStream) -> None:
        kept: tuple[list[bytes], list[bytes]] = ([], [])
        self.said.append(kept)
        async with client, await anyio.connect_tcp(self.target.host, self.target.port) as server:
            async with anyio.create_task_group() as group:
                group.start_soon(self._pass, client, server, lambda frame: self.forth(frame), kept[0])
                group.start_soon(self._pass, server, client, lambda frame: self.back(frame), kept[1])

    async def _pass(
        self, source: anyio.abc.ByteStream, target: anyio.abc.ByteStream, change: Change, kept: list[bytes]
    ) -> None:
        unread = b""
        try:
            while True:
                unread += await source.receive()
                while len(unread) >= 4 and len(unread) >= (end := 4 + int.from_bytes(unread[:4], "big")):
                    frame, unread = change(unread[:end]), unread[end:]
                    kept.append(frame)
                    if frame:
                        await target.send(frame)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(target)


@asynccontextmanager
async def relayed(target: aiote.Address) -> AsyncIterator[Relay]:
    """Give a relay in front of an engine."""
    relay = Relay(target)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    relay.port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, relay.carry)
        yield relay
        group.cancel_scope.cancel()
