"""Leases: one peer's until they are revoked, and nobody's bytes land in them afterwards."""

from __future__ import annotations

import dataclasses

import anyio
import numpy as np
import pytest

import aiote
from aiote.core.address import ANYONE
from aiote.core.descriptor import RegionDescriptor
from support.engines.opening import (
    each_memory,
    each_progress,
    each_provider,
    fabric,
    go_round,
    linked,
    opened,
    pair,
    round_trips,
    until,
)

pytestmark = [pytest.mark.libfabric, pytest.mark.anyio]

BIG = 16 << 20


@each_memory
@each_progress
async def test_the_holder_writes_and_reads_through_its_lease(provider, progress):
    async with linked(provider, progress=progress) as (owner, holder):
        memory = bytearray(b"-" * 4096)
        region = owner.register(memory)
        async with region.lease(slice(1024, 2048), holder.address) as lease:
            assert lease.nbytes == 1024
            remote = holder.attach(lease.descriptor)
            assert remote.nbytes == 1024
            source = holder.register(b"x" * 1024)
            await holder.write_imm(source, remote, 1)
            await owner.counter(1).wait(1)
            await holder.write(source[:4], remote[1020:1024])
            back = bytearray(1024)
            await holder.read(remote, holder.register(back))
            assert back == b"x" * 1024
            pages = [0, 2]
            await holder.write_pages(aiote.Pages(source, pages, 256), aiote.Pages(remote, pages, 256), 1)
            await owner.counter(1).wait(2)
        assert memory == b"-" * 1024 + b"x" * 1024 + b"-" * 2048
        assert lease.revoked


@each_memory
async def test_a_revoked_lease_refuses_every_verb_with_an_error_that_says_so(provider):
    async with linked(provider) as (owner, holder):
        memory = bytearray(64)
        region = owner.register(memory)
        lease = region.lease(slice(0, 64), holder.address)
        remote = holder.attach(lease.descriptor)
        source, target = holder.register(b"x" * 64), holder.register(bytearray(64))
        await holder.write(source, remote)
        await lease.revoke()
        memory[:] = bytes(64)
        late = holder.attach(bytes(remote._descriptor))  # a descriptor that was on its way when it was revoked
        for submit in (
            lambda: holder.submit_write(source, remote),
            lambda: holder.submit_write_imm(source, remote, 1),
            lambda: holder.submit_write(source[:8], remote[8:16]),
            lambda: holder.submit_read(remote, target),
            lambda: holder.submit_write_pages(aiote.Pages(source, [0], 8), aiote.Pages(remote, [0], 8), 1),
            lambda: holder.submit_write(source, late),
        ):
            with pytest.raises(aiote.TransferError, match="revoked lease 1") as caught:
                await submit()
            assert isinstance(caught.value.cause, aiote.LeaseRevokedError)
            assert str(owner.address) in str(caught.value)
            assert caught.value.confirmed
        assert memory == bytes(64)
        assert owner.counter(1).value == 0
        # The peer is as it was, and so is the region.
        await holder.write(source, holder.attach(region.descriptor))
        assert memory == b"x" * 64


@each_memory
@each_progress
async def test_nothing_arrives_after_a_lease_is_revoked_in_the_middle_of_a_write(provider, progress):
    """Nothing arrives after the revocation, and the connection lives on."""
    async with linked(provider, progress=progress) as (owner, holder):
        memory = np.zeros(BIG, np.uint8)
        region = owner.register(memory)
        source = np.ones(BIG, np.uint8)
        local = holder.register(source)
        peer = await holder.connect(owner.address)
        for turn in range(4):
            lease = region.lease(slice(0, BIG), holder.address)
            remote = holder.attach(lease.descriptor)
            transfers = [holder.submit_write_imm(local, remote, 7) for _ in range(64)]
            await go_round(5 * turn)
            await lease.revoke()
            source[:] = 2
            assert memory.max() < 2
            memory[:] = 0
            await round_trips(holder, owner)
            assert not memory.any()
            for transfer in transfers:
                assert transfer.done()
                if transfer.exception() is not None:
                    assert isinstance(transfer.exception().cause, aiote.LeaseRevokedError)
            assert isinstance(transfers[-1].exception(), aiote.TransferError)
            source[:] = 1
        assert not peer.lost


async def test_a_holder_answers_when_what_was_posted_is_over():
    """A silent NIC keeps the write until it is back; its holder does not say before that nothing is under way."""
    async with linked("sim") as (owner, holder):
        lease = owner.register(bytearray(64)).lease(slice(0, 64), holder.address)
        connection = (await holder.connect(owner.address))._connection
        fabric().kill_rail(owner, 0, silently=True)
        transfer = holder.submit_write(holder.register(b"x" * 64), holder.attach(lease.descriptor))
        await until(lambda: holder.statistics().outstanding)
        over: list[bool] = []
        connection.leases.revoke(lease.number, lease.number, lease.number, lambda: over.append(transfer.done()))
        assert not over
        fabric().restore_rail(owner, 0)
        await until(lambda: over)
        assert over == [True]


