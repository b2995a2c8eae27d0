"""What a NIC has written is flushed to the GPU before it is counted: real verbs, and the stand-in for CUDA's driver.

A NIC in software reaches no memory of a GPU, so here memory of the host asks for the flush.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import aiote
from aiote_native.cuda.driver import load, needs_flush
from support.engines.opening import across, until
from support.gpu.driver_calls import FLUSHING
from support.gpu.standin_cuda import GpuArray, broken, driver, failing, standin_path
from support.network.guest_switch import over_switch

pytestmark = pytest.mark.needs_rdma

IMM = 0x61


@contextmanager
def flushed(engine: aiote.Engine) -> Iterator[None]:
    """Have what reaches an engine's NIC flushed to a GPU."""
    driver().standin_ordering(0, 1)
    load(standin_path())
    gpu, memory = GpuArray(64), np.zeros(4096, np.uint8)
    assert needs_flush(gpu.address)
    registration = engine._runtime.rail_set.rails[0].device.register(memory.ctypes.data, memory.nbytes)
    try:
        registration.flush_behind(gpu.address)
        yield
    finally:
        registration.close()
        driver().standin_ordering(100, 0)


@pytest.mark.parametrize("progress", ["adaptive", "thread"])
async def test_writes_and_reads_are_flushed_once_a_batch_and_no_longer_than_somebody_needs_it(progress):
    contexts = driver().standin_contexts()
    async with over_switch(1, progress=progress) as (left, right, _):
        source, target = left.register(bytes(range(256)) * 16), across(left, right, bytearray(4096))
        await left.write_imm(source, target, IMM)
        await right.counter(IMM).wait(1)
        before = driver().standin_flushes()
        with flushed(right):
            for number in range(20):
                await left.write_imm(source, target, IMM)
                await right.counter(IMM).wait(1)
                assert driver().standin_flushes() > before + number
            before = driver().standin_flushes()
            await right.read(across(right, left, bytearray(64)), right.register(bytearray(64)))
            assert driver().standin_flushes() > before
        before = driver().standin_flushes()
        await left.write_imm(source, target, IMM)
        await right.counter(IMM).wait(1)
        assert driver().standin_flushes() == before
    assert driver().standin_contexts() == contexts


async def test_what_could_not_be_flushed_is_not_counted_and_ends_the_connection():
    async with over_switch(1) as (left, right, events):
        source, target = left.register(bytes(4096)), across(left, right, bytearray(4096))
        with flushed(right), broken(0):
            transfers = [left.submit_write_imm(source, target, IMM) for _ in range(20)]
            await until(lambda: events)
            for transfer in transfers:
                try:
                    await transfer
                except aiote.AioteError:
                    continue
            assert right.counter(IMM).value == 0


async def test_a_flush_that_fails_once_is_made_again():
    async with over_switch(1) as (left, right, events):
        source, target = left.register(bytes(range(256)) * 16), across(left, right, bytearray(4096))
        with flushed(right):
            for number in range(20):
                with failing(FLUSHING[0]):
                    await left.write_imm(source, target, IMM)
                    await right.counter(IMM).wait(1)
                    assert not driver().standin_fails()
                assert right.counter(IMM).value == 0, number
        assert not events


async def test_a_read_that_could_not_be_flushed_fails():
    async with over_switch(1) as (left, right, _):
        remote = across(right, left, bytearray(4096))
        with flushed(right), broken(0), pytest.raises(aiote.AioteError):
            await right.read(remote, right.register(bytearray(4096)))
