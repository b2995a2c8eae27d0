"""Counters: early arrivals, several waits, cancellation that consumes nothing, freeing, a hundred thousand at once."""

from __future__ import annotations

import asyncio
import gc

import anyio
import anyio.lowlevel
import pytest

import aiote
from support.engines.opening import each_progress, each_provider, go_round, linked, opened, round_trips, until

pytestmark = pytest.mark.libfabric


async def count(sender: aiote.Engine, receiver: aiote.Engine, imm: int, n: int) -> None:
    """Have n immediates arrive, whoever waits for them."""
    before = receiver.statistics().immediates
    for transfer in [sender.submit_write_imm(None, receiver.address, imm) for _ in range(n)]:
        await transfer
    await until(lambda: receiver.statistics().immediates == before + n)


@pytest.mark.anyio
@each_provider
@each_progress
async def test_every_arrival_counts_once_whether_it_is_awaited_or_not(provider, progress):
    """Before the counter is made, while nobody waits, while somebody does: each arrival counts once."""
    async with linked(provider, progress=progress) as (left, right):
        await count(left, right, 7, 3)
        counter = right.counter(7)
        assert counter.imm == 7
        assert counter.value == 3
        await count(left, right, 7, 2)
        assert counter.value == 5
        await counter.wait(4)
        assert counter.value == 1
        async with anyio.create_task_group() as group:
            group.start_soon(counter.wait, 3)
            await go_round()
            await count(left, right, 7, 2)
        assert counter.value == 0
        assert repr(counter) == "<Counter 0x7, 0>"


async def test_counters_of_one_immediate_share_one_count():
    async with linked("tcp") as (left, right):
        one, other = right.counter(7), right.counter(7)
        await count(left, right, 7, 3)
        await one.wait(2)
        assert one.value == other.value == 1
        one.close()
        assert other.value == 1
        await other.wait(1)


async def test_arrivals_of_one_immediate_count_for_no_other():
    async with linked("tcp") as (left, right):
        for imm in range(10):
            await count(left, right, imm, imm)
        assert [right.counter(imm).value for imm in range(10)] == list(range(10))


@pytest.mark.anyio
async def test_waits_are_served_in_order():
    """First come, first served, also where a later one would need less."""
    async with linked("tcp") as (left, right):
        counter = right.counter(7)
        served = []

        async def wait(name: str, n: int) -> None:
            await counter.wait(n)
            served.append(name)

        async with anyio.create_task_group() as group:
            for name, n in (("three", 3), ("one", 1), ("two", 2)):
                group.start_soon(wait, name, n)
                await go_round()
            for arrivals, expected in ((2, []), (1, ["three"]), (1, ["three", "one"]), (1, ["three", "one"])):
                await count(left, right, 7, arrivals)
                await until(lambda expected=expected: len(served) >= len(expected))
                await round_trips(left, right)
                assert served == expected
            await count(left, right, 7, 1)
        assert served == ["three", "one", "two"]
        assert counter.value == 0


@pytest.mark.anyio
@each_progress
async def test_a_cancelled_wait_consumes_nothing_and_lets_the_next_one_go(progress):
    async with linked("tcp", progress=progress) as (left, right):
        counter = right.counter(7)
        served = []

        async def wait(n: int) -> None:
            await counter.wait(n)
            served.append(n)

        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as first:
                    first.start_soon(wait, 3)
                    await go_round()
                    group.start_soon(wait, 2)
                    await go_round()
                    await count(left, right, 7, 2)
                    await round_trips(left, right)
                    assert served == []
                    scope.cancel()
            await until(lambda: served)
        assert served == [2]
        assert counter.value == 0


@pytest.mark.anyio
@each_progress
@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_wait_cancelled_as_it_is_satisfied_consumes_what_it_tells(progress, turns):
    """Whichever wins: what was waited for is either consumed and told, or not consumed."""
    async with linked("tcp", progress=progress) as (left, right):
        counter = right.counter(7)
        told = []
        for _ in range(10):
            scope = anyio.CancelScope()

            async def wait(scope: anyio.CancelScope) -> None:
                with scope:
                    await counter.wait(2)
                    told.append(2)

            async with anyio.create_task_group() as group:
                group.start_soon(wait, scope)
                await go_round(1)
                await count(left, right, 7, 2)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert counter.value == 20 - sum(told)


