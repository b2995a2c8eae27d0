"""`recv_into`: a message is copied whole into memory of the receiver's, or stays."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aiote
from support.engines.opening import each_progress, each_provider, go_round, linked, opened, pair, until

pytestmark = pytest.mark.libfabric

UNTOUCHED = b"\xa5"


@pytest.mark.anyio
@each_provider
@each_progress
async def test_messages_fill_the_buffer_and_nothing_behind_them(provider, progress):
    async with linked(provider, progress=progress, message_bytes=1000) as (left, right):
        peer = await right.connect(left.address)
        for length in (0, 1, 999, 1000):
            payload = bytes(number % 251 for number in range(length))
            for receive in (right.recv_into, peer.recv_into):
                memory = bytearray(UNTOUCHED * 1010)
                await left.send(right.address, payload)
                with memoryview(memory)[5:-5] as inner:
                    found = await receive(inner)
                assert found == ((length, peer) if receive == right.recv_into else length)
                assert memory == UNTOUCHED * 5 + payload + UNTOUCHED * (1005 - length)


@pytest.mark.anyio
@each_provider
async def test_a_longer_message_is_an_error_and_stays(provider):
    async with linked(provider) as (left, right):
        peer = await right.connect(left.address)
        await left.send(right.address, b"0123456789")
        await until(lambda: right.statistics().inbox == 1)
        for receive in (right.recv_into, peer.recv_into):
            short = bytearray(UNTOUCHED * 9)
            with pytest.raises(aiote.UsageError, match="has 10 bytes, but the buffer only 9; the message stays"):
                await receive(short)
            assert short == UNTOUCHED * 9
        assert right.statistics().inbox == 1
        fits = bytearray(10)
        assert await right.recv_into(fits) == (10, peer)
        assert fits == b"0123456789"
        assert right.statistics().inbox == 0


@pytest.mark.anyio
@each_provider
async def test_messages_of_a_lost_peer_stay_and_are_copied_alike(provider):
    async with pair(provider) as (left, right):
        for payload in (b"first", b"second"):
            await left.send(right.address, payload)
        await until(lambda: right.statistics().inbox == 2)
        peer = await right.connect(left.address)
        await left.aclose()
        await peer.wait_closed()
        for receive in (right.recv_into, peer.recv_into):
            with pytest.raises(aiote.UsageError, match="but the buffer only 4; the message stays"):
                await receive(bytearray(4))
        assert right.statistics().inbox == 2
        memory = np.zeros(3, np.float64)
        assert await right.recv_into(memory) == (5, peer)
        assert memory.tobytes()[:5] == b"first"
        assert await peer.recv_into(memory) == 6
        assert memory.tobytes()[:6] == b"second"
        with pytest.raises(aiote.PeerLostError, match="recv"):
            await peer.recv_into(memory)


@pytest.mark.anyio
@each_provider
async def test_a_receiver_without_room_hands_its_wake_up_to_the_next(provider):
    """Two wait, one message comes, the first has no room for it: the second gets it."""
    async with linked(provider) as (left, right):
        got: list[bytes] = []

        async def fail() -> None:
            with pytest.raises(aiote.UsageError, match="the message stays"):
                await right.recv_into(bytearray(2))

        async def take() -> None:
            got.append((await right.recv()).data)

        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await go_round()
            group.start_soon(take)
            await go_round()
            await left.send(right.address, b"long")
        assert got == [b"long"]


@pytest.mark.anyio
@each_provider
@each_progress
async def test_a_cancelled_one_loses_nothing_and_lets_go_of_the_buffer(provider, progress):
    """Cancelled at every turn of the loop from its start until it has the message."""
    async with linked(provider, progress=progress) as (left, right):
        for turns in range(5):
            memory, got = bytearray(UNTOUCHED * 8), []
            scope = anyio.CancelScope()

            async def take(scope=scope, memory=memory, got=got) -> None:
                with scope:
                    try:
                        got.append(await right.recv_into(memory))
                    except BaseException:
                        # Fails while anything, the exception's frames included, has the buffer.
                        memory.extend(b"+")
                        raise

            async with anyio.create_task_group() as group:
                group.start_soon(take)
                await anyio.lowlevel.checkpoint()
                await left.send(right.address, b"precious")
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
            if got:
                assert memory == b"precious"
            else:
                assert memory == UNTOUCHED * 8 + b"+"
                assert (await right.recv()).data == b"precious"
        assert right.statistics().inbox == 0


async def test_what_is_no_memory_to_write_to_is_refused_at_once():
    strided, released = np.zeros(16, np.uint8)[::2], memoryview(bytearray(8))
    released.release()
    async with opened("socket") as right:
        for unfit, why in (
            (b"read-only", "writable and contiguous"),
            (memoryview(b"read-only"), "writable and contiguous"),
            (strided, "writable and contiguous"),
            (released, "memoryview gives no buffer"),
            (8, "int gives no buffer"),
            (None, "NoneType gives no buffer"),
            (np.zeros(2, object), "ndarray of object: its elements are pointers"),
            (np.ma.zeros(2), "MaskedArray has a mask"),
        ):
            with pytest.raises(aiote.UsageError, match=f"recv_into: .*{why}"):
                await right.recv_into(unfit)


@pytest.mark.anyio
@each_provider
@each_progress
async def test_many_messages_arrive_once_each_whatever_way_they_are_taken(provider, progress):
    """Four receivers, two of them with buffers of their own, and more messages than the pool has room for."""
    total = 60
    async with linked(provider, progress=progress, message_pool=4) as (left, right):
        got: list[bytes] = []

        async def copy(scope: anyio.CancelScope) -> None:
            memory = bytearray(4)
            while True:
                length, source = await right.recv_into(memory)
                assert source.address == left.address
                taken(bytes(memory[:length]), scope)

        async def take(scope: anyio.CancelScope) -> None:
            while True:
                taken((await right.recv()).data, scope)

        def taken(data: bytes, scope: anyio.CancelScope) -> None:
            got.append(data)
            if len(got) == total:
                scope.cancel()

        async with anyio.create_task_group() as group:
            for receive in (copy, take, copy, take):
                group.start_soon(receive, group.cancel_scope)
            for number in range(total):
                await left.send(right.address, b"%d" % number)
        assert sorted(got) == sorted(b"%d" % number for number in range(total))
