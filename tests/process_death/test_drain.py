"""Cancelling what a peer does not let end: the await is bounded, the memory is the caller's again, the error says what
is sure.
"""

from __future__ import annotations

import asyncio

import anyio
import pytest

import aiote
from support.engines.opening import (
    LOST_SOON,
    PATIENCE_S,
    each_provider,
    go_round,
    linked,
    opened,
    served_by_process,
    until,
)

pytestmark = pytest.mark.libfabric

BIG = 16 << 20
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""
SOON = {"drain_timeout": 0.2, **LOST_SOON}


async def left_behind(child) -> list[int]:
    """Let a child go on, wait until it has seen that it was left, and return which bytes it has."""
    child.resume()
    while (await child.ask("peers"))["peers"]:
        await anyio.sleep(0.005)
    first = (await child.ask("contents"))["bytes"]
    await anyio.sleep(0.1)
    assert (await child.ask("contents"))["bytes"] == first
    return first


@pytest.mark.anyio
@served_by_process
async def test_a_cancelled_write_to_a_stopped_peer_never_arrives_late(provider, child):
    """No late writes: what the memory holds after the cancellation never arrives."""
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, **SOON) as engine, opened(provider) as other:
            await engine.connect(other.address)
            peer = await engine.connect(stopped.address)
            await stopped.stop()
            memory = bytearray(b"\1" * BIG)
            local = engine.register(memory)
            transfer = engine.submit_write(local, engine.attach(stopped.descriptor))
            with anyio.move_on_after(0.1) as scope:
                await transfer
            assert scope.cancelled_caught
            assert transfer.done()
            memory[:] = b"\2" * BIG
            assert set(await left_behind(stopped)) <= {0, 1}

            error = transfer.exception()
            assert isinstance(error, aiote.TransferError)
            # Nobody can be asked; over shm the gate keeps a peer that stands outside of its library from going on.
            assert error.confirmed is (provider in ("shm", "local"))
            assert "cancelled" in str(error)
            assert "did not leave the NIC within 0.2 s" in peer.reason
            assert await peer.wait_closed() == peer.reason
            await local.aclose()
            memory.clear()
            assert [one.address for one in engine.peers] == [other.address]


async def test_a_cancelled_read_from_a_stopped_peer_never_fills_late(child):
    """The local side of the same promise: nothing is written to it after the cancellation. Not over shm, where a read
    needs nobody's help.
    """
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp", size=BIG, heartbeat_timeout=NEVER_S)
        async with opened("tcp", **SOON) as engine:
            await engine.connect(stopped.address)
            await stopped.stop()
            memory = bytearray(b"\1" * BIG)
            transfer = engine.submit_read(engine.attach(stopped.descriptor), engine.register(memory))
            with anyio.move_on_after(0.1) as scope:
                await transfer
            assert scope.cancelled_caught
            memory[:] = b"\2" * BIG
            await left_behind(stopped)
            assert memory == b"\2" * BIG
            assert transfer.exception().confirmed is False


@served_by_process
async def test_a_deadline_and_a_bare_cancel_while_draining_are_not_swallowed(provider, child):
    """asyncio's own ways of cancelling, one of them in the middle of the draining: none is swallowed or wrapped."""
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, **SOON | {"drain_timeout": 2.0}) as engine:
            await engine.connect(stopped.address)
            remote = engine.attach(stopped.descriptor)
            await stopped.stop()
            memory = bytearray(BIG)
            local = engine.register(memory)
            first = asyncio.ensure_future(engine.write(local, remote))
            await go_round()
            first.cancel()
            await go_round()
            assert not first.done()  # it drains
            first.cancel()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await engine.write(local, remote)
            with pytest.raises(asyncio.CancelledError):
                await first
            await local.aclose()
            memory.clear()


async def test_others_that_wait_for_the_same_transfer_hear_of_it(child):
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp", size=BIG, heartbeat_timeout=NEVER_S)
        async with opened("tcp", **SOON) as engine:
            peer = await engine.connect(stopped.address)
            remote = engine.attach(stopped.descriptor)
            await stopped.stop()
            shared = engine.submit_write(engine.register(bytearray(BIG)), remote)
            another = engine.submit_write(engine.register(bytearray(BIG)), remote)
            heard: list[aiote.TransferError] = []

            async def wait(transfer: aiote.Transfer) -> None:
                with pytest.raises(aiote.TransferError) as caught:
                    await transfer
                heard.append(caught.value)

            async with anyio.create_task_group() as group:
                group.start_soon(wait, shared)
                group.start_soon(wait, another)
                with anyio.move_on_after(0.05) as scope:
                    await shared
                assert scope.cancelled_caught
            assert {error.transfer for error in heard} == {shared, another}
            assert all(str(stopped.address) in str(error) or "cancelled" in str(error) for error in heard)
            # The pair of endpoints is one for all: what else was under way ended with it, and says why.
            (other,) = [error for error in heard if error.transfer is another]
            assert peer.reason in str(other)
            assert not other.confirmed


@served_by_process
async def test_a_peer_that_can_be_asked_confirms(provider, child):
    """A live peer that is merely slower than the patience of the draining: both sides agree that the pair is gone."""
    slow = child()
    with anyio.fail_after(PATIENCE_S):
        await slow.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, drain_timeout=0.1, heartbeat_timeout=PATIENCE_S) as engine:
            remote = engine.attach(slow.descriptor)
            peer = await engine.connect(slow.address)
            await slow.stop()
            transfer = engine.submit_write(engine.register(bytearray(BIG)), remote)

            async def wait() -> None:
                await transfer

            waiting = asyncio.ensure_future(wait())
            await go_round()
            waiting.cancel()
            await until(lambda: peer.lost)
            slow.resume()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            error = transfer.exception()
            assert isinstance(error, aiote.TransferError)
            assert error.confirmed is True
            # It is there to be connected to, and what it has stays as it is.
            before = (await slow.ask("contents"))["bytes"]
            await engine.connect(slow.address)
            await engine.write(engine.register(b"\5" * 64), remote[:64])
            assert (await slow.ask("contents"))["bytes"] == sorted({*before, 5})


@pytest.mark.anyio
@each_provider
async def test_what_ends_in_time_costs_no_connection(provider):
    """A cancellation that drains leaves the peer as it was."""
    async with linked(provider) as (left, right):
        memory = bytearray(1 << 20)
        remote = left.attach(right.register(memory).descriptor)
        local = left.register(b"\1" * (1 << 20))
        (peer,) = left.peers
        for delay in (0, 0, 0.0005, 0.001):
            transfer = left.submit_write(local, remote)
            with anyio.move_on_after(delay) as scope:
                await transfer
            assert transfer.done()
            if scope.cancelled_caught and transfer.exception() is not None:
                assert transfer.exception().confirmed
        assert not peer.lost
        await left.write(local, remote)
        assert memory == b"\1" * (1 << 20)


async def test_cancelling_before_the_peer_is_connected_drains_nothing(child):
    """Nothing was posted: the await ends without any draining."""
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp", size=4096)
        await stopped.stop()
        async with opened("tcp", drain_timeout=NEVER_S, heartbeat_timeout=NEVER_S) as engine:
            local = engine.register(bytearray(4096))
            transfer = engine.submit_write(local, engine.attach(stopped.descriptor))
            with anyio.move_on_after(0.02) as scope:
                await transfer
            assert scope.cancelled_caught
            with pytest.raises(aiote.TransferError, match="cancelled before anything was posted") as caught:
                await transfer
            assert caught.value.confirmed
            await local.aclose()
