"""GPU memory through the host's, on the stand-in for the driver: what it promises is what memory of the host has."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

import aiote
from support.engines.opening import FENCE, across, linked, opened, run_script, served_on, until
from support.gpu.standin_cuda import GpuArray, broken, driver, gpu_copy, held, paced, pending, standin_path
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

IMM = 0x77
SLOT = 256 << 10
WORD = 4096
WIRES = ["local", "socket"]
SIZES = (1, 4097, SLOT, SLOT + 1, 3 * SLOT - 5, 5 << 20)

staged = pytest.mark.parametrize("provider", WIRES)
each_progress = pytest.mark.parametrize("progress", ["adaptive", "thread"])
gpus = functools.partial(linked, libcuda=standin_path(), drain_timeout=30.0, gpu_sharing=False)


async def test_a_region_says_where_its_memory_is_and_how_each_rail_reaches_it():
    events: list[aiote.Event] = []
    async with opened("auto", libcuda=standin_path(), gpu_sharing=False) as engine:
        engine.listen_events(events.append)
        region, own = engine.register(GpuArray(64, 1)), engine.register(bytearray(64))
        ways = {name: found.way for name, found in region.reach.items()}
        assert (region.device, set(ways.values()), len(ways)) == ("cuda:1", {"staged"}, len(engine.rails))
        assert (own.device, {found.way for found in own.reach.values()}) == ("cpu", {"direct"})
        told = [event.details for event in events if event.name == "memory.staged"]
        assert [(each["rail"], each["device"]) for each in told] == [(name, "cuda:1") for name in ways]
        assert all("pinned host memory" in str(each["reason"]) for each in told)


@pytest.mark.parametrize(("path", "says"), [("/none/libcuda.so.1", "cannot open shared object"), ("libc.so.6", "R525")])
def test_a_driver_that_is_missing_or_none_is_named(path, says):
    done = run_script(
        """
        import asyncio, sys
        import aiote
        class Lent:
            __cuda_array_interface__ = {"version": 3, "shape": (8,), "typestr": "|u1", "data": (1 << 40, False)}
        async def main():
            async with aiote.open_engine("local", libcuda=sys.argv[1]) as engine:
                try:
                    engine.register(Lent())
                except aiote.FabricError as error:
                    print(sys.argv[2] in str(error), "open the CUDA driver" in str(error))
                engine.register(bytearray(8))
        asyncio.run(main())
        """,
        path,
        says,
    )
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


def test_without_gpu_memory_the_driver_is_never_opened():
    done = run_script(
        """
        import asyncio, pathlib, sys
        import aiote
        async def main():
            async with aiote.open_engine("local", libcuda=sys.argv[1]) as engine:
                engine.register(bytearray(8))
        asyncio.run(main())
        print(sys.argv[1] in pathlib.Path("/proc/self/maps").read_text())
        """,
        standin_path(),
    )
    assert (done.stdout.split(), done.stderr) == (["False"], "")


async def fenced(left: aiote.Engine, right: aiote.Engine) -> None:
    """Have immediates alone arrive both ways, behind whatever was posted: their counts wait for no copy."""
    with left.counter(FENCE) as here, right.counter(FENCE) as there:
        for one, other, counter in ((left, right, there), (right, left, here)) * 3:
            one.submit_write_imm(None, other.address, FENCE)
            await counter.wait(1)


@staged
@each_progress
@pytest.mark.parametrize("ends", ["gpu-gpu", "gpu-host", "host-gpu"])
async def test_every_byte_arrives_wherever_it_lies(provider, progress, ends):
    near, far = ends.split("-")
    async with gpus(provider, progress=progress) as (left, right):
        for size in SIZES:
            source = gpu_copy(filled(size)) if near == "gpu" else filled(size)
            target = GpuArray(size) if far == "gpu" else np.zeros(size, np.uint8)
            region, remote = left.register(source), across(left, right, target)
            await left.write_imm(region, remote, IMM)
            await right.counter(IMM).wait(1)
            sent, got = getattr(source, "seen", source), getattr(target, "seen", target)
            assert np.array_equal(sent, got)
            sent[:] = 0
            await left.read(remote, region)
            assert np.array_equal(sent, got)
            await region.aclose()


@staged
async def test_pages_go_between_gpus_in_any_order(provider):
    page, count = 12_345, 100
    order = np.random.default_rng(5).permutation(count)
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(filled(page * count)), GpuArray(page * count)
        pages = aiote.Pages(left.register(source), range(count), page)
        there = aiote.Pages(across(left, right, target), order, page)
        await left.write_pages(pages, there, IMM)
        await right.counter(IMM).wait(count)
        sent, got = source.seen.reshape(count, page), target.seen.reshape(count, page)
        assert np.array_equal(sent, got[order])
        sent[:] = 0
        await left.read_pages(there, pages)
        assert np.array_equal(sent, got[order])


@staged
@each_progress
async def test_a_count_comes_after_the_last_copy(provider, progress):
    """With late copies in pieces, whoever is told of a count finds all bytes in the GPU's memory."""
    async with gpus(provider, progress=progress) as (left, right):
        target = GpuArray(600_000)
        region, remote = left.register(filled(600_000)), across(left, right, target)
        for seed in range(1, 9):
            with paced(300, seed):
                target.seen[:] = 0
                transfer = left.submit_write_imm(region, remote, IMM)
                await right.counter(IMM).wait(1)
                assert np.count_nonzero(target.seen) == 600_000
                await transfer


