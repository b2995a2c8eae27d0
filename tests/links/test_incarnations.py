"""Engines that restart: what was addressed to an earlier life fails at once, and the new one is found."""

from __future__ import annotations

import dataclasses
import socket

import anyio
import pytest

import aiote
from support.engines.opening import LOST_SOON, PATIENCE_S, each_provider, opened, served_by_process, served_on, until

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

NAME = bytes(range(16))
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""


def named(provider: str, port: int = 0):
    """Open an engine that has the same name in every life."""
    return opened(provider, identity=NAME, port=port, heartbeat_timeout=NEVER_S)


@pytest.mark.anyio
@each_provider
async def test_a_stale_address_is_refused_at_once(provider):
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, heartbeat_timeout=NEVER_S) as left:
            async with named(provider) as first:
                stale = first.address
                memory = first.register(bytearray(64)).descriptor
            async with named(provider, stale.port) as second:
                assert (second.address.host, second.address.port) == (stale.host, stale.port)
                assert second.address.identity == stale.identity == NAME
                assert second.address.incarnation != stale.incarnation
                with pytest.raises(aiote.PeerError, match="incarnation.*restarted; ask for its present address"):
                    await left.connect(stale)
                with pytest.raises(aiote.PeerError, match="restarted"):
                    await left.write(left.register(bytearray(64)), left.attach(memory))
                with pytest.raises(aiote.PeerError, match="restarted"):
                    await left.send(stale, b"x")
                assert second.peers == ()
                # Whoever asks for whoever is there finds the new one.
                peer = await left.connect(f"{stale.host}:{stale.port}")
                assert peer.address == second.address


@pytest.mark.anyio
@each_provider
async def test_a_restarted_peer_connects_anew(provider):
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, heartbeat_timeout=NEVER_S) as left:
            first = await named(provider)
            before = await left.connect(first.address)
            attached = left.attach(first.register(bytearray(64)).descriptor)
            await left.write(left.register(bytes(64)), attached)
            await first.aclose()
            assert await before.wait_closed()
            async with named(provider, first.address.port) as second:
                after = await left.connect(second.address)
                assert after is not before
                assert before.lost
                assert after.connected
                with pytest.raises(aiote.PeerError, match="restarted"):
                    await left.write(left.register(bytes(64)), attached)
                with pytest.raises(aiote.PeerError):
                    await left.send(before, b"x")
                memory = bytearray(64)
                await left.write(left.register(b"n" * 64), left.attach(second.register(memory).descriptor))
                assert memory == b"n" * 64
                await second.send(left.address, b"hello again")
                assert (await left.recv()).source is after


@served_by_process
@pytest.mark.parametrize("dialled_by", ["the restarted one", "the other one"])
async def test_a_new_incarnation_comes_when_the_old_one_is_silent(provider, dialled_by, child):
    """The old life is stopped as by a host that died: nothing tells of its end."""
    old = child()
    with anyio.fail_after(PATIENCE_S):
        await old.open(provider, size=8 << 20, identity=NAME, heartbeat_timeout=NEVER_S)
        async with opened(provider, connect_timeout=PATIENCE_S, **LOST_SOON) as left:
            before = await left.connect(old.address)
            await old.stop()
            memory = left.register(bytearray(8 << 20))
            stuck = [left.submit_write(memory, left.attach(old.descriptor)) for _ in range(2)]
            async with opened(provider, identity=NAME, heartbeat_timeout=NEVER_S, connect_timeout=PATIENCE_S) as new:
                if dialled_by == "the restarted one":
                    await new.connect(left.address)
                else:
                    await left.connect(new.address)
                for transfer in stuck:
                    with pytest.raises(aiote.TransferError, match="of 8388608 bytes.*"):
                        await transfer
                assert before.lost
                await until(lambda: [peer.address for peer in left.peers] == [new.address])
                await left.send(new.address, b"to the new one")
                assert (await new.recv()).data == b"to the new one"


