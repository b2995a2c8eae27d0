"""A NIC of several is lost for real: every transfer completes, every count is right, and the rail comes back.

Each engine is a process in a network namespace of its own. Cable 0 carries the control connection, others are rails.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import anyio
import pytest

from support.network.namespaced_engines import CONFIG, PIECE, WRITES, opened, pour
from support.network.namespaces import Network, end_of
from support.process.children import Child, ChildError
from support.service.arrays import check

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.needs_namespaces,
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
]

CALLS = 40
RESET = ("REJECT", "--reject-with", "tcp-reset")

CUTS: dict[str, Callable[[Network, str], Awaitable[None]]] = {
    "cable pulled": lambda network, cable: network.pull(cable),
    "dropped": lambda network, cable: network.refuse("DROP", cable=cable),
    "reset": lambda network, cable: network.refuse(*RESET, cable=cable),
}
each_cut = pytest.mark.parametrize("cut", [pytest.param(cut, id=name) for name, cut in CUTS.items()])


async def names_of(child: Child) -> list[str]:
    return [name for name, _ in (await child.ask("happened"))["events"]]


@each_cut
async def test_a_rail_is_lost_under_load_and_comes_back(network, processes, cut):
    async with opened(network, processes) as (network, near, far):
        await pour(near, far, 1)
        for cable in network.cables[1:]:
            # Slow enough that it is lost in the middle.
            await network.limit(cable, 200)
        try:
            near.tell("pour", descriptor=far.descriptor.hex(), imm=2, size=PIECE, count=WRITES, window=8)
            far.tell("poured", imm=2, count=WRITES)
            await under_way(network)
            await cut(network, network.cables[2])
            there, sent = await far.answer(), await near.answer()
            assert there == {"digest": sent["digest"], "left": 0}
        finally:
            for cable in network.cables[1:]:
                await network.limit(cable, 0)
        # It stays away for more than the limit, tried again and again: neither work nor rest harms the others.
        await anyio.sleep(1.5 * CONFIG["heartbeat_timeout"])
        await pour(near, far, 3)
        names = await names_of(near)
        assert names.count("rail.failed") == 1
        assert "peer.lost" not in names
        await network.heal()
        while "rail.back" not in await names_of(near):
            await anyio.sleep(0.02)
        await pour(near, far, 4)


@each_cut
async def test_writes_fail_when_all_rails_are_lost_and_work_once_they_are_back(network, processes, cut):
    """What was under way ends with an error that says so; with the cables in again all is as before."""
    async with opened(network, processes, rails=2) as (network, near, far):
        await pour(near, far, 1)
        for cable in network.cables[1:]:
            await network.limit(cable, 200)
        near.tell("pour", descriptor=far.descriptor.hex(), imm=2, size=PIECE, count=10 * WRITES, window=8)
        await under_way(network)
        for cable in network.cables[1:3]:
            await cut(network, cable)
        with pytest.raises(ChildError, match="no channel is left"):
            await near.answer()
        for cable in network.cables[1:]:
            await network.limit(cable, 0)
        await network.heal()
        await pour(near, far, 3)


async def test_a_rail_that_is_ten_times_slower_is_given_less(network, processes):
    """Unequal rails end together: far less than the slow one's share of the bytes goes over it."""
    async with opened(network, processes, rails=2) as (network, near, far):
        await network.limit(network.cables[1], 400)
        await network.limit(network.cables[2], 40)
        try:
            await pour(near, far, 1)
            before = [await sent(network, cable) for cable in network.cables[1:3]]
            await pour(near, far, 2)
            after = [await sent(network, cable) for cable in network.cables[1:3]]
            fast, slow = (now - was for now, was in zip(after, before, strict=True))
            assert slow < 0.3 * (fast + slow)
        finally:
            for cable in network.cables[1:3]:
                await network.limit(cable, 0)


@pytest.mark.parametrize("provider", ["socket", "tcp"])
@each_cut
async def test_calls_go_on_when_one_of_two_unequal_rails_is_lost(network, processes, cut, provider):
    """Arrays both ways, arrays to be filled and streams: every byte is right, and none of them in a message."""
    async with opened(network, processes, 2, provider) as (network, near, far):
        await far.ask("serve")
        check(await near.ask("use", address=str(far.address), calls=6), 6)
        await network.limit(network.cables[1], 400)
        await network.limit(network.cables[2], 80)
        try:
            near.tell("use", address=str(far.address), calls=CALLS)
            await under_way(network)
            await cut(network, network.cables[2])
            check(await near.answer(), CALLS)
        finally:
            for cable in network.cables[1:3]:
                await network.limit(cable, 0)
        names = await names_of(near) + await names_of(far)
        assert "rail.failed" in names
        assert "peer.lost" not in names
        await network.heal()
        while "rail.back" not in await names_of(near):
            await anyio.sleep(0.02)
        check(await near.ask("use", address=str(far.address), calls=6), 6)


async def under_way(network: Network) -> None:
    """Wait until a few pieces have left over the cable that is to be cut."""
    begun = await sent(network, network.cables[2])
    while await sent(network, network.cables[2]) < begun + 2 * PIECE:
        await anyio.sleep(0.01)


async def sent(network: Network, cable: str) -> int:
    """Return how many bytes have left over a cable."""
    said = await anyio.run_process([*network.enter(0), "ip", "-json", "-stats", "link", "show", "dev", cable])
    return int(json.loads(said.stdout)[0]["stats64"]["tx"]["bytes"])


@pytest.mark.parametrize("provider", ["socket", "tcp"])
@each_cut
async def test_an_update_of_weights_goes_on_when_one_of_two_unequal_rails_is_lost(network, processes, cut, provider):
    async with opened(network, processes, 2, provider) as (network, near, far):
        controller = Child(*network.enter(0))
        try:
            names = [end_of(1 + number, 0) for number in range(2)]
            await controller.open(provider, rails=names, host=end_of(0, 0), **CONFIG)
            await near.ask("source", rank=0)
            await far.ask("target", rank=0, versions="shadow")
            ends = {"sources": [str(near.address)], "targets": [str(far.address)]}
            await near.ask("train", version=1)
            assert (await controller.ask("update", version=1, **ends))["committed"] == ["r0"]
            await network.limit(network.cables[1], 20)
            await network.limit(network.cables[2], 4)
            await near.ask("train", version=2)
            controller.tell("update", version=2, **ends)
            begun = await sent(network, network.cables[2])
            while await sent(network, network.cables[2]) < begun + 20_000:
                await anyio.sleep(0.01)
            await cut(network, network.cables[2])
            answer = await controller.answer()
            assert answer["committed"] == ["r0"], answer
            found = await far.ask("look")
            assert found["right"]
            assert found["version"] == 2
        finally:
            controller.end()
            for cable in network.cables[1:3]:
                await network.limit(cable, 0)
            await network.heal()
        assert "rail.failed" in await names_of(near) + await names_of(far)
