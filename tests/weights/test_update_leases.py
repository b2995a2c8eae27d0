"""Memory that a target lends for an update is nobody's to write any more when the update has ended, however it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiote
from aiote import service
from aiote.weights import Layout, Replicate, serve_target
from aiote.weights.protocol import TargetService, Update, UpdateOrder
from engines import pair, until

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
        order = UpdateOrder(UPDATE, [str(source.address)], np.zeros(1, np.uint64))
        stream: Any = client.update(order)
        lent = await anext(stream)
        start = int(lent.places[0, 1])
        remote = source.attach(lent.lent.unpacked(1)[0])[start : start + memory.nbytes]
        mine = np.ones(64, np.float32)
        region = source.register(mine)
        await source.write(region, remote)
        if ends == "committed":
            await source.write_imm(None, rank.address, lent.imm)
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
