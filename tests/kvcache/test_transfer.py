"""The main path: a prompt's cache goes from prefill ranks to decode ranks, and every byte is where the layout says."""

from __future__ import annotations

import gc

import anyio
import numpy as np
import pytest

from aiote.kvcache import CacheLayout
from engines import PATIENCE_S, each_provider
from kvcaches import SMALL, deployed, tail_of, until_idle

pytestmark = pytest.mark.anyio

GQA = CacheLayout(layers=2, kv_heads=2, head_size=4, page_tokens=4, dtype="uint8", order="NHD")
MLA = CacheLayout(layers=3, kv_heads=1, head_size=9, page_tokens=4, dtype="uint8", mla=True)


@each_provider
async def test_a_cache_arrives_and_its_pages_come_back(provider):
    with anyio.fail_after(PATIENCE_S):
        async with deployed(provider) as deployment:
            (decode,) = deployment.decode
            for count in (1, 4, 21):
                async with decode.decoder.request(np.arange(count) + 5, deployment.group) as slot:
                    await slot.arrived()
                    decode.check(slot)
                    assert slot.tail == tail_of(slot.tokens, 24)
                    assert len(slot.pages) == SMALL.pages_for(count)
            await until_idle(deployment)


@pytest.mark.parametrize("layout", [SMALL, GQA, MLA], ids=["HND", "NHD-GQA", "MLA"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (4, 2)])
async def test_a_cache_arrives_between_groups_of_different_sizes(layout, prefill, decode):
    async def one(rank: int) -> None:
        here = deployment.decode[rank]
        async with here.decoder.request(range(19), deployment.group, request_id=b"the same") as slot:
            await slot.arrived()
            here.check(slot, rank, decode)
            assert slot.tail == tail_of(slot.tokens, 24)

    with anyio.fail_after(PATIENCE_S):
        async with deployed("sim", layout, prefill=prefill, decode=decode) as deployment:
            async with anyio.create_task_group() as group:
                for rank in range(decode):
                    group.start_soon(one, rank)
            await until_idle(deployment)


async def test_a_request_leaves_nothing_for_the_garbage_collector():
    """On neither side: a collector that has work comes in every few requests, and holds up the event loop."""

    async def ask(times: int) -> None:
        for _ in range(times):
            async with decode.decoder.request(range(19), deployment.group) as slot:
                async for _ in slot.layers():
                    pass
                decode.check(slot)

    with anyio.fail_after(PATIENCE_S):
        async with deployed("sim") as deployment:
            (decode,) = deployment.decode
            await ask(3)
            gc.collect()
            gc.disable()
            try:
                await ask(20)
                await until_idle(deployment)
                found = gc.collect()
            finally:
                gc.enable()
            assert found < 20, "cycles of twenty requests"
