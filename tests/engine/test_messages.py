"""Messages: they all arrive, once, whole; who sends faster than the other side takes waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import aiote
from support.engines.opening import each_progress, each_provider, go_round, linked, opened, pair, round_trips, until

pytestmark = pytest.mark.libfabric


@pytest.mark.anyio
@each_provider
@each_progress
async def test_messages_go_both_ways_and_name_their_sender(provider, progress):
    async with pair(provider, progress=progress) as (left, right):
        await left.send(right.address, b"ping")
        message = await right.recv()
        assert message.data == b"ping"
        assert message.source.address == left.address
        await right.send(message.source, b"pong")
        answer = await left.recv()
        assert (answer.data, answer.source.address) == (b"pong", right.address)


@each_provider
async def test_payloads_of_every_kind_and_size_arrive_whole(provider):
    async with linked(provider, message_bytes=1000) as (left, right):
        payloads = [
            b"",
            b"x",
            bytearray(b"bytearray"),
            memoryview(b"0123456789")[2:5],
            np.arange(4, dtype=np.uint16),
            memoryview(b"0123456789")[::2],
            bytes(range(250)) * 4,
        ]
        for payload in payloads:
            await left.send(right.address, payload)
        got = [(await right.recv()).data for _ in payloads]
        assert Counter(got) == Counter(bytes(memoryview(payload)) for payload in payloads)
        assert all(type(data) is bytes for data in got)


async def test_the_payload_may_be_changed_at_once():
    async with linked("tcp") as (left, right):
        payload = bytearray(b"before")
        transfer = left.submit_send(right.address, payload)
        payload[:] = b"after!"
        await transfer
        assert (await right.recv()).data == b"before"


@each_provider
async def test_a_message_that_is_too_long_for_its_receiver_is_refused(provider):
    """The receiver's limit counts; told at once if the peer is known, else when it is."""
    async with pair(provider, message_bytes=1000) as (left, right):
        says = "a message of 1001 bytes, but the peer accepts at most 1000 .*write larger data with engine.write"
        with pytest.raises(aiote.UsageError, match=says):
            await left.send(right.address, bytes(1001))
        with pytest.raises(aiote.UsageError, match=says):
            left.submit_send(right.address, bytes(1001))
        await left.send(right.address, bytes(1000))
        assert (await right.recv()).data == bytes(1000)


async def test_each_side_is_held_to_the_others_limit_of_a_message():
    async with opened("tcp", message_bytes=100) as small, opened("tcp", message_bytes=5000, message_pool=3) as large:
        await small.send(large.address, bytes(5000))
        assert len((await large.recv()).data) == 5000
        with pytest.raises(aiote.UsageError, match="accepts at most 100"):
            await large.send(small.address, bytes(101))
        for _ in range(40):
            await large.send(small.address, bytes(100))
            await small.recv()


@pytest.mark.anyio
@each_provider
@each_progress
async def test_a_sender_waits_for_a_receiver_that_takes_nothing(provider, progress):
    """As many as the pool holds are on their way, the rest wait with their sender; then all arrive, none twice."""
    async with linked(provider, progress=progress, message_pool=4) as (left, right):
        transfers = [left.submit_send(right.address, b"%d" % number) for number in range(40)]
        await until(lambda: sum(transfer.done() for transfer in transfers) >= 4)
        await round_trips(left, right)
        assert sum(transfer.done() for transfer in transfers) == 4
        assert left.statistics().queued == 36
        assert right.statistics().inbox == 4
        got = Counter([(await right.recv()).data for _ in transfers])
        assert got == Counter(b"%d" % number for number in range(40))
        for transfer in transfers:
            await transfer
        assert left.statistics().queued == right.statistics().inbox == 0


@pytest.mark.anyio
@each_provider
async def test_writes_pass_where_messages_wait(provider):
    """Back-pressure is the messages' own: writes, reads and counts go on."""
    async with linked(provider, message_pool=2) as (left, right):
        waiting = [left.submit_send(right.address, b"x") for _ in range(10)]
        remote = left.attach(right.register(bytearray(8)).descriptor)
        await left.write_imm(left.register(b"12345678"), remote, 1)
        await right.counter(1).wait(1)
        assert not waiting[-1].done()
        for _ in waiting:
            await right.recv()
        for transfer in waiting:
            await transfer


@pytest.mark.anyio
@each_provider
async def test_a_flood_both_ways_with_small_pools_arrives_whole(provider):
    """Neither side's messages wait for the other's: credits flow back beside them."""
    total = 120
    async with linked(provider, message_pool=2) as (left, right):
        got: dict[aiote.Engine, list[bytes]] = {left: [], right: []}

        async def send(here: aiote.Engine, there: aiote.Engine) -> None:
            for number in range(total):
                await here.send(there.address, b"%d" % number)

        async def take(engine: aiote.Engine) -> None:
            async for message in engine.messages():
                got[engine].append(message.data)
                if len(got[engine]) == total:
                    return

        async with anyio.create_task_group() as group:
            group.start_soon(send, left, right)
            group.start_soon(send, right, left)
            group.start_soon(take, left)
            group.start_soon(take, right)
        expected = Counter(b"%d" % number for number in range(total))
        assert Counter(got[left]) == Counter(got[right]) == expected


