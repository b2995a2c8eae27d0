"""Memory that a target lends for an update is nobody's to write any more when the update has ended, however it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiote
from aiote import service
from aiote.weights import Layout, Replicate, serve_target
from aiote.weights.protocol import TargetService, Update, UpdateOrder
from support.engines.opening import opened, pair, until

pytestmark = pytest.mark.anyio

LAYOUT = Layout.over([0], {"a": ((64,), "F32", Replicate())})
UPDATE = Update(1, 1)


@pytest.mark.parametrize("provider", ["sim", "local"])
@pytest.mark.parametrize("ends", ["aborted", "committed"])
@pytest.mark.parametrize("versions", ["shadow", "inplace"])
async def test_what_was_lent_for_an_update_is_refused_after_it(versions, ends, provider):
    memory = np.zeros(64, np.float32)
    async with (
        pair(provider) as (source, rank),
        serve_target(rank, LAYOUT, 0, {"a": memory}, versions=versions) as target,
    ):
        client = service.client(source, rank.address, TargetService)
        order = UpdateOrder(UPDATE, [str(source.address)], [np.zeros(1, np.uint64)])
        stream: Any = client.update(order)
        lent = await anext(stream)
        start = int(lent.places[0, 1])
        remote = source.attach(lent.lent.unpacked(1)[0])[start : start + memory.nbytes]
        mine = np.ones(64, np.float32)
        region = source.register(mine)
        await source.write(region, remote)
        if ends == "committed":
            await source.write_imm(None, rank.address, lent.imms[0])
            assert (await anext(stream)).kind == "counted"
            await client.commit(UPDATE)
            assert (await anext(stream)).kind == "committed"
        await stream.aclose()
        await until(lambda: target.current is None)
        mine[:] = 7
        with pytest.raises(aiote.TransferError, match="revoked"):
            await source.write(region, remote)
        assert (target.written.views[0][start : start + memory.nbytes].view(np.float32) == 1).all()
        assert set(memory) == {1 if ends == "committed" or versions == "inplace" else 0}


async def test_a_source_has_one_lease_of_the_regions_that_it_writes_to():
    names = ("a", "b", "c")
    layout = Layout.over([0], {name: ((16,), "F32", Replicate()) for name in names})
    memory = np.zeros(len(names) * 64, np.float32)
    # With gaps, so that each tensor is a region of its own.
    arrays = {name: memory[64 * at : 64 * at + 16] for at, name in enumerate(names)}
    async with (
        pair("sim") as (source, rank),
        opened("sim") as other,
        serve_target(rank, layout, 0, arrays, versions="inplace") as target,
    ):
        client = service.client(source, rank.address, TargetService)
        written = [np.array([0, 2], np.uint64), np.array([1], np.uint64)]
        stream: Any = client.update(UpdateOrder(UPDATE, [str(source.address), str(other.address)], written))
        lent = (await anext(stream)).lent.unpacked(6)
        assert [bool(descriptor) for descriptor in lent] == [True, False, True, False, True, False]
        regions = [source.attach(lent[0]), source.attach(lent[2]), other.attach(lent[4])]
        assert [region.nbytes for region in regions] == [64] * 3
        assert regions[0].lease == regions[1].lease != regions[2].lease
        with pytest.raises(aiote.UsageError, match="granted to another engine"):
            source.attach(lent[4])
        mine = source.register(np.ones(16, np.float32))
        await source.write(mine, regions[1])
        await stream.aclose()
        await until(lambda: target.current is None)
        for region in regions[:2]:
            with pytest.raises(aiote.TransferError, match="revoked"):
                await source.write(mine, region)
        assert (arrays["c"] == 1).all()
        assert not arrays["a"].any()


async def test_an_order_says_for_each_source_what_it_writes():
    async with pair("sim") as (source, rank), serve_target(rank, LAYOUT, 0, {"a": np.zeros(64, np.float32)}):
        client = service.client(source, rank.address, TargetService)
        stream: Any = client.update(UpdateOrder(UPDATE, [str(source.address)], []))
        with pytest.raises(service.CallError, match="the order lists 1 sources, but tensors for 0"):
            await anext(stream)
