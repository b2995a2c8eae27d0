"""Receives for immediates: filled up before they run dry, waited for where they do, never too many for the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiote
from support.engines.opening import PATIENCE_S, across
from support.network.guest_switch import over_switch

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("the loop is held up on purpose"),
]
COUNTERS = Path("/sys/class/infiniband")


def not_ready() -> int:
    """Return how often any NIC had no receive for what came."""
    return sum(int(file.read_text()) for file in COUNTERS.glob("*/ports/1/hw_counters/*rnr_err"))


def refills(engine: aiote.Engine) -> int:
    return sum(rail.device.attributes["refills"] for rail in engine._runtime.rail_set.rails)


async def test_in_steady_state_no_receive_is_missing():
    """Far more immediates than there are receives come in the end, and never one too early."""
    async with over_switch(1, verbs=aiote.VerbsConfig(srq_depth=512)) as (left, right, _):
        source, target = left.register(bytes(4096)), across(left, right, bytearray(4096))
        before, filled = not_ready(), refills(right)
        with right.counter(5) as arrivals:
            for _ in range(20):
                for transfer in [left.submit_write_imm(source[:8], target[:8], 5) for _ in range(100)]:
                    await transfer
                await arrivals.wait(100)
        assert not_ready() == before
        # In batches, not one by one.
        assert 2000 // 64 - 1 <= refills(right) - filled <= 2000 // 16


async def test_a_receiver_that_does_not_look_makes_senders_wait_and_loses_nothing():
    """Its few receives are used up; the NIC refuses the rest until it looks again."""
    async with over_switch(1, verbs=aiote.VerbsConfig(srq_depth=64), progress="thread") as (left, right, events):
        target = across(left, right, bytearray(64))
        transfers = [left.submit_write_imm(None, target, 6) for _ in range(2000)]
        await right.counter(6).wait(2000)
        for transfer in transfers:
            await transfer
        assert right.counter(6).value == 0
        assert events == []


async def test_many_senders_share_the_receives_and_lose_nothing(need_four):
    """Eight peers at once, each with more under way than there are receives."""
    config = aiote.EngineConfig(verbs=aiote.VerbsConfig(srq_depth=64))
    async with asyncio.timeout(PATIENCE_S), aiote.open_engine("verbs", ["rxe0"], config) as hub:
        senders = [await aiote.open_engine("verbs", [f"rxe{1 + i % 3}"], config) for i in range(8)]
        region = hub.register(bytearray(64))
        transfers = []
        for sender in senders:
            target = sender.attach(region.descriptor)
            transfers += [sender.submit_write_imm(None, target, 7) for _ in range(200)]
        await hub.counter(7).wait(1600)
        for transfer in transfers:
            await transfer
        assert hub.counter(7).value == 0
        for sender in senders:
            await sender.aclose()


async def test_settings_reach_the_queue_pairs():
    """A path of another MTU, a table entry of choice, more patience: it connects and moves bytes all the same."""
    verbs = aiote.VerbsConfig(mtu=256, timeout=10, retries=3, service_level=1, traffic_class=104, srq_depth=64)
    async with over_switch(1, verbs=verbs) as (left, right, _):
        memory = bytearray(100_000)
        await left.write_imm(left.register(b"y" * 100_000), across(left, right, memory), 1)
        await right.counter(1).wait(1)
        assert memory == b"y" * 100_000


async def test_a_gid_that_is_not_there_is_refused():
    with pytest.raises(aiote.UsageError, match="gid_index=200: port rxe0 has no such GID; it has 0"):
        await aiote.open_engine("verbs", ["rxe0"], aiote.EngineConfig(verbs=aiote.VerbsConfig(gid_index=200)))


async def test_a_rail_that_is_not_there_is_refused():
    with pytest.raises(aiote.UsageError, match=r"'mlx5_0' does not exist; the RDMA ports are rxe0 \(nic0\)"):
        await aiote.open_engine("verbs", ["mlx5_0"])
