"""Who waits for room toward a peer, and what happens to the line when something goes wrong in it."""

from __future__ import annotations

import asyncio

import pytest

import aiote
from support.engines.opening import across, each_progress, each_provider, go_round, linked, opened

pytestmark = pytest.mark.libfabric


@each_provider
@pytest.mark.parametrize("writers", [4, 8])
async def test_a_task_that_waits_for_room_is_not_starved(provider, writers):
    """Awaited writes take every place as soon as it is free, and stand in line for more; so does `room`."""
    async with linked(provider, max_transfers=4) as (left, right):
        local, remote = left.register(bytes(64)), across(left, right, bytearray(64))
        await left.write(local, remote)
        over = False

        async def write() -> None:
            while not over:
                await left.write(local, remote)

        tasks = [asyncio.create_task(write()) for _ in range(writers)]
        await go_round()
        for _ in range(20):
            async with asyncio.timeout(20):
                await left.room(remote)
            # The room is ours until the next await.
            await left.submit_write(local, remote)
        over = True
        await asyncio.gather(*tasks)


async def test_room_that_is_not_used_goes_to_the_next():
    async with linked("shm", max_transfers=1) as (left, right):
        local, remote = left.register(bytes(64)), across(left, right, bytearray(64))
        await left.write(local, remote)
        held = left.submit_write(local, remote)
        idlers = [asyncio.create_task(left.room(remote)) for _ in range(5)]
        cancelled = asyncio.create_task(left.room(remote))
        await asyncio.sleep(0)
        cancelled.cancel()
        writer = asyncio.create_task(left.write(local, remote))
        await held
        await asyncio.wait_for(asyncio.gather(*idlers, writer), 20)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await left.write(local, remote)


async def test_a_wait_for_room_ends_when_its_peer_is_lost():
    """What keeps the place is a message that nobody takes."""
    async with opened("tcp", max_transfers=1) as left, opened("tcp", message_pool=2) as right:
        peer = await left.connect(right.address)
        for _ in range(2):
            await left.send(peer, b"fills the pool")
        stuck = left.submit_send(peer, b"waits")
        waiting = asyncio.create_task(left.room(peer))
        await go_round()
        assert not waiting.done()
        await right.aclose()
        with pytest.raises(aiote.PeerError):
            await asyncio.wait_for(waiting, 20)
        with pytest.raises(aiote.AioteError):
            await stuck


@each_provider
async def test_hundreds_of_waiting_transfers_that_are_refused_all_fail(provider):
    """The peer's limit is known once it is connected: each is refused then, one after the other."""
    async with opened(provider) as left, opened(provider) as right:
        payload = bytes(1 << 20)
        long = [left.submit_send(right.address, payload) for _ in range(600)]
        good = left.submit_send(right.address, b"good")
        await asyncio.wait_for(good, 30)
        for transfer in long:
            with pytest.raises(aiote.UsageError, match="accepts at most"):
                await transfer
        assert (await right.recv()).data == b"good"


async def test_a_wait_for_an_address_without_identity_goes_on_with_the_peer_that_answers():
    async with opened("tcp") as left, opened("tcp") as right:
        nameless = aiote.Address(right.address.host, right.address.port)
        early = [left.submit_send(nameless, b"early") for _ in range(3)]
        named = [left.submit_send(right.address, b"named") for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*early, *named), 20)
        assert sorted([(await right.recv()).data for _ in range(6)]) == [b"early"] * 3 + [b"named"] * 3


@each_progress
@each_provider
async def test_whoever_hears_of_a_lost_peer_may_try_again_at_once(provider, progress):
    """The engine has taken note before the tasks run: the error names the peer, and a retry finds a new connection."""
    async with linked(provider, progress=progress) as (left, right):
        local, remote = left.register(bytes(1 << 20)), across(left, right, bytearray(1 << 20))
        await left.write(local, remote)
        errors: list[aiote.AioteError] = []

        async def insist() -> None:
            for _ in range(3):
                try:
                    return await left.write(local, remote)
                except aiote.TransferError as error:
                    assert isinstance(error.cause, aiote.PeerError), error
                    errors.append(error)
                except aiote.PeerError as error:
                    errors.append(error)

        tasks = [asyncio.create_task(insist()) for _ in range(50)]
        await asyncio.sleep(0)
        for link in tuple(left._runtime.core.peers):
            link.fail(5)
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        # A native thread may have been done before.
        assert errors or progress == "thread"
        assert len(errors) <= len(tasks), "nobody failed twice"


@each_provider
async def test_an_interrupt_while_room_is_made_loses_nothing(provider):
    """A signal may raise wherever Python code runs, and what makes room runs in the middle of a collection."""

    class Alarm(Exception):
        pass

    async with linked(provider) as (left, right):
        local, remote = left.register(bytes(64)), across(left, right, bytearray(64))
        await left.write(local, remote)
        (link,) = left._runtime.core.peers
        make_room, calls = link.on_room, 0

        def interrupted() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise Alarm
            make_room()

        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context.get("exception")))
        link.on_room = interrupted
        transfers = [left.submit_write(local, remote) for _ in range(100)]
        link.ready = False  # as it is while somebody stands in the queue: nobody is called otherwise
        await asyncio.wait_for(asyncio.gather(*transfers), 30)
        assert [type(error) for error in told] == [Alarm]
        assert link.unfinished == left.statistics().outstanding == 0
        await asyncio.wait_for(local.aclose(), 30)


async def test_thread_mode_leaves_the_loop_its_turns():
    """What woken tasks start may be over before they sleep again: that is for the loop's next turn."""
    async with linked("shm", progress="thread") as (left, right):
        local, remote = left.register(bytes(64)), across(left, right, bytearray(64))
        await left.write(local, remote)
        over = False
        written = turns = 0

        async def write() -> None:
            nonlocal written
            while not over:
                await left.write(local, remote)
                written += 1

        tasks = [asyncio.create_task(write()) for _ in range(64)]
        while written < 20_000:
            await asyncio.sleep(0)
            turns += 1
        over = True
        await asyncio.gather(*tasks)
        # One batch of at most all writers for each turn of the loop's, give or take what the tasks themselves start.
        assert written / turns < 8 * len(tasks)


async def test_a_counter_that_is_closed_under_a_wait_drops_what_was_counted():
    async with linked("tcp") as (left, right):
        counter = right.counter(7)
        waiting = asyncio.create_task(counter.wait(5))
        await asyncio.sleep(0)
        for _ in range(3):
            await left.write_imm(None, right.address, 7)
        while right.statistics().immediates < 3:
            await asyncio.sleep(0)
        counter.close()
        with pytest.raises(aiote.ClosedError):
            await waiting
        assert right.counter(7).value == 0


async def test_an_await_that_is_resumed_too_early_is_an_error_and_not_the_end():
    async with linked("tcp") as (left, right):
        local, remote = left.register(bytes(8 << 20)), across(left, right, bytearray(8 << 20))
        await left.write(local[:8], remote[:8])
        transfer = left.submit_write(local, remote)
        steps = transfer.__await__()
        steps.send(None)
        with pytest.raises(RuntimeError, match="resumed the await of a transfer before its end"):
            steps.send(None)
        assert not transfer.done()
        await transfer