@each_provider
async def test_other_leases_go_on_when_one_is_revoked(provider):
    async with pair(provider) as (owner, holder), opened(provider) as third:
        memory = bytearray(300)
        region = owner.register(memory)
        for engine in (holder, third):
            await engine.connect(owner.address)
        ends = {
            name: (engine, region.lease(slice(100 * at, 100 * at + 100), engine.address))
            for at, (name, engine) in enumerate({"first": holder, "second": holder, "third": third}.items())
        }
        remotes = {name: engine.attach(lease.descriptor) for name, (engine, lease) in ends.items()}
        await ends["first"][1].revoke()
        with pytest.raises(aiote.TransferError, match="revoked"):
            await holder.write(holder.register(b"1" * 100), remotes["first"])
        await holder.write(holder.register(b"2" * 100), remotes["second"])
        await third.write(third.register(b"3" * 100), remotes["third"])
        assert memory == bytes(100) + b"2" * 100 + b"3" * 100


@each_provider
async def test_a_lease_revoked_before_its_holder_connects_is_void_from_then_on(provider):
    """It is void from the first connection on, and so it stays after the connection was lost."""
    async with pair(provider) as (owner, holder):
        memory = bytearray(64)
        region = owner.register(memory)
        revoked, live = (region.lease(slice(0, 64), holder.address) for _ in range(2))
        void, good = (holder.attach(lease.descriptor) for lease in (revoked, live))
        keys = len(void._descriptor.keys)
        await revoked.revoke()
        source = holder.register(b"x" * 64)
        for _ in range(2):
            with pytest.raises(aiote.TransferError, match="revoked lease 1"):
                await holder.write(source, void)
            assert memory == bytes(64)
            await holder.write(source, good)
            memory[:] = bytes(64)
            peer = await holder.connect(owner.address)
            peer._connection.lose("for a test")
            await until(lambda: not owner.peers)
        assert len(void._descriptor.keys) == keys


async def test_a_write_that_waits_for_the_connection_is_refused_once_its_lease_is_revoked():
    async with pair("tcp") as (owner, holder):
        region = owner.register(bytearray(64))
        lease = region.lease(slice(0, 64), holder.address)
        waiting = holder.submit_write(holder.register(b"x" * 64), holder.attach(lease.descriptor))
        await lease.revoke()
        with pytest.raises(aiote.TransferError, match="nothing was posted.*revoked lease 1"):
            await waiting


async def test_attaching_anothers_lease_and_leasing_to_nobody_are_refused():
    async with linked("tcp") as (owner, holder), opened("tcp") as stranger:
        region = owner.register(bytearray(64))
        lease = region.lease(slice(0, 64), holder.address)
        with pytest.raises(aiote.UsageError, match="granted to another engine"):
            stranger.attach(lease.descriptor)
        for wrong, reason in (
            ("nobody", "'nobody': no port number"),
            (5, "a Peer or an Address is expected, got int"),
            (aiote.Address("127.0.0.1", 1), "must name one engine"),
            (owner.address, "own address"),
        ):
            with pytest.raises(aiote.UsageError, match=reason):
                region.lease(slice(0, 64), wrong)
        with pytest.raises(aiote.UsageError, match="leaves its 64 bytes"):
            region.lease(slice(0, 65), holder.address)
        with pytest.raises(aiote.UsageError, match="the slice is empty"):
            region.lease(slice(5, 5), holder.address)


async def test_a_lease_has_keys_of_its_own():
    async with linked("tcp") as (owner, holder):
        region = owner.register(bytearray(64))
        keys = {holder.attach(region.descriptor)._descriptor.keys[0].key}
        for _ in range(10):
            async with region.lease(slice(0, 64), holder.address) as lease:
                keys.add(holder.attach(lease.descriptor)._descriptor.keys[0].key)
        assert len(keys) == 11
        assert len(region.memory.registrations) == 1


@each_memory
async def test_closing_the_region_revokes_its_leases(provider):
    async with linked(provider) as (owner, holder):
        memory = bytearray(64)
        region = owner.register(memory)
        leases = [region.lease(slice(0, 32), holder.address) for _ in range(3)]
        remotes = [holder.attach(lease.descriptor) for lease in leases]
        await region.aclose()
        assert all(lease.revoked for lease in leases)
        memory.clear()  # nobody exports it any more
        for remote in remotes:
            with pytest.raises(aiote.TransferError, match="revoked"):
                await holder.write(holder.register(bytes(32)), remote)
        with pytest.raises(aiote.ClosedError):
            region.lease(slice(0, 1), holder.address)
        with pytest.raises(aiote.ClosedError, match="the lease was revoked"):
            assert leases[0].descriptor


