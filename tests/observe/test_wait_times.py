"""Histograms of waits: those that sleep are timed, once each, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter_ns
from typing import Any

import anyio
import pytest

import aiote
from aiote.observe import Latencies, WaitTimes
from support.engines.opening import across, linked, pair, until


@asynccontextmanager
async def timed(every: int = 1) -> AsyncIterator[tuple[Any, Any, Latencies]]:
    """Two engines, and the times of the second one's waits."""
    async with linked("local") as (left, right):
        latencies = Latencies(right, every)
        yield left, right, latencies
        latencies.close()


def counted(latencies: Latencies) -> dict[str, int]:
    return {kind: histogram.count for kind, histogram in latencies.by_wait.items() if histogram.count}


async def asleep(wait: Callable[[], Awaitable[object]], end: Callable[[], Awaitable[object]]) -> tuple[int, int]:
    """Begin a wait, and end it when it sleeps; return the least and the most time in nanoseconds that it took."""
    began = perf_counter_ns()
    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        slept = perf_counter_ns()
        await anyio.wait_all_tasks_blocked()
        least = perf_counter_ns() - slept
        await end()
    return least, perf_counter_ns() - began


def is_one_sleep(latencies: Latencies, kind: str, between: tuple[int, int]) -> bool:
    histogram, (least, most) = latencies.by_wait[kind], between
    return counted(latencies) == {kind: 1} and sum(histogram.buckets) == 1 and least <= histogram.sum_ns <= most


async def test_a_wait_of_a_counter_is_timed_if_it_sleeps():
    async with timed() as (left, right, latencies):
        with right.counter(3) as arrivals:
            await left.write_imm(None, right.address, 3)
            await until(lambda: arrivals.value)
            await arrivals.wait(1)
            assert counted(latencies) == {}
            took = await asleep(arrivals.wait, lambda: left.write_imm(None, right.address, 3))
        assert is_one_sleep(latencies, "counter", took)


async def test_a_wait_of_a_row_is_timed_once_however_often_it_wakes():
    async with timed() as (left, right, latencies):

        async def write() -> None:
            for imm in (5, 6):
                await left.write_imm(None, right.address, imm)
                await anyio.sleep(0)

        with right.counters(5, [1, 1]) as row:
            took = await asleep(lambda: row.wait(2), write)
            assert await row.wait(2) == 2
        assert is_one_sleep(latencies, "row", took)


async def test_a_wait_of_a_watched_value_is_timed():
    async with timed() as (left, right, latencies):
        value, one = bytearray(8), left.register(bytearray([1] * 8))
        target = across(left, right, value)
        changes = right.watch(value)
        took = await asleep(changes.__anext__, lambda: left.write(one, target))
        await changes.aclose()
        assert is_one_sleep(latencies, "value", took)


async def test_a_wait_that_looks_again_for_a_loss_is_timed_as_one():
    async with timed() as (left, right, latencies):
        looks: list[None] = []
        with right.counter(3) as arrivals:

            async def look_again() -> None:
                arrivals.wake_waits()
                await until(lambda: len(looks) > 1)
                await left.write_imm(None, right.address, 3)

            took = await asleep(lambda: arrivals.wait_unless(1, lambda: looks.append(None)), look_again)
        assert is_one_sleep(latencies, "counter", took)


async def test_a_wait_that_raises_is_not_timed():
    async with timed() as (_, right, latencies):
        with right.counter(3) as arrivals, right.counters(5, [1]) as row:
            for wait in (arrivals.wait, lambda: row.wait(1), right.watch(bytearray(8)).__anext__):
                async with anyio.create_task_group() as group:
                    group.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    group.cancel_scope.cancel()
            with pytest.raises(LookupError):
                await arrivals.wait_unless(1, LookupError)
        assert counted(latencies) == {}


async def test_one_wait_in_so_many_is_timed_until_the_timing_is_closed():
    async with timed(every=4) as (left, right, latencies):
        with right.counter(3) as arrivals:

            async def waits(number: int) -> None:
                for _ in range(number):
                    await asleep(arrivals.wait, lambda: left.write_imm(None, right.address, 3))

            await waits(9)
            assert counted(latencies) == {"counter": 3}
            latencies.close()
            await waits(5)
            assert counted(latencies) == {"counter": 3}


async def test_a_closed_engine_takes_no_times():
    async with pair("local") as (left, _):
        left.time_waits(WaitTimes())
        left.time_waits(None)
    with pytest.raises(aiote.ClosedError):
        left.time_waits(None)
