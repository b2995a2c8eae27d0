"""Producers in processes of their own: caches arrive, and nothing of a killed or stopped one's lands too late.

At a few moments, for a process takes its time to start; at others in virtual time, in test_push_pull_storm.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

import aiote
from aiote.kvcache.consumer import Consumer
from aiote.kvcache.mapping import PageRow
from aiote.kvcache.producer import Producer
from aiote.kvcache.protocol import TransferRefused
from support.engines.opening import LOST_SOON, PATIENCE_S, opened, real_provider, served_by_process, until
from support.kv.caches import Side, built, expected
from support.kv.faults import Child
from support.kv.producer_process import MODEL, PAGES, TOKENS, serve

pytestmark = [pytest.mark.anyio, pytest.mark.libfabric, pytest.mark.one_library]

PATTERN = 0xEE


@pytest.fixture
def children(request: pytest.FixtureRequest) -> Iterator[list[Child]]:
    """Processes; started before the loop runs, for that blocks."""
    provider = request.getfixturevalue("provider")
    made = [Child("support.kv.producer_process", provider, pause, 4) for pause in getattr(request, "param", [0.002])]
    yield made
    for child in made:
        child.end()


def rank(tokens: int) -> Side:
    side = built(MODEL, Side(pages=200, tokens=tokens, order="field token head"), "decode")
    for memory in side.caches[0].memories:
        memory[...] = PATTERN
    return side


async def receive(consumer: Consumer, side: Side, address: aiote.Address, number: int, reads: bool) -> None:
    """Have a request come, and look at each byte of its pages."""
    rows = {0: PageRow(np.arange(PAGES)[::-1] + number * PAGES)}
    async with consumer.receive([address], str(number), tokens=TOKENS, rows=rows, reads=reads) as reception:
        await reception.arrived()
        wanted = expected(side.caches[0], rows, PAGES * 4, PATTERN, number)
        for memory, right in zip(side.caches[0].memories, wanted, strict=True):
            pages = rows[0].pages
            assert np.array_equal(memory[pages], right.reshape(memory.shape)[pages])


@real_provider
async def test_caches_arrive_from_another_process(provider, children):
    side = rank(4)
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, **LOST_SOON) as engine, Consumer(engine, side.caches[0]) as consumer:
            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(receive, consumer, side, children[0].address, number, number % 2 == 1)
            others = np.arange(4 * PAGES, 200)
            assert all((memory[others] == PATTERN).all() for memory in side.caches[0].memories)


@served_by_process
@pytest.mark.parametrize("children", [[0.05]], indirect=True, ids=["slow"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_pages_of_a_dead_producer_are_left_alone_and_another_one_fills_them(provider, children, number):
    side = rank(4)
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, **LOST_SOON) as engine, Consumer(engine, side.caches[0]) as consumer:
            rows, memories = {0: PageRow(np.arange(PAGES))}, side.caches[0].memories
            with pytest.raises(TransferRefused):
                async with consumer.receive([children[0].address], "0", tokens=TOKENS, rows=rows) as reception:
                    await until(lambda: not all((memory == PATTERN).all() for memory in memories))
                    children[0].signal(number)
                    await reception.arrived()
            for memory in memories:
                memory[...] = PATTERN
            if number == signal.SIGSTOP:
                children[0].signal(signal.SIGCONT)
            left = built(MODEL, Side(pages=PAGES * 4), "prefill")
            async with (
                opened(provider, **LOST_SOON) as another,
                Producer(another, left.caches[0]) as producer,
                anyio.create_task_group() as group,
            ):
                group.start_soon(serve, producer, left, 1, 0)
                await receive(consumer, side, another.address, 1, reads=False)
            others = [*range(PAGES), *range(2 * PAGES, 200)]
            assert all((memory[others] == PATTERN).all() for memory in side.caches[0].memories)
