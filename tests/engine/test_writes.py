"""Writes, reads, immediates: the bytes are right and counted once; what is refused is so before anything moves."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import (
    across,
    each_memory,
    each_progress,
    each_provider,
    go_round,
    linked,
    noise,
    opened,
    pair,
)

pytestmark = pytest.mark.libfabric

SIZES = [1, 7, 4096, 65537, 3_000_001]


@pytest.mark.anyio
@each_memory
@each_progress
async def test_writes_and_reads_move_bytes_and_each_write_counts_once(provider, progress):
    """The first use connects; after `write` returns the bytes are there; each write counts one."""
    async with pair(provider, progress=progress) as (left, right):
        source, target, back = noise(100_000), np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
        local, remote = left.register(source), across(left, right, target)
        await left.write(local, remote)
        assert np.array_equal(target, source)
        source[:] = noise(100_000, 2)
        await left.write_imm(local, remote, 5)
        await right.counter(5).wait(1)
        assert np.array_equal(target, source)
        await left.write_imm(None, remote, 6)
        await left.write_imm(None, right.address, 6)
        await right.counter(6).wait(2)
        target[:] = noise(100_000, 3)
        await left.read(remote, left.register(back))
        assert np.array_equal(back, target)
        assert right.counter(5).value == right.counter(6).value == 0


@each_memory
@pytest.mark.parametrize("size", SIZES)
async def test_a_write_of_any_size_changes_exactly_its_bytes(provider, size):
    """Not a byte less, not a byte beside."""
    async with linked(provider) as (left, right):
        source = noise(size)
        target = np.full(size + 128, 0xEE, np.uint8)
        remote = across(left, right, target)
        await left.write_imm(left.register(source), remote[64 : 64 + size], 1)
        await right.counter(1).wait(1)
        assert np.array_equal(target[64:-64], source)
        assert (target[:64] == 0xEE).all()
        assert (target[-64:] == 0xEE).all()
        back = np.full(size + 128, 0xDD, np.uint8)
        await left.read(remote[64 : 64 + size], left.register(back)[64 : 64 + size])
        assert np.array_equal(back[64:-64], source)
        assert (back[:64] == 0xDD).all()
        assert (back[-64:] == 0xDD).all()


@each_memory
async def test_a_write_of_no_bytes_ends_and_counts(provider):
    """Empty slices are legal: a write of no bytes ends, and counts where it has an immediate."""
    target = bytearray(8)
    async with linked(provider) as (left, right):
        local, remote = left.register(b"12345678"), across(left, right, target)
        await left.write(local[4:4], remote[8:8])
        await left.write_imm(local[0:0], remote[0:0], 9)
        await right.counter(9).wait(1)
        await left.read(remote[0:0], left.register(bytearray(8))[0:0])
        assert target == bytes(8)


@each_memory
@each_progress
async def test_every_submit_form_moves_its_bytes(provider, progress):
    async with pair(provider, progress=progress) as (left, right):
        target = np.zeros(400, np.uint8)
        remote = across(left, right, target)
        local = left.register(noise(400))
        back = np.zeros(100, np.uint8)
        transfers = [
            left.submit_write(local[0:100], remote[0:100]),
            left.submit_write(local[100:200], remote[100:200], 1),
            left.submit_write_imm(local[200:300], remote[200:300], 1),
            left.submit_write_imm(None, remote, 1),
            left.submit_write_pages(aiote.Pages(local, [3], 100), aiote.Pages(remote, [3], 100), 1),
            left.submit_send(right.address, b"and a message"),
        ]
        assert all(isinstance(transfer, aiote.Transfer) for transfer in transfers)
        for transfer in transfers:
            await transfer
            assert transfer.done()
            assert transfer.exception() is None
        await right.counter(1).wait(4)
        assert (await right.recv()).data == b"and a message"
        assert np.array_equal(target, noise(400))
        await left.submit_read(remote[300:400], left.register(back))
        assert np.array_equal(back, target[300:])


@pytest.mark.anyio
@each_memory
async def test_hundreds_of_transfers_both_ways_arrive_and_count_once(provider):
    """More than any queue holds, of all kinds, both ways; each arrives, each counts one."""
    async with linked(provider) as (left, right):
        count, size = 700, 300
        sources = {engine: noise(count * size, seed) for seed, engine in enumerate((left, right))}
        targets = {engine: np.zeros(count * size, np.uint8) for engine in (left, right)}

        async def flood(here: aiote.Engine, there: aiote.Engine) -> None:
            local, remote = here.register(sources[here]), across(here, there, targets[there])
            parts = [slice(i * size, (i + 1) * size) for i in range(count)]
            for transfer in [here.submit_write_imm(local[part], remote[part], 77) for part in parts]:
                await transfer

        async with anyio.create_task_group() as group:
            group.start_soon(flood, left, right)
            group.start_soon(flood, right, left)
            group.start_soon(left.counter(77).wait, count)
            group.start_soon(right.counter(77).wait, count)
        assert np.array_equal(targets[right], sources[left])
        assert np.array_equal(targets[left], sources[right])
        assert left.statistics().immediates == right.statistics().immediates == count


async def test_one_source_is_written_to_many_places():
    async with linked("tcp") as (left, right):
        target = np.zeros(1000, np.uint8)
        local, remote = left.register(b"0123456789"), across(left, right, target)
        for transfer in [left.submit_write(local, remote[i : i + 10]) for i in range(0, 1000, 10)]:
            await transfer
        assert target.tobytes() == b"0123456789" * 100


@each_provider
async def test_sources_and_targets_of_different_lengths_are_refused(provider):
    async with linked(provider) as (left, right):
        local, remote = left.register(bytearray(10)), across(left, right, bytearray(20))
        with pytest.raises(aiote.UsageError, match="write: src has 10 bytes, dst 20; slice the larger one"):
            left.submit_write(local, remote)
        with pytest.raises(aiote.UsageError, match="write_imm: src has 10 bytes, dst 20"):
            await left.write_imm(local, remote, 1)
        with pytest.raises(aiote.UsageError, match="read: src_remote has 20 bytes, dst_local 10"):
            await left.read(remote, local)
        assert left.statistics().queued == 0


@each_provider
async def test_read_only_memory_is_no_destination(provider):
    """Refused by whoever would write, on the word of the descriptor; reading it is fine."""
    constant = b"constant"
    async with linked(provider) as (left, right):
        remote = across(left, right, constant)
        local = left.register(bytearray(8))
        assert not remote.writable
        assert not remote[2:4].writable
        for verb in (
            lambda: left.submit_write(local, remote),
            lambda: left.submit_write_imm(local, remote, 1),
            lambda: left.submit_write_pages(aiote.Pages(local, [0], 8), aiote.Pages(remote, [0], 8)),
        ):
            with pytest.raises(aiote.UsageError, match="the remote memory is read-only: its owner must register"):
                verb()
        with pytest.raises(aiote.UsageError, match="the local memory is read-only, so it cannot be a destination"):
            left.submit_read(across(left, right, bytearray(8)), left.register(b"12345678"))
        await left.write_imm(None, remote, 3)
        await right.counter(3).wait(1)
        await left.read(remote, local)
        assert constant == b"constant"


async def test_a_region_of_another_engine_is_refused():
    async with pair("tcp") as (left, right):
        foreign = right.register(bytearray(8))
        remote = across(left, right, bytearray(8))
        says = "the local region belongs to another engine; register the memory with this one too"
        with pytest.raises(aiote.UsageError, match=f"write: {says}"):
            left.submit_write(foreign, remote)
        with pytest.raises(aiote.UsageError, match=f"read: {says}"):
            left.submit_read(remote, foreign)
        with pytest.raises(aiote.UsageError, match=f"write_pages: {says}"):
            left.submit_write_pages(aiote.Pages(foreign, [0], 8), aiote.Pages(remote, [0], 8))


async def test_a_peer_of_another_engine_is_refused():
    """Its connection is not ours."""
    async with linked("tcp") as (left, right), opened("tcp") as third:
        (peer,) = left.peers
        for verb in (lambda: third.submit_send(peer, b"x"), lambda: third.submit_write_imm(None, peer, 1)):
            with pytest.raises(aiote.UsageError, match="belongs to another engine"):
                verb()
        await third.send(peer.address, b"by its address")
        assert (await right.recv()).data == b"by its address"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e, r, m: e.submit_write(None, m), "src is None; only write_imm may go without a source"),
        (lambda e, r, m: e.submit_write(b"x", m), r"src must be a Region of this engine .*, got bytes"),
        (lambda e, r, m: e.submit_write(m, m), "src must be a Region of this engine .*, got RemoteRegion"),
        (lambda e, r, m: e.submit_write(r, r), "got Region; a Region is local: send its descriptor over"),
        (
            lambda e, r, m: e.submit_write(r, b"x"),
            r"dst must be a RemoteRegion \(engine.attach\(descriptor\)\), got bytes",
        ),
        (lambda e, r, m: e.submit_write(r, m.owner), "dst must be a RemoteRegion .*, got Address"),
        (lambda e, r, m: e.submit_write_imm(None, r, 1), "must be a RemoteRegion, a Peer or an Address, got Region"),
        (lambda e, r, m: e.submit_write_imm(None, 5, 1), "must be a RemoteRegion, a Peer or an Address, got int"),
        (lambda e, r, m: e.submit_write_imm(r, m, 1 << 28), "the immediate is 268435456, expected 0 to 268435455"),
        (lambda e, r, m: e.submit_write_imm(r, m, -1), "the immediate is -1, expected 0 to"),
        (lambda e, r, m: e.submit_write_imm(r, m, 1.5), "the immediate is 1.5, expected an integer"),
        (lambda e, r, m: e.submit_write_imm(None, m, "x"), "the immediate is 'x', expected an integer"),
        (lambda e, r, m: e.submit_read(r, r), "src_remote must be a RemoteRegion"),
        (lambda e, r, m: e.submit_read(m, m), "dst_local must be a Region of this engine"),
        (lambda e, r, m: e.submit_send(5, b""), r"expected a Peer, an Address or its text, got int"),
        (lambda e, r, m: e.submit_send("there", b""), r"'there': no port number after the host"),
        (lambda e, r, m: e.submit_send(m.owner, "text"), "the payload must be bytes or a buffer, got str"),
        (lambda e, r, m: e.submit_send(m.owner, np.array([None])), "ndarray of object: its elements are pointers"),
        (lambda e, r, m: e.submit_send(m.owner, np.ma.zeros(2)), "MaskedArray has a mask"),
        (lambda e, r, m: aiote.Pages(r, np.ma.array([0, 1], mask=[0, 1]), 8), "MaskedArray has a mask"),
        (lambda e, r, m: e.submit_send(m.owner, np.zeros(2, "M8[s]")), "ndarray: .*cannot include dtype 'M'"),
        (lambda e, r, m: e.submit_send(e.address, b""), "engine's own address: an engine has no connection to itself"),
        (lambda e, r, m: e.submit_write_pages(r, m), r"src and dst must be Pages\(region, indices, page_bytes\)"),
    ],
)
async def test_wrong_arguments_are_told_at_once(call, says):
    """Before anything is connected or posted."""
    async with pair("tcp") as (left, right):
        region, remote = left.register(bytearray(8)), across(left, right, bytearray(8))
        with pytest.raises(aiote.UsageError, match=says):
            call(left, region, remote)
        assert left.peers == ()


@each_provider
async def test_the_smallest_and_the_largest_immediate_count(provider):
    async with linked(provider) as (left, right):
        region, remote = left.register(bytearray(8)), across(left, right, bytearray(8))
        for imm in (0, (1 << 28) - 1):
            await left.write_imm(region, remote, imm)
            await left.write_imm(None, remote, np.int64(imm))
            await right.counter(imm).wait(2)


async def test_what_was_addressed_to_a_closed_engine_fails():
    async with opened("tcp") as left:
        async with opened("tcp") as right:
            remote = across(left, right, bytearray(8))
        for verb in (
            left.write(left.register(bytearray(8)), remote),
            left.write_imm(None, remote, 1),
            left.read(remote, left.register(bytearray(8))),
            left.send(remote.owner, b"x"),
        ):
            with pytest.raises(aiote.PeerError, match="cannot be reached") as caught:
                await verb
            assert caught.value.peer == str(remote.owner)
        await go_round(1)
        assert left.peers == ()
