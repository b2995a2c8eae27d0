"""Rails on real queue pairs that lose their cable: everything completes, counts are exact, and the rail comes back."""

from __future__ import annotations

import asyncio

import pytest

import aiote
from aiote import service
from support.engines.opening import PATIENCE_S, across, until
from support.engines.two_way_traffic import IMM, Traffic
from support.network.guest_switch import SOONER, over_switch
from support.service.arrays import Served, check, use

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("commands at the switch are run, and wait"),
]


def names(events: list[aiote.Event]) -> list[str]:
    return [event.name for event in events]


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.2])
async def test_traffic_is_exact_when_a_cable_is_pulled_in_the_middle(switch, need_four, pause):
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


async def test_calls_go_on_when_one_of_two_unequal_rails_is_lost(switch, need_four):
    """Arrays both ways, arrays to be filled and streams: every byte is right, and none of them in a message."""
    calls = 12
    # The rail fails by its port. A guest that is kept from running may be late with a lease, which loses no peer here.
    connected = over_switch(2, drain_timeout=PATIENCE_S / 2)
    async with connected as (left, right, events), service.serve(right, Served(right)) as server:
        for nic in (1, 3):
            switch.disturb(nic, "delay", "5ms")
        running = asyncio.create_task(use(left, right.address, calls))
        await until(lambda: server.calls > calls // 4)
        switch.pull(1)
        assert not running.done()
        check(await running, calls)
        assert "rail.failed" in names(events)
        assert "peer.lost" not in names(events)
        switch.plug(1)
        await until(lambda: names(events).count("rail.back") == names(events).count("rail.failed"))
        check(await use(left, right.address, calls), calls)


async def test_traffic_waits_while_the_only_cable_is_pulled_for_a_moment(switch):
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


async def test_writes_fail_in_time_when_the_only_cable_stays_away(switch):
    """What was under way ends with an error that says so, within the limit."""
    async with over_switch(1, **SOONER) as (left, right, events):
        source, target = left.register(bytes(8 << 20)), across(left, right, bytearray(8 << 20))
        switch.pull(0)
        transfers = [left.submit_write_imm(source, target, IMM) for _ in range(4)]
        for transfer in transfers:
            with pytest.raises(aiote.TransferError):
                await transfer
        assert "peer.lost" in names(events)


@pytest.mark.parametrize("netem", [("loss", "1%"), ("loss", "10%"), ("delay", "5ms", "reorder", "30%", "50%")])
async def test_traffic_over_a_bad_cable_is_exact(switch, need_four, netem):
    async with over_switch(2) as (left, right, _):
        switch.disturb(1, *netem)
        switch.disturb(3, *netem)
        traffic = Traffic(left, right, 4, writes=48)
        await traffic.run()
        traffic.check()


async def test_a_port_that_goes_down_is_heard_of_at_once(switch, need_four):
    """With nothing under way, too: not by requests that end in vain."""
    async with over_switch(2) as (left, _right, events):
        switch.pull(1)
        await until(lambda: {"rail.down", "rail.failed"} <= set(names(events)))
        down, failed = (next(e for e in events if e.name == name) for name in ("rail.down", "rail.failed"))
        assert (down.details["rail"], failed.details["rail"]) == ("rxe1", "rxe1")
        assert "its port went down" in failed.details["reason"]
        assert [rail.state for rail in left.rails] == ["up", "down"]
        switch.plug(1)
        await until(lambda: {"rail.up", "rail.back"} <= set(names(events)))
        assert "peer.lost" not in names(events)


async def test_a_key_that_was_taken_back_ends_the_write_and_not_the_peer():
    """The NIC refuses it and breaks the connection, which is made anew; what others write meanwhile arrives."""
    async with over_switch(1) as (left, right, events):
        memory = bytearray(1 << 16)
        source, good = left.register(b"x" * (1 << 16)), across(left, right, memory)
        owner = right.register(bytearray(1 << 16))
        bad = left.attach(owner.descriptor)
        await owner.aclose()
        refused = left.submit_write_imm(source, bad, IMM)
        fine = [left.submit_write_imm(source, good, IMM + 1) for _ in range(20)]
        with pytest.raises(aiote.TransferError):
            await refused
        for transfer in fine:
            await transfer
        await right.counter(IMM + 1).wait(20)
        assert memory == b"x" * (1 << 16)
        assert "peer.lost" not in names(events)
        assert right.counter(IMM).value == 0


@pytest.mark.parametrize("what", ["write", "read", "send"])
async def test_a_transfer_cancelled_over_a_pulled_cable_moves_nothing_later(switch, what):
    """The queue pair is put into the error state and flushed, then the cancellation is over; nothing comes later."""
    async with over_switch(1, drain_timeout=0.05) as (left, right, _events):
        memory = bytearray(1 << 20)
        source, target = left.register(b"x" * (1 << 20)), across(left, right, memory)
        here = left.register(bytearray(1 << 20))
        verbs = {
            "write": lambda: left.write_imm(source, target, IMM),
            "read": lambda: left.read(target, here),
            "send": lambda: left.send(right.address, b"text"),
        }
        switch.pull(0)
        task = asyncio.create_task(verbs[what]())
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() or isinstance(task.exception(), aiote.AioteError)
        assert source.memory.in_flight == here.memory.in_flight == 0
        arrived = bytes(memory)
        switch.plug(0)
        await asyncio.sleep(1)
        assert memory == arrived
        assert right.counter(IMM).value == 0