@pytest.mark.anyio
async def test_several_receivers_share_the_messages():
    async with linked("tcp") as (left, right):
        got = []

        async def take() -> None:
            got.append((await right.recv()).data)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(take)
            await go_round()
            for number in range(5):
                await left.send(right.address, b"%d" % number)
        assert sorted(got) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_peer_that_floods_does_not_starve_another():
    """Peers are served in turn: a quiet one's message is among the first two."""
    async with linked("tcp", message_pool=8) as (left, right), opened("tcp") as third:
        flood = [left.submit_send(right.address, b"flood") for _ in range(20)]
        await third.send(right.address, b"quiet")
        await until(lambda: right.statistics().inbox == 9)
        assert b"quiet" in [(await right.recv()).data for _ in range(2)]
        for _ in range(len(flood) + 1 - 2):
            assert (await right.recv()).data in (b"flood", b"quiet")


@pytest.mark.anyio
@each_progress
async def test_a_cancelled_recv_loses_nothing(progress):
    async with linked("tcp", progress=progress) as (left, right):
        for turns in range(4):
            got = []
            scope = anyio.CancelScope()

            async def take(scope: anyio.CancelScope, got: list[bytes]) -> None:
                with scope:
                    got.append((await right.recv()).data)

            async with anyio.create_task_group() as group:
                group.start_soon(take, scope, got)
                await anyio.lowlevel.checkpoint()
                await left.send(right.address, b"precious")
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
            if not got:
                got.append((await right.recv()).data)
            assert got == [b"precious"]


async def test_a_cancelled_recv_hands_its_wake_up_to_the_next():
    """Two wait, one message comes, the first is cancelled as it is woken: the second gets the message.

    Receivers run in the round that finds the message, so nothing comes between. Another receiver, whose buffer is too
    short, hands its wake-up to the first and cancels it before it runs.
    """
    async with linked("tcp") as (left, right):
        tasks: list[asyncio.Task[aiote.Message]] = []

        async def refuse() -> None:
            with pytest.raises(aiote.UsageError, match="the message stays"):
                await right.recv_into(bytearray(1))
            tasks[0].cancel()

        refusing = asyncio.create_task(refuse())
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(right.recv()) for _ in range(2)]
        await asyncio.sleep(0)
        await left.send(right.address, b"precious")
        await refusing
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert (await tasks[1]).data == b"precious"


async def test_a_cancelled_send_that_waited_never_arrives():
    async with linked("tcp", message_pool=2) as (left, right):
        sent = [left.submit_send(right.address, b"%d" % number) for number in range(2)]
        for transfer in sent:
            await transfer
        doomed, kept = left.submit_send(right.address, b"doomed"), left.submit_send(right.address, b"kept")
        doomed.cancel()
        with pytest.raises(aiote.TransferError, match="send of 6 bytes: cancelled"):
            await doomed
        assert [(await right.recv()).data for _ in range(3)] == [b"0", b"1", b"kept"]
        await kept
        await round_trips(left, right)
        assert right.statistics().inbox == 0


@each_provider
async def test_what_arrived_of_a_peer_that_left_is_kept(provider):
    async with pair(provider) as (left, right):
        for number in range(3):
            await left.send(right.address, b"%d" % number)
        await until(lambda: right.statistics().inbox == 3 and right.peers)
        (peer,) = right.peers
        await left.aclose()
        await peer.wait_closed()
        got = [await right.recv() for _ in range(3)]
        assert sorted(message.data for message in got) == [b"0", b"1", b"2"]
        assert {message.source for message in got} == {peer}


@pytest.mark.anyio
async def test_a_loop_over_messages_ends_with_the_engine():
    async with linked("tcp") as (left, right):
        got = []

        async def take() -> None:
            async for message in right.messages():
                got.append(message.data)
            got.append(None)

        async with anyio.create_task_group() as group:
            group.start_soon(take)
            await left.send(right.address, b"last")
            await until(lambda: got)
            await right.aclose()
        assert got == [b"last", None]


@pytest.mark.anyio
async def test_messages_have_one_listener_and_its_end_leaves_the_next_alone():
    async with pair("sim") as (left, right):
        heard: list[bytes] = []

        def hear() -> None:
            while (message := right.recv_nowait()) is not None:
                heard.append(message.data)

        stop = right.listen_messages(hear, lambda: None)
        with pytest.raises(aiote.UsageError, match="has a listener already"):
            right.listen_messages(lambda: None, lambda: None)
        await left.send(right.address, b"one")
        await until(lambda: heard == [b"one"])
        stop()
        right.listen_messages(hear, lambda: None)
        stop()
        await left.send(right.address, b"two")
        await until(lambda: heard == [b"one", b"two"])
    with pytest.raises(aiote.ClosedError):
        right.listen_messages(hear, lambda: None)
