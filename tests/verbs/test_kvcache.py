"""KV caches over queue pairs, on two rails of which a slower one loses its cable in the midst: every byte is right."""

from __future__ import annotations

import pytest

from support.engines.opening import LOST_SOON, until
from support.kv.caches import Model, Side
from support.kv.worlds import served_while, world

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("commands at the switch are run, and wait"),
]
MODEL = Model(layers=4, heads=2, item=256, state=5)
TOKENS, PAGES = 240, 72
RAILS = [["rxe0", "rxe1"], ["rxe2", "rxe3"]]


@pytest.mark.parametrize("pulled", [0, 1])
@pytest.mark.parametrize("reads", [False, True], ids=["push", "pull"])
async def test_requests_go_on_when_one_of_two_unequal_rails_is_lost(switch, need_four, reads, pulled):
    sides = Side(pages=PAGES), Side(pages=PAGES, order="field token head")
    async with world("verbs", *sides, MODEL, LOST_SOON, RAILS) as w:
        await w.consumers[0].connect(w.places, reads=reads)
        for nic in (1, 3):
            switch.disturb(nic, "delay", "5ms")
        events = await served_while(w, TOKENS, reads, 4, lambda number: number == 2 and switch.pull(pulled))
        assert "rail.failed" in events
        switch.plug(pulled)
        await until(lambda: events.count("rail.back") == events.count("rail.failed"))
        assert "peer.lost" not in events
