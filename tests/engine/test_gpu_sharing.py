"""GPU memory between processes of one host: the target's owner copies, and nobody loses what was promised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import LOST_SOON, PATIENCE_S, go_round, opened, until
from support.gpu.driver_calls import SHARING
from support.gpu.hardware_cuda import needs_standin
from support.gpu.standin_cuda import GpuArray, driver, failing, gpu_copy, held, paced, pending, standin_path
from support.machine import LONG
from support.process.children import Child, ChildError
from support.process.open_resources import descriptors
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

LIBCUDA = standin_path()
IMM = 0x51
MODULE = "support.gpu.child"
SIZE = (3 << 20) + 17

each_progress = pytest.mark.parametrize("progress", ["adaptive", "thread"])


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child(module=MODULE)
    yield made
    made.end()


@pytest.fixture
def doomed() -> Iterator[Child]:
    """One that the test kills."""
    made = Child(module=MODULE)
    yield made
    made.end()


@contextlib.asynccontextmanager
async def beside(
    child: Child, size: int = SIZE, theirs: dict[str, object] | None = None, **settings: object
) -> AsyncIterator[aiote.Engine]:
    """Open an engine in the child, with memory of a GPU, and one here."""
    settings = {"libcuda": LIBCUDA, "drain_timeout": 30.0, **settings}
    with anyio.fail_after(PATIENCE_S):
        await child.open("local", size, **{**settings, **(theirs or {})})
        await child.ask("standin", call="reset")
        driver().standin_reset()
        async with opened("local", **settings) as engine:
            yield engine


async def asked(child: Child, call: str, value: int | None = None) -> int:
    """Call a function of the child's stand-in."""
    needs_standin()
    return (await child.ask("standin", call=call, value=value))["value"]


def counted(name: str) -> int:
    return int(getattr(driver(), f"standin_{name}")())


@each_progress
async def test_a_write_between_two_processes_is_pulled_by_its_target(child, progress):
    async with beside(child, progress=progress) as engine:
        source, remote = engine.register(gpu_copy(filled(SIZE))), engine.attach(child.descriptor)
        assert source.reach["local"].way == "shared"
        before = counted("copies")
        await engine.write_imm(source, remote, IMM)
        await child.ask("wait", imm=IMM, n=1)
        assert counted("copies") == before  # none was ours: nothing was staged
        target = GpuArray(SIZE)
        await engine.read(remote, engine.register(target))
        assert np.array_equal(target.seen, filled(SIZE))
        assert await asked(child, "opened") == 1  # for the read it was not ours that was opened


async def test_pages_are_pulled_wherever_they_lie(child):
    page, count = 12_345, 100
    order = np.random.default_rng(5).permutation(count)
    async with beside(child, page * count) as engine:
        source, target = gpu_copy(filled(page * count)), GpuArray(page * count)
        pages, there = engine.register(source), engine.attach(child.descriptor)
        await engine.write_pages(aiote.Pages(pages, range(count), page), aiote.Pages(there, order, page), IMM)
        await engine.read(there, engine.register(target))
        assert np.array_equal(source.seen.reshape(count, page), target.seen.reshape(count, page)[order])


@each_progress
async def test_a_pulled_write_is_counted_after_its_last_copy(child, progress):
    async with beside(child, 600_000, progress=progress) as engine:
        target = GpuArray(600_000)
        descriptor = engine.register(target).descriptor.hex()
        for seed in range(1, 7):
            with paced(300, seed):
                target.seen[:] = 0
                child.tell("write", descriptor=descriptor, imm=IMM)
                await engine.counter(IMM).wait(1)
                assert np.count_nonzero(target.seen) == 600_000
                await child.answer()


async def test_many_frames_are_pulled_at_a_time(child):
    """Over the ring two are under way, because their bytes go through it; references have room for sixteen."""
    size = 16 << 20
    async with beside(child, size) as engine:
        target = GpuArray(size)
        descriptor = engine.register(target).descriptor.hex()
        await child.ask("write", descriptor=descriptor, imm=IMM)  # the first opens the memory
        with held():
            child.tell("write", descriptor=descriptor, imm=IMM)
            await until(lambda: pending() >= 16)
        await engine.counter(IMM).wait(2)
        await child.answer()
        assert (target.seen == 1).all()


async def test_nothing_is_counted_or_confirmed_while_a_pull_waits(child):
    async with beside(child, 1 << 20) as engine:
        descriptor = engine.register(GpuArray(1 << 20)).descriptor.hex()
        await engine.connect(child.address)
        with held():
            child.tell("write", descriptor=descriptor, imm=IMM)
            await until(pending)
            await engine.write_imm(None, child.address, IMM)
            assert engine.counter(IMM).value == 0
        await engine.counter(IMM).wait(1)
        await child.answer()


