"""Those who connect to an engine's control port and are no engines: raw sockets, and one that knows the handshake."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

import aiote
from aiote.core.control import ControlProtocol, MessageReceived, Role
from aiote.core.control_frames import EngineOffer, RailOffer
from aiote.core.handshake import HandshakeConfig

LIKE_YOURS = (RailOffer(0, "tcp", "tcp", "lo", 0),)
"""Stands for the rails that the engine itself offers."""


class Stranger:
    """A TCP connection to an engine's control port."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.heard = b""

    async def dial(self, address: aiote.Address) -> None:
        self.socket.connect_ex((address.host, address.port))
        await anyio.wait_writable(self.socket)

    async def say(self, words: bytes) -> None:
        """Send everything; an engine that hangs up meanwhile has heard enough."""
        while words:
            await anyio.wait_writable(self.socket)
            try:
                words = words[self.socket.send(words) :]
            except ConnectionError:
                return

    async def hear(self, *, until_end: bool) -> bytes:
        """Return all that the engine says until it hangs up, or the next thing that it says."""
        while True:
            await anyio.wait_readable(self.socket)
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                data = b""
            self.heard += data
            if not data or not until_end:
                return self.heard if until_end else data


@asynccontextmanager
async def stranger(address: aiote.Address) -> AsyncIterator[Stranger]:
    one = Stranger()
    with one.socket:
        await one.dial(address)
        yield one


def refusals(engine: aiote.Engine) -> list[str]:
    """Collect the reasons of an engine's refusals."""
    reasons: list[str] = []

    def note(event: aiote.Event) -> None:
        if event.name == "connection.refused":
            reasons.append(str(event.details["reason"]))

    engine.listen_events(note)
    return reasons


def offer(**changes: object) -> EngineOffer:
    """Return an offer that an engine could make."""
    fields: dict = {
        "host_id": bytes(32),
        "message_bytes": 16384,
        "pool": 16,
        "heartbeat_ms": 1000,
        "rails": LIKE_YOURS,
        "address": aiote.Address("127.0.0.1", 9, b"i" * 16, 1),
    }
    return EngineOffer(**{**fields, **changes})


class Insider(Stranger):
    """A stranger that knows the protocol and gets through its handshake; what it says then is the test's."""

    def __init__(self, identity: bytes = b"i" * 16, key: bytes | None = None) -> None:
        super().__init__()
        self.protocol = ControlProtocol(Role.INITIATOR, HandshakeConfig(identity, 1, key))
        self.events: list[object] = []

    async def next(self, kind: type) -> object:
        """Return the next event or message of a kind."""
        while True:
            for place, event in enumerate(self.events):
                item = event.message if isinstance(event, MessageReceived) else event
                if isinstance(item, kind):
                    del self.events[: place + 1]
                    return item
            await self.say(self.protocol.data_to_send())
            self.events += self.protocol.receive(await self.hear(until_end=False))

    async def tell(self, *messages: object) -> None:
        for message in messages:
            self.protocol.send(message)
        await self.say(self.protocol.data_to_send())
