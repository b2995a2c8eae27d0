"""Engines that connect to each other at the same moment: one connection results, and both use it."""

from __future__ import annotations

import itertools
import random
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, each_provider, opened, pair, real_provider, until

pytestmark = pytest.mark.libfabric


def by_address(address: aiote.Address) -> aiote.Address:
    return address


def by_place(address: aiote.Address) -> str:
    return f"{address.host}:{address.port}"


WAYS = [
    pytest.param(by_address, by_address, id="by address"),
    pytest.param(by_place, by_place, id="by place"),
    pytest.param(by_address, by_place, id="both ways"),
]


def streams(engines: list[aiote.Engine]) -> int:
    """Count the control connections that the kernel has between engines."""
    ports = {f"{engine.address.port:04X}" for engine in engines}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(fields[3] == "01" and fields[1].rpartition(":")[2] in ports for fields in rows)


async def connect(one: aiote.Engine, target: aiote.Address | str, pause: int) -> None:
    """Connect after `pause` turns of the loop, and try the connection at once."""
    for _ in range(pause):
        await anyio.lowlevel.checkpoint()
    peer = await one.connect(target)
    assert peer.connected
    await one.send(peer, bytes(one.address))


async def assert_all_connected(engines: list[aiote.Engine]) -> None:
    """Check that all are connected with all, once, and that what they sent each other came."""
    for engine in engines:
        others = {bytes(other.address) for other in engines if other is not engine}
        came = [await engine.recv() for _ in others]
        assert {message.data for message in came} == others
        assert all(bytes(message.source.address) == message.data for message in came)
        assert {bytes(peer.address) for peer in engine.peers} == others
        assert len(engine.peers) == len(others)
    await until(lambda: streams(engines) == len(engines) * (len(engines) - 1) // 2)
    # And they stay: nothing ends them later.
    for engine in engines:
        for peer in engine.peers:
            assert not peer.lost
            await engine.write_imm(None, peer, 7)
    for engine in engines:
        await engine.counter(7).wait(len(engines) - 1)


@pytest.mark.anyio
@each_provider
@pytest.mark.parametrize(("way", "way_back"), WAYS)
async def test_two_engines_that_connect_at_once_have_one_connection(provider, way, way_back):
    random.seed(7)
    for _ in range(3):
        async with pair(provider) as (left, right):
            async with anyio.create_task_group() as group:
                group.start_soon(connect, left, way(right.address), random.randrange(12))
                group.start_soon(connect, right, way_back(left.address), random.randrange(12))
            await assert_all_connected([left, right])


@each_provider
@pytest.mark.verbs_once("way", "way_back")
@pytest.mark.parametrize(("way", "way_back"), WAYS)
async def test_five_engines_that_connect_at_once_have_one_connection_a_pair(provider, way, way_back):
    """Ten pairs, twenty attempts."""
    random.seed(8)
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            # A machine that is busy with something else takes longer than the default limit for all of it.
            engines = [
                await stack.enter_async_context(opened(provider, heartbeat_timeout=PATIENCE_S)) for _ in range(5)
            ]
            async with anyio.create_task_group() as group:
                for one, other in itertools.combinations(engines, 2):
                    group.start_soon(connect, one, way(other.address), random.randrange(30))
                    group.start_soon(connect, other, way_back(one.address), random.randrange(30))
            await assert_all_connected(engines)


@real_provider
async def test_two_processes_that_connect_at_once_have_one_connection(provider, child):
    """Two loops of their own, so that the moments are the machine's choice."""
    other = child()
    with anyio.fail_after(PATIENCE_S):
        await other.open(provider)
        for number in range(5):
            async with opened(provider) as engine:
                other.tell("connect", address=by_place(engine.address))
                peer = await engine.connect(other.address)
                assert (await other.answer())["peer"] == str(engine.address)
                assert engine.peers == (peer,)
                await engine.write(engine.register(bytes([number]) * 4096), engine.attach(other.descriptor))
                assert (await other.ask("contents"))["bytes"] == [number]
                assert (await other.ask("peers"))["peers"] == [str(engine.address)]
            while (await other.ask("peers"))["peers"]:
                await anyio.sleep(0.001)
