"""Each call of the driver fails once, at each place in turn; a device breaks; a process forks; an engine rests."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncIterator

import numpy as np
import pytest

import aiote
from support import TESTS
from support.engines.opening import across, each_progress, linked, round_trips, run_script, served_on, until
from support.gpu.driver_calls import AT_CLOSING, AT_LOADING, IN_TRANSFERS, OF_ERRORS, called, failing_somewhere
from support.gpu.standin_cuda import (
    GpuArray,
    broken,
    busy,
    driver,
    failing,
    gpu_copy,
    held,
    launched,
    new_stream,
    pending,
    standin_path,
)
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

IMM = 0x3E
SIZE = 70_000
PLACES = 12
"""More calls of one function than a test makes beyond those whose number it decides itself."""

staged = pytest.mark.parametrize("provider", ["local", "socket"])
gpus = functools.partial(linked, libcuda=standin_path(), gpu_sharing=False, drain_timeout=30.0)

# Made again, or asked again where the answer matters.
NOTICED_BY_NOBODY = {"cuStreamQuery", "cuCtxPopCurrent_v2", "cuStreamWriteValue32_v2"}


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Check that what was taken of the driver was given back, and that this thread is as it was."""
    cuda = driver()
    counts = (cuda.standin_memories, cuda.standin_events, cuda.standin_contexts)
    before = [count() for count in counts]
    yield
    assert [count() for count in counts] == before
    assert (cuda.standin_depth(), cuda.standin_capture_mode()) == (0, 0)


def test_every_function_of_the_driver_that_is_called_fails_in_a_test():
    """Those of sharing, segments, NICs and values fail in the test files of these."""
    assert sorted(failing_somewhere()) == sorted(called())


FAILING_AT_FIRST = """
    import asyncio, sys
    sys.path.insert(0, sys.argv[1])
    import aiote
    from support.gpu.standin_cuda import GpuArray, driver, standin_path
    class Unknown:
        __cuda_array_interface__ = {"version": 3, "shape": (8,), "typestr": "|u1", "data": (1 << 40, False)}
    memory = GpuArray(64)
    async def main():
        async with aiote.open_engine("local", libcuda=standin_path()) as engine:
            if sys.argv[2] == "old":
                driver().standin_version(11080)
            driver().standin_fail(sys.argv[2].encode(), 0, 2)
            try:
                engine.register(Unknown() if sys.argv[2].startswith("cuGetError") else memory)
            except aiote.FabricError as error:
                print(error)
            driver().standin_version(12000)
            print(engine.register(memory).device)
    asyncio.run(main())
"""


@pytest.mark.parametrize("name", AT_LOADING)
def test_a_call_that_fails_at_loading_is_told_and_made_again_for_the_next_memory(name):
    done = run_script(FAILING_AT_FIRST, str(TESTS), name)
    told, device = done.stdout.splitlines()
    assert (f"{name}: CUDA_ERROR_OUT_OF_MEMORY: out of memory" in told, device, done.stderr) == (True, "cuda:0", "")


@pytest.mark.parametrize("name", OF_ERRORS)
def test_an_error_that_the_driver_does_not_describe_is_told_by_its_number(name):
    done = run_script(FAILING_AT_FIRST, str(TESTS), name)
    told, device = done.stdout.splitlines()
    assert ("CUDA error 1" in told, device, done.stderr) == (True, "cuda:0", "")


def test_a_driver_that_is_too_old_is_named_and_the_first_that_is_not_is_taken():
    done = run_script(FAILING_AT_FIRST, str(TESTS), "old")
    told, device = done.stdout.splitlines()
    assert ("is the driver of CUDA 11.8; install the driver of CUDA 12.0" in told, device) == (True, "cuda:0")


async def moved(left: aiote.Engine, right: aiote.Engine, source: GpuArray, target: GpuArray, stream: int) -> None:
    """Register, write behind a stream and read back; an error says what failed."""
    region = left.register(source)
    try:
        there = right.register(target)
        try:
            remote = left.attach(there.descriptor)
            await left.write(region, remote, stream=stream)
            assert np.array_equal(source.seen, target.seen)
            await left.read(remote, region)
        finally:
            await there.aclose()
    finally:
        await region.aclose()


@staged
@pytest.mark.parametrize("name", IN_TRANSFERS)
async def test_each_call_fails_once_and_the_engine_lives(provider, name):
    """What fails says so in a sentence; what ends well has moved every byte; the same works right after."""
    source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
    failures = 0
    with new_stream() as stream:
        async with nothing_left(), gpus(provider) as (left, right):
            for after in range(PLACES):
                target.seen[:] = 0
                with failing(name, after):
                    try:
                        await moved(left, right, source, target, stream)
                    except (aiote.FabricError, aiote.TransferError) as error:
                        failures += 1
                        assert re.search("CUDA_ERROR_OUT_OF_MEMORY: out of memory|Input/output error", str(error))
                        assert "\n" not in str(error)
                    used = not driver().standin_fails()
                await moved(left, right, source, target, stream)
                if not used:
                    break
            await served_on(left, right)
    assert failures or name in NOTICED_BY_NOBODY


