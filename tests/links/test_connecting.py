"""Connecting: every way to name an engine, and everything that may be found where one was expected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from aiote.core.control import ControlProtocol, HelloReceived, Role
from aiote.core.handshake import HandshakeConfig
from support.engines.opening import PATIENCE_S, each_provider, linked, opened, pair, until

pytestmark = pytest.mark.libfabric

NEVER_S = 1000.0
"""A limit that no test waits for: what ends sooner did not end by it."""
SHORT_S = 0.3
"""A limit for engines that make no connection in their test but the one that comes to nothing."""

NAMES: dict[str, Callable[[aiote.Address], aiote.Address | str]] = {
    "address": lambda address: address,
    "bytes": lambda address: aiote.Address.from_bytes(bytes(address)),
    "text": str,
    "scheme and place": lambda address: f"aiote://{address.host}:{address.port}",
    "place": lambda address: f"{address.host}:{address.port}",
    "name and port": lambda address: f"localhost:{address.port}",
    "address of anyone": lambda address: aiote.Address(address.host, address.port),
}


@pytest.mark.anyio
@each_provider
async def test_every_way_to_name_an_engine_gives_the_same_peer(provider):
    async with pair(provider) as (left, right):
        for name in NAMES.values():
            peer = await left.connect(name(right.address))
            assert peer.connected
            assert peer.address == right.address
            assert left.peers == (peer,)
        await until(lambda: right.peers)
        assert [one.address for one in right.peers] == [left.address]
        await left.send(peer, b"to a peer")
        message = await right.recv()
        assert message.data == b"to a peer"
        assert message.source is right.peers[0]


@pytest.mark.parametrize("name", [pytest.param(name, id=key) for key, name in NAMES.items()])
async def test_each_way_to_name_an_engine_makes_the_first_connection(name):
    async with pair("tcp") as (left, right):
        peer = await left.connect(name(right.address))
        assert peer.address.identity == right.address.identity
        assert left.peers == (peer,)
        assert await left.connect(right.address) is peer
        await right.send(left.address, b"back")
        assert (await left.recv()).source is peer
        assert len(right.peers) == 1


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "http://h:1", None, 5, b"x"]
)
async def test_connecting_to_what_is_no_address_is_refused(wrong):
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError):
            await engine.connect(wrong)


@pytest.mark.parametrize("name", [pytest.param(NAMES[key], id=key) for key in ("address", "text", "place")])
async def test_connecting_to_itself_is_refused(name):
    async with opened("tcp", connect_timeout=NEVER_S) as engine:
        with pytest.raises(aiote.UsageError, match="itself"):
            await engine.connect(name(engine.address))


@pytest.mark.anyio
async def test_connecting_to_a_closed_port_fails():
    with anyio.fail_after(PATIENCE_S), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
        async with opened("tcp", connect_timeout=NEVER_S) as engine:
            with pytest.raises(aiote.PeerError, match=r"127\.0\.0\.1:\d+.*cannot be reached"):
                await engine.connect(f"127.0.0.1:{taken.getsockname()[1]}")
            remote = aiote.Address("127.0.0.1", taken.getsockname()[1], b"i" * 16, 1)
            with pytest.raises(aiote.PeerError, match=r"127\.0\.0\.1:\d+.*cannot be reached"):
                await engine.send(remote, b"x")
            assert engine.peers == ()


async def test_connecting_to_an_unknown_name_fails():
    async with opened("tcp", connect_timeout=NEVER_S) as engine:
        with pytest.raises(aiote.PeerError, match=r"no-such-host\.invalid"):
            await engine.connect("no-such-host.invalid:4000")


@pytest.mark.anyio
async def test_connecting_to_a_silent_port_times_out():
    with anyio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0)) as silent:
        async with opened("tcp", connect_timeout=SHORT_S) as engine:
            with pytest.raises(aiote.ConnectTimeoutError, match=r"no connection was made within 0\.3 s"):
                await engine.connect(f"127.0.0.1:{silent.getsockname()[1]}")
            assert engine.peers == ()


async def test_connecting_to_a_port_that_does_not_accept_times_out():
    """A full backlog drops what comes: not even TCP's own handshake is answered."""
    with anyio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with opened("tcp", connect_timeout=SHORT_S) as engine:
            with pytest.raises(aiote.ConnectTimeoutError, match=r"did not answer within connect_timeout \(0\.3 s\)"):
                await engine.connect(f"127.0.0.1:{full.getsockname()[1]}")
        for filler in fillers:
            filler.close()