async def test_a_cancellation_between_satisfaction_and_wake_up_gives_the_counts_back():
    """Both waits were satisfied in one round, and the task of the first cancels the other before that has run."""
    async with linked("tcp") as (left, right):
        await count(left, right, 1, 1)
        between = 0
        for number in range(50):
            counter = right.counter(number + 7)
            arrived = right.statistics().immediates

            async def wait_and_cancel(counter: aiote.Counter, second: asyncio.Task[None], arrived: int) -> bool:
                await counter.wait(1)
                satisfied = right.statistics().immediates == arrived + 3 and counter.value == 0
                assert second.cancel()
                return satisfied

            # The first in line is the first to wait, so the second task is made first and starts later.
            gate = asyncio.Event()

            async def wait_later(counter: aiote.Counter, gate: asyncio.Event) -> None:
                await gate.wait()
                await counter.wait(2)

            second = asyncio.create_task(wait_later(counter, gate))
            first = asyncio.create_task(wait_and_cancel(counter, second, arrived))
            await asyncio.sleep(0)
            gate.set()
            await asyncio.sleep(0)
            transfers = [left.submit_write_imm(None, right.address, number + 7) for _ in range(3)]
            between += await first
            with pytest.raises(asyncio.CancelledError):
                await second
            for transfer in transfers:
                await transfer
            await counter.wait(2)
            assert counter.value == 0
        assert between, "never satisfied before it was cancelled: nothing was tried"


async def test_a_wait_that_ran_out_of_time_may_be_repeated():
    async with linked("tcp") as (left, right):
        counter = right.counter(7)
        await count(left, right, 7, 1)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await counter.wait(2)
        assert counter.value == 1
        await count(left, right, 7, 1)
        await counter.wait(2)


async def test_a_wait_for_zero_ends_at_once():
    async with opened("tcp") as engine:
        await engine.counter(7).wait(0)


@pytest.mark.parametrize("n", [-1, 1.0, "2", None, (1 << 40) + 1])
async def test_a_bad_number_of_counts_is_refused(n):
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError, match="expected the number of writes to wait for, an integer from 0 to"):
            await engine.counter(7).wait(n)


@pytest.mark.parametrize("imm", [-1, 1 << 28, 1.5, "x"])
async def test_a_bad_immediate_is_refused(imm):
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError, match="the immediate is"):
            engine.counter(imm)


@pytest.mark.anyio
async def test_iterating_yields_once_for_each_arrival():
    async with linked("tcp") as (left, right):
        counter = right.counter(7)
        await count(left, right, 7, 2)
        got = []

        async def iterate() -> None:
            async for imm in counter:
                got.append(imm)
                if len(got) == 4:
                    break

        async with anyio.create_task_group() as group:
            group.start_soon(iterate)
            await until(lambda: len(got) == 2)
            await count(left, right, 7, 3)
        assert got == [7, 7, 7, 7]
        assert counter.value == 1


async def test_the_context_frees_the_immediate_and_drops_what_is_left():
    async with linked("tcp") as (left, right):
        with right.counter(7) as counter:
            await count(left, right, 7, 3)
            await counter.wait(1)
            assert right.statistics().counters == 1
        assert right.statistics().counters == 0
        assert counter.value == 0
        assert repr(counter) == "<Counter 0x7, closed>"
        with pytest.raises(aiote.ClosedError, match="the counter of immediate 0x7 is closed"):
            await counter.wait(0)
        counter.close()
        assert right.counter(7).value == 0


async def test_a_counter_that_nobody_holds_keeps_its_counts():
    async with linked("tcp") as (left, right):
        right.counter(7)
        gc.collect()
        assert right.statistics().counters == 0
        await count(left, right, 7, 2)
        assert right.counter(7).value == 2
        gc.collect()
        assert right.counter(7).value == 2


@pytest.mark.anyio
@each_progress
async def test_closing_the_counter_ends_its_waits(progress):
    async with linked("tcp", progress=progress) as (left, right):
        counter, other = right.counter(7), right.counter(7)
        ended = []

        async def wait(which: aiote.Counter) -> None:
            try:
                await which.wait(2)
            except aiote.ClosedError as error:
                ended.append(str(error))

        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(wait, counter)
            await go_round()
            counter.close()
        assert ended == ["the counter of immediate 0x7 is closed"] * 2
        await count(left, right, 7, 2)
        await other.wait(2)


