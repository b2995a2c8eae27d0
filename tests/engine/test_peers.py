"""What a program does with one peer: read its messages alone, end its connection, and tell why it cannot be reached."""

from __future__ import annotations

import functools
import pickle
import socket

import anyio
import pytest

import aiote
from support.engines.opening import (
    LOST_SOON,
    PATIENCE_S,
    each_provider,
    linked,
    opened,
    pair,
    round_trips,
    run_script,
    until,
)

pytestmark = pytest.mark.anyio
KEY, OTHER = b"a key of a cluster, 25 bytes", b"another key of a cluster, 33 bytes"


async def test_recv_of_a_peer_takes_that_peers_messages_alone():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right), opened("socket") as other:
            await other.connect(right.address)
            for number in range(10):
                await left.send(right.address, b"left %d" % number)
                await other.send(right.address, b"other %d" % number)
            from_left = next(peer for peer in right.peers if peer.address == left.address)
            from_other = next(peer for peer in right.peers if peer.address == other.address)
            got = [(await from_other.recv()).data for _ in range(10)]
            assert got == [b"other %d" % number for number in range(10)]
            assert [(await from_left.recv()).source for _ in range(10)] == [from_left] * 10
            assert right.statistics().inbox == 0


async def test_recv_of_a_peer_waits_and_is_woken_by_it_alone():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right), opened("socket") as other:
            await other.connect(right.address)
            from_left = next(peer for peer in right.peers if peer.address == left.address)
            got: list[bytes] = []

            async def take() -> None:
                got.append((await from_left.recv()).data)

            async with anyio.create_task_group() as group:
                group.start_soon(take)
                group.start_soon(take)
                await other.send(right.address, b"not for them")
                await until(lambda: right.statistics().inbox == 1)
                assert got == []
                await left.send(right.address, b"one")
                await left.send(right.address, b"two")
            assert sorted(got) == [b"one", b"two"]
            assert (await right.recv()).data == b"not for them"


async def test_two_that_read_one_peer_in_loops_both_end_with_the_engine():
    """Woken together, one takes the message and waits again before the other has looked."""
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right):
            (peer,) = right.peers
            got: list[bytes] = []

            async def read() -> None:
                async for message in peer.messages():
                    got.append(message.data)

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                for number in range(5):
                    await left.send(right.address, b"%d" % number)
                    await until(functools.partial(lambda number: len(got) > number, number))
                await right.aclose()
            assert got == [b"%d" % number for number in range(5)]


async def test_a_cancelled_recv_of_a_peer_loses_nothing():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right):
            (peer,) = right.peers
            async with anyio.create_task_group() as group:
                group.start_soon(peer.recv)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
            await left.send(right.address, b"still there")
            assert (await peer.recv()).data == b"still there"


async def test_messages_of_a_lost_peer_are_read_before_its_loss_is_told():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right), opened("socket") as other:
            await other.send(right.address, b"of another")
            peer = next(peer for peer in right.peers if peer.address == left.address)
            for number in range(3):
                await left.send(right.address, b"%d" % number)
            await until(lambda: right.statistics().inbox == 4)
            await left.aclose()
            await peer.wait_closed()
            assert [message.data async for message in peer.messages()] == [b"0", b"1", b"2"]
            with pytest.raises(aiote.PeerLostError, match="recv: peer .*closed the connection"):
                await peer.recv()
            assert (await right.recv()).data == b"of another"


async def test_recv_of_a_peer_ends_with_the_peer_and_with_the_engine():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right):
            (peer,) = right.peers
            ended: list[type] = []

            async def take() -> None:
                try:
                    await peer.recv()
                except aiote.AioteError as error:
                    ended.append(type(error))

            async with anyio.create_task_group() as group:
                group.start_soon(take)
                await anyio.wait_all_tasks_blocked()
                left.abort()
            assert ended == [aiote.PeerLostError]
        async with linked("socket") as (left, right):
            (peer,) = right.peers
            async with anyio.create_task_group() as group:
                group.start_soon(take)
                await anyio.wait_all_tasks_blocked()
                await right.aclose()
            assert ended[1:] == [aiote.ClosedError]


@each_provider
async def test_disconnect_ends_one_peer_and_no_other(provider):
    """What is under way to it ends, the other side hears why, and its next use connects anew."""
    with anyio.fail_after(PATIENCE_S):
        async with pair(provider) as (left, right), opened(provider) as other:
            await other.connect(left.address)
            peer = await left.connect(right.address)
            await until(lambda: right.peers)
            (back,) = right.peers
            waiting = left.counter(1)
            peer.disconnect("enough for today")
            assert (peer.lost, peer.connected, peer.reason) == (True, False, "enough for today")
            assert "enough for today" in await back.wait_closed()
            peer.disconnect("again")
            assert peer.reason == "enough for today"
            with pytest.raises(aiote.PeerLostError):
                await left.send(peer, b"no")
            waiting.close()
            await round_trips(left, other)
            again = await left.connect(right.address)
            assert again is not peer
            await round_trips(left, right)


@pytest.mark.parametrize("reason", [None, 5, b"bytes", ValueError("no")])
async def test_a_reason_that_is_no_text_changes_nothing(reason):
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right):
            with pytest.raises(aiote.UsageError, match="the reason must be text"):
                left.peers[0].disconnect(reason)
            await round_trips(left, right)