@asynccontextmanager
async def impostor(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]) -> AsyncIterator[str]:
    """Run a TCP server; give its `host:port`."""
    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def saying(words: bytes, *, hang_up: bool) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        if not hang_up:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    return serve


GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "an endless frame": b"\xff" * 100_000,
    "an empty frame": b"\0\0\0\0",
    "an unknown kind": b"\0\0\0\x05\xee____",
    "a message out of order": b"\0\0\0\x09\x0a" + b"\0" * 8,
    "a challenge cut short": b"\0\0\0\x03\x02\0\1",
}


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in GARBAGE.items()])
@pytest.mark.parametrize("hang_up", [False, True], ids=["and stays", "and hangs up"])
async def test_connecting_to_a_port_that_speaks_garbage_fails_with_the_reason(words, hang_up):
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as engine, impostor(saying(words, hang_up=hang_up)) as place:
            with pytest.raises(
                aiote.PeerError, match=f"{place}.*(protocol|end|hung up|connection).*both sides are engines"
            ):
                await engine.connect(place)
            assert engine.peers == ()


@pytest.mark.parametrize("words", [b"", b"\0", b"\0\0\0\x57\x02\0\1"], ids=["nothing", "a byte", "half a frame"])
async def test_connecting_to_a_port_that_hangs_up_fails(words):
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as engine, impostor(saying(words, hang_up=True)) as place:
            with pytest.raises(aiote.PeerError, match="the connection (ended|broke)"):
                await engine.connect(place)


