"""Values in memory whose change is awaited."""

from __future__ import annotations

import array
import asyncio
import ctypes
import threading

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_progress, each_provider, go_round, linked, opened, until

pytestmark = pytest.mark.libfabric


@pytest.mark.anyio
@each_progress
async def test_a_watch_sees_the_last_of_the_values_that_a_thread_writes(progress):
    """Values in between may be missed, none is invented, the last one is seen."""
    value = np.zeros(1, np.uint64)
    last = 2000

    def bump() -> None:
        for _ in range(last):
            value[0] += np.uint64(1)
            threading.Event().wait(1e-5)

    async with opened("tcp", progress=progress) as engine:
        changes = []
        thread = threading.Thread(target=bump)
        with anyio.fail_after(PATIENCE_S):
            watching = engine.watch(value)
            thread.start()
            async for old, new in watching:
                changes.append((old, new))
                if new == last:
                    break
            await watching.aclose()
        thread.join()
    assert changes[0][0] == 0
    assert all(old < new for old, new in changes)
    assert [old for old, _ in changes[1:]] == [new for _, new in changes[:-1]]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
async def test_changes_of_values_of_every_width_are_seen(width):
    value = bytearray(width)
    async with opened("tcp") as engine:
        watching = engine.watch(value)
        value[-1] = 0x80
        assert await anext(watching) == (0, 0x80 << 8 * (width - 1))
        value[:] = b"\xff" * width
        assert await anext(watching) == (0x80 << 8 * (width - 1), (1 << 8 * width) - 1)
        value[:] = bytes(width)
        assert await anext(watching) == ((1 << 8 * width) - 1, 0)
        await watching.aclose()


async def test_what_changed_before_the_first_step_is_seen():
    """The value at the call counts, not the one when somebody begins to wait."""
    value = np.array([5], np.uint32)
    async with opened("tcp") as engine:
        watching = engine.watch(value)
        value[0] = 6
        assert await anext(watching) == (5, 6)
        await watching.aclose()


@each_provider
async def test_a_value_that_a_peer_writes_is_seen(provider):
    value = np.zeros(1, np.uint64)
    async with linked(provider) as (left, right):
        watching = right.watch(value)
        remote = left.attach(right.register(value).descriptor)
        for new in (7, 8):
            await left.write(left.register(np.array([new], np.uint64)), remote)
            assert (await anext(watching))[1] == new
        await watching.aclose()


@pytest.mark.anyio
@each_progress
async def test_several_watchers_go_on_when_one_is_cancelled(progress):
    values = np.zeros(3, np.uint64)
    async with opened("tcp", progress=progress) as engine:
        seen = {}

        async def watch(i: int) -> None:
            watching = engine.watch(values[i : i + 1])
            seen[i] = await anext(watching)
            await watching.aclose()

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as group:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as doomed:
                        doomed.start_soon(watch, 0)
                        group.start_soon(watch, 1)
                        group.start_soon(watch, 2)
                        await go_round()
                        scope.cancel()
                values[:] = 9
                await until(lambda: len(seen) == 2)
        assert seen == {1: (0, 9), 2: (0, 9)}


async def test_the_memory_of_a_watched_value_is_held_and_given_back():
    value = bytearray(8)
    async with opened("tcp") as engine:
        watching = engine.watch(value)
        task = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)
        with pytest.raises(BufferError):
            value.append(0)
        value[0] = 1
        assert await task == (0, 1)
        await watching.aclose()
        value.append(0)


async def test_closing_the_engine_ends_the_watch():
    async with opened("tcp") as engine:
        watching = engine.watch(bytearray(8))
        task = asyncio.ensure_future(anext(watching))
        await go_round()
    for step in (task, anext(watching)):
        with pytest.raises(aiote.ClosedError):
            await step
    await watching.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(watching)


async def test_a_step_under_way_keeps_the_memory_though_the_watch_is_closed():
    value = bytearray(8)
    async with opened("tcp") as engine:
        watching = engine.watch(value)
        task = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0)
        await watching.aclose()
        with pytest.raises(BufferError):
            value.append(0)
        value[0] = 1
        assert await task == (0, 1)
        value.append(0)


@pytest.mark.anyio
async def test_a_loop_over_changes_may_be_left_and_gone_on_with():
    value = np.zeros(1, np.uint64)
    async with opened("tcp") as engine:
        watching = engine.watch(value)
        for new in (1, 2):
            value[0] = new
            async for change in watching:
                assert change == (new - 1, new)
                break
        with anyio.move_on_after(0.01) as scope:
            await anext(watching)
        assert scope.cancelled_caught
        value[0] = 3
        assert await anext(watching) == (2, 3)


class OnGPU:
    """A value in a GPU's memory."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (1,),
            "typestr": "<u8",
            "data": (0x7F0000000000, False),
        }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (bytearray(3), "watch: a watched value has 3 bytes, expected 1, 2, 4 or 8"),
        (bytearray(16), "has 16 bytes, expected 1, 2, 4 or 8"),
        (b"", "watch: .*empty"),
        (5, "watch: int has no memory to lend"),
        (np.zeros(2, np.uint16)[::2], None),
        (np.zeros(4, np.uint8)[::2], "watch: .*not contiguous"),
        (memoryview(array.array("Q", [0, 0])).cast("B")[1:9], "watch: the watched value is not aligned to its size"),
        (OnGPU(), "watch: the value is in memory of 'cuda', which this process cannot read; use pinned host memory"),
        (ctypes.c_uint64(0), None),
        (b"12345678", None),
    ],
)
async def test_only_aligned_values_of_1_2_4_or_8_bytes_are_watched(value, says):
    async with opened("tcp") as engine:
        if says is None:
            await engine.watch(value).aclose()
            return
        with pytest.raises(aiote.UsageError, match=says):
            engine.watch(value)