async def test_addresses_are_taken_as_text_wherever_an_address_is():
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as left, opened("socket") as right:
            text = str(right.address)
            assert left.find_peer(text) is None
            await left.send(text, b"1")
            assert left.find_peer(text) is left.peers[0]
            await left.write_imm(None, text, 5)
            await left.room(text)
            group = await left.peer_group([text])
            await left.scatter(group, [aiote.ScatterTarget(None, text)], 5)
            with right.counter(5) as counter:
                await counter.wait(2)
            async with left.register(bytearray(64)) as region, region.lease(slice(0, 8), text) as lease:
                assert len(right.attach(lease.descriptor)) == 8
            assert region.closed
            for wrong in ("nonsense", "", "host:port"):
                with pytest.raises(aiote.UsageError):
                    left.submit_send(wrong, b"")


async def test_a_message_does_not_show_its_data():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket") as (left, right):
            await left.send(right.address, b"a secret")
            message = await right.recv()
            assert "secret" not in repr(message)
            assert "8 bytes" in repr(message)


async def test_settings_are_taken_by_name():
    with anyio.fail_after(PATIENCE_S):
        config = aiote.EngineConfig(spin_us=7, message_pool=4)
        async with aiote.open_engine("socket", config=config, message_pool=8) as engine:
            assert (engine.config.spin_us, engine.config.message_pool) == (7, 8)
        with pytest.raises(aiote.UsageError, match="'spin' is no setting; did you mean spin_us"):
            aiote.open_engine("socket", spin=1)
        with pytest.raises(aiote.UsageError, match="'zzz' is no setting: expected one of cluster_key"):
            aiote.open_engine("socket", zzz=1)
        with pytest.raises(aiote.UsageError, match="config must be an EngineConfig, got dict"):
            aiote.open_engine("socket", config={})
        with pytest.raises(aiote.UsageError, match="port=-1"):
            aiote.open_engine("socket", port=-1)


async def test_the_error_tells_why_there_is_no_connection():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with anyio.fail_after(PATIENCE_S):
        async with opened("socket") as engine:
            with pytest.raises(aiote.PeerRefusedError, match="cannot be reached"):
                await engine.connect(f"127.0.0.1:{port}")
        for mine in (OTHER, None):
            async with (
                opened("socket", cluster_key=KEY, host="127.0.0.1") as engine,
                opened("socket", cluster_key=mine, host="127.0.0.1") as stranger,
            ):
                with pytest.raises(aiote.AuthenticationError, match="key"):
                    await stranger.connect(engine.address)
        async with opened("socket") as engine, opened("local") as other:
            with pytest.raises(aiote.PeerRefusedError, match="no rail in common"):
                await other.connect(engine.address)


async def test_a_lost_peer_is_told_from_one_that_was_never_there():
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket", **LOST_SOON) as (left, right):
            (peer,) = left.peers
            right.abort()
            await peer.wait_closed()
            with pytest.raises(aiote.PeerError) as caught:
                await left.send(peer.address, b"")
            assert not isinstance(caught.value, aiote.PeerLostError)
            with pytest.raises(aiote.PeerLostError):
                left.submit_send(peer, b"")


def examples() -> list[aiote.AioteError]:
    cause = aiote.FabricError(5, "it broke", operation="write", rail="eth0")
    transfer = aiote.TransferError(object(), cause, "write failed", confirmed=False, confirmed_bytes=3, total_bytes=9)
    told = [
        kind("aiote://there", "it left", operation="send")
        for kind in (
            aiote.PeerError,
            aiote.PeerLostError,
            aiote.ConnectTimeoutError,
            aiote.PeerRefusedError,
            aiote.AuthenticationError,
            aiote.LeaseRevokedError,
        )
    ]
    plain = [kind("what happened") for kind in (aiote.UsageError, aiote.ClosedError, aiote.QueueFull)]
    return [cause, transfer, *told, *plain]


def test_every_error_survives_pickling():
    kinds = {getattr(aiote, name) for name in aiote.__all__}
    errors = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, aiote.AioteError)}
    assert {type(error) for error in examples()} == errors - {aiote.AioteError}
    for error in examples():
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        told = {name: value for name, value in vars(error).items() if name not in ("transfer", "cause")}
        assert {name: value for name, value in vars(again).items() if name not in ("transfer", "cause")} == told
        assert getattr(again, "errno", None) == getattr(error, "errno", None)
    again = pickle.loads(pickle.dumps(examples()[1]))
    assert again.transfer is None
    assert str(again.__cause__) == str(again.cause) == "write on rail eth0: it broke (errno 5)"


@pytest.mark.blocking_allowed("it waits for a process")
def test_an_error_reaches_the_parent_of_a_process():
    """As it does with multiprocessing and Ray, which pickle what a task raises."""
    done = run_script(
        """
        import multiprocessing, aiote

        def fails():
            cause = aiote.PeerLostError("aiote://there", "it died", operation="write")
            raise aiote.TransferError(object(), cause, "write failed", total_bytes=9)

        with multiprocessing.get_context("fork").Pool(1) as pool:
            try:
                pool.apply(fails)
            except aiote.TransferError as error:
                print(error.total_bytes, error.cause)
        """
    )
    assert done.stdout == "9 write: peer aiote://there: it died\n", done.stderr


@pytest.mark.blocking_allowed("it waits for a process")
def test_an_engine_of_which_only_a_peer_is_kept_goes_on():
    """It lives as long as its event loop; then, never closed, it is reported."""
    done = run_script(
        """
        import asyncio, gc, aiote

        async def start(address):
            engine = await aiote.open_engine("socket")
            return await engine.connect(address), engine.register(bytearray(8))

        async def main():
            async with aiote.open_engine("socket") as other:
                peer, region = await start(other.address)
                gc.collect()
                await other.send(other.peers[0], b"still there")
                print((await peer.recv()).data.decode(), peer.lost, region.closed)

        asyncio.run(main())
        gc.collect()
        """
    )
    assert done.stdout == "still there False False\n", done.stderr
    assert done.stderr.count("was never closed") == 1
