"""NICs that send a packet of each write in turn: what shares a NIC ends together, and what is lost keeps nobody."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

import aiote
from aiote.testing import Fabric, NicModel, run

WHOLE = NicModel(name="whole", gbps=8, latency_us=10, answer_us=5, operation_us=2)
TURNS = dataclasses.replace(WHOLE, name="turns", packet_bytes=4096)
SIZE = 1_000_000
WIRE_US = SIZE * 8e-3 / WHOLE.gbps

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")


def ends(model: NicModel, writes: Sequence[tuple[int, int, int]], rails: int = 1) -> list[float]:
    """Return how many microseconds each write (sender, target, bytes) took, all submitted at once."""

    async def main(fabric: Fabric) -> list[float]:
        engines = [await fabric.open_engine(heartbeat_interval=10.0, heartbeat_timeout=60.0) for _ in range(4)]
        regions = [engine.register(bytearray(SIZE)) for engine in engines]
        for sender, target, _ in writes:
            await engines[sender].connect(engines[target].address)
        began = fabric.now

        async def one(sender: int, target: int, size: int) -> float:
            there = engines[sender].attach(regions[target].descriptor)
            await engines[sender].write(regions[sender][:size], there[:size])
            return (fabric.now - began) * 1e6

        found = await asyncio.gather(*(one(*write) for write in writes))
        for engine in engines:
            await engine.aclose()
        return found

    return run(main, model=model, rails=rails)


def test_a_lone_write_takes_as_long_as_before():
    for size in (1, 4096, 100_000, SIZE):
        assert ends(TURNS, [(0, 1, size)]) == pytest.approx(ends(WHOLE, [(0, 1, size)]), abs=0.3)


def test_writes_of_one_nic_share_it():
    first, second = ends(WHOLE, [(0, 1, SIZE), (0, 2, SIZE)])
    assert (first, second) == pytest.approx((WIRE_US + 15, 2 * WIRE_US + 15), rel=0.01)
    assert ends(TURNS, [(0, 1, SIZE), (0, 2, SIZE)]) == pytest.approx([2 * WIRE_US + 15] * 2, rel=0.01)


def test_a_small_write_passes_a_large_one():
    assert ends(TURNS, [(0, 1, SIZE), (0, 2, 4096)])[1] < 30
    assert ends(WHOLE, [(0, 1, SIZE), (0, 2, 4096)])[1] > WIRE_US


def test_a_receiver_is_shared_by_its_senders():
    assert ends(TURNS, [(0, 2, SIZE), (1, 2, SIZE)]) == pytest.approx([2 * WIRE_US + 15] * 2, rel=0.02)
    # Two senders that begin with the same receiver are no slower than two that begin with different ones.
    crossed = ends(TURNS, [(0, 2, SIZE), (0, 3, SIZE), (1, 2, SIZE), (1, 3, SIZE)])
    assert max(crossed) == pytest.approx(2 * WIRE_US + 15, rel=0.02)


def test_a_write_whose_target_is_lost_keeps_no_other():
    async def main(fabric: Fabric) -> None:
        engines = [await fabric.open_engine() for _ in range(3)]
        left, lost, other = engines
        memories = [bytearray(SIZE) for _ in engines]
        regions = [engine.register(memory) for engine, memory in zip(engines, memories, strict=True)]
        for peer in (lost, other):
            await left.connect(peer.address)
        source = left.register(bytes([7]) * SIZE)
        doomed = left.submit_write(source, left.attach(regions[1].descriptor))
        kept = left.submit_write(source, left.attach(regions[2].descriptor))
        fabric.kill_rail(lost, at=fabric.now + WIRE_US / 2e6)
        await kept
        assert memories[2] == bytes([7]) * SIZE
        with pytest.raises(aiote.AioteError):
            await doomed
        for engine in engines:
            await engine.aclose()

    run(main, model=TURNS)


def test_a_silent_nic_goes_on_where_it_stopped():
    async def main(fabric: Fabric) -> float:
        left, right = await fabric.open_engine(), await fabric.open_engine()
        memory = bytearray(SIZE)
        region = right.register(memory)
        await left.connect(right.address)
        source, there = left.register(bytes([7]) * SIZE), left.attach(region.descriptor)
        began = fabric.now
        fabric.kill_rail(left, silently=True, at=began + 500e-6)
        fabric.restore_rail(left, at=began + 900e-6)
        await asyncio.gather(left.write(source, there), left.write_imm(None, there, 1))
        took = fabric.now - began
        assert memory == bytes([7]) * SIZE
        for engine in (left, right):
            await engine.aclose()
        return took * 1e6

    assert run(main, model=TURNS) == pytest.approx(WIRE_US + 15 + 400, rel=0.02)


def test_what_no_packet_can_be_is_refused():
    with pytest.raises(aiote.UsageError, match="packet_bytes=.*: expected 0 to"):
        NicModel(name="wrong", packet_bytes=-1)
