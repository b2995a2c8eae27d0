"""Scatters that a native thread posts when a flag in memory says so; a thread plays the GPU that raises it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np
import pytest

import aiote
from aiote import ScatterTarget
from support.engines.fan_out import SIZE, Star, star
from support.engines.opening import PATIENCE_S, across, each_progress, each_provider, opened, round_trips, until

pytestmark = pytest.mark.libfabric


class Device:
    """Memory that a GPU writes: a flag, and for each of so many writes a length and two offsets."""

    def __init__(self, writes: int) -> None:
        self.words = np.zeros(4, np.uint32)
        self.numbers = np.zeros((3, writes), np.int64)

    @property
    def flag(self) -> np.ndarray:
        return self.words[1:2]

    def arm(self, here: Star, value: int = 1, imm: object = 5, **more) -> aiote.Transfer:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        return prepared.submit_when(self.flag, value, *self.numbers, imm, **more)

    def play(self, lengths, here=0, there=0, value: int = 1) -> None:
        """Write the numbers and raise the flag from another thread."""

        def run() -> None:
            for row, given in zip(self.numbers, (lengths, here, there), strict=True):
                row[:] = given
            self.flag[0] = value

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


@pytest.mark.anyio
@each_provider
@each_progress
async def test_what_was_written_before_the_flag_is_posted(provider, progress):
    async with star(provider, 3, 1 << 20, progress=progress) as here:
        device = Device(3)
        expected = [np.zeros(1 << 20, np.uint8) for _ in here.others]
        for number in range(1, 6):
            transfer = device.arm(here, number)
            await round_trips(here.hub, here.others[0])
            assert not transfer.done()
            lengths = np.array([number, 100_000 + number, 0])
            device.play(lengths, [number, 7, 0], np.array([8, 16, 0]) * number, number)
            await transfer
            for wanted, length, start, at in zip(expected, lengths, [number, 7, 0], [8, 16, 0], strict=True):
                wanted[at * number : at * number + length] = here.source[start : start + length]
        for other, memory, wanted in zip(here.others, here.memories, expected, strict=True):
            await other.counter(5).wait(5)
            assert other.counter(5).value == 0
            assert np.array_equal(memory, wanted)


@each_provider
async def test_each_write_counts_on_an_immediate_of_its_own(provider):
    async with star(provider, 3) as here:
        device = Device(3)
        imms = np.array([5, 6, 7])
        transfer = device.arm(here, imm=imms)
        # They are read when it is armed, unlike the lengths.
        imms[:] = 9
        device.play([8, 0, 8])
        await transfer
        for other, imm in zip(here.others, (5, 6, 7), strict=True):
            await other.counter(imm).wait(1)
            assert other.statistics().immediates == 1
        with pytest.raises(aiote.UsageError, match="imm.2. is 268435456, expected from 0"):
            device.arm(here, imm=np.array([0, 0, 1 << 28]))


@each_provider
async def test_a_flag_that_is_raised_already_posts_at_once_and_nothing_goes_where_nothing_is_to_go(provider):
    async with star(provider, 3) as here:
        device = Device(2)
        device.play([0, 8])
        await device.arm(here, to=np.array([2, 0]), skip_empty=True)
        await here.others[0].counter(5).wait(1)
        await round_trips(here.hub, here.others[2])
        assert [other.counter(5).value for other in here.others] == [0, 0, 0]
        assert np.array_equal(here.memories[0][:8], here.source[:8])
        await device.arm(here, to=np.array([2, 0]))
        await here.others[2].counter(5).wait(1)


async def test_flags_wrap_and_each_request_waits_for_its_own_value():
    async with star("socket", 1) as here:
        device = Device(1)
        device.words[1] = 2**32 - 3
        later = [device.arm(here, value, imm) for imm, value in enumerate((2**32 - 2, 2**32 - 1, 0, 1))]
        for imm, value in enumerate((2**32 - 2, 2**32 - 1, 0, 1)):
            device.play(8, value=value)
            await later[imm]
            await here.others[0].counter(imm).wait(1)
        assert here.hub._runtime.core.proxy.armed == 0


async def test_a_request_without_targets_tells_that_the_flag_was_raised():
    async with star("socket", 1) as here:
        nothing, device = np.zeros(0, np.int64), Device(0)
        empty = here.hub.prepare_scatter(here.group, [])
        transfer = empty.submit_when(device.flag, 1, nothing)
        await round_trips(here.hub, here.others[0])
        assert not transfer.done()
        device.words[1] = 1
        await transfer
        cancelled = empty.submit_when(device.flag, 2, nothing)
        cancelled.cancel()
        with pytest.raises(aiote.TransferError, match="cancelled"):
            await cancelled


@each_progress
async def test_the_thread_needs_no_gil(progress):
    """Python computes without giving the interpreter away, and the bytes leave all the same."""
    async with star("socket", 2, progress=progress) as here:
        device = Device(2)
        transfer = device.arm(here)
        await round_trips(here.hub, here.others[0])
        # A native thread of the engine may post something of its own; these two are of the flag.
        before, interval, end = here.hub.statistics().posted, sys.getswitchinterval(), time.monotonic() + PATIENCE_S
        sys.setswitchinterval(2 * PATIENCE_S)
        try:
            device.numbers[0] = 8
            device.words[1] = 1
            while here.hub.statistics().posted < before + 2 and time.monotonic() < end:
                pass
            assert here.hub.statistics().posted >= before + 2
        finally:
            sys.setswitchinterval(interval)
        await transfer


LIES = {
    "a length": ([8, SIZE + 1], 0, 0, 6),
    "a negative length": ([8, -1], 0, 0, 6),
    "an offset here": ([8, 8], [0, SIZE - 7], 0, 6),
    "an offset there": ([8, 8], 0, [SIZE + 1, 0], 6),
    "a sum that wraps": ([8, 8], 0, [0, -4], 6),
    "a flag that goes back": ([8, 8], 0, 0, 4),
    "a flag that is ahead": ([8, 8], 0, 0, 7),
}


@each_provider
@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_fails_the_request_and_posts_nothing(provider, lie):
    async with star(provider, 2) as here:
        device = Device(2)
        device.words[1] = 5
        transfer = device.arm(here, 6)
        await round_trips(here.hub, here.others[0])
        before = here.hub.statistics().posted
        device.play(*LIES[lie])
        with pytest.raises(aiote.TransferError, match="went backwards" if "flag" in lie else "leaves its target"):
            await transfer
        assert here.hub.statistics().posted == before
        assert here.untouched
        assert here.region.memory.in_flight == 0


@each_provider
async def test_what_is_armed_ends_when_it_is_cancelled_and_a_later_flag_posts_nothing(provider):
    async with star(provider, 2) as here:
        device = Device(2)
        first, second = device.arm(here), device.arm(here)

        async def waits() -> None:
            await second

        task = asyncio.create_task(waits())
        await round_trips(here.hub, here.others[0])
        first.cancel()
        task.cancel()
        with pytest.raises(aiote.TransferError, match="cancelled"):
            await first
        with pytest.raises(asyncio.CancelledError):
            await task
        assert here.hub._runtime.core.proxy.armed == 0
        before = here.hub.statistics().posted
        device.play(8)
        await device.arm(here, imm=6)
        assert here.hub.statistics().posted == before + 2
        assert here.others[0].counter(5).value == 0


@each_provider
async def test_what_is_armed_ends_with_its_peers(provider):
    """The others are posted all the same."""
    async with star(provider, 2) as here:
        device = Device(2)
        transfer, alone = device.arm(here), Device(1).arm(here, to=np.array([0]))
        await here.others[0].aclose()
        with pytest.raises(aiote.TransferError, match="target 0"):
            await alone
        assert not transfer.done()
        device.play(8)
        with pytest.raises(aiote.TransferError, match="target 0"):
            await transfer
        await here.others[1].counter(5).wait(1)
        assert np.array_equal(here.memories[1][:8], here.source[:8])


@each_provider
@each_progress
async def test_what_is_armed_ends_with_the_engine(provider, progress):
    async with star(provider, 2, progress=progress) as here:
        nothing = np.zeros(0, np.int64)
        device, empty = Device(2), here.hub.prepare_scatter(here.group, [])
        waits = [device.arm(here), empty.submit_when(device.flag, 1, nothing)]
        proxy = here.hub._runtime.core.proxy
        await here.hub.aclose()
        for transfer in waits:
            with pytest.raises(aiote.TransferError):
                await transfer
        assert proxy.armed == 0
        device.play(8)
        assert here.untouched


async def test_what_is_armed_ends_with_the_lease_that_it_goes_through():
    async with star("socket", 1) as here:
        memory = np.zeros(SIZE, np.uint8)
        lease = here.others[0].register(memory).lease(slice(0, SIZE), here.hub.address)
        remote = here.hub.attach(lease.descriptor)
        prepared = here.hub.prepare_scatter(here.group, [ScatterTarget(here.region, remote)])
        device = Device(1)
        transfer = prepared.submit_when(device.flag, 1, *device.numbers, 5)
        await lease.revoke()
        with pytest.raises(aiote.TransferError, match="revoked"):
            await transfer
        device.play(8)
        await round_trips(here.hub, here.others[0])
        assert not memory.any()


async def test_the_thread_sleeps_while_nothing_is_armed():
    async with star("socket", 1) as here:
        device = Device(1)
        device.play(8)
        await device.arm(here)
        proxy = here.hub._runtime.core.proxy
        looks = proxy.looks
        for _ in range(20):
            await round_trips(here.hub, here.others[0])
        # It may have been on its way to sleep.
        assert proxy.looks <= looks + 1
        transfer = device.arm(here, 2)
        await until(lambda: proxy.looks > looks + 20)
        device.play(8, value=2)
        await transfer


async def test_a_child_of_a_fork_leaves_the_thread_alone():
    async with star("socket", 1) as here:
        transfer = Device(1).arm(here)
        proxy = here.hub._runtime.core.proxy
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transfer.cancel()
                proxy.close()
                code = 0 if proxy.armed == 0 else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert proxy.armed == 1
        transfer.cancel()
        with pytest.raises(aiote.TransferError):
            await transfer


WRONG = {
    "one uint32 at a multiple of 4 bytes": (np.zeros(2, np.uint32), 1, np.zeros(2, np.int64)),
    "one uint32 in memory": ([0], 1, np.zeros(2, np.int64)),
    "1 numbers: expected one for each of 2": (np.zeros(1, np.uint32), 1, np.zeros(1, np.int64)),
    "multiples of 8": (np.zeros(1, np.uint32), 1, np.zeros(28, np.uint8)[4:20].view(np.int64)),
    "value=-1": (np.zeros(1, np.uint32), -1, np.zeros(2, np.int64)),
    "value=4294967296": (np.zeros(1, np.uint32), 1 << 32, np.zeros(2, np.int64)),
    "to.1. is 2": (np.zeros(1, np.uint32), 1, np.zeros(2, np.int64), np.array([0, 2])),
}


async def test_wrong_arguments_are_refused():
    async with star("socket", 2) as here:
        prepared = here.hub.prepare_scatter(here.group, here.targets)
        for text, (flag, value, lengths, *to) in WRONG.items():
            with pytest.raises(aiote.UsageError, match=text):
                prepared.submit_when(flag, value, lengths, to=to[0] if to else None)
        assert here.region.memory.in_flight == 0


async def test_a_region_that_is_closed_cannot_be_armed():
    async with star("socket", 1) as here, opened("socket") as other:
        target = ScatterTarget(here.hub.register(np.zeros(64, np.uint8)), across(here.hub, other, bytearray(64)))
        group = await here.hub.peer_group([other.address])
        prepared = here.hub.prepare_scatter(group, [target])
        await target.src.aclose()
        with pytest.raises(aiote.ClosedError):
            prepared.submit_when(np.zeros(1, np.uint32), 1, np.zeros(1, np.int64))