@staged
@pytest.mark.parametrize("name", AT_CLOSING)
async def test_what_fails_at_the_close_is_done_again(provider, name):
    source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
    for after in range(3):
        async with nothing_left():
            with failing(name, 1 << 20), new_stream() as stream:
                async with gpus(provider) as (left, right):
                    await moved(left, right, source, target, stream)
                    driver().standin_fail(name.encode(), after, 2)
                assert after or not driver().standin_fails()


@staged
async def test_a_call_that_fails_by_chance_while_the_loop_sleeps_breaks_no_device(provider):
    """Only a context that says so each time is broken."""
    async with gpus(provider) as (left, right):
        source, target = gpu_copy(filled(SIZE)), GpuArray(SIZE)
        region, remote = left.register(source), across(left, right, target)
        for name in ("cuStreamQuery", "cuCtxPushCurrent_v2"):
            with held():
                transfer = left.submit_write(region, remote, stream=-1)
                await until(pending)
                with failing(name):
                    await until(lambda: not driver().standin_fails())
                assert not transfer.done()
            await transfer


@staged
@each_progress
async def test_a_broken_device_ends_everything_of_it_and_nothing_else(provider, progress):
    """Copies, reads, what is held and what comes later of device 0 end with errors; device 1 and the host go on."""
    sick, well = gpu_copy(filled(SIZE), 0), gpu_copy(filled(SIZE), 1)
    targets = [GpuArray(SIZE, 1), np.zeros(SIZE, np.uint8)]
    async with nothing_left(), gpus(provider, progress=progress) as (left, right):
        remotes = [across(left, right, target) for target in targets]
        ill, healthy, host = left.register(sick), left.register(well), left.register(filled(SIZE))
        with new_stream() as stream:
            with busy():
                launched(sick, 1, 0, stream)
                waiting = left.submit_write_imm(ill, remotes[0], IMM, stream=stream)
                with held():
                    copying = left.submit_write_imm(ill, remotes[0], IMM, stream=-1)
                    reading = left.submit_read(remotes[1], ill, stream=-1)
                    await until(pending)
                    with broken(0):
                        for transfer in (waiting, copying, reading):
                            with pytest.raises(aiote.TransferError):
                                await transfer
            with broken(0):
                for remote in remotes:
                    with pytest.raises(aiote.TransferError):
                        await left.write(ill, remote)
                    await left.write(healthy, remote)
                    await left.write(host, remote)
                with pytest.raises(aiote.FabricError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                    left.register(sick)
                await served_on(left, right)
        assert right.counter(IMM).value == 0


@staged
async def test_an_engine_at_rest_calls_no_driver(provider):
    async with gpus(provider) as (left, right):
        region, remote = left.register(gpu_copy(filled(64))), across(left, right, GpuArray(64))
        with new_stream() as stream:
            await left.write_imm(region, remote, IMM, stream=stream)
        await left.write_imm(region, remote, IMM)
        await right.counter(IMM).wait(2)
        await round_trips(left, right)
        calls = driver().standin_calls()
        await round_trips(left, right, 20)
        assert driver().standin_calls() == calls


FORKED = """
    import asyncio, os, sys
    sys.path.insert(0, sys.argv[1])
    import aiote
    from aiote import gpu
    from support.gpu.standin_cuda import GpuArray, driver, new_stream, standin_path
    driver()
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    config = aiote.EngineConfig(libcuda=standin_path(), progress=sys.argv[2])
    left = run(aiote.open_engine("local", config=config)._open())
    right = run(aiote.open_engine("local", config=config)._open())
    source, target = GpuArray(1000), GpuArray(1000)
    source.seen[:] = 7
    region = left.register(source)
    remote = left.attach(right.register(target).descriptor)
    run(left.write(region, remote))
    child = os.fork()
    if child == 0:
        codes = []
        for call in (lambda: left.register(source), lambda: left.submit_write(region, remote),
                     lambda: left.submit_write(region, remote, stream=1)):
            try:
                call()
            except aiote.UsageError as error:
                codes.append("parent process" in str(error))
        try:
            gpu.allocate(64)
        except aiote.FabricError as error:
            codes.append("CUDA_ERROR_NOT_INITIALIZED" in str(error))
        left.abort()
        os._exit(0 if codes == [True] * 4 else 1)
    print(os.waitpid(child, 0)[1])
    source.seen[:] = 8
    run(left.write(region, remote))
    print(bool((target.seen == 8).all()))
    run(left.aclose())
    run(right.aclose())
    loop.close()
"""


def test_a_child_of_a_fork_is_told_and_its_parent_goes_on():
    done = run_script(FORKED, str(TESTS), "thread", AIOTE_LIBCUDA=standin_path())
    assert (done.stdout.split(), done.stderr) == (["0", "True"], "")
