"""The Transfer that a submitted request gives: awaited by any number of tasks, asked, shown and cancelled."""

from __future__ import annotations

import re

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import (
    across,
    each_progress,
    each_provider,
    go_round,
    linked,
    opened,
    pair,
    round_trips,
    until,
)

pytestmark = pytest.mark.libfabric

LARGE = 8 << 20
STRIPE = 8192
"""LARGE bytes are a thousand stripes of this size: more than a channel's queue takes, so some are never posted."""


@pytest.mark.anyio
@each_provider
@each_progress
async def test_a_transfer_is_awaited_by_many_and_again(provider, progress):
    async with linked(provider, progress=progress) as (left, right):
        target = bytearray(8)
        transfer = left.submit_write(left.register(b"12345678"), across(left, right, target))
        ended = []

        async def wait() -> None:
            await transfer
            ended.append(bytes(target))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(wait)
        assert ended == [b"12345678"] * 5
        await transfer
        assert transfer.done()
        assert transfer.exception() is None


async def test_the_repr_of_a_transfer_says_what_it_does_and_how_far_it_is():
    async with pair("tcp") as (left, right):
        region, remote = left.register(bytearray(8)), across(left, right, bytearray(8))
        transfer = left.submit_write_imm(region, remote, 1)
        assert repr(transfer) == "<Transfer write_imm of 8 bytes, waiting for its peer>"
        assert transfer.exception() is None
        await transfer
        assert repr(transfer) == "<Transfer write_imm of 8 bytes, over>"
        assert transfer.peer.address == right.address
        shown = [
            (left.submit_write(region, remote), "write of 8 bytes"),
            (left.submit_read(remote, region), "read of 8 bytes"),
            (left.submit_send(right.address, b"123"), "send of 3 bytes"),
            (left.submit_write_imm(None, remote, 0x1F), "write_imm of immediate 0x1f alone"),
            (
                left.submit_write_pages(aiote.Pages(region, [0, 1], 4), aiote.Pages(remote, [0, 1], 4)),
                "write_pages of 2 pages of 4 bytes",
            ),
        ]
        for transfer, description in shown:
            assert transfer.description == description
            assert repr(transfer) == f"<Transfer {description}, under way>"
        for transfer, _ in shown:
            await transfer


@pytest.mark.anyio
@each_provider
async def test_a_transfer_cancelled_before_the_peer_is_connected_posts_nothing(provider):
    async with pair(provider) as (left, right):
        target = bytearray(8)
        transfer = left.submit_write_imm(left.register(b"12345678"), across(left, right, target), 1)
        transfer.cancel()
        assert transfer.done()
        with pytest.raises(aiote.TransferError, match="cancelled before anything was posted") as caught:
            await transfer
        assert caught.value is transfer.exception()
        assert (caught.value.transfer, caught.value.cause, caught.value.confirmed) == (transfer, None, True)
        await left.connect(right.address)
        await round_trips(left, right)
        assert target == bytes(8)
        assert right.counter(1).value == 0


@pytest.mark.anyio
@each_provider
@each_progress
async def test_a_write_cancelled_under_way_moves_nothing_after_its_await(provider, progress):
    """What is not posted is dropped, what is drains; when the await ends nothing moves any more."""
    source, target = np.full(LARGE, 1, np.uint8), np.zeros(LARGE, np.uint8)
    async with linked(provider, progress=progress, largest_message=STRIPE) as (left, right):
        region, remote = left.register(source), across(left, right, target)
        for imm in range(10, 40):
            target[:] = 0
            transfer = left.submit_write_imm(region, remote, imm)
            transfer.cancel()
            try:
                await transfer
            except aiote.TransferError as error:
                caught = error
                if (written := target.copy()).sum() < LARGE:
                    break
            # A native thread can do it all while this one waits for a processor.
            assert progress == "thread"
        else:
            pytest.fail("every cancellation came too late")
        assert re.search(r"write_imm of 8388608 bytes: cancelled, \d+ of 8388608", str(caught))
        assert caught.confirmed
        assert caught.cause is None
        assert transfer.done()
        assert written.sum() > 0
        source[:] = 2
        await round_trips(left, right)
        assert np.array_equal(target, written)
        assert right.counter(imm).value == 0
        assert left.statistics().outstanding == left.statistics().queued == 0
        transfer.cancel()
        await left.write_imm(region, remote, 2)
        await right.counter(2).wait(1)
        assert (target == 2).all()


