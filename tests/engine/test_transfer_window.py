"""The transfers that one owner has in flight: their room, failures, cancellation and end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from aiote.aio import Condition, TransferWindow
from support.engines.opening import fabric, linked

pytestmark = [pytest.mark.libfabric, pytest.mark.virtual_time]

LATE_S = 0.05


@asynccontextmanager
async def slow_writes() -> AsyncIterator[Callable[[], aiote.Transfer]]:
    """Give a function that submits a write, which takes LATE_S."""
    async with linked("sim") as (owner, writer):
        remote, source = writer.attach(owner.register(bytearray(8)).descriptor), writer.register(b"12345678")
        await writer.write(source, remote)
        fabric().slow_rail(owner, by=LATE_S)
        fabric().slow_rail(writer, by=LATE_S)
        yield lambda: writer.submit_write(source, remote)


def following(transfers: list[aiote.Transfer], **limit: int) -> TransferWindow[aiote.Transfer]:
    window = TransferWindow[aiote.Transfer](Condition(), **limit)
    for transfer in transfers:
        window.add(transfer)
    return window


async def test_there_is_room_once_the_oldest_transfer_is_over():
    async with slow_writes() as write:
        first = write()
        window = following([first], limit=2)
        assert window.has_room
        await anyio.sleep(LATE_S / 2)
        second = write()
        window.add(second)
        assert not window.has_room
        with anyio.move_on_after(LATE_S / 10) as impatient:
            await window.room()
        assert impatient.cancelled_caught
        assert not first.done(), "a wait for room that is cancelled cancels no transfer"
        await window.room()
        assert (first.done(), second.done(), len(window)) == (True, False, 1)
        await window.wait_over()
        assert second.done()
        assert len(window) == 0
        assert first.exception() is second.exception() is None


async def test_drain_cancels_and_waits_even_if_the_wait_is_cancelled():
    async with slow_writes() as write:
        transfers = [write() for _ in range(3)]
        window = following(transfers)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await window.drain()
        await window.drain()
        assert all(transfer.done() for transfer in transfers)
        assert len(window) == 0
        window.raise_failure()
        assert await window.next_failure() is None


async def test_each_failure_is_reported_once_and_a_success_never():
    async with slow_writes() as write:
        cancelled, other, lasting = transfers = [write() for _ in range(3)]
        window = following(transfers)
        cancelled.cancel()
        other.cancel()
        assert await window.next_failure() in (cancelled, other)
        await window.wait_over()
        with pytest.raises(aiote.TransferError, match="cancelled"):
            window.raise_failure()
        window.raise_failure()
        assert await window.next_failure() is None
        assert lasting.exception() is None