async def test_a_cancelled_write_waits_for_the_end_of_its_pull(child):
    async with beside(child, 1 << 20) as engine:
        source, remote = engine.register(gpu_copy(filled(1 << 20))), engine.attach(child.descriptor)
        await engine.write(source, remote)
        await asked(child, "hold", 1)
        transfer = engine.submit_write(source, remote)
        while not await asked(child, "pending"):
            pass
        transfer.cancel()
        await go_round()
        assert not transfer.done()
        await asked(child, "hold", 0)
        with pytest.raises((asyncio.CancelledError, aiote.AioteError)):
            await transfer
        assert await asked(child, "pending") == 0


@each_progress
async def test_memory_is_not_given_back_while_a_lost_peer_pulls(child, progress):
    """The target's GPU copies outside of any call, so no gate stops it: who gives the peer up waits for it, or says
    that the end is not confirmed. What the memory's owner writes there then, nobody sees.
    """
    async with beside(child, 1 << 20, progress=progress) as engine:
        remote = engine.attach(child.descriptor)
        try:
            for _ in range(3):
                source = gpu_copy(filled(1 << 20) % 250)
                region = engine.register(source)
                await engine.write(region, remote)
                await asked(child, "pace", 50_000)
                transfer = engine.submit_write(region, remote)
                while not await asked(child, "pending"):
                    pass
                engine.peers[0].disconnect("for a test")
                with pytest.raises(aiote.AioteError):
                    await transfer
                confirmed = transfer.exception().confirmed
                source.seen[:] = 251
                while await asked(child, "pending"):
                    pass
                await asked(child, "pace", 20)
                assert 251 not in (await child.ask("contents"))["bytes"] or not confirmed
        finally:
            await asked(child, "pace", 20)


async def test_a_region_is_closed_behind_the_reads_of_it(child):
    async with beside(child, 1 << 20) as engine:
        region = engine.register(gpu_copy(filled(1 << 20)))
        await asked(child, "hold", 1)
        await child.ask("start_read", descriptor=region.descriptor.hex())
        while not await asked(child, "pending"):
            pass
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(region.aclose)
            await until(lambda: region.memory.closing)
            assert (await asked(child, "pending"), region.closed, region.memory.registrations != ()) == (1, True, True)
            await asked(child, "hold", 0)
        assert (await asked(child, "open"), counted("violations")) == (0, 0)
        assert (await child.ask("failures"))["failures"] == []


async def answered(child: Child) -> object:
    try:
        return await child.answer()
    except ChildError as error:
        return str(error)


async def test_what_a_peer_has_open_is_closed_before_it_is_freed(child):
    async with beside(child) as engine:
        first, second = GpuArray(SIZE), GpuArray(SIZE)
        regions = [engine.register(first), engine.register(first), engine.register(second)]
        for region in regions:
            await engine.write(region, engine.attach(child.descriptor))
        assert await asked(child, "open") == 2  # one for each allocation
        await regions[0].aclose()
        await engine.write(regions[1], engine.attach(child.descriptor))
        assert await asked(child, "open") == 2  # the other region lies in it, too
        await regions[1].aclose()
        assert await asked(child, "open") == 1
        await regions[2].aclose()
        assert await asked(child, "open") == 0


async def test_an_address_that_was_freed_and_given_out_again_is_other_memory(child):
    async with beside(child, 4 << 20) as engine:
        target = GpuArray(4 << 20)
        descriptor, places = engine.register(target).descriptor.hex(), []
        for value in range(2, 8):
            made = await child.ask("allocate", size=4 << 20, value=value)
            places.append(made["at"])
            await child.ask("write", descriptor=descriptor, imm=IMM)
            assert set(target.seen.tolist()) == {value}
        assert len(set(places)) < len(places)
        assert await asked(child, "violations") == 0
        assert counted("open") == 1


async def test_the_death_of_who_pulls_ends_the_write_and_harms_nobody(doomed):
    async with beside(doomed, 1 << 20, **LOST_SOON) as engine:
        source = gpu_copy(filled(1 << 20))
        region, remote = engine.register(source), engine.attach(doomed.descriptor)
        await engine.write(region, remote)
        await asked(doomed, "hold", 1)
        transfer = engine.submit_write(region, remote)
        while not await asked(doomed, "pending"):
            pass
        doomed.kill()
        with pytest.raises(aiote.AioteError):
            await transfer
        await region.aclose()


async def test_the_death_of_whose_memory_is_pulled_harms_nobody(doomed):
    async with beside(doomed, 1 << 20, **LOST_SOON) as engine:
        target = GpuArray(1 << 20)
        region = engine.register(target)
        # Not held for good: whoever shuts the channel waits for the copies.
        with paced(20_000):
            doomed.tell("write", descriptor=region.descriptor.hex(), imm=IMM)
            await until(pending)
            doomed.kill()
            await doomed.gone()
        await until(lambda: counted("open") == 0)
        await region.aclose()
        again = engine.register(GpuArray(64))
        assert again.reach["local"].way == "shared"