@each_provider
async def test_a_read_cancelled_under_way_fills_nothing_after_its_await(provider):
    """After the await the local buffer is the caller's again: nothing writes to it."""
    target = np.zeros(LARGE, np.uint8)
    source = np.full(LARGE, 1, np.uint8)
    async with linked(provider, largest_message=STRIPE) as (left, right):
        transfer = left.submit_read(across(left, right, source), left.register(target))
        transfer.cancel()
        with pytest.raises(aiote.TransferError, match="read of 8388608 bytes: cancelled"):
            await transfer
        target[:] = 7
        source[:] = 2
        await round_trips(left, right)
        assert (target == 7).all()


@each_provider
async def test_a_transfer_cancelled_in_the_queue_leaves_the_others_whole(provider):
    """Of many transfers one is taken out; the others arrive, and each counts."""
    async with linked(provider, largest_message=STRIPE) as (left, right):
        target = np.zeros(LARGE + 30, np.uint8)
        remote = across(left, right, target)
        large = left.submit_write_imm(left.register(np.full(LARGE, 1, np.uint8)), remote[:LARGE], 1)
        local = left.register(np.full(30, 9, np.uint8))
        parts = [slice(10 * i, 10 * i + 10) for i in range(3)]
        small = [left.submit_write_imm(local[part], remote[LARGE:][part], 1) for part in parts]
        small[1].cancel()
        with pytest.raises(aiote.TransferError, match=r"cancelled, 0 of 10 bytes confirmed"):
            await small[1]
        for transfer in (large, small[0], small[2]):
            await transfer
        await right.counter(1).wait(3)
        assert target[LARGE:].tolist() == [9] * 10 + [0] * 10 + [9] * 10
        assert (target[:LARGE] == 1).all()
        assert right.counter(1).value == 0


async def test_cancelling_a_transfer_that_is_over_changes_nothing():
    async with linked("tcp") as (left, right):
        transfer = left.submit_send(right.address, b"x")
        await transfer
        transfer.cancel()
        await transfer
        assert transfer.exception() is None


@pytest.mark.anyio
@each_provider
async def test_every_awaiter_hears_of_the_cancellation(provider):
    async with linked(provider, largest_message=STRIPE) as (left, right):
        transfer = left.submit_write(
            left.register(np.zeros(LARGE, np.uint8)), across(left, right, np.zeros(LARGE, np.uint8))
        )
        heard = []

        async def wait() -> None:
            try:
                await transfer
            except aiote.TransferError as error:
                heard.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(wait)
            await go_round(1)
            transfer.cancel()
        assert len(heard) == 3
        assert len(set(heard)) == 1


async def test_the_error_of_a_failed_transfer_names_peer_rail_and_operation():
    async with linked("tcp", message_pool=2) as (left, right):
        (peer,) = left.peers
        waiting = [left.submit_send(peer, b"nobody takes it") for _ in range(5)]
        await right.aclose()
        with pytest.raises(aiote.TransferError) as caught:
            await waiting[-1]
        error = caught.value
        assert error.transfer is waiting[-1]
        assert isinstance(error.cause, aiote.PeerError)
        assert error.__cause__ is error.cause
        assert error.cause.peer == str(right.address)
        assert "send of 15 bytes" in str(error)
        assert "0 of 15 bytes confirmed" in str(error)
        assert str(right.address) in str(error)
        with pytest.raises(aiote.TransferError) as again:
            await waiting[-1]
        assert again.value is error


async def test_a_transfer_that_is_never_awaited_arrives_all_the_same():
    """A transfer that nobody looks at goes its way."""
    async with linked("tcp") as (left, right):
        target = bytearray(8)
        left.submit_write_imm(left.register(b"12345678"), across(left, right, target), 1)
        await right.counter(1).wait(1)
        assert target == b"12345678"


async def test_a_transfer_that_failed_before_its_await_raises_there():
    async with opened("tcp") as left:
        transfer = left.submit_send(aiote.Address("127.0.0.1", 1, b"nobody is there!", 1), b"x")
        await until(transfer.done)
        assert isinstance(transfer.exception(), aiote.PeerError)
        with pytest.raises(aiote.PeerError, match="cannot be reached"):
            await transfer