@pytest.mark.anyio
@pytest.mark.parametrize("dialled_by", ["the impostor", "the other one"])
async def test_nobody_displaces_an_engine_that_lives(dialled_by):
    """Another holder of the key says that it is a later life of an engine, which is connected."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket", connect_timeout=2.0) as left, named("socket") as honest:
            peer = await left.connect(honest.address)
            async with opened("socket", identity=NAME, connect_timeout=2.0) as impostor:
                assert impostor.address.incarnation > honest.address.incarnation
                with pytest.raises(aiote.PeerError, match="an earlier life of this engine is connected"):
                    await (
                        impostor.connect(left.address)
                        if dialled_by == "the impostor"
                        else left.connect(impostor.address)
                    )
            assert left.peers == (peer,)
            await served_on(left, honest)


@pytest.mark.anyio
async def test_a_new_incarnation_ends_the_wait_for_the_old_one():
    """The old life's port takes connections and says nothing, as a process that hangs."""
    with anyio.fail_after(PATIENCE_S), socket.create_server(("127.0.0.1", 0)) as hanging:
        async with opened("socket", connect_timeout=NEVER_S) as left, anyio.create_task_group() as tasks:
            old = aiote.Address("127.0.0.1", hanging.getsockname()[1], NAME, 1)

            async def wait_for_the_old_one() -> None:
                with pytest.raises(aiote.PeerError, match="a new incarnation of it has connected"):
                    await left.connect(old)

            tasks.start_soon(wait_for_the_old_one)
            async with named("socket") as new:
                await new.connect(left.address)


@pytest.mark.anyio
@pytest.mark.parametrize("dialled_by", ["the older one", "the other one"])
async def test_an_older_incarnation_does_not_displace_a_newer_one(dialled_by):
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as left, named("socket") as older, named("socket") as newer:
            assert older.address.incarnation < newer.address.incarnation
            peer = await newer.connect(left.address)
            with pytest.raises(aiote.PeerError, match="a newer incarnation of it is connected"):
                await (older.connect(left.address) if dialled_by == "the older one" else left.connect(older.address))
            assert [one.address for one in left.peers] == [newer.address]
            assert peer.connected
            await served_on(left, newer)


@pytest.mark.anyio
async def test_a_claimed_address_is_not_where_a_peer_is_reached():
    """One that says that it listens where another does is not taken for that one."""
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as left, opened("socket") as liar, opened("socket") as honest:
            liar._runtime.address = dataclasses.replace(
                liar.address, host=honest.address.host, port=honest.address.port
            )
            await liar.connect(left.address)
            await until(lambda: left.peers)
            place = f"{honest.address.host}:{honest.address.port}"
            peer = await left.connect(place)
            assert peer.address == honest.address
            assert await left.connect(place) is peer
            assert len(left.peers) == 2


@pytest.mark.anyio
async def test_a_peer_that_has_dialled_us_is_found_at_its_place():
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as left, opened("socket") as right:
            await right.connect(left.address)
            await until(lambda: left.peers)
            place = f"{right.address.host}:{right.address.port}"
            assert await left.connect(place) is left.peers[0]
            assert await left.connect(place) is left.peers[0]


@pytest.mark.anyio
async def test_another_engine_on_the_same_port_is_not_taken_for_the_old_one():
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp", heartbeat_timeout=NEVER_S) as left:
            async with opened("tcp") as first:
                stale = first.address
            async with opened("tcp", port=stale.port) as second:
                with pytest.raises(aiote.PeerError, match="another engine answers at this address"):
                    await left.connect(stale)
                assert (await left.connect(second.address)).address == second.address


async def test_one_name_twice_on_one_port_is_an_error():
    async with named("tcp") as first:
        with pytest.raises(aiote.FabricError, match=f"cannot listen on 127.0.0.1 port {first.address.port}") as caught:
            await named("tcp", first.address.port)
        assert caught.value.operation == "open control port"
