"""Many engines that write to one at full speed: nothing is lost, and no queue overflows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
import aiote.testing
from support.engines.opening import PATIENCE_S, across, opened

pytestmark = pytest.mark.libfabric

PAGE = 4096
PAGES = 64
ROUNDS = 4
IMM = 11


async def pour(engine: aiote.Engine, remote: aiote.RemoteRegion, number: int) -> None:
    """Write many small pages and immediates, as many at once as there may be, and a message in between."""
    source = engine.register(np.full(PAGES * PAGE, number + 1, np.uint8))
    pages = [aiote.Pages(region, range(PAGES), PAGE) for region in (source, remote)]
    transfers = [engine.submit_write_pages(*pages, IMM) for _ in range(ROUNDS)]
    transfers += [engine.submit_write_imm(None, remote, IMM) for _ in range(100)]
    for turn in range(8):
        await engine.send(remote.owner, bytes([number, turn]))
    for transfer in transfers:
        await transfer


async def many_to_one(open_engine: Callable[[], Any], writers: int) -> None:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(open_engine())
        others = [await stack.enter_async_context(open_engine()) for _ in range(writers)]
        memory = np.zeros((writers, PAGES * PAGE), np.uint8)
        remotes = [across(one, hub, memory[number]) for number, one in enumerate(others)]
        for one in others:
            await one.connect(hub.address)
        pouring = [asyncio.ensure_future(pour(one, remotes[i], i)) for i, one in enumerate(others)]
        got = [(await hub.recv()).data for _ in range(8 * writers)]
        await asyncio.gather(*pouring)
        await hub.counter(IMM).wait(writers * (ROUNDS * PAGES + 100))
        assert hub.counter(IMM).value == 0
        assert sorted(got) == sorted(bytes([number, turn]) for number in range(writers) for turn in range(8))
        assert all((memory[number] == number + 1).all() for number in range(writers))
        assert len(hub.peers) == writers


@pytest.mark.blocking_allowed("tcp of 1.17 takes 50 ms for each connection, and many are made in one turn")
@pytest.mark.parametrize("provider", ["tcp", "shm"])
async def test_a_dozen_writers_to_one_engine_all_finish(provider):
    with anyio.fail_after(PATIENCE_S):
        await many_to_one(lambda: opened(provider, message_pool=4), 12)


@pytest.mark.blocking_allowed("sixty-four engines in one process")
def test_sixty_four_writers_to_one_engine_all_finish():
    """In virtual time, over simulated NICs with short queues that refuse, delay and reorder."""
    model = dataclasses.replace(aiote.testing.UNRULY, queue=32, events=32, max_sge=4)
    aiote.testing.run(lambda fabric: many_to_one(lambda: fabric.open_engine(message_pool=4), 64), 5, model=model)
