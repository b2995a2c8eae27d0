"""Weight updates over queue pairs, on two rails of which a slower one is lost in the midst: every byte is right."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiote
from aiote.weights import Controller, Layout, Replicate, Shard, serve_source, serve_target
from support.engines.opening import until
from support.network.guest_switch import over_switch

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("commands at the switch are run, and wait"),
]
SHAPE = (1024, 512)
SOURCES = Layout.over([0], {name: (SHAPE, "I32", Replicate()) for name in "abcd"})
TARGETS = Layout.over([0], {"a": (SHAPE, "I32", Shard(1)), **{name: (SHAPE, "I32", Shard(0)) for name in "bcd"}})


@pytest.mark.parametrize("pulled", [0, 1])
async def test_an_update_goes_on_when_one_of_two_unequal_rails_is_lost(switch, need_four, pulled):
    values = {name: np.arange(SHAPE[0] * SHAPE[1], dtype=np.int32).reshape(SHAPE) for name in "abcd"}
    arrays = {name: np.zeros(SHAPE, np.int32) for name in values}
    # The controller is on a device of which no cable is pulled.
    async with over_switch(2) as (left, right, events), aiote.open_engine("verbs", ["rxe2"]) as own:
        for nic in (1, 3):
            switch.disturb(nic, "delay", "5ms")
        async with (
            serve_source(left, SOURCES, 0, values),
            serve_target(right, TARGETS, 0, arrays, share_memory=False) as target,
        ):
            controller = Controller(own, [left.address], [right.address])
            for version in range(1, 4):
                for number, array in enumerate(values.values()):
                    array += 1000 * version + number
                some = target.written.views[0][:: 1 << 12]
                before = some.copy()
                running = asyncio.create_task(controller.update(version))
                if version == 2:
                    await until(lambda some=some, before=before: not np.array_equal(some, before))
                    switch.pull(pulled)
                    assert not running.done()
                assert (await running).attempts == 1
                for name, array in values.items():
                    np.testing.assert_array_equal(arrays[name], array)
                if version == 2:
                    switch.plug(pulled)
                    assert count(events, "rail.failed")
                    await until(lambda: count(events, "rail.back") == count(events, "rail.failed"))
            assert not count(events, "peer.lost")


def count(events: list[aiote.Event], name: str) -> int:
    return sum(event.name == name for event in events)
