"""What a simulated network does when NICs die, fall silent, slow down or come back, at any point of a transfer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiote
from aiote.testing import UNRULY, Fabric, NicModel, run

SIZE = 200_000
CALM = NicModel(name="calm", latency_us=10, answer_us=10)
LINGERING = dataclasses.replace(CALM, lingers=True)


class Two:
    """Two connected engines with memory on both sides, and what became of a write between them."""

    def __init__(self, fabric: Fabric, left: aiote.Engine, right: aiote.Engine) -> None:
        self.fabric, self.left, self.right = fabric, left, right
        self.pool = bytearray(SIZE)
        self.region = right.register(self.pool)
        self.content = bytes(range(1, 251)) * (SIZE // 250)
        self.source = left.register(self.content)
        self.target = left.attach(self.region.descriptor)

    async def write(self, imm: int | None = 5) -> str:
        try:
            await (self.left.write(self.source, self.target) if imm is None else self.counted(imm))
        except aiote.AioteError as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    async def counted(self, imm: int) -> None:
        await self.left.write_imm(self.source, self.target, imm)


@contextlib.asynccontextmanager
async def two(fabric: Fabric, **settings: Any) -> AsyncIterator[Two]:
    async with fabric.open_engine(**settings) as left, fabric.open_engine(**settings) as right:
        await left.connect(right.address)
        yield Two(fabric, left, right)


def test_a_rail_that_breaks_ends_what_it_carries():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.kill_rail(pair.left, "sim0", at=fabric.now + 5e-6)
            outcome = await pair.write()
            assert outcome.startswith(("TransferError", "PeerError"))
            assert "sim0" in outcome
            assert pair.left.rails[0].state == "down"
            assert pair.right.rails[0].state == "up"

    run(main, 1, model=CALM)


def test_a_rail_of_the_target_that_breaks_is_told_to_the_initiator():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.kill_rail(pair.right, 0, at=fabric.now + 5e-6)
            assert (await pair.write()).startswith(("TransferError", "PeerError"))
            assert fabric.now < 0.1

    run(main, 1, model=CALM)


def test_a_silent_rail_tells_nobody_and_goes_on_when_it_is_back():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.kill_rail(pair.right, 0, silently=True)
            fabric.restore_rail(pair.right, 0, at=fabric.now + 1.0)
            before = fabric.now
            assert await pair.write() == "done"
            assert fabric.now - before == pytest.approx(1.0, abs=0.01)
            assert pair.pool == pair.content
            assert pair.right.counter(5).value == 1

    run(main, 1, model=CALM)


def test_a_rail_that_stays_silent_is_found():
    """The heartbeats go on over the control connection, and yet nothing hangs."""

    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.kill_rail(pair.right, 0, silently=True)
            outcome = await pair.write()
            assert "makes no progress" in outcome
            assert fabric.now < 10
            assert not any(pair.pool)

    run(main, 1, model=CALM)


def test_a_slow_rail_is_slow():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.slow_rail(pair.right, 0, by=0.5)
            before = fabric.now
            assert await pair.write() == "done"
            assert 0.5 <= fabric.now - before < 0.6
            fabric.slow_rail(pair.right, 0, by=0)
            before = fabric.now
            assert await pair.write() == "done"
            assert fabric.now - before < 0.01

    run(main, 1, model=CALM)


def test_a_crash_is_heard_by_the_peer():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            writes = [asyncio.ensure_future(pair.write()) for _ in range(10)]
            await asyncio.sleep(15e-6)
            fabric.crash(pair.right)
            outcomes = await asyncio.gather(*writes)
            assert all(outcome != "done" for outcome in outcomes)
            assert fabric.now < 0.1

    run(main, 1, model=CALM)


def test_a_partition_is_found_by_both_and_heals():
    """Neither hears anything of the other, and no byte of what was under way comes late."""

    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.partition(pair.right)
            outcome = await pair.write()
            assert "silent for" in outcome or "makes no progress" in outcome
            assert 1 < fabric.now < 6
            await asyncio.sleep(10)
            assert not pair.left.peers
            assert not pair.right.peers
            fabric.heal(pair.right)
            await asyncio.sleep(10)
            assert not any(pair.pool)
            assert await pair.write() == "done"
            assert pair.pool == pair.content
            assert pair.right.counter(5).value == 1

    run(main, 1, model=CALM)


def test_a_short_partition_is_survived():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            writing = asyncio.ensure_future(pair.write())
            await asyncio.sleep(12e-6)
            fabric.partition(pair.left)
            await asyncio.sleep(1)
            fabric.heal(pair.left)
            assert await writing == "done"
            assert pair.pool == pair.content
            await pair.left.send(pair.right.address, b"x")
            assert (await pair.right.recv()).data == b"x"
            assert len(pair.left.peers) == 1

    run(main, 1, model=CALM)


def test_a_new_engine_uses_a_rail_that_was_restored():
    async def main(fabric: Fabric) -> None:
        async with two(fabric) as pair:
            fabric.kill_rail(pair.left, 0)
            assert await pair.write() != "done"
            fabric.restore_rail(pair.left, 0)
            await asyncio.sleep(5)
            assert await pair.write() == "done"
            assert pair.pool == pair.content

    run(main, 1, model=CALM)


@pytest.mark.parametrize("silently", [False, True], ids=["broken", "silent"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_rail_may_die_at_any_event(side, silently):
    """At each one in turn: the write ends, counts at most once, and writes nothing once its failure was told."""
    outcomes = set()
    for events in range(40):

        async def main(fabric: Fabric, events: int = events) -> str:
            async with two(fabric) as pair:
                fabric.kill_rail(getattr(pair, side), 0, silently=silently, after=events)
                outcome = await pair.write()
                frozen, count = bytes(pair.pool), pair.right.counter(5).value
                if silently:
                    fabric.restore_rail(getattr(pair, side), 0)
                await asyncio.sleep(20)
                assert bytes(pair.pool) == frozen
                assert pair.right.counter(5).value == count <= 1
                if outcome == "done":
                    assert (frozen, count) == (pair.content, 1)
                return outcome.partition(":")[0]

        outcomes.add(run(main, events))
    assert "done" in outcomes
    assert len(outcomes) > 1


@pytest.mark.parametrize("whole", [False, True], ids=["connection", "engine"])
@pytest.mark.parametrize("model", [CALM, LINGERING], ids=["gone", "on the wire"])
def test_writes_of_a_closed_endpoint_arrive_only_where_the_model_lets_them(model, whole):
    """It is gone, even while the memory that it was sent from is there, or, where the model says so, it arrives."""

    async def main(fabric: Fabric) -> bool:
        async with two(fabric) as pair:
            peer = await pair.left.connect(pair.right.address)
            writing = asyncio.ensure_future(pair.write(None))
            await asyncio.sleep(5e-6)
            if whole:
                pair.left.abort()
            else:
                peer._connection.lose("for a test")
            assert await writing != "done"
            await asyncio.sleep(6e-6)
            return any(pair.pool)

    assert run(main, 1, model=model) is (model is LINGERING)


def test_unruly_traffic_counts_and_copies_exactly():
    """Random orders, pieces, refusals and short queues over three rails, for many seeds."""

    async def main(fabric: Fabric) -> None:
        async with two(fabric, message_pool=4) as pair:
            numbers = list(range(200))
            pages = aiote.Pages(pair.source, numbers, 1000), aiote.Pages(pair.target, numbers[::-1], 1000)
            messages = [asyncio.ensure_future(pair.left.send(pair.right.address, bytes([n]))) for n in range(50)]
            writing = asyncio.ensure_future(pair.left.write_pages(*pages, 6))
            got = sorted([(await pair.right.recv()).data[0] for _ in range(50)])
            await asyncio.gather(*messages, writing, pair.right.counter(6).wait(200))
            expected = b"".join(pair.content[1000 * n : 1000 * n + 1000] for n in numbers[::-1])
            assert pair.pool == expected
            assert got == list(range(50))
            assert await pair.write(7) == "done"
            await pair.right.counter(7).wait(1)
            assert pair.pool == pair.content

    for seed in range(15):
        run(main, seed, rails=3, model=dataclasses.replace(UNRULY, queue=8, events=8, max_sge=1 + seed % 4))
