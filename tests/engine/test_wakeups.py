"""What wakes when: tasks run where the engine's own callback is, and others of the loop are not kept from theirs."""

from __future__ import annotations

import asyncio

import pytest

import aiote
from support.engines.opening import PATIENCE_S, across, each_provider, linked, until


@pytest.mark.libfabric
@each_provider
async def test_an_interrupt_in_a_woken_task_ends_the_loop_after_the_others_have_heard(provider):
    """The tasks of one round: the first raises what ends the program, the second has its end delivered all the same."""

    class Stop(BaseException):
        pass

    async with linked(provider) as (left, right):
        transfer = left.submit_write(left.register(b"12345678"), across(left, right, bytearray(8)))
        heard: list[str] = []
        loop = asyncio.get_running_loop()
        told: list[dict[str, object]] = []
        loop.set_exception_handler(lambda _loop, context: told.append(context))

        async def stop() -> None:
            await transfer
            raise Stop

        async def hear() -> None:
            await transfer
            heard.append("ended")

        stopping, hearing = asyncio.create_task(stop()), asyncio.create_task(hear())
        with pytest.raises(Stop):
            await stopping
        await hearing
        assert heard == ["ended"]


@pytest.mark.libfabric
@each_provider
async def test_a_woken_task_may_close_the_engine(provider):
    """It runs inside the engine's own turn, which must not touch what is gone."""
    async with linked(provider) as (left, right):
        remote = across(left, right, bytearray(8))
        await left.write(left.register(b"12345678"), remote)
        counter = right.counter(1)

        async def close() -> None:
            await counter.wait(1)
            await right.aclose()

        async def wait() -> None:
            await counter.wait(5)

        closing, waiting = asyncio.create_task(close()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        transfers = [left.submit_write_imm(None, remote, 1) for _ in range(3)]
        await closing
        with pytest.raises(aiote.ClosedError):
            await waiting
        for transfer in transfers:
            try:
                await transfer
            except aiote.AioteError:
                pass


@pytest.mark.libfabric
@each_provider
async def test_a_woken_task_may_abort_both_engines(provider):
    async with linked(provider) as (left, right):
        remote = across(left, right, bytearray(8))
        await left.write(left.register(b"12345678"), remote)

        async def abort() -> None:
            with right.counter(1) as counter:
                await counter.wait(1)
                left.abort()
                right.abort()

        task = asyncio.create_task(abort())
        await asyncio.sleep(0)
        transfers = [left.submit_write_imm(None, remote, 1) for _ in range(50)]
        await task
        ends = await asyncio.gather(*transfers, return_exceptions=True)
        assert all(end is None or isinstance(end, aiote.AioteError) for end in ends)


@pytest.mark.libfabric
@each_provider
async def test_other_callbacks_of_the_loop_have_their_turns_while_tasks_wake_each_other(provider):
    """Two engines of one loop play ball through woken tasks alone; a timer and a plain callback are not starved."""
    async with linked(provider, spin_us=1_000_000) as (left, right):
        there, back = across(left, right, bytearray(8)), across(right, left, bytearray(8))
        await left.write(left.register(b"12345678"), there)
        await right.write(right.register(b"12345678"), back)
        over = False
        games = {1: 0, 2: 0}

        async def play(engine: aiote.Engine, remote: aiote.RemoteRegion, imm: int, first: bool) -> None:
            with engine.counter(imm) as counter:
                while not over:
                    if first:
                        await engine.submit_write_imm(None, remote, 3 - imm)
                    await counter.wait(1)
                    if not first:
                        await engine.submit_write_imm(None, remote, 3 - imm)
                    games[imm] += 1

        players = [asyncio.create_task(play(left, there, 1, True)), asyncio.create_task(play(right, back, 2, False))]
        while games[1] <= 10:
            await asyncio.sleep(0)
        await until(lambda: games[1] > 20)  # which sets timers
        over = True
        done, pending = await asyncio.wait(players, timeout=PATIENCE_S)
        for task in pending:
            task.cancel()
        assert done
        for task in done:
            task.result()


@pytest.mark.libfabric
@each_provider
async def test_a_transfer_is_awaited_by_everything_that_takes_awaitables(provider):
    async with linked(provider) as (left, right):
        local, remote = left.register(b"12345678"), across(left, right, bytearray(8))

        async def task() -> None:
            await left.write(local, remote)

        async with asyncio.TaskGroup() as group:
            group.create_task(left.write(local, remote))
            group.create_task(task())
        await asyncio.wait_for(left.write(local, remote), 30)
        await asyncio.wait_for(left.submit_write(local, remote), 30)
        await asyncio.shield(left.submit_write(local, remote))
        await asyncio.gather(*(left.submit_write(local, remote) for _ in range(10)), left.write(local, remote))
        transfer = left.submit_write(local, remote)
        assert await asyncio.gather(transfer, transfer, transfer) == [None, None, None]
        assert await transfer is None


@pytest.mark.libfabric
@each_provider
async def test_the_quick_and_the_slow_way_to_start_a_transfer_do_the_same(provider):
    """The first transfer to a region looks its peer up, the others start in one call; both say what they are."""
    async with linked(provider) as (left, right):
        memory = bytearray(8)
        local, remote = left.register(b"12345678"), across(left, right, memory)
        texts = []
        for _ in range(2):
            transfer = left.submit_write_imm(local, remote, 7)
            texts.append(transfer.description)
            await transfer
        assert texts == ["write_imm of 8 bytes"] * 2
        assert memory == b"12345678"
        # Where a NIC answers for the target, that is told later than we are.
        await right.counter(7).wait(2)
        for verb, text in (
            (lambda: left.submit_write(local, remote), "write of 8 bytes"),
            (lambda: left.submit_send(right.address, b"123"), "send of 3 bytes"),
        ):
            assert [verb().description for _ in range(2)] == [text] * 2


@pytest.mark.libfabric
@each_provider
async def test_no_transfer_overtakes_one_that_waits_for_admission(provider):
    """With room for one, the second waits; a third, which could start in one call, comes after it."""
    async with linked(provider, max_transfers=1) as (left, right):
        memory = bytearray(8 << 20)
        local, remote = left.register(bytes(8 << 20)), across(left, right, memory)
        await left.write(local[:8], remote[:8])
        order: list[int] = []

        async def write(number: int) -> None:
            await left.write_imm(local, remote, 1)
            order.append(number)

        tasks = [asyncio.create_task(write(number)) for number in range(4)]
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]
        with pytest.raises(aiote.QueueFull):
            for _ in range(2):
                left.submit_write(local, remote)
        await left.room(remote)
