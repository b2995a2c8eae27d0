"""Which rail carries what: pinned transfers, rails in turn, and what is asked for wrongly."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import anyio
import numpy as np
import pytest

import aiote
from aiote.machine import numa
from aiote.machine.topology import Place
from aiote.rails import RailSet
from aiote.testing import EFA_200G, Fabric, run
from support.engines.opening import PATIENCE_S, across, fabric, linked, until

pytestmark = pytest.mark.libfabric

LOOPBACK = ["127.0.0.1", "127.0.0.1"]
SIZE = 4 << 20


def shares(engine: aiote.Engine) -> list[int]:
    """Return how many requests have ended on each channel toward the one peer."""
    (link,) = engine._runtime.core.peers
    return link.ended()


async def used(engine: aiote.Engine, awaited) -> list[int]:
    before = shares(engine)
    await awaited
    return [now - was for now, was in zip(shares(engine), before, strict=True)]


@pytest.mark.parametrize("rail", [0, 1])
async def test_a_pinned_transfer_stays_on_its_rail(rail):
    async with linked("tcp", LOOPBACK) as (left, right):
        source = left.register(np.ones(SIZE, np.uint8))
        remote = across(left, right, np.zeros(SIZE, np.uint8))
        pages = [aiote.Pages(region, range(64), 4096) for region in (source, remote)]
        for awaited in (
            left.write(source, remote, rail=rail),
            left.write_imm(source, remote, 1, rail=rail),
            left.write_imm(None, remote, 1, rail=rail),
            left.read(remote, left.register(bytearray(SIZE)), rail=rail),
            left.write_pages(*pages, 1, rail=rail),
        ):
            ended = await used(left, awaited)
            assert ended[rail] > 0
            assert ended[1 - rail] == 0
        await right.counter(1).wait(66)


async def test_pinned_transfers_do_not_hold_up_the_others():
    async with linked("tcp", LOOPBACK) as (left, right):
        source = left.register(np.ones(SIZE, np.uint8))
        remote = across(left, right, np.zeros(SIZE, np.uint8))
        pinned = [left.submit_write(source, remote, rail=0) for _ in range(20)]
        ended = await used(left, left.write(source, remote))
        assert ended[1] > 0
        await asyncio.gather(*(transfer for transfer in pinned))


async def test_small_writes_do_not_keep_a_large_pinned_one_waiting():
    """They take its rail's room as soon as there is some, and it needs more than they do."""
    async with linked("tcp", LOOPBACK) as (left, right):
        source = left.register(np.ones(SIZE, np.uint8))
        remote = across(left, right, np.zeros(SIZE, np.uint8))

        async def stream() -> None:
            while True:
                await left.write(source[: 1 << 16], remote[: 1 << 16])

        streams = [asyncio.ensure_future(stream()) for _ in range(200)]
        await until(lambda: left.statistics().queued)
        with anyio.fail_after(PATIENCE_S):
            await left.write(source, remote, rail=0)
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_a_pinned_transfer_goes_on_when_its_rail_is_lost():
    async with linked("sim", ["sim0", "sim1"]) as (left, right):
        source = left.register(np.ones(SIZE, np.uint8))
        target = np.zeros(SIZE, np.uint8)
        remote = across(left, right, target)
        before = shares(left)
        transfers = [left.submit_write_imm(source, remote, 1, rail=0) for _ in range(30)]
        fabric().kill_rail(left, 0)
        for transfer in transfers:
            await transfer
        await right.counter(1).wait(30)
        assert right.counter(1).value == 0
        assert target.all()
        assert shares(left)[1] > before[1], "the other rail carried what was left"


async def test_round_robin_gives_each_rail_as_many_pages():
    async with linked("tcp", LOOPBACK, schedule="round-robin") as (left, right):
        source = left.register(np.ones(64 * 4096, np.uint8))
        remote = across(left, right, np.zeros(64 * 4096, np.uint8))
        pages = [aiote.Pages(region, range(64), 4096) for region in (source, remote)]
        assert await used(left, left.write_pages(*pages)) == [32, 32]


@pytest.mark.parametrize("schedule", ["earliest-finish", "round-robin"])
@pytest.mark.parametrize("turn", [0, 1, 5])
async def test_writes_begin_with_the_rail_that_was_asked_for_and_alternate(turn, schedule):
    async with linked("sim", ["sim0", "sim1"], schedule=schedule) as (left, right):
        source = left.register(np.ones(4096, np.uint8))
        remote = across(left, right, np.zeros(4096, np.uint8))
        # What was carried before does not count.
        await left.write(source, remote)
        (peer,) = left.peers
        peer.rotate_rails(turn)
        order = [(await used(left, left.write(source, remote))).index(1) for _ in range(4)]
        assert order == [turn % 2, 1 - turn % 2] * 2


@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
def test_a_rail_that_has_carried_nothing_for_long_gets_a_mib_more_and_no_more():
    small = 1 << 16

    async def main(fabric: Fabric) -> list[int]:
        async with fabric.open_engine() as left, fabric.open_engine() as right:
            source = left.register(np.ones(SIZE, np.uint8))
            remote = across(left, right, np.zeros(SIZE, np.uint8))
            await left.write(source, remote, rail=0)
            begun = len(fabric.trace())
            for _ in range(24):
                await left.write(source[:small], remote[:small])
            return [event.rail for event in fabric.trace()[begun:] if event.what == "place"]

    assert run(main, 1, model=[EFA_200G, EFA_200G]) == [1] * 16 + [0, 1] * 4


@pytest.mark.parametrize("rail", ["eth7", 2, -1, 1.5])
async def test_a_rail_that_does_not_exist_is_refused(rail):
    async with linked("tcp", LOOPBACK) as (left, right):
        with pytest.raises(aiote.UsageError, match="rail="):
            await left.write(left.register(bytes(8)), across(left, right, bytearray(8)), rail=rail)


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(aiote.UsageError, match="schedule"):
        aiote.EngineConfig(schedule="best")


async def test_near_rails_are_preferred_and_far_ones_help_out():
    async with linked("tcp", LOOPBACK) as (left, right):
        source = left.register(np.ones(64 * 4096, np.uint8))
        source.memory.rank((1, 0))
        remote = across(left, right, np.zeros(64 * 4096, np.uint8))
        small = [region[:4096] for region in (source, remote)]
        assert await used(left, left.write(*small)) == [0, 1]
        pages = [aiote.Pages(region, range(64), 4096) for region in (source, remote)]
        far, near = await used(left, left.write_pages(*pages))
        assert 0 < far < near


def test_memory_and_rails_on_known_nodes_are_ranked(monkeypatch):
    """The rails' places and the memory's node come from sysfs and the kernel; here they are said."""
    asked = []

    class Memory:
        address, length = 4096, 8192

        def rank(self, ranks):
            asked.append(ranks)

    def fabric_on(*nodes: int) -> RailSet:
        made = RailSet.__new__(RailSet)
        made.rails = [SimpleNamespace(place=Place(node)) for node in nodes]
        return made

    monkeypatch.setattr(numa, "memory_node", lambda address, length: 1)
    fabric_on(0, 1)._rank(Memory())
    fabric_on(1, -1, 0)._rank(Memory())
    assert asked == [(1, 0), (0, 2, 1)]
    fabric_on(0, 0)._rank(Memory())
    fabric_on(-1, -1)._rank(Memory())
    assert len(asked) == 2, "rails that lie alike need no ranks, and nobody is asked where the memory is"
