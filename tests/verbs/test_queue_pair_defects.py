"""Defects of the reference design that concern queue pairs; the numbers are those of its list, others are elsewhere."""

from __future__ import annotations

import asyncio
import struct

import pytest

import aiote
from aiote.rails import rail_set
from support.engines.opening import PATIENCE_S, across, opened, until
from support.network.guest_switch import SOONER, nics, over_switch
from support.process.idleness import assert_idle

pytestmark = [
    pytest.mark.needs_rdma,
    pytest.mark.blocking_allowed("commands at the switch are run, and wait"),
]
IMM = 21


async def test_defect_5_a_write_to_a_peer_that_is_still_connecting_waits_for_it():
    async with opened("verbs") as left, opened("verbs") as right:
        memory = bytearray(5000)
        target = left.attach(right.register(memory).descriptor)
        transfer = left.submit_write_imm(left.register(b"w" * 5000), target, IMM)
        message = left.submit_send(right.address, b"early")
        assert left.peers == ()
        await transfer
        await message
        await right.counter(IMM).wait(1)
        assert memory == b"w" * 5000
        assert (await right.recv()).data == b"early"


BAD = {
    "of nobody": lambda good: b"",
    "cut": lambda good: good[:-1],
    "of another version": lambda good: b"\xff" + good[1:],
    "of a queue pair that cannot be": lambda good: good[:22] + struct.pack("<I", 1 << 24) + good[26:],
    "of InfiniBand": lambda good: good[:3] + b"\0" + good[4:],
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
async def test_defect_5_a_malformed_address_is_refused_and_harms_nobody(spoil, monkeypatch):
    """What does not stand for queue pairs ends that connection with a reason; the next one is as good as any."""
    config = aiote.EngineConfig(heartbeat_interval=0.5, heartbeat_timeout=2.0)
    async with aiote.open_engine("verbs", ["rxe0"], config) as left, aiote.open_engine("verbs", None, config) as right:
        with monkeypatch.context() as patch:
            address = rail_set.PendingChannel.address
            patch.setattr(rail_set.PendingChannel, "address", property(lambda self: spoil(address.fget(self))))
            with pytest.raises(aiote.PeerError):
                await left.connect(right.address)
        await left.connect(right.address)
        memory = bytearray(64)
        await left.write(left.register(b"f" * 64), left.attach(right.register(memory).descriptor))
        assert memory == b"f" * 64


async def test_defect_6_failed_completions_are_told_apart_without_their_undefined_fields(switch):
    """A write, a read, pages and a message fail at once: each hears of its own end, and every count is right."""
    async with over_switch(1, **SOONER) as (left, right, _):
        memory = bytearray(1 << 18)
        source, target = left.register(bytes(1 << 18)), across(left, right, memory)
        here = left.register(bytearray(1 << 18))
        pages = [aiote.Pages(region, range(64), 4096) for region in (source, target)]
        switch.pull(0)
        transfers = [
            left.submit_write_imm(source, target, IMM),
            left.submit_read(target, here),
            left.submit_write_pages(*pages, IMM),
            left.submit_send(right.address, b"text"),
        ]
        for transfer in transfers:
            with pytest.raises(aiote.TransferError) as caught:
                await transfer
            assert caught.value.transfer is transfer
            assert transfer.description in str(caught.value)
        assert source.memory.in_flight == here.memory.in_flight == 0
        statistics = left.statistics()
        assert statistics.outstanding == statistics.queued == 0


async def test_defect_8_neither_queue_overflows_however_many_send(need_four):
    """More immediates are under way than receives or completions fit, from peers on other NICs and on the same."""
    config = aiote.EngineConfig(verbs=aiote.VerbsConfig(srq_depth=128))
    async with asyncio.timeout(PATIENCE_S), aiote.open_engine("verbs", ["rxe0"], config) as hub:
        senders = [await aiote.open_engine("verbs", [f"rxe{i % nics()}"], config) for i in range(12)]
        region, lost = hub.register(bytearray(1 << 16)), []
        hub.listen_events(lost.append)
        transfers = []
        for sender in senders:
            source, target = sender.register(bytes(1 << 16)), sender.attach(region.descriptor)
            pages = [aiote.Pages(one, range(256), 256) for one in (source, target)]
            transfers.append(sender.submit_write_pages(*pages, IMM))
        await hub.counter(IMM).wait(12 * 256)
        for transfer in transfers:
            await transfer
        await until(lambda: hub.counter(IMM).value == 0)
        assert [event for event in lost if "lost" in event.name or "failed" in event.name] == []
        for sender in senders:
            await sender.aclose()


async def test_defect_11_an_idle_engine_on_software_devices_does_nothing():
    """Devices without a place on any bus are no mistake, and nobody spins where nothing happens."""
    async with over_switch(1) as (left, right, _):
        assert all(rail.numa_node == -1 and rail.state == "up" for rail in (*left.rails, *right.rails))
        receiving = asyncio.create_task(right.recv())
        await assert_idle(left, right, rounds=4)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
