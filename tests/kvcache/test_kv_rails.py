"""Requests over two rails of which one is lost in the midst: each arrives once, byte by byte, and no peer is lost."""

from __future__ import annotations

import random

import pytest

from support.engines.data_connections import cut, data_connections
from support.engines.opening import LOST_SOON, fabric, until
from support.kv.caches import Model, Side
from support.kv.worlds import served_while, world

MODEL = Model(layers=6, heads=2, item=128, state=5)
LARGE = Model(layers=6, heads=2, item=2048, state=5)
TOKENS, PAGES = 160, 48
RAILS = ["sim0", "sim1"]
both = pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])


@pytest.mark.virtual_time
@both
@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("lost", RAILS)
@pytest.mark.parametrize("order", ["field head token", "token head field"])
async def test_requests_go_on_when_one_of_two_unequal_rails_is_lost(lost, silently, reads, order):
    """Whole pages and single pieces."""
    async with world("sim", Side(pages=PAGES), Side(pages=PAGES, order=order), MODEL, rails=[RAILS]) as w:
        await w.consumers[0].connect(w.places, reads=reads)
        there = w.consumers[0].engine
        fabric().slow_rail(there, "sim1", by=0.002)

        def harm(number: int) -> None:
            if number == 2:
                fabric().kill_rail(there, lost, silently=silently, after=3)

        events = await served_while(w, TOKENS, reads, 4, harm)
        assert "rail.failed" in events
        assert "peer.lost" not in events


@pytest.mark.libfabric
@pytest.mark.one_library
@both
@pytest.mark.parametrize("seed", range(3))
async def test_requests_go_on_when_a_data_connection_is_cut(seed, reads):
    draw = random.Random(seed)
    sides = Side(pages=PAGES), Side(pages=PAGES, order="field token head")
    async with world("tcp", *sides, LARGE, LOST_SOON, [["127.0.0.1"] * 2]) as w:
        await w.consumers[0].connect(w.places, reads=reads)
        engines = w.producers[0].engine, w.consumers[0].engine

        def harm(_: int) -> None:
            if victims := data_connections(*engines):
                cut(draw.choice(victims))

        events = await served_while(w, TOKENS, reads, 8, harm)
        # Where nothing was under way at that moment, libfabric connects anew and says nothing.
        await until(lambda: "rail.failed" in events)
        await until(lambda: events.count("rail.back") == events.count("rail.failed"))
        assert "peer.lost" not in events
