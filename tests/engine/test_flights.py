"""Transfers that are cared for together, and what a lease has under way."""

from __future__ import annotations

import pytest

import aiote
from support.engines.opening import each_progress, each_provider, linked, until

pytestmark = [pytest.mark.libfabric, pytest.mark.anyio]

PAGE = 64


def told(flight: aiote.Flight) -> list[aiote.Transfer | None]:
    """Have a flight note what it tells."""
    heard: list[aiote.Transfer | None] = []
    flight.changed = heard.append
    return heard


@each_provider
@each_progress
async def test_a_flight_tells_the_end_of_its_last_transfer_and_counts_bytes(provider, progress):
    async with linked(provider, progress=progress) as (owner, writer):
        memory = bytearray(8 * PAGE)
        remote = writer.attach(owner.register(memory).descriptor)
        source = aiote.Pages(writer.register(b"x" * PAGE), [0] * 4, PAGE)
        target = aiote.Pages(remote, [0, 2, 4, 6], PAGE)
        flight = aiote.Flight()
        heard = told(flight)
        for _ in range(3):
            writer.submit_write_pages(source, target, 1).join(flight)
        await owner.counter(1).wait(12)
        await until(lambda: not flight)
        assert heard
        assert set(heard) == {None}
        assert (flight.landed, flight.landed_bytes) == (3, 12 * PAGE)
        assert memory == (b"x" * PAGE + bytes(PAGE)) * 4


async def test_a_flight_tells_of_each_transfer_that_fails():
    async with linked("sim") as (owner, writer):
        remote = writer.attach(owner.register(bytearray(PAGE)).descriptor)
        source = writer.register(b"x" * PAGE)
        flight = aiote.Flight()
        heard = told(flight)
        transfers = [writer.submit_write(source, remote) for _ in range(3)]
        for transfer in transfers:
            transfer.join(flight)
        assert len(flight) == 3
        assert list(flight) == transfers
        peer = await writer.connect(owner.address)
        peer._connection.lose("for a test")
        await until(lambda: not flight)
        failed = [transfer for transfer in transfers if transfer.exception() is not None]
        assert failed
        assert {transfer for transfer in heard if transfer is not None} == set(failed)
        assert len(heard) == len(failed)
        assert flight.landed == len(transfers) - len(failed)


async def test_a_transfer_that_is_over_is_told_of_when_it_joins():
    async with linked("sim") as (owner, writer):
        remote = writer.attach(owner.register(bytearray(PAGE)).descriptor)
        transfer = writer.submit_write(writer.register(b"x" * PAGE), remote)
        await transfer
        flight = aiote.Flight()
        heard = told(flight)
        transfer.join(flight)
        assert heard == [None]
        assert flight.landed == 1


@each_provider
async def test_pages_at_another_offset_are_those_of_another_layer(provider):
    async with linked(provider) as (owner, writer):
        memory = bytearray(4 * PAGE)
        remote = writer.attach(owner.register(memory).descriptor)
        source = aiote.Pages(writer.register(b"x" * PAGE), [0], PAGE)
        first = aiote.Pages(remote, [1], PAGE)
        for layer in (0, 2):
            await writer.write_pages(source, first.at(layer * PAGE), 1)
        assert memory == (bytes(PAGE) + b"x" * PAGE) * 2
        assert (first.offset, first.at(PAGE).offset, first.at(PAGE).index) == (0, PAGE, first.index)
        for wrong, text in ((3 * PAGE, "outside of the region"), (-1, "not negative"), (1 << 63, "fit in 63 bits")):
            with pytest.raises(aiote.UsageError, match=text):
                first.at(wrong)


@each_provider
async def test_a_write_that_starts_the_short_way_is_refused_once_its_lease_is_revoked(provider):
    """The second write through a lease takes the short way; a revocation ends it, and closes that way."""
    async with linked(provider) as (owner, holder):
        memory = bytearray(2 * PAGE)
        lease = owner.register(memory).lease(slice(0, 2 * PAGE), holder.address)
        remote = holder.attach(lease.descriptor)
        source = aiote.Pages(holder.register(b"x" * PAGE), [0, 0], PAGE)
        target = aiote.Pages(remote, [0, 1], PAGE)
        for _ in range(2):
            await holder.write_pages(source, target, 1)
        assert not remote.memory.lease_flight
        transfer = holder.submit_write_pages(source, target, 1)
        assert transfer.lease == 1
        assert list(remote.memory.lease_flight) == [transfer]
        await transfer
        await lease.revoke()
        memory[:] = bytes(2 * PAGE)
        with pytest.raises(aiote.TransferError, match="revoked lease 1"):
            await holder.write_pages(source, target, 1)
        assert not any(memory)
