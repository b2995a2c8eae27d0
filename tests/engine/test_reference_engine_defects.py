"""Regression tests, by name, for the defects of the reference engine.

Defect numbers are those of the list that this project keeps of the reference: 1 lost bytes, 2 stripes with the wrong
key, 3 immediates that depend on the sender's NICs, 4 immediates that come early, 6 completions read that say nothing,
7 memory reused too soon, 9 callbacks that stop the engine, 10 empty requests and registrations that are not one's own,
12 peers with other numbers of NICs. Of 8, queues that overflow at fan-in, is test_fan_in.py. Several rails are
several times the loopback NIC, or simulated ones.
"""

from __future__ import annotations

from itertools import pairwise

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import (
    PATIENCE_S,
    across,
    each_progress,
    each_provider,
    go_round,
    linked,
    opened,
    pair,
    round_trips,
    until,
)

pytestmark = pytest.mark.libfabric


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(("size", "rails"), [(1, 2), (16385, 2), (196611, 4), (3, 4), (65537, 3), (1 << 20, 3)])
async def test_defect_1_striping_drops_bytes(size, rails):
    """Defect 1: 1 byte over 2 NICs sent nothing, 16385 over 2 lost one, 196611 over 4 lost three."""
    async with linked("tcp", ["lo"] * rails, stripe_bytes=1) as (left, right):
        source, target = noise(size), np.zeros(size, np.uint8)
        posted = left.statistics().posted
        await left.write_imm(left.register(source), across(left, right, target), 1)
        await right.counter(1).wait(1)
        assert np.array_equal(target, source)
        assert left.statistics().posted - posted == min(size, rails)


@each_provider
@pytest.mark.parametrize("size", [1, 16385, 196611])
async def test_defect_1_writes_over_the_largest_message_drop_bytes(provider, size):
    """Defect 1, with stripes that a largest message asks for: sizes that no number of stripes divides."""
    async with linked(provider, largest_message=4096) as (left, right):
        source, target = noise(size), np.zeros(size, np.uint8)
        await left.write_imm(left.register(source), across(left, right, target), 1)
        await right.counter(1).wait(1)
        assert np.array_equal(target, source)


async def test_defect_1_pages_keep_their_remainders():
    """Defect 1, in pages: each is cut over the rails without losing its last bytes."""
    async with linked("tcp", ["lo"] * 3, stripe_bytes=1) as (left, right):
        source, target = noise(7 * 1001), np.zeros(7 * 1001, np.uint8)
        src = aiote.Pages(left.register(source), range(7), 1001)
        await left.write_pages(src, aiote.Pages(across(left, right, target), range(7), 1001), 1)
        await right.counter(1).wait(7)
        assert np.array_equal(target, source)


@each_provider
async def test_defect_1_scatters_keep_their_remainders(provider):
    """Defect 1: a scatter that was cut by bytes dropped remainders."""
    async with linked(provider, largest_message=1000) as (left, right):
        group = await left.peer_group([right.address])
        source, target = noise(9999), np.zeros(9999, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        cuts = [0, 1, 1, 1003, 4000, 9999]
        parts = [slice(a, b) for a, b in pairwise(cuts)]
        await left.scatter(group, [aiote.ScatterTarget(region[part], remote[part]) for part in parts], 1)
        await right.counter(1).wait(len(parts))
        assert np.array_equal(target, source)


async def test_defect_2_a_stripe_carries_the_key_of_the_rail_that_posts_it():
    """Defect 2: a stripe built for one NIC was posted on another. Simulated NICs draw other keys, and some address
    memory from 0, so that any mistake is an error or writes elsewhere.
    """
    async with linked("sim", ["sim0", "sim1", "sim2"], stripe_bytes=1) as (left, right):
        source, target = noise(1 << 20), np.zeros(1 << 20, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        for part in (slice(0, 3), slice(3, 100_000), slice(100_000, 1 << 20)):
            await left.write_imm(region[part], remote[part], 1)
        await right.counter(1).wait(3)
        assert np.array_equal(target, source)
        pages = [aiote.Pages(each, range(256), 4096) for each in (region, remote)]
        target[:] = 0
        await left.write_pages(*pages, 1)
        assert np.array_equal(target, source)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (1, 2), (3, 2), (4, 4)])
