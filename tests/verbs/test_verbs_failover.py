"""Rails on real queue pairs that lose their cable: everything completes, every count is exact, and the rail comes back."""

from __future__ import annotations

import asyncio

import pytest

import aiote
from engines import across, until
from switch import over_switch
from traffic import IMM, Traffic

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("commands at the switch are run, and wait"),
]


def names(events: list[aiote.Event]) -> list[str]:
    return [event.name for event in events]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2])
async def test_a_cable_is_pulled_in_the_middle_of_everything(switch, need_four, pause):
    async with over_switch(2) as (left, right, events):
        traffic = Traffic(left, right, 1)
        running = asyncio.create_task(traffic.run())
        await asyncio.sleep(pause)
        switch.pull(1)
        assert not running.done()
        await running
        traffic.check()
        assert "rail.failed" in names(events)
        assert "peer.lost" not in names(events)
        switch.plug(1)
        await until(lambda: names(events).count("rail.back") == names(events).count("rail.failed"))
        again = Traffic(left, right, 2)
        await again.run()
        again.check()


async def test_the_only_cable_is_pulled_for_a_moment(switch):
    """With one rail everything waits until it is back, and is done exactly once."""
    async with over_switch(1) as (left, right, events):
        traffic = Traffic(left, right, 3)
        running = asyncio.create_task(traffic.run())
        await asyncio.sleep(0.05)
        switch.pull(0)
        assert not running.done()
        await asyncio.sleep(1)
        switch.plug(0)
        await running
        traffic.check()
        assert "rail.back" in names(events)
        assert "peer.lost" not in names(events)


async def test_the_only_cable_stays_away(switch):
    """What was under way ends with an error that says so, within the limit."""
    async with over_switch(1) as (left, right, events):
        source, target = left.register(bytes(8 << 20)), across(left, right, bytearray(8 << 20))
        switch.pull(0)
        transfers = [left.submit_write_imm(source, target, IMM) for _ in range(4)]
        for transfer in transfers:
            with pytest.raises(aiote.TransferError):
                await transfer
        assert "peer.lost" in names(events)


@pytest.mark.parametrize("netem", [("loss", "1%"), ("loss", "10%"), ("delay", "5ms", "reorder", "30%", "50%")])
async def test_a_bad_cable(switch, need_four, netem):
    async with over_switch(2) as (left, right, _):
        switch.disturb(1, *netem)
        switch.disturb(3, *netem)
        traffic = Traffic(left, right, 4)
        await traffic.run()
        traffic.check()