@staged
@each_progress
async def test_nothing_is_counted_or_confirmed_while_copies_wait(provider, progress):
    async with gpus(provider, progress=progress) as (left, right):
        target = GpuArray(3 * SLOT)
        region, remote, counter = left.register(filled(3 * SLOT)), across(left, right, target), right.counter(IMM)
        with held():
            transfer = left.submit_write_imm(region, remote, IMM)
            await until(lambda: pending() >= 3)
            await fenced(left, right)
            assert (counter.value, transfer.done(), target.seen.any()) == (0, False, False)
        await counter.wait(1)
        await transfer
        assert target.seen.all()


@staged
async def test_a_frame_leaves_after_its_last_copy(provider):
    """A source that changes until its copy is done is sent as it was then; nothing stands in for what is missing."""
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(np.full(600_000, 1, np.uint8)), np.zeros(600_000, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with held():
            transfer = left.submit_write_imm(region, remote, IMM)
            await until(pending)
            await fenced(left, right)
            assert not target.any()
            source.seen[:] = 2
        await transfer
        assert (target == 2).all()


@staged
async def test_what_comes_from_the_host_passes_what_waits_for_a_gpu(provider):
    async with gpus(provider) as (left, right):
        with held():
            waits = left.submit_write(left.register(gpu_copy(filled(64))), across(left, right, bytearray(64)))
            await until(pending)
            await served_on(left, right)
            assert not waits.done()
        await waits


@staged
async def test_answers_keep_their_order_behind_one_that_waits_for_a_gpu(provider):
    """The asking side tells them by their order alone."""
    async with gpus(provider) as (left, right):
        sources = [gpu_copy(filled(5000, 1)), filled(5000, 2), gpu_copy(filled(5000, 3)), filled(5000, 4)]
        remotes = [across(left, right, source) for source in sources]
        targets = [np.zeros(5000, np.uint8) for _ in sources]
        with held():
            reads = [left.submit_read(remote, left.register(to)) for remote, to in zip(remotes, targets, strict=True)]
            await until(lambda: pending() == 2)
            await fenced(left, right)
            assert not any(read.done() for read in reads)
        for read in reads:
            await read
        for source, target in zip(sources, targets, strict=True):
            assert np.array_equal(getattr(source, "seen", source), target)


@staged
async def test_closing_a_region_waits_for_the_peer_s_copies(provider):
    """Its owner frees the memory next: no copy may read or write it from then on."""
    async with gpus(provider) as (left, right):
        target = GpuArray(SLOT)
        region = right.register(target)
        remote = left.attach(region.descriptor)
        with held():
            transfer = left.submit_write(left.register(filled(SLOT)), remote)
            await until(lambda: pending() == 1)
            closing = asyncio.ensure_future(region.aclose())
            await fenced(left, right)
            assert not closing.done()
            assert region.memory.registrations
        await closing
        assert (pending(), target.seen.all()) == (0, True)
        await transfer


@staged
async def test_a_cancelled_write_ends_behind_its_copies(provider):
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(filled(2 * SLOT)), np.zeros(2 * SLOT, np.uint8)
        region, remote = left.register(source), across(left, right, target)
        with held():
            task = asyncio.ensure_future(left.write(region, remote))
            await until(pending)
            task.cancel()
            await fenced(left, right)
            assert not task.done()
            assert region.memory.in_flight
        with pytest.raises(asyncio.CancelledError):
            await task
        assert region.memory.in_flight == 0 == pending()
        await left.write(region, remote)
        assert np.array_equal(source.seen, target)


@staged
async def test_more_than_all_slots_hold_goes_in_turns(provider):
    """Twice the pinned memory under way at once; the slots come back."""
    size = 16 << 20
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(filled(size)), GpuArray(size)
        region, remote = left.register(source), across(left, right, target)
        for _ in range(3):
            target.seen[:] = 0
            step = size // 64
            parts = [
                left.submit_write_imm(region[at : at + step], remote[at : at + step], IMM)
                for at in range(0, size, step)
            ]
            await right.counter(IMM).wait(64)
            for part in parts:
                await part
            assert np.array_equal(source.seen, target.seen)


@pytest.mark.parametrize("nbytes", [4 << 20, (9 << 20) + 5])
async def test_as_much_memory_is_pinned_as_the_setting_says(nbytes):
    """Whole slots for each direction, once for each GPU, until the engine is closed."""
    before = driver().standin_pinned()
    async with opened("socket", libcuda=standin_path(), gpu_staging_bytes=nbytes) as engine:
        for device, gpus_used in ((0, 1), (0, 1), (1, 2)):
            engine.register(GpuArray(64, device))
            each = nbytes // SLOT * SLOT + WORD
            assert driver().standin_pinned() == before + 2 * gpus_used * each
    assert driver().standin_pinned() == before


@staged
@pytest.mark.parametrize("ends", ["gpu-host", "host-gpu"])
async def test_no_call_waits_for_a_stream_that_is_full(provider, ends):
    """A driver blocks who gives a stream more than 256 things to do. The largest staging memory has room for more."""
    page, count = 40_000, 600
    async with gpus(provider, gpu_staging_bytes=64 << 20, max_transfers=1 << 20) as (left, right):
        source = filled(page * count)
        target = np.zeros(page * count, np.uint8) if ends == "gpu-host" else GpuArray(page * count)
        region = left.register(gpu_copy(source) if ends == "gpu-host" else source)
        remote, blocked = across(left, right, target), driver().standin_blocked()
        with paced(100):
            order = np.random.default_rng(1).permutation(count)
            pages = [aiote.Pages(one, order, page) for one in (region, remote)]
            await left.write_pages(*pages, IMM, stream=-1 if ends == "gpu-host" else None)
            await right.counter(IMM).wait(1)
        assert np.array_equal(source, getattr(target, "seen", target))
        assert driver().standin_blocked() == blocked


@staged
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_broken_device_ends_its_transfers_and_no_others(provider, side):
    async with gpus(provider) as (left, right):
        here = gpu_copy(filled(SLOT)) if side == "source" else filled(SLOT)
        there = GpuArray(SLOT) if side == "target" else np.zeros(SLOT, np.uint8)
        region, remote = left.register(here), across(left, right, there)
        with held():
            transfer = left.submit_write(region, remote)
            await until(pending)
            with broken():
                says = "CUDA_ERROR_ILLEGAL_ADDRESS" if side == "source" else "or its GPU failed"
                with pytest.raises(aiote.TransferError, match=says):
                    await transfer
                with pytest.raises(aiote.TransferError, match=says):
                    await left.write(region, remote, stream=-1 if side == "source" else None)
                broken_engine = left if side == "source" else right
                with pytest.raises(aiote.FabricError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                    broken_engine.register(here if side == "source" else there)
                await served_on(left, right)