async def test_defect_3_the_count_depends_on_the_number_of_nics(ours, theirs):
    """Defect 3: one write gave as many immediates as its sender had NICs, and the receiver had to know how many."""
    async with opened("tcp", ["lo"] * ours, stripe_bytes=1) as left:
        async with opened("tcp", ["lo"] * theirs, stripe_bytes=1) as right:
            local, remote = left.register(noise(10_000)), across(left, right, np.zeros(10_000, np.uint8))
            counter = right.counter(1)
            for size in (1, 2, 9999, 10_000):
                await left.write_imm(local[:size], remote[:size], 1)
            await left.write_imm(None, remote, 1)
            await left.write_pages(aiote.Pages(local, range(5), 999), aiote.Pages(remote, range(5), 999), 1)
            await counter.wait(10)
            await round_trips(left, right)
            assert counter.value == 0


@pytest.mark.anyio
@each_provider
@each_progress
async def test_defect_4_immediates_before_the_counter_are_lost(provider, progress):
    """Defect 4: what arrived before the receiver armed its counter was lost."""
    async with linked(provider, progress=progress) as (left, right):
        for _ in range(5):
            await left.write_imm(None, right.address, 7)
        await until(lambda: right.statistics().immediates == 5)
        counter = right.counter(7)
        assert counter.value == 5
        await counter.wait(3)
        await left.write_imm(None, right.address, 7)
        await counter.wait(3)
        assert counter.value == 0


async def test_defect_6_a_failed_completion_is_taken_for_another_kind():
    """Defect 6: the kind of a failed completion was read where it is undefined.

    Writes, reads and messages fail side by side: each ends with an error of its own, nothing is counted or received.
    """
    async with linked("tcp", message_pool=2) as (left, right):
        region = right.register(bytearray(1000))
        remote = left.attach(region.descriptor)
        await region.aclose()
        local = left.register(bytearray(1000))
        transfers = {
            "write of 1000 bytes": left.submit_write(local, remote),
            "write_imm of 1000 bytes": left.submit_write_imm(local, remote, 1),
            "read of 1000 bytes": left.submit_read(remote, local),
            "write_pages of 10 pages of 100 bytes": left.submit_write_pages(
                aiote.Pages(local, range(10), 100), aiote.Pages(remote, range(10), 100), 1
            ),
        }
        for description, transfer in transfers.items():
            with pytest.raises(aiote.TransferError) as caught:
                await transfer
            assert description in str(caught.value)
            assert caught.value.transfer is transfer
            assert isinstance(caught.value.cause, aiote.FabricError | aiote.PeerError)
        assert left.statistics().outstanding == left.statistics().queued == 0
        # Where the provider gave the connection up, the first use makes a new one.
        while True:
            try:
                await left.send(right.address, b"still here")
                break
            except aiote.AioteError:
                await go_round()
        assert (await right.recv()).data == b"still here"
        assert (right.statistics().immediates, right.statistics().inbox) == (0, 0)
        await round_trips(left, right)
        assert (right.counter(1).value, right.statistics().inbox) == (0, 0)


@pytest.mark.parametrize("rails", [1, 2])
async def test_defect_7_an_error_is_told_while_stripes_are_in_flight(rails):
    """Defect 7: the first stripe's error was reported while others were in flight, and the memory reused too early."""
    async with linked("tcp", ["lo"] * rails, largest_message=4096) as (left, right):
        good, bad = right.register(np.zeros(1 << 20, np.uint8)), right.register(np.zeros(1 << 20, np.uint8))
        remote = left.attach(bad.descriptor)
        await bad.aclose()
        memory = np.full(1 << 20, 1, np.uint8)
        region = left.register(memory)
        transfer = left.submit_write(region, remote)
        with pytest.raises(aiote.TransferError):
            await transfer
        assert left.statistics().outstanding == left.statistics().queued == 0
        await region.aclose()
        memory[:] = 2
        assert not good.closed


@each_provider
@each_progress
async def test_defect_7_a_cancellation_is_over_before_the_last_stripe(provider, progress):
    """Defect 7, by cancellation: when it is told, nothing of the transfer is in flight any more."""
    async with linked(provider, progress=progress, largest_message=4096) as (left, right):
        target = np.zeros(16 << 20, np.uint8)
        memory = np.full(16 << 20, 1, np.uint8)
        transfer = left.submit_write(left.register(memory), across(left, right, target))
        transfer.cancel()
        with pytest.raises(aiote.TransferError):
            await transfer
        assert left.statistics().outstanding == left.statistics().queued == 0
        memory[:] = 2
        await round_trips(left, right)
        assert not (target == 2).any()


