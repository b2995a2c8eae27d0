"""`connect_timeout`, on a clock that the test holds: it ends an attempt that comes to nothing; nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiote
from aiote.core.control import Authenticated, ControlProtocol, HelloReceived, Role
from aiote.core.control_frames import Hello, encode, frame
from aiote.core.handshake import VERSION, HandshakeConfig
from aiote.testing import Fabric
from support.engines.opening import until
from support.engines.raw_clients import refusals

TIMEOUT_S = 7.0
SLACK_S = 0.01
"""Round trips of the simulated network, and the polling of a test; microseconds and milliseconds of virtual time."""

pytestmark = pytest.mark.virtual_time

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def limited(**more: float) -> aiote.EngineConfig:
    """Return settings in which the heartbeat's limit is far from the connection's."""
    return aiote.EngineConfig(connect_timeout=TIMEOUT_S, **{"heartbeat_timeout": 1000.0, **more})


def port_of(server: Any) -> int:
    """Return the port of a server in memory, which has no socket."""
    return int(server.address[1])


def hello() -> bytes:
    return frame(encode(Hello(VERSION, VERSION, b"n" * 32, b"i" * 16, 1, bytes(16), 0, False)), None)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.read()
    finally:
        writer.close()


async def silent_after_the_challenge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await talk(reader, writer, until_authenticated=True)


async def silent_after_the_welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await talk(reader, writer, until_authenticated=False)


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, until_authenticated: bool) -> None:
    """Accept as an engine does, and say no more after the challenge, or after the welcome."""
    protocol = ControlProtocol(Role.ACCEPTOR, HandshakeConfig(b"i" * 16, 1))
    try:
        while data := await reader.read(4096):
            for event in () if protocol.is_over else protocol.receive(data):
                if isinstance(event, HelloReceived):
                    protocol.accept()
            if not (until_authenticated and protocol.is_authenticated):
                writer.write(protocol.data_to_send())
    finally:
        writer.close()


@pytest.mark.parametrize("serve", [silent, silent_after_the_challenge, silent_after_the_welcome])
@pytest.mark.parametrize("heartbeat_timeout", [1.5, 1000.0])
async def test_an_attempt_at_a_silent_host_ends_by_the_connect_timeout(serve, heartbeat_timeout):
    with Fabric() as fabric:
        async with fabric.open_engine(config=limited(heartbeat_timeout=heartbeat_timeout)) as engine:
            async with await asyncio.start_server(serve, "127.0.0.1") as server:
                started = fabric.now
                with pytest.raises(aiote.PeerError, match=r"no connection was made within 7\.0 s"):
                    await engine.connect(f"127.0.0.1:{port_of(server)}")
                assert TIMEOUT_S <= fabric.now - started <= TIMEOUT_S + SLACK_S
            async with fabric.open_engine() as other:
                await engine.connect(other.address)


async def test_a_partitioned_host_is_given_up_by_the_connect_timeout():
    with Fabric() as fabric:
        async with fabric.open_engine(config=limited()) as engine, fabric.open_engine() as other:
            await asyncio.sleep(1)  # it accepts by now
            fabric.partition(other)
            started = fabric.now
            with pytest.raises(aiote.PeerError, match=r"within connect_timeout \(7\.0 s\)"):
                await engine.connect(other.address)
            assert TIMEOUT_S <= fabric.now - started <= TIMEOUT_S + SLACK_S
            fabric.heal(other)
            await engine.connect(other.address)


async def test_a_send_that_waits_for_its_connection_ends_by_the_connect_timeout():
    with Fabric() as fabric:
        async with fabric.open_engine(config=limited()) as engine:
            async with await asyncio.start_server(silent, "127.0.0.1") as server:
                nobody = aiote.Address("127.0.0.1", port_of(server), b"i" * 16, 1)
                started = fabric.now
                with pytest.raises(aiote.PeerError, match="no connection was made"):
                    await engine.send(nobody, b"x")
                assert TIMEOUT_S <= fabric.now - started <= TIMEOUT_S + SLACK_S


async def says_nothing(_writer: asyncio.StreamWriter) -> None:
    pass


async def says_half_a_hello(writer: asyncio.StreamWriter) -> None:
    writer.write(hello()[:20])


async def says_a_byte_at_a_time(writer: asyncio.StreamWriter) -> None:
    """However lively it looks: the limit is that of the whole."""
    for byte in hello():
        writer.write(bytes([byte]))
        await asyncio.sleep(0.5)


async def proves_itself_and_offers_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    protocol = ControlProtocol(Role.INITIATOR, HandshakeConfig(b"g" * 16, 1))
    writer.write(protocol.data_to_send())
    while not any(isinstance(event, Authenticated) for event in protocol.receive(await reader.read(4096))):
        writer.write(protocol.data_to_send())
    writer.write(protocol.data_to_send())


@pytest.mark.parametrize("words", [says_nothing, says_half_a_hello, says_a_byte_at_a_time])
async def test_a_connection_that_says_too_little_is_refused_by_the_connect_timeout(words):
    await two_hundred(lambda streams: words(streams[1]))


async def test_a_connection_that_never_offers_is_refused_by_the_connect_timeout():
    await two_hundred(lambda streams: proves_itself_and_offers_nothing(*streams))


async def two_hundred(words: Callable[[Streams], Awaitable[None]]) -> None:
    """Connect so many at once, each with these words; an engine is connected and served past them all."""
    with Fabric() as fabric:
        async with fabric.open_engine() as left, fabric.open_engine(config=limited()) as right:
            reasons, started = refusals(right), fabric.now
            place = right.address.host, right.address.port
            callers = [await asyncio.open_connection(*place) for _ in range(200)]
            speaking = [asyncio.ensure_future(words(caller)) for caller in callers]
            await left.send(right.address, b"past them all")
            assert (await right.recv()).data == b"past them all"
            assert fabric.now - started < TIMEOUT_S
            for reader, writer in callers:
                await reader.read()
                writer.close()
            assert TIMEOUT_S <= fabric.now - started <= TIMEOUT_S + 200 * SLACK_S
            await until(lambda: len(reasons) == 200)
            assert set(reasons) == {"no connection was made within 7.0 s"}
            assert [peer.address for peer in right.peers] == [left.address]
            for task in speaking:
                task.cancel()
            await asyncio.wait(speaking)