@pytest.mark.parametrize("step", ["after its challenge", "after its welcome"])
async def test_connecting_to_an_engine_that_falls_silent_times_out(step):
    """It speaks the protocol well, up to a point."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ControlProtocol(Role.ACCEPTOR, HandshakeConfig(b"i" * 16, 1))
        while data := await reader.read(4096):
            for event in protocol.receive(data) if not protocol.is_over else ():
                if isinstance(event, HelloReceived):
                    protocol.accept()
            if step == "after its challenge" and protocol.is_authenticated:
                continue
            writer.write(protocol.data_to_send())
        writer.close()

    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=SHORT_S) as engine, impostor(serve) as place:
            with pytest.raises(aiote.ConnectTimeoutError, match=r"no connection was made within 0\.3 s"):
                await engine.connect(place)
            assert engine.peers == ()


async def test_connecting_to_another_engine_than_the_one_named_fails():
    async with pair("tcp", connect_timeout=NEVER_S) as (left, right):
        host, port = right.address.host, right.address.port
        with pytest.raises(aiote.PeerError, match="another engine answers at this address"):
            await left.connect(aiote.Address(host, port, b"i" * 16, 1))
        await left.connect(right.address)


@pytest.mark.anyio
async def test_engines_without_a_rail_in_common_refuse_each_other():
    told: list[aiote.Event] = []
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", connect_timeout=NEVER_S) as left, opened("shm", connect_timeout=NEVER_S) as right:
            right.listen_events(told.append)
            for one, other in ((left, right), (right, left)):
                with pytest.raises(aiote.PeerRefusedError, match="no rail in common: .*tcp.*shm|shm.*tcp") as caught:
                    await one.connect(other.address)
                assert str(caught.value).count(str(other.address)) == 1
            await until(lambda: told)
            assert "no rail in common" in str(told[0].details["reason"])
            assert left.peers == right.peers == ()
            async with opened("shm") as third:
                await third.connect(right.address)


@pytest.mark.anyio
@each_provider
async def test_fifty_tasks_that_connect_at_once_get_the_same_peer(provider):
    async with pair(provider) as (left, right):
        found: list[aiote.Peer] = []
        names = list(NAMES.values())

        async def connect(name: Callable[[aiote.Address], aiote.Address | str]) -> None:
            found.append(await left.connect(name(right.address)))

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(connect, names[number % len(names)])
        assert len(found) == 50
        assert set(found) == set(left.peers)
        assert len(left.peers) == 1
        await until(lambda: len(right.peers) == 1)
        for _ in range(3):
            await left.send(found[0], b"one")
            assert (await right.recv()).data == b"one"
        assert len(right.peers) == 1


@pytest.mark.anyio
async def test_fifty_first_writes_to_an_address_connect_once():
    """The first use connects; fifty first uses connect once."""
    async with pair("tcp") as (left, right):
        memory = bytearray(50)
        remote = left.attach(right.register(memory).descriptor)
        source = left.register(bytes(range(50)))
        async with anyio.create_task_group() as group:
            for i in range(50):
                group.start_soon(left.write, source[i : i + 1], remote[i : i + 1])
        assert memory == bytes(range(50))
        assert len(left.peers) == len(right.peers) == 1


@pytest.mark.anyio
async def test_a_cancelled_connect_ends_at_once_and_harms_nobody():
    with anyio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        async with opened("tcp", connect_timeout=2.0) as engine:
            reasons: list[str] = []

            async def wait() -> None:
                with pytest.raises(aiote.PeerError) as caught:
                    await engine.connect(place)
                reasons.append(caught.value.reason)

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                with anyio.move_on_after(0.05) as scope:
                    await engine.connect(place)
                assert scope.cancelled_caught
                assert reasons == []
            assert reasons == ["no connection was made within 2.0 s"]


@pytest.mark.anyio
@each_provider
async def test_connects_cancelled_at_any_point_leave_a_later_one_whole(provider):
    async with pair(provider) as (left, right):
        for turns in range(12):
            async with anyio.create_task_group() as group:
                group.start_soon(left.connect, f"127.0.0.1:{right.address.port}")
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        peer = await left.connect(right.address)
        assert left.peers == (peer,)
        await left.send(peer, b"well")
        assert (await right.recv()).data == b"well"


@pytest.mark.anyio
@pytest.mark.parametrize("who", ["the one that connects", "the one that is connected to"])
async def test_closing_an_engine_while_it_connects_ends_the_attempt(who):
    for turns in range(0, 40, 4):
        ended: list[str] = []
        async with pair("tcp", connect_timeout=NEVER_S) as (left, right):

            async def connect(left: aiote.Engine = left, right: aiote.Engine = right, ended: list[str] = ended) -> None:
                try:
                    await (await left.connect(right.address)).wait_closed()
                    ended.append("connected")
                except (aiote.PeerError, aiote.ClosedError) as error:
                    ended.append(str(error))

            async with anyio.create_task_group() as group:
                group.start_soon(connect)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                await (left if who == "the one that connects" else right).aclose()
        assert len(ended) == 1


async def test_peers_and_their_ends_are_told():
    told: list[aiote.Event] = []
    async with linked("tcp") as (left, right):
        left.listen_events(told.append)
        async with opened("tcp") as third:
            await third.connect(left.address)
            await until(lambda: len(told) == 1)
        await until(lambda: len(told) == 2)
        assert [event.name for event in told] == ["peer.connected", "peer.lost"]
        assert [event.details["peer"] for event in told] == [str(third.address)] * 2
        assert "closed the connection" in str(told[1].details["reason"])
        assert len(left.peers) == len(right.peers) == 1