@each_provider
@each_progress
async def test_defect_9_an_exception_in_a_callback_stops_the_engine(provider, progress, monkeypatch):
    """Defect 9: a user's callback that raised ended the worker; here it is reported, and everything goes on."""
    reported = []
    monkeypatch.setattr("sys.excepthook", lambda kind, error, trace: reported.append(error))
    mine = RuntimeError("a listener's own mistake")

    def raises(event: aiote.Event) -> None:
        raise mine

    async with pair(provider, progress=progress) as (left, right):
        heard = []
        for engine in (left, right):
            engine.listen_events(raises)
            engine.listen_events(heard.append)
        target = bytearray(8)
        await left.write_imm(left.register(b"12345678"), across(left, right, target), 1)
        await right.counter(1).wait(1)
        await right.send(left.address, b"hello")
        assert (await left.recv()).data == b"hello"
        assert target == b"12345678"
        assert reported == [mine] * len(heard)
        assert len(heard) == 2


@each_provider
@pytest.mark.blocking_allowed("Python computes while the native threads move data: that is what is tested")
async def test_defect_9_a_held_gil_and_a_full_queue_deadlock(provider):
    """Defect 9: a bounded queue of completions and a held GIL waited for each other.

    Thousands of completions, counts and messages come to both sides while Python holds the GIL and looks at none.
    """
    async with linked(provider, progress="thread", message_pool=4) as (left, right):
        local, remote = left.register(bytearray(8)), across(left, right, bytearray(8))
        transfers = [left.submit_write_imm(local, remote, 1) for _ in range(3000)]
        messages = [left.submit_send(right.address, b"x") for _ in range(20)]
        total = sum(number * number for number in range(2_000_000))
        assert total > 0
        for transfer in transfers:
            await transfer
        await right.counter(1).wait(3000)
        for _ in messages:
            await right.recv()
        for transfer in messages:
            await transfer


@each_provider
@each_progress
async def test_defect_10_an_empty_page_list_never_completes(provider, progress):
    """Defect 10: an empty list of pages had no completion that could end it."""
    async with pair(provider, progress=progress) as (left, right):
        src = aiote.Pages(left.register(bytearray(8)), [], 8)
        dst = aiote.Pages(across(left, right, bytearray(8)), [], 8)
        with anyio.fail_after(PATIENCE_S):
            await left.write_pages(src, dst, 1)
            await left.write_pages(src, dst)
            await right.counter(1).wait(0)
        assert right.counter(1).value == 0


@each_provider
async def test_defect_10_an_empty_scatter_or_barrier_crashes(provider):
    """Defect 10: an empty barrier crashed."""
    async with pair(provider) as (left, _):
        group = await left.peer_group([])
        await left.scatter(group, [], 1)
        await left.barrier(group, 2)


@each_provider
async def test_defect_10_a_larger_range_at_the_same_pointer_gives_the_old_registration(provider):
    """Defect 10: registering a larger range at a pointer that was known gave the old, smaller one."""
    memory = np.zeros(8192, np.uint8)
    async with linked(provider) as (left, right):
        small = right.register(memory[:16])
        large = right.register(memory)
        assert (small.nbytes, large.nbytes) == (16, 8192)
        remote = left.attach(large.descriptor)
        await left.write(left.register(np.full(8192, 3, np.uint8)), remote)
        assert (memory == 3).all()
        await small.aclose()
        await left.write(left.register(np.full(16, 4, np.uint8)), remote[8176:])
        assert (memory[8176:] == 4).all()


@pytest.mark.parametrize(("ours", "theirs"), [(1, 3), (3, 1), (2, 4), (4, 3)])
async def test_defect_12_peers_must_have_the_same_number_of_nics(ours, theirs):
    """Defect 12: peers had to have the same number of NICs. Every verb, both ways."""
    async with opened("sim", [f"sim{i}" for i in range(ours)], stripe_bytes=1) as left:
        async with opened("sim", [f"sim{i}" for i in range(theirs)], stripe_bytes=1) as right:
            for here, there in ((left, right), (right, left)):
                source, target = noise(10_007), np.zeros(10_007, np.uint8)
                region, remote = here.register(source), across(here, there, target)
                await here.write_imm(region, remote, 1)
                await there.counter(1).wait(1)
                assert np.array_equal(target, source)
                back = np.zeros(10_007, np.uint8)
                await here.read(remote, here.register(back))
                assert np.array_equal(back, source)
                await here.send(there.address, b"hello")
                assert (await there.recv()).data == b"hello"
