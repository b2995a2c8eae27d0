"""The order of transfers with kernels: `stream=` on every verb, with kernels of the stand-in that are late."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiote
from support.engines.opening import across, linked, served_on, until
from support.gpu.hardware_cuda import needs_standin
from support.gpu.standin_cuda import (
    GpuArray,
    broken,
    busy,
    captured,
    driver,
    gpu_copy,
    launched,
    new_stream,
    paced,
    standin_path,
    synchronized,
)
from support.machine import LONG
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

IMM = 0x51
SIZE = 300_000
LATE_US = 15_000
SEEDS = 10_000 if LONG else 40
LEGACY, PER_THREAD = 1, 2
FIRST_AND_LATER = (7, 8)
"""What is written. The first transfer to a peer's memory is looked at more closely than those that follow."""

staged = pytest.mark.parametrize("provider", ["local", "socket"])
each_progress = pytest.mark.parametrize("progress", ["adaptive", "thread"])
gpus = functools.partial(linked, libcuda=standin_path(), drain_timeout=30.0)


class Stream:
    """A stream object, with the attributes that it is made with."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


SPELLINGS: dict[str, Callable[[int], Any]] = {
    "number": lambda handle: handle,
    "protocol": lambda handle: Stream(__cuda_stream__=lambda: (0, handle)),
    "property": lambda handle: Stream(__cuda_stream__=(0, handle)),
    "torch": lambda handle: Stream(cuda_stream=handle),
    "cupy": lambda handle: Stream(ptr=handle),
    "numba": lambda handle: Stream(handle=ctypes.c_void_p(handle)),
}

VERBS = ["write", "write_imm", "write_pages", "scatter", "prepared scatter", "prepared pages"]


async def written(verb: str, left: aiote.Engine, right: aiote.Engine, source: Any, target: Any, **order: Any) -> None:
    """Write all of a region with a verb, behind a stream or none."""
    if verb == "write":
        await left.write(source, target, **order)
    elif verb == "write_imm":
        await left.write_imm(source, target, IMM, **order)
    elif verb == "write_pages":
        page = source.nbytes // 100
        await left.write_pages(
            aiote.Pages(source, range(100), page), aiote.Pages(target, range(100), page), IMM, **order
        )
    else:
        group = await left.peer_group([right.address])
        targets = [aiote.ScatterTarget(source, target)]
        if verb == "scatter":
            await left.scatter(group, targets, IMM, **order)
        elif verb == "prepared scatter":
            await left.prepare_scatter(group, targets).write(np.array([source.nbytes]), **order)
        else:
            pages = np.arange(100)
            await left.prepare_pages(group, targets, source.nbytes // 100).write(pages, pages, **order)


@staged
@each_progress
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_a_write_is_behind_the_kernel_that_fills_its_source(provider, progress, verb, spelling):
    async with gpus(provider, progress=progress) as (left, right):
        source, target = GpuArray(SIZE), np.zeros(SIZE, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with new_stream() as stream:
            for value in FIRST_AND_LATER:
                launched(source, value, LATE_US, stream)
                await written(verb, left, right, region, remote, stream=SPELLINGS[spelling](stream))
                assert (target == value).all()


@staged
@pytest.mark.parametrize("verb", ["write", "write_pages", "scatter"])
@pytest.mark.parametrize("blocking", [True, False])
async def test_the_default_is_behind_what_blocking_streams_do(provider, verb, blocking):
    """As the legacy default stream is; one that was made as non-blocking has to be named."""
    async with gpus(provider) as (left, right):
        source, target = GpuArray(SIZE), np.zeros(SIZE, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with new_stream(blocking=blocking) as stream, busy() if not blocking else contextlib.nullcontext():
            for value in FIRST_AND_LATER:
                launched(source, value, LATE_US, stream)
                await written(verb, left, right, region, remote)
                assert (target == value).all() == blocking


@staged
async def test_a_read_is_behind_the_kernel_that_uses_its_target(provider):
    async with gpus(provider) as (left, right):
        source, target = filled(SIZE), GpuArray(SIZE)
        region, remote = left.register(target), across(left, right, source)
        with new_stream() as stream:
            for read in ("read", "read", "read_pages"):
                launched(target, 7, LATE_US, stream)
                if read == "read":
                    await left.read(remote, region, stream=stream)
                else:
                    page = SIZE // 100
                    here, there = aiote.Pages(region, range(100), page), aiote.Pages(remote, range(100), page)
                    await left.read_pages(there, here, stream=stream)
                synchronized(stream)
                assert np.array_equal(target.seen, source)


@staged
@pytest.mark.parametrize("order", [{"stream": -1}])
async def test_what_is_ready_waits_for_nothing(provider, order):
    """The arm that has to fail where the other must not: it overtakes the kernel."""
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(np.ones(SIZE, np.uint8)), np.zeros(SIZE, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with new_stream() as stream, busy():
            launched(source, 7, 0, stream)
            await left.write(region, remote, **order)
            assert (target == 1).all()


@staged
async def test_others_pass_what_is_held_and_a_cancelled_one_is_over_at_once(provider):
    async with gpus(provider) as (left, right):
        source = GpuArray(64)
        region, remote = left.register(source), across(left, right, bytearray(64))
        with new_stream() as stream, busy():
            launched(source, 7, 0, stream)
            held = [left.submit_write_imm(region, remote, IMM, stream=stream) for _ in range(20)]
            ready = left.submit_write(region, remote, stream=-1)
            await ready
            await served_on(left, right)
            assert not any(one.done() for one in held)
            for one in held:
                one.cancel()
            for one in held:
                with pytest.raises(aiote.TransferError, match="cancelled"):
                    await one
            await region.aclose()
            assert right.counter(IMM).value == 0


@staged
async def test_what_is_behind_several_streams_goes_in_the_order_of_their_ends(provider):
    async with gpus(provider) as (left, right):
        sources = [GpuArray(1000) for _ in range(6)]
        regions = [left.register(one) for one in sources]
        target = np.zeros(6000, np.uint8)
        remote = across(left, right, target)
        with new_stream() as slow, new_stream() as fast, busy():
            launched(sources[0], 1, 0, slow)
            streams = [slow, fast, slow, fast, slow, fast]
            writes = [
                left.submit_write(region, remote[1000 * i : 1000 * (i + 1)], stream=stream)
                for i, (region, stream) in enumerate(zip(regions, streams, strict=True))
            ]
            for one in writes[1::2]:
                await one
            assert not any(one.done() for one in writes[::2])
        for one in writes:
            await one
        assert target[0] == 1


@staged
async def test_a_scatter_is_behind_the_streams_of_every_device(provider):
    async with gpus(provider) as (left, right):
        sources = [GpuArray(SIZE, 0), GpuArray(SIZE, 1)]
        targets = [np.zeros(SIZE, np.uint8) for _ in sources]
        group = await left.peer_group([right.address])
        rows = [
            aiote.ScatterTarget(left.register(one), across(left, right, to))
            for one, to in zip(sources, targets, strict=True)
        ]
        for device, one in enumerate(sources):
            launched(one, 7, LATE_US * (1 + device), None, device)
        await left.scatter(group, rows)
        assert all((to == 7).all() for to in targets)
        with new_stream() as stream, pytest.raises(aiote.UsageError, match="does not belong to cuda:1"):
            await left.scatter(group, rows, stream=stream)


REFUSED = {
    "stream=0 may mean either": 0,
    "expected None or 1": -2,
    "stream=18446744073709551616": 1 << 64,
    "it is bool": True,
    "it is str": "stream",
    "returned 5": Stream(__cuda_stream__=lambda: 5),
    "has version 1": Stream(__cuda_stream__=lambda: (1, 64)),
    "stream=4095": 4095,
    "was destroyed": 0x1234_0000,
}


@pytest.mark.parametrize("says", REFUSED)
async def test_what_is_no_stream_is_refused_and_nothing_is_kept(says):
    if says == "was destroyed":
        needs_standin()  # a GPU's driver reads at whatever address it is given
    async with gpus("local") as (left, right):
        region, remote = left.register(GpuArray(64)), across(left, right, bytearray(64))
        await left.write(region, remote, stream=-1)  # what follows takes the way of plain transfers, as far as it goes
        for start in (left.submit_write, left.submit_write_imm):
            imm = () if start == left.submit_write else (IMM,)
            with pytest.raises(aiote.UsageError, match=says):
                start(region, remote, *imm, stream=REFUSED[says])
        await region.aclose()


async def test_a_stream_of_another_device_or_one_that_was_destroyed_is_refused():
    async with gpus("local") as (left, right):
        region, remote = left.register(GpuArray(64)), across(left, right, bytearray(64))
        with new_stream(1) as elsewhere, new_stream() as gone:
            with pytest.raises(aiote.UsageError, match="does not belong to cuda:0"):
                await left.write(region, remote, stream=elsewhere)
        needs_standin()
        with pytest.raises(aiote.UsageError, match="or was destroyed"):
            await left.write(region, remote, stream=gone)


async def test_memory_of_the_host_is_behind_no_stream():
    async with gpus("local") as (left, right):
        region, remote = left.register(bytearray(64)), across(left, right, bytearray(64))
        await left.write(region, remote, stream=-1)
        with pytest.raises(aiote.UsageError, match="this is the host's"):
            await left.write(region, remote, stream=PER_THREAD)
        with pytest.raises(aiote.UsageError, match="this is the host's"):
            await left.write_imm(None, remote, IMM, stream=LEGACY)


@staged
async def test_the_thread_s_default_stream_is_waited_for(provider):
    async with gpus(provider) as (left, right):
        source, target = GpuArray(SIZE), np.zeros(SIZE, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        launched(source, 7, LATE_US, PER_THREAD)
        await left.write(region, remote, stream=PER_THREAD)
        assert (target == 7).all()


@staged
@pytest.mark.parametrize("given", ["captured", "legacy"])
async def test_a_stream_that_is_captured_is_refused_and_its_capture_goes_on(provider, given):
    async with gpus(provider) as (left, right):
        region, remote = left.register(GpuArray(64)), across(left, right, bytearray(64))
        with new_stream(blocking=True) as stream, captured(stream) as broken_by_us:
            with pytest.raises(aiote.UsageError, match=r"WatchedValue.*stream=-1"):
                await left.write(region, remote, stream=stream if given == "captured" else None)
            await left.write(region, remote, stream=-1)
            await served_on(left, right)
            assert not broken_by_us()


@staged
async def test_a_capture_goes_on_while_transfers_wait_for_other_streams(provider):
    """Who asks whether a stream is done breaks captures, unless it says that it may be asked."""
    async with gpus(provider) as (left, right):
        source, target = GpuArray(SIZE), np.zeros(SIZE, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with new_stream() as stream, new_stream() as other, captured(other) as broken_by_us:
            launched(source, 7, LATE_US, stream)
            await left.write(region, remote, stream=stream)
            assert (bool((target == 7).all()), broken_by_us()) == (True, False)


@staged
async def test_a_device_that_breaks_ends_what_waits_for_it_and_no_other(provider):
    async with gpus(provider) as (left, right):
        source, other = GpuArray(64, 0), gpu_copy(filled(64), 1)
        region, remote = left.register(source), across(left, right, bytearray(64))
        healthy = left.register(other)
        with new_stream() as stream, busy():
            launched(source, 7, 0, stream)
            held = left.submit_write(region, remote, stream=stream)
            await left.write(healthy, remote)
            assert not held.done()
            with broken(0):
                with pytest.raises(aiote.TransferError, match="behind a stream.*CUDA_ERROR_ILLEGAL_ADDRESS"):
                    await held
                with pytest.raises(aiote.TransferError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                    await left.write(region, remote, stream=stream)
                await left.write(healthy, remote)
                await served_on(left, right)


@staged
async def test_a_peer_that_goes_ends_what_is_held(provider):
    async with gpus(provider) as (left, right):
        source = GpuArray(64)
        region, remote = left.register(source), across(left, right, bytearray(64))
        with new_stream() as stream, busy():
            launched(source, 7, 0, stream)
            held = left.submit_write(region, remote, stream=stream)
            await right.aclose()
            with pytest.raises(aiote.TransferError):
                await held
            await region.aclose()


@staged
async def test_nothing_is_synchronized_and_events_are_used_again(provider):
    events = driver().standin_events()  # those that tests before could not destroy, since that call failed
    async with gpus(provider) as (left, right):
        region, remote = left.register(GpuArray(SIZE)), across(left, right, GpuArray(SIZE))
        before = driver().standin_synchronizations()
        with new_stream() as stream:
            for _ in range(30):
                await left.write(region, remote, stream=stream)
                await left.read(remote, region)
        assert driver().standin_synchronizations() == before
        assert driver().standin_events() <= events + 2
    assert driver().standin_events() == events


@staged
@each_progress
async def test_no_seed_finds_a_write_before_its_kernel(provider, progress):
    """Producers on late streams, with the orders and delays of many seeds; each value is whole at the receiver."""
    async with gpus(provider, progress=progress) as (left, right):
        source, target = GpuArray(70_000), np.zeros(70_000, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        for seed in range(1, SEEDS // 4 + 1):
            with paced(60, seed), new_stream() as stream:
                for value in (seed % 251 + 1, seed % 7 + 1):
                    launched(source, value, seed % 11 * 50, stream)
                    await left.write_imm(region, remote, IMM, stream=stream)
                    await right.counter(IMM).wait(1)
                    assert (target == value).all()


async def test_closing_the_engine_ends_what_is_held():
    source, events = GpuArray(64), driver().standin_events()
    with new_stream() as stream, busy():
        async with gpus("local") as (left, right):
            region, remote = left.register(source), across(left, right, bytearray(64))
            launched(source, 7, 0, stream)
            held = left.submit_write(region, remote, stream=stream)
            waiting = asyncio.ensure_future(asyncio.wait([asyncio.ensure_future(held_by(held))]))
            await until(lambda: not waiting.done())
        assert held.done()
        await waiting
    assert driver().standin_events() == events


async def held_by(transfer: aiote.Transfer) -> None:
    with pytest.raises(aiote.AioteError):
        await transfer


def test_the_stand_in_has_no_stream_at_the_address_that_is_refused():
    needs_standin()
    code = driver().cuStreamQuery(ctypes.c_void_p(0x1234_0000))
    assert code in (201, 400)
