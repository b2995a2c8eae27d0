"""GPU memory in segments (`cuMemCreate`) between processes: a descriptor for each, mapped side by side, given back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import PATIENCE_S, opened, until
from support.gpu.driver_calls import EXPORTING, IMPORTING, UNMAPPING
from support.gpu.hardware_cuda import needs_standin
from support.gpu.standin_cuda import SEGMENT, GpuArray, SegmentedArray, driver, failing, standin_path
from support.machine import LONG
from support.process.children import Child
from support.process.open_resources import descriptors
from support.rails.rail_pair import filled

pytestmark = pytest.mark.libfabric

LIBCUDA = standin_path()
IMM = 0x52
MODULE = "support.gpu.child"
SIZE = 2 * SEGMENT + 12_345
"""Of three segments; frames go over the ends of the first two."""


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    made = Child(module=MODULE)
    yield made
    made.end()


@contextlib.asynccontextmanager
async def beside(child: Child, size: int = SIZE, segment: int = SEGMENT) -> AsyncIterator[tuple[aiote.Engine, str]]:
    """Open an engine in the child, with memory in segments, and one here; give the descriptor of that memory."""
    settings = {"libcuda": LIBCUDA, "drain_timeout": 30.0}
    with anyio.fail_after(PATIENCE_S):
        await child.open("local", 64, **settings)
        made = await child.ask("allocate", size=size, segment=segment)
        await child.ask("standin", call="reset")
        driver().standin_reset()
        async with opened("local", **settings) as engine:
            yield engine, made["descriptor"]


async def asked(child: Child, call: str) -> int:
    needs_standin()
    return (await child.ask("standin", call=call))["value"]


def counted(name: str) -> int:
    return int(getattr(driver(), f"standin_{name}")())


def in_segments(contents: np.ndarray, **more: object) -> SegmentedArray:
    made = SegmentedArray(contents.nbytes, **more)
    made.seen[:] = contents
    return made


async def test_segments_are_shared_and_nothing_is_staged(child):
    async with beside(child) as (engine, descriptor):
        source, remote = engine.register(in_segments(filled(SIZE))), engine.attach(bytes.fromhex(descriptor))
        assert source.reach["local"].way == "shared"
        before = counted("copies")
        await engine.write_imm(source, remote, IMM)
        await child.ask("wait", imm=IMM, n=1)
        assert counted("copies") == before
        assert await asked(child, "open") == 3
        target = SegmentedArray(SIZE)
        await engine.read(remote, engine.register(target))
        assert np.array_equal(target.seen, filled(SIZE))


async def test_a_part_of_a_segment_is_shared_with_its_whole_and_no_more(child):
    async with beside(child) as (engine, descriptor):
        memory = in_segments(np.zeros(4 * SEGMENT, np.uint8))
        memory.seen[SEGMENT + 7 : SEGMENT + 7 + SIZE] = filled(SIZE)
        part = GpuArray.__new__(GpuArray)
        part.__cuda_array_interface__ = {
            **memory.__cuda_array_interface__,
            "shape": (SIZE,),
            "data": (memory.address + SEGMENT + 7, False),
        }
        await engine.write(engine.register(part), engine.attach(bytes.fromhex(descriptor)))
        assert await asked(child, "open") == 3
        assert (await child.ask("contents"))["bytes"] == sorted(set(filled(SIZE).tolist()))


async def test_segments_of_more_than_one_message_are_mapped_in_order(child):
    count = 300
    async with beside(child, 1 << 20) as (engine, descriptor):
        memory = SegmentedArray(count * SEGMENT)
        values = np.random.default_rng(3).permutation(256)
        for number in range(count):
            memory.seen[number * SEGMENT : number * SEGMENT + 64] = values[number % 256]
        region, remote = engine.register(memory), engine.attach(bytes.fromhex(descriptor))
        for number in range(0, count, 13):
            await engine.write(region[number * SEGMENT : number * SEGMENT + 64], remote[:64])
            await engine.write(region[number * SEGMENT : number * SEGMENT + 64], remote[64:128])
            back = GpuArray(128)
            await engine.read(remote[:128], engine.register(back))
            assert set(back.seen.tolist()) == {values[number % 256]}
        assert await asked(child, "open") == count


async def test_segments_are_unmapped_by_peers_before_they_are_freed(child):
    async with beside(child) as (engine, descriptor):
        remote = engine.attach(bytes.fromhex(descriptor))
        before = 0
        for _ in range(3_000 if LONG else 20):
            memory = in_segments(filled(SIZE))
            async with engine.register(memory) as region:
                await engine.write(region, remote)
            del memory
            before = before or len(descriptors())
        assert (await asked(child, "open"), counted("violations")) == (0, 0)
        assert len(descriptors()) <= before + 1  # a connection over which they were given, which ends soon


async def test_other_segments_at_the_same_address_are_other_memory(child):
    async with beside(child) as (engine, descriptor):
        target = GpuArray(SIZE)
        there = engine.register(target).descriptor.hex()
        for value in range(2, 8):
            await child.ask("allocate", size=SIZE, value=value, segment=SEGMENT)
            await child.ask("write", descriptor=there, imm=IMM)
            assert set(target.seen.tolist()) == {value}
        assert await asked(child, "violations") == 0
        assert counted("open") == 3
        assert descriptor


async def test_segments_without_descriptors_are_staged_and_their_reach_says_why(child):
    async with beside(child) as (engine, descriptor):
        source = engine.register(in_segments(filled(SIZE), shareable=False))
        found = source.reach["local"]
        assert (found.way, "it was allocated without POSIX_FILE_DESCRIPTOR handles" in found.reason) == ("staged", True)
        await engine.write_imm(source, engine.attach(bytes.fromhex(descriptor)), IMM)
        await child.ask("wait", imm=IMM, n=1)
        assert await asked(child, "opened") == 0


@pytest.mark.parametrize("name", IMPORTING)
async def test_what_fails_in_opening_is_staged_and_leaves_nothing(child, name):
    """Each call fails once, at each of its first places: every byte arrives, and the next allocation may be shared."""
    async with beside(child) as (engine, _):
        target = GpuArray(SIZE)
        there = engine.register(target).descriptor.hex()
        for after in range(4):
            made = await child.ask("allocate", size=SIZE, value=after + 2, segment=SEGMENT)
            assert made["reach"]["local"][0] == "shared"
            with failing(name, after):
                await child.ask("write", descriptor=there, imm=IMM)
            assert set(target.seen.tolist()) == {after + 2}
            assert counted("open") in (0, 3)
        await child.ask("allocate", size=64)
        await until(lambda: counted("open") == 0)


@pytest.mark.parametrize("name", UNMAPPING)
async def test_what_fails_in_closing_is_done_again(child, name):
    """Handles are released once their segments are mapped."""
    async with beside(child) as (engine, _):
        segments, writing = counted("segments"), name == "cuMemRelease"
        with failing(name, 0 if writing else 1 << 20):
            await child.ask("write", descriptor=engine.register(GpuArray(SIZE)).descriptor.hex(), imm=IMM)
            if not writing:
                driver().standin_fail(name.encode(), 0, 2)
            await child.ask("allocate", size=64)
            assert not driver().standin_fails()
        assert (counted("open"), counted("segments")) == (0, segments)


@pytest.mark.parametrize("name", EXPORTING)
@pytest.mark.parametrize("after", [0, 1])
async def test_what_fails_in_giving_is_asked_for_again_or_staged_and_told(child, name, after):
    """Where some descriptors came, the rest is asked for anew; where none came, the peer says why."""
    async with beside(child) as (engine, descriptor):
        events: list[aiote.Event] = []
        engine.listen_events(events.append)
        source, remote = engine.register(in_segments(filled(SIZE))), engine.attach(bytes.fromhex(descriptor))
        with failing(name, after):
            await engine.write_imm(source, remote, IMM)
            await child.ask("wait", imm=IMM, n=1)
            assert not driver().standin_fails()
        if after == 0:
            await until(lambda: [event for event in events if event.name == "memory.staged"])
        told = [str(event.details["reason"]) for event in events if event.name == "memory.staged"]
        assert ["CUDA_ERROR_OUT_OF_MEMORY" in reason for reason in told] == [True] * (after == 0)
        assert await asked(child, "open") == (3 if after else 0)
        target = GpuArray(SIZE)
        await engine.read(remote, engine.register(target))
        assert np.array_equal(target.seen, filled(SIZE))
