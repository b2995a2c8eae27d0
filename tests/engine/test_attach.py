"""Descriptors of a peer's memory are believed only of its own memory, in its present life, as it may be used."""

from __future__ import annotations

import pytest

import aiote
from support.engines.false_descriptors import WRONG, claimed
from support.engines.opening import linked, opened, until

SIZE = 4096


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("how", WRONG)
async def test_an_error_names_what_is_not_as_claimed(how, access):
    async with linked("sim") as (user, owner), opened("sim") as third:
        peer = await user.connect(owner.address)
        own = owner.register(bytearray(SIZE)).descriptor
        for of in (peer, owner.address):
            assert user.attach(own, owner=of, access=access, nbytes=SIZE).nbytes == SIZE
            wrong = claimed(how, own, owner.address, third.address)
            with pytest.raises(aiote.UsageError, match=WRONG[how]):
                user.attach(wrong, owner=of, access=access, nbytes=SIZE)
        if how in ("too short", "shut"):
            # What is not asked for is not looked at.
            user.attach(wrong, owner=peer)


async def test_memory_that_may_be_read_alone_is_not_to_be_written():
    async with linked("sim") as (user, owner):
        descriptor = owner.register(bytearray(SIZE), "read").descriptor
        assert user.attach(descriptor, owner=owner.address, access="read").readable
        with pytest.raises(aiote.UsageError, match="may not be written"):
            user.attach(descriptor, owner=owner.address, access="write")


async def test_a_lease_that_its_owner_has_revoked_is_refused():
    async with linked("sim") as (user, owner):
        peer = await user.connect(owner.address)
        region = owner.register(bytearray(SIZE))
        lease = region.lease(slice(0, SIZE), user.address)
        descriptor = lease.descriptor
        remote = user.attach(descriptor, owner=peer)
        await user.write(user.register(bytes(SIZE)), remote)
        await lease.revoke()
        await until(lambda: peer.has_revoked(remote.lease))
        with pytest.raises(aiote.UsageError, match=f"has revoked its lease {remote.lease}; ask for a new descriptor"):
            user.attach(descriptor, owner=peer)
        async with region.lease(slice(0, SIZE), user.address) as another:
            user.attach(another.descriptor, owner=peer)