async def test_automatic_counters_are_unused_ones():
    async with linked("tcp") as (left, right):
        counters = [right.counter() for _ in range(100)]
        values = [counter.imm for counter in counters]
        assert len(set(values)) == 100
        assert all(1 << 27 <= value < 1 << 28 for value in values)
        # One that has counts but no counter is used, too.
        following = values[-1] + 1 if values[-1] + 1 < 1 << 28 else 1 << 27
        await count(left, right, following, 1)
        assert right.counter().imm not in {*values, following}
        counters[0].close()
        assert right.counter().imm != values[0]


async def test_automatic_counters_go_round_at_the_end():
    async with opened("tcp") as engine:
        engine._counters._grants._next = (1 << 28) - 2
        taken = engine.counter(1 << 27)
        assert [engine.counter().imm - (1 << 28) for _ in range(2)] == [-2, -1]
        assert engine.counter().imm == (1 << 27) + 1
        taken.close()


@pytest.mark.blocking_allowed("a hundred thousand counters are made without a pause")
async def test_a_hundred_thousand_counters_keep_counts_of_their_own():
    total = 100_000
    async with linked("tcp") as (left, right):
        counters = [right.counter(imm) for imm in range(total)]
        assert right.statistics().counters == total
        for imm in (0, 777, total - 1):
            await count(left, right, imm, 2)
        assert sum(counter.value for counter in counters) == 6
        await counters[777].wait(2)
        for counter in counters:
            counter.close()
        assert right.statistics().counters == 0


async def test_a_counter_beyond_the_limit_is_refused_until_one_is_closed():
    async with linked("tcp", max_counters=3) as (_, right):
        counters = [right.counter(imm) for imm in range(3)]
        with pytest.raises(aiote.UsageError, match=r"counter: 3 immediates are in use.*raise config\.max_counters"):
            right.counter(3)
        right.counter(2)
        counters[0].close()
        right.counter(3)


@each_provider
async def test_arrivals_beyond_the_limit_end_the_connection(provider):
    """Never dropped, never grown: who sends more distinct immediates than the receiver takes hears of it."""
    async with linked(provider, max_counters=3) as (left, right):
        (peer,) = left.peers
        for imm in range(4):
            try:
                await left.write_imm(None, peer, imm)
            except aiote.AioteError:
                break
        await peer.wait_closed()
        assert [right.counter(imm).value for imm in range(3)] == [1, 1, 1]


@each_provider
async def test_a_full_table_loses_the_peer_that_filled_it(provider):
    """Of two peers the one that counts on many values nobody asked for is lost, though the other meets the limit."""
    async with linked(provider, max_counters=8) as (greedy, right), opened(provider) as modest:
        asked = right.counter(100)
        for imm in range(6):
            await greedy.write_imm(None, right.address, imm)
        await modest.write_imm(None, right.address, 100)
        await modest.write_imm(None, right.address, 50)
        await until(lambda: right.counter(50).value == 1)
        await until(lambda: len(right.peers) == 2)
        await modest.write_imm(None, right.address, 51)
        # Until it has come the table is full, and no counter can be opened.
        await until(lambda: len(right.peers) == 1)
        await until(lambda: right.counter(51).value == 1)
        assert right.peers[0].address == modest.address
        assert asked.value == 1


@each_provider
async def test_counts_of_a_peer_that_left_make_room_when_it_is_needed(provider):
    async with opened(provider, max_counters=8) as right, opened(provider) as modest:
        await modest.write_imm(None, right.address, 100)
        async with opened(provider) as greedy:
            for imm in range(7):
                await greedy.write_imm(None, right.address, imm)
        await until(lambda: len(right.peers) == 1)
        # Until the room is needed it stays.
        with right.counter(6) as kept:
            assert kept.value == 1
        for imm in range(50, 56):
            await modest.write_imm(None, right.address, imm)
        await until(lambda: right.counter(55).value == 1)
        assert right.peers[0].address == modest.address
        assert right.counter(100).value == 1
