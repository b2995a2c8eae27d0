"""Cancelling whoever awaits: the cancellation passes unchanged, after the NIC has let go, and the engine works on."""

from __future__ import annotations

import asyncio

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import (
    PATIENCE_S,
    across,
    each_memory,
    each_progress,
    each_provider,
    go_round,
    linked,
    pair,
    round_trips,
    until,
)

pytestmark = pytest.mark.libfabric

LARGE = 8 << 20
STRIPE = 8192

VERBS = {
    "write": lambda engine, local, remote: engine.write(local, remote),
    "write_imm": lambda engine, local, remote: engine.write_imm(local, remote, 1),
    "read": lambda engine, local, remote: engine.read(remote, local),
    "write_pages": lambda engine, local, remote: engine.write_pages(
        aiote.Pages(local, range(LARGE // STRIPE), STRIPE), aiote.Pages(remote, range(LARGE // STRIPE), STRIPE), 1
    ),
}


@pytest.mark.anyio
@each_memory
@each_progress
@pytest.mark.parametrize("verb", ["write_imm", "read"])
async def test_a_task_cancelled_in_a_large_transfer_ends_when_nothing_moves_any_more(provider, progress, verb):
    await cancel_large(provider, progress, verb)


@each_memory
@pytest.mark.parametrize("verb", ["write", "write_pages"])
async def test_other_verbs_are_cancelled_alike(provider, verb):
    await cancel_large(provider, "adaptive", verb)


def count_of(verb: str, remote_memory: np.ndarray) -> int:
    """Return the immediates that belong to what has arrived: one a page, or one for all of it."""
    if verb == "write_pages":
        return int((remote_memory.reshape(-1, STRIPE) == 1).all(1).sum())
    return int(verb == "write_imm" and (remote_memory == 1).all())


async def cancel_large(provider: str, progress: str, verb: str) -> None:
    """Cancel a task in the middle of a large transfer, and see that nothing moves afterwards but new transfers."""
    local_memory, remote_memory = np.full(LARGE, 1, np.uint8), np.full(LARGE, 2, np.uint8)
    # A peer that is lost counts no more, and a busy machine may take longer than a second to end a GPU's copies.
    settings = {"progress": progress, "largest_message": STRIPE, "drain_timeout": PATIENCE_S}
    async with linked(provider, **settings) as (left, right):
        local, remote = left.register(local_memory), across(left, right, remote_memory)
        raised: list[BaseException] = []

        async def move() -> None:
            try:
                await VERBS[verb](left, local, remote)
            except BaseException as error:
                raised.append(error)
                raise

        already = left.statistics().posted
        async with anyio.create_task_group() as group:
            group.start_soon(move)
            await until(lambda: left.statistics().posted > already)
            group.cancel_scope.cancel()
        # A native thread may have been done before.
        expected = [] if progress == "thread" and not raised else [anyio.get_cancelled_exc_class()]
        assert [type(error) for error in raised] == expected
        assert left.statistics().outstanding == left.statistics().queued == 0
        arrived = count_of(verb, remote_memory)
        local_memory[:], before = 7, remote_memory.copy()
        await round_trips(left, right)
        assert (local_memory == 7).all()
        assert np.array_equal(remote_memory, before)
        assert right.counter(1).value == arrived
        await left.write_imm(local, remote, 3)
        await right.counter(3).wait(1)
        assert (remote_memory == 7).all()


@each_provider
async def test_a_timeout_of_asyncio_ends_every_await_with_its_error(provider):
    async with linked(provider, largest_message=STRIPE) as (left, right):
        local, remote = left.register(np.zeros(LARGE, np.uint8)), across(left, right, np.zeros(LARGE, np.uint8))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await left.write(local, remote)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await right.counter(1).wait(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await right.recv()
        await left.write(local, remote)


@pytest.mark.anyio
@each_provider
async def test_a_timeout_of_anyio_ends_every_await_with_its_error(provider):
    async with linked(provider, largest_message=STRIPE) as (left, right):
        local, remote = left.register(np.zeros(LARGE, np.uint8)), across(left, right, np.zeros(LARGE, np.uint8))
        with pytest.raises(TimeoutError), anyio.fail_after(0.001):
            while True:
                await left.write(local, remote)
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            await right.counter(1).wait(1)
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            await right.recv()
        with pytest.raises(TimeoutError), anyio.fail_after(0.01):
            async for _ in left.watch(bytearray(8)):
                pass
        await left.write(local, remote)
        assert left.statistics().outstanding == left.statistics().queued == 0


@pytest.mark.anyio
async def test_a_write_cancelled_while_connecting_never_starts():
    """The transfer never starts; the connection comes to be all the same."""
    async with pair("tcp") as (left, right):
        target = bytearray(8)
        local, remote = left.register(b"12345678"), across(left, right, target)
        async with anyio.create_task_group() as group:
            group.start_soon(left.write, local, remote)
            group.start_soon(left.connect, right.address)
            await go_round(1)
            group.cancel_scope.cancel()
        await until(lambda: left.peers)
        await round_trips(left, right)
        assert target == bytes(8)
        await left.write(local, remote)
        assert target == b"12345678"


@each_memory
async def test_further_cancellations_do_not_end_the_draining_early(provider):
    """A second and a third cancellation cannot make the await let go of the buffer early."""
    target = np.zeros(LARGE, np.uint8)
    async with linked(provider, largest_message=STRIPE) as (left, right):
        source = np.full(LARGE, 1, np.uint8)
        task = asyncio.create_task(left.write(left.register(source), across(left, right, target)))
        await until(lambda: left.statistics().queued)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        assert task.cancelled()
        assert left.statistics().outstanding == left.statistics().queued == 0
        before = target.copy()
        source[:] = 2
        await round_trips(left, right)
        assert np.array_equal(target, before)


@each_memory
async def test_one_awaiter_cancelled_cancels_the_transfer_for_all(provider):
    async with linked(provider, largest_message=STRIPE) as (left, right):
        transfer = left.submit_write(
            left.register(np.zeros(LARGE, np.uint8)), across(left, right, np.zeros(LARGE, np.uint8))
        )

        async def wait() -> None:
            await transfer

        one, other = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        with pytest.raises(aiote.TransferError, match="cancelled"):
            await other


@each_provider
async def test_a_shielded_transfer_goes_on_when_its_task_is_cancelled(provider):
    async with linked(provider, largest_message=STRIPE) as (left, right):
        target = np.zeros(LARGE, np.uint8)
        transfer = left.submit_write(left.register(np.full(LARGE, 1, np.uint8)), across(left, right, target))

        async def wait() -> None:
            await transfer

        inner = asyncio.create_task(wait())
        outer = asyncio.shield(inner)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        await inner
        assert (target == 1).all()


async def test_a_cancellation_that_meets_the_completion_is_not_lost():
    """The transfer is over, its task is about to be told, and is cancelled by one that was told before."""
    async with linked("tcp") as (left, right):
        target = bytearray(8)
        local, remote = left.register(b"12345678"), across(left, right, target)

        async def wait() -> None:
            await transfer

        async def wait_and_cancel() -> None:
            await transfer
            assert not second.done()
            assert second.cancel()

        for _ in range(100):
            transfer = left.submit_write(local, remote)
            first, second = asyncio.create_task(wait_and_cancel()), asyncio.create_task(wait())
            await asyncio.sleep(0)
            if not transfer.done():
                break
            # A busy machine stopped this process, and a thread of the engine went on: it was over before both waited.
            await asyncio.gather(first, second, return_exceptions=True)
        else:
            pytest.fail("100 transfers were over before their tasks waited")
        await first
        with pytest.raises(asyncio.CancelledError):
            await second
        assert transfer.exception() is None
        assert target == b"12345678"


@each_provider
async def test_a_transfer_whose_coroutine_is_closed_is_cancelled(provider):
    """Nobody can wait for what it started: that is cancelled, and drains by itself."""
    async with linked(provider, largest_message=STRIPE) as (left, right):
        local, remote = left.register(np.full(LARGE, 1, np.uint8)), across(left, right, np.zeros(LARGE, np.uint8))
        coroutine = left.write_imm(local, remote, 1)
        coroutine.send(None)
        coroutine.close()
        await until(lambda: left.statistics().outstanding == left.statistics().queued == 0)
        await left.write_imm(local, remote, 2)
        await right.counter(2).wait(1)
        assert right.counter(1).value == 0


async def test_of_hundreds_of_cancelled_writes_only_the_finished_ones_count():
    """Some finish, some do not; the count is that of the finished ones, and nothing is left behind."""
    size = 100_000
    async with linked("tcp", largest_message=STRIPE) as (left, right):
        local, remote = left.register(np.zeros(size, np.uint8)), across(left, right, np.zeros(size, np.uint8))
        tasks = [asyncio.create_task(left.write_imm(local, remote, 1)) for _ in range(300)]
        await until(lambda: sum(task.done() for task in tasks) >= 50)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        finished = results.count(None)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        await until(lambda: left.statistics().outstanding == 0)
        assert finished >= 50
        assert left.statistics().queued == 0
        # A cancelled one may have been delivered whole by then, but never in part, and never more than once.
        assert finished <= right.counter(1).value <= 300
        await left.write_imm(local, remote, 2)
        await right.counter(2).wait(1)