@pytest.mark.parametrize("ends", ["exporter", "importer", "both"])
async def test_with_sharing_switched_off_at_either_end_all_is_staged_and_told(child, ends):
    off = {"gpu_sharing": False}
    async with beside(child, theirs=off if ends != "exporter" else {}, **(off if ends != "importer" else {})) as engine:
        events: list[aiote.Event] = []
        engine.listen_events(events.append)
        source, remote = engine.register(gpu_copy(filled(SIZE))), engine.attach(child.descriptor)
        await engine.write_imm(source, remote, IMM)
        await child.ask("wait", imm=IMM, n=1)
        target = GpuArray(SIZE)
        await engine.read(remote, engine.register(target))
        assert np.array_equal(target.seen, filled(SIZE))
        assert (await asked(child, "opened"), counted("opened")) == (0, 0) or ends == "exporter"
        await until(lambda: events)
        told = [str(event.details["reason"]) for event in events if event.name == "memory.staged"]
        assert told
        assert ends != "importer" or "Operation not permitted" in told[0]
        assert source.reach["local"].way == ("shared" if ends == "importer" else "staged")


async def test_memory_without_a_handle_is_staged_and_its_reach_says_why(child):
    async with beside(child) as engine:
        driver().standin_unshareable(1)
        try:
            source = engine.register(gpu_copy(filled(SIZE)))
        finally:
            driver().standin_unshareable(0)
        found = source.reach["local"]
        assert (found.way, "cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE" in found.reason) == ("staged", True)
        await engine.write_imm(source, engine.attach(child.descriptor), IMM)
        await child.ask("wait", imm=IMM, n=1)
        assert await asked(child, "opened") == 0


@pytest.mark.parametrize("name", SHARING[:3])
async def test_a_call_of_sharing_that_fails_once_has_all_staged_and_the_next_memory_shared(child, name):
    """In opening, with what this engine pulls; in exporting, with what it registers."""
    async with beside(child) as engine:
        for after in range(2):
            target = GpuArray(SIZE)
            made = await child.ask("allocate", size=SIZE, value=after + 2)
            with failing(name, after):
                region = engine.register(target)
                await child.ask("write", descriptor=region.descriptor.hex(), imm=IMM)
                await engine.read(engine.attach(bytes.fromhex(made["descriptor"])), region)
            assert set(target.seen.tolist()) == {after + 2}
        await child.ask("allocate", size=64)
        await until(lambda: counted("open") == 0)
        assert engine.register(GpuArray(64)).reach["local"].way == "shared"


async def test_what_fails_to_close_keeps_no_region_open(child):
    async with beside(child) as engine:
        descriptor = engine.register(GpuArray(SIZE)).descriptor.hex()
        await child.ask("write", descriptor=descriptor, imm=IMM)
        with failing(SHARING[3]):
            await child.ask("allocate", size=64)
            assert not driver().standin_fails()
        assert counted("open") == 0


async def test_devices_that_do_not_reach_each_other_stage_and_an_event_names_the_error(child):
    async with beside(child) as engine:
        events: list[aiote.Event] = []
        engine.listen_events(events.append)
        await asked(child, "isolate", 1)
        source = engine.register(gpu_copy(filled(SIZE), 1))  # the child's is on device 0
        await engine.write_imm(source, engine.attach(child.descriptor), IMM)
        await child.ask("wait", imm=IMM, n=1)
        told = [str(event.details["reason"]) for event in events if event.name == "memory.staged"]
        assert len(told) == 1
        assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in told[0]


async def test_a_lease_is_revoked_behind_the_pulls_through_it(child):
    async with beside(child, 1 << 20, **LOST_SOON) as engine:
        target = GpuArray(1 << 20)
        region = engine.register(target)
        await engine.connect(child.address)
        lease = region.lease(slice(0, 1 << 20), child.address)
        descriptor = lease.descriptor.hex()
        await child.ask("write", descriptor=descriptor, imm=IMM)
        await child.ask("fill", value=9)
        async with anyio.create_task_group() as tasks:
            with held():
                child.tell("write", descriptor=descriptor, imm=IMM)
                await until(pending)
                revoked = anyio.Event()

                async def revoke() -> None:
                    await lease.revoke()
                    revoked.set()

                tasks.start_soon(revoke)
                await go_round()
                assert not revoked.is_set()
            await revoked.wait()
            seen = bytes(target.seen)
        await answered(child)
        refused = await asked_to_write(child, descriptor)
        assert "lease" in refused.lower() or "refused" in refused.lower() or "revoked" in refused.lower()
        assert bytes(target.seen) == seen


async def asked_to_write(child: Child, descriptor: str) -> str:
    child.tell("write", descriptor=descriptor, imm=IMM)
    return str(await answered(child))


async def test_what_is_opened_again_and_again_leaves_no_descriptor_and_no_mapping(child):
    async with beside(child, 4096) as engine:
        remote = engine.attach(child.descriptor)
        async with engine.register(GpuArray(4096)) as region:
            await engine.write(region, remote)
        before = len(descriptors())
        for _ in range(10_000 if LONG else 60):
            async with engine.register(GpuArray(4096)) as region:
                await engine.write(region, remote)
        # Those of the stand-in's own memory are gone with it.
        assert len(descriptors()) <= before + 1
        assert (await asked(child, "open"), counted("violations")) == (0, 0)
