"""No late writes: every kind of transfer, cancelled in every way after any number of steps, writes nothing more.

A checksum is taken the moment that the await has ended, of the memory that is written to; the memory that is read from
is filled with poison. What is written later changes the checksum, whatever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import each_memory, each_progress, go_round, linked, round_trips
from support.machine import SLOWER

pytestmark = pytest.mark.libfabric

SIZE = 2 << 20 if SLOWER == 1 else 1 << 20
PAGE = 8192  # more than what goes through shared memory over shm: several in one message
TURNS = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]
"""Turns of the loop before the cancellation: at first nothing is posted, in the end the transfer may be over."""
LATE_S = 0.003

Make = Callable[[], aiote.Transfer]
Way = Callable[[Make, int], Awaitable[None]]


async def by_task(make: Make, number: int) -> None:
    async def work() -> None:
        await make()

    task = asyncio.ensure_future(work())
    await go_round(number)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def by_timeout(make: Make, number: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as deadline:
            transfer = make()
            await go_round(number)
            deadline.reschedule(asyncio.get_running_loop().time())
            await transfer


async def by_deadline(make: Make, number: int) -> None:
    with contextlib.suppress(TimeoutError):
        with anyio.fail_after(1000) as scope:
            transfer = make()
            await go_round(number)
            scope.deadline = anyio.current_time()
            await transfer


async def by_group(make: Make, number: int) -> None:
    """A sibling that fails cancels the group."""

    async def fail() -> None:
        await go_round(number)
        raise LookupError

    async def work() -> None:
        await make()

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(work())
            group.create_task(fail())


async def by_itself(make: Make, number: int) -> None:
    transfer = make()
    await go_round(number)
    transfer.cancel()
    with contextlib.suppress(aiote.TransferError):
        await transfer


WAYS = [by_task, by_timeout, by_deadline, by_group, by_itself]
VERBS = ["write", "write_imm", "write_pages", "read"]


def maker(engine: aiote.Engine, verb: str, local: aiote.Region, remote: aiote.RemoteRegion) -> Make:
    pages = range(SIZE // PAGE)[::-1]  # none is beside the next one
    return {
        "write": lambda: engine.submit_write(local, remote),
        "write_imm": lambda: engine.submit_write_imm(local, remote, 1),
        "write_pages": lambda: engine.submit_write_pages(
            aiote.Pages(local, pages, PAGE), aiote.Pages(remote, pages, PAGE), 1
        ),
        "read": lambda: engine.submit_read(remote, local),
    }[verb]


@each_memory
@each_progress
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_written_after_the_await(provider, progress, verb, way: Way):
    async with linked(provider, progress=progress, largest_message=SIZE // 16) as (left, right):
        here, there = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        local, remote = left.register(here), left.attach(right.register(there).descriptor)
        source, target = (there, here) if verb == "read" else (here, there)
        make = maker(left, verb, local, remote)
        for number, steps in enumerate(TURNS[::4] if provider.endswith("+cuda") else TURNS):
            source[:] = number + 1
            await way(make, steps)
            assert left.statistics().outstanding == left.statistics().queued == 0
            before = zlib.crc32(target)
            source[:] = 0xFF
            await round_trips(left, right, 1)
            assert zlib.crc32(target) == before
            assert target.max() < 0xFF
        # The engine works on, and on the same connection.
        source[:] = 0x77
        await make()
        assert (target == 0x77).all()
        assert len(left.peers) == 1


@each_memory
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("end", ["close", "abort", "leave"])
async def test_nothing_is_written_after_the_engine_was_closed(provider, verb, end):
    for steps in TURNS[::3]:
        async with linked(provider, largest_message=SIZE // 16) as (left, right):
            here, there = np.ones(SIZE, np.uint8), np.ones(SIZE, np.uint8)
            local, remote = left.register(here), left.attach(right.register(there).descriptor)
            source, target = (there, here) if verb == "read" else (here, there)
            transfer = maker(left, verb, local, remote)()
            await go_round(steps)
            if end == "close":
                await left.aclose()
            elif end == "abort":
                left.abort()
            else:
                left.peers[0].disconnect("for a test")
            with contextlib.suppress(aiote.AioteError):
                await transfer
            before = zlib.crc32(target) if verb == "read" or end == "close" else None
            source[:] = 0xFF
            await asyncio.sleep(LATE_S)
            if before is not None:
                assert zlib.crc32(target) == before
            if transfer.exception() is None or getattr(transfer.exception(), "confirmed", True):
                assert target.max() < 0xFF