@each_provider
async def test_closing_the_engine_ends_its_leases(provider):
    async with opened(provider) as holder:
        async with opened(provider) as owner:
            memory = bytearray(64)
            lease = owner.register(memory).lease(slice(0, 64), await owner.connect(holder.address))
        await lease.revoke()
        assert lease.revoked
        memory.clear()


async def test_a_cancelled_revocation_goes_on():
    async with linked("tcp") as (owner, holder):
        region = owner.register(bytearray(64))
        lease = region.lease(slice(0, 64), holder.address)
        remote = holder.attach(lease.descriptor)
        with anyio.move_on_after(0):
            await lease.revoke()
        assert lease.revoked
        await lease.revoke()
        await lease.revoke()
        with pytest.raises(aiote.TransferError, match="revoked"):
            await holder.write(holder.register(bytes(64)), remote)


@pytest.mark.parametrize("provider", ["local", "socket"])
async def test_a_lease_with_a_forged_holder_is_refused_by_the_owners_nic(provider):
    """Another one that got hold of its descriptor and puts its own name there is refused by the owner's NIC."""
    memory = bytearray(4096)
    async with linked(provider) as (owner, holder), opened(provider) as thief:
        await thief.connect(owner.address)
        region = owner.register(memory)
        async with region.lease(slice(0, 1024), holder.address) as lease:
            told = RegionDescriptor.from_bytes(lease.descriptor)
            for changes in ({"holder": thief.address.identity}, {"lease": 0, "holder": ANYONE}):
                stolen = thief.attach(bytes(dataclasses.replace(told, **changes)))
                with pytest.raises(aiote.TransferError):
                    await thief.write(thief.register(b"b" * 1024), stolen)
                with pytest.raises(aiote.TransferError):
                    await thief.read(stolen, thief.register(bytearray(1024)))
            assert not any(memory)
            await holder.write(holder.register(b"a" * 1024), holder.attach(lease.descriptor))
            assert memory == b"a" * 1024 + bytes(3072)


@each_memory
@each_progress
async def test_several_slices_are_lent_and_revoked_as_one(provider, progress):
    async with linked(provider, progress=progress) as (owner, holder):
        first, second = bytearray(256), np.zeros(BIG, np.uint8)
        regions = [owner.register(memory) for memory in (first, second)]
        lease = owner.lease([regions[0][0:64], regions[0][128:192], regions[1]], holder.address)
        assert lease.nbytes == 128 + BIG
        remotes = [holder.attach(descriptor) for descriptor in lease.descriptors]
        assert {remote.lease for remote in remotes} == {lease.number}
        with pytest.raises(aiote.UsageError, match="has 3 slices"):
            assert lease.descriptor
        source = holder.register(b"x" * 64)
        for remote in remotes[:2]:
            await holder.write(source, remote)
        assert first == b"x" * 64 + bytes(64) + b"x" * 64 + bytes(64)
        big = holder.register(np.ones(BIG, np.uint8))
        transfers = [holder.submit_write(big, remotes[2]) for _ in range(16)]
        await go_round(5)
        await lease.revoke()
        second[:] = 0
        await round_trips(holder, owner)
        assert not second.any()
        assert all(transfer.done() for transfer in transfers)
        for remote in remotes[:2]:
            with pytest.raises(aiote.TransferError, match="revoked lease 1"):
                await holder.write(source, remote)


async def test_closing_one_region_revokes_all_slices_of_a_lease():
    async with linked("sim") as (owner, holder):
        memories = [bytearray(64), bytearray(64)]
        regions = [owner.register(memory) for memory in memories]
        lease = owner.lease(regions, holder.address)
        remote = holder.attach(lease.descriptors[1])
        await regions[0].aclose()
        assert lease.revoked
        with pytest.raises(aiote.TransferError, match="revoked"):
            await holder.write(holder.register(b"x" * 64), remote)
        assert memories[1] == bytes(64)
        await regions[1].aclose()
        memories[1].clear()  # nobody exports it any more


async def test_a_slice_that_cannot_be_lent_leaves_nothing_of_the_others():
    async with linked("sim") as (owner, holder):
        memory = bytearray(64)
        region, foreign = owner.register(memory), holder.register(bytearray(64))
        for slices, reason in (
            ([region, foreign], "another engine"),
            ([region, region[5:5]], "the slice is empty"),
            ([], "at least one slice"),
        ):
            with pytest.raises(aiote.UsageError, match=reason):
                owner.lease(slices, holder.address)
        await region.aclose()
        memory.clear()
