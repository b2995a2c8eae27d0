"""The limit of unfinished transfers toward one peer: awaited verbs wait in line, `submit_` forms say that it is met."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import across, each_progress, each_provider, linked, opened, pair, until

pytestmark = [pytest.mark.libfabric, pytest.mark.anyio]


@each_provider
@each_progress
async def test_awaited_writes_beyond_the_limit_wait_for_admission(provider, progress):
    async with linked(provider, progress=progress, max_transfers=4) as (left, right):
        remote = across(left, right, bytearray(1 << 16))
        local = left.register(bytearray(1 << 16))
        seen: set[int] = set()

        async def write() -> None:
            await left.write_imm(local, remote, 1)
            statistics = left.statistics()
            seen.add(statistics.outstanding + statistics.queued)

        async with anyio.create_task_group() as group:
            for _ in range(500):
                group.start_soon(write)
        await right.counter(1).wait(500)
        assert max(seen) <= 4


@each_provider
async def test_submitting_beyond_the_limit_is_refused_and_nothing_is_started(provider):
    async with linked(provider, max_transfers=3) as (left, right):
        remote = across(left, right, bytearray(1 << 20))
        local = left.register(bytearray(1 << 20))
        transfers = [left.submit_write_imm(local, remote, 1) for _ in range(3)]
        for submit in (
            lambda: left.submit_write(local, remote),
            lambda: left.submit_write_imm(None, remote, 1),
            lambda: left.submit_read(remote, local),
            lambda: left.submit_send(right.address, b"x"),
            lambda: left.submit_write_pages(aiote.Pages(local, [0], 8), aiote.Pages(remote, [0], 8), 1),
        ):
            with pytest.raises(
                aiote.QueueFull, match=r"3 transfers toward peer aiote://.* are unfinished; await engine.room"
            ):
                submit()
        for transfer in transfers:
            await transfer
        left.submit_write(local, remote).cancel()
        await right.counter(1).wait(3)
        assert right.counter(1).value == 0


@each_provider
async def test_room_comes_with_each_transfer_that_ends(provider):
    async with linked(provider, max_transfers=2) as (left, right):
        remote = across(left, right, bytearray(8))
        local = left.register(b"12345678")
        for _ in range(100):
            await left.room(remote)
            left.submit_write_imm(local, remote, 1)
        await right.counter(1).wait(100)

        async def one() -> None:
            await left.room(right.address)
            left.submit_write_imm(local, remote, 2)

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(one)
        await right.counter(2).wait(50)


@each_provider
async def test_room_that_is_kept_is_not_taken_by_what_could_start_in_one_call(provider):
    async with linked(provider, max_transfers=1) as (left, right):
        local, remote = left.register(b"12345678"), across(left, right, bytearray(8))
        await left.write(local, remote)  # the next ones need not look their peer up
        use, give_up = await (await left.connect(right.address))._connection.reserve_room()
        with pytest.raises(aiote.QueueFull):
            left.submit_write(local, remote)
        use()
        transfer = left.submit_write(local, remote)
        give_up()
        await transfer
        await left.write(local, remote)


async def test_transfers_that_wait_for_the_connection_count_as_well():
    async with pair("tcp", max_transfers=2) as (left, right):
        remote = across(left, right, bytearray(8))
        local = left.register(b"12345678")
        waiting = [left.submit_write_imm(local, remote, 1) for _ in range(2)]
        with pytest.raises(aiote.QueueFull):
            left.submit_write_imm(local, remote, 1)
        # A cancelled one leaves the line at once.
        waiting[0].cancel()
        left.submit_write_imm(local, remote, 1)
        with anyio.move_on_after(0):
            await left.room(remote)
            pytest.fail("there is no room")
        await left.room(remote)
        await right.counter(1).wait(2)
        with pytest.raises(aiote.TransferError, match="cancelled before anything was posted"):
            await waiting[0]


async def test_a_write_cancelled_while_it_waits_for_admission_ends_at_once():
    async with linked("tcp", max_transfers=1) as (left, right):
        # NumPy's zeros cost nothing before they are touched; a bytearray would hold the loop for that.
        remote = across(left, right, np.zeros(64 << 20, np.uint8))
        local = left.register(np.zeros(64 << 20, np.uint8))
        first = left.submit_write(local, remote)
        ended: list[int] = []

        async def write(number: int, scope: anyio.CancelScope) -> None:
            with scope:
                await left.write_imm(local[:8], remote[:8], 1)
            ended.append(number)

        scopes = [anyio.CancelScope() for _ in range(5)]
        async with anyio.create_task_group() as group:
            for number, scope in enumerate(scopes):
                group.start_soon(write, number, scope)
            await anyio.sleep(0)
            await anyio.sleep(0)
            scopes[1].cancel()
            scopes[3].cancel()
            await anyio.sleep(0)
            assert not first.done()
            await first
        assert sorted(ended) == [0, 1, 2, 3, 4]
        await right.counter(1).wait(3)
        assert right.counter(1).value == 0


async def test_waiting_for_admission_ends_with_the_peer_and_with_the_engine():
    async with opened("tcp", max_transfers=1) as left, opened("tcp") as right, opened("tcp", max_transfers=1) as other:
        remote = across(left, right, bytearray(8))
        local = left.register(b"12345678")
        peer = await left.connect(right.address)
        failed: list[type[BaseException]] = []

        async def room() -> None:
            try:
                await left.room(peer)
            except aiote.AioteError as error:
                failed.append(type(error))

        async def write() -> None:
            try:
                await left.write(local, remote)
            except aiote.AioteError as error:
                failed.append(type(error))

        async with anyio.create_task_group() as group:
            held = [left.submit_send(peer, bytes(8))]
            for work in (room, write):
                group.start_soon(work)
            await anyio.sleep(0)
            assert left.peers == (peer,)
            right.abort()
        await until(lambda: peer.lost)
        assert all(transfer.done() for transfer in held)
        assert all(issubclass(kind, (aiote.PeerError, aiote.TransferError)) for kind in failed)
        with pytest.raises(aiote.PeerError):
            await left.room(peer)
        await other.aclose()
        with pytest.raises(aiote.ClosedError):
            await other.room(left.address)
