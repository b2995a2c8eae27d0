"""What an engine tells about itself: statistics and events; and that it is idle when it is idle."""

from __future__ import annotations

import dataclasses

import anyio
import pytest

import aiote
from support.engines.opening import across, each_progress, each_provider, fabric, linked, opened, pair, until
from support.process.idleness import come_to_rest

pytestmark = pytest.mark.libfabric


@each_provider
@each_progress
async def test_statistics_count_requests_bytes_immediates_and_messages(provider, progress):
    async with linked(provider, progress=progress, largest_message=100) as (left, right):
        before = left.statistics()
        local, remote = left.register(bytearray(1000)), across(left, right, bytearray(1000))
        await left.write(local, remote)
        await left.write_imm(local, remote, 1)
        await left.write_imm(None, remote, 2)
        await until(lambda: right.statistics().immediates == 11)
        after = left.statistics()
        assert after.posted - before.posted == after.completed - before.completed == 21
        assert (after.outstanding, after.queued, after.inbox) == (0, 0, 0)
        assert sum(after.carried) - sum(before.carried) == 2000
        assert right.statistics().counters == 2
        await left.send(right.address, b"x")
        await until(lambda: right.statistics().inbox == 1)
        await right.recv()
        assert right.statistics().inbox == 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            after.posted = 0


@pytest.mark.anyio
@each_provider
@each_progress
async def test_an_idle_connected_engine_makes_no_round(provider, progress):
    """Connected, with a wait and a receiver pending: nobody spins, the progress loop makes no round."""
    async with linked(provider, progress=progress) as (left, right):
        await left.write(left.register(bytearray(8)), across(left, right, bytearray(8)))
        async with anyio.create_task_group() as group:
            group.start_soon(right.recv)
            group.start_soon(right.counter(1).wait, 1)
            await come_to_rest(left, right)
            before = left.statistics().rounds, right.statistics().rounds
            await anyio.sleep(0.2)
            assert (left.statistics().rounds, right.statistics().rounds) == before
            group.cancel_scope.cancel()


@each_provider
async def test_listeners_hear_when_a_peer_connects_and_is_lost(provider):
    async with pair(provider) as (left, right):
        seen: dict[aiote.Engine, list[aiote.Event]] = {left: [], right: []}
        for engine, events in seen.items():
            engine.listen_events(events.append)
        await left.connect(right.address)
        await until(lambda: seen[right])
        for here, there in ((left, right), (right, left)):
            (event,) = seen[here]
            assert event.name == "peer.connected"
            assert event.details["peer"] == str(there.address)
        await left.aclose()
        await until(lambda: len(seen[right]) == 2)
        event = seen[right][1]
        assert event.name == "peer.lost"
        assert event.details["peer"] == str(left.address)
        assert "its engine was closed" in event.details["reason"]
        with pytest.raises(TypeError):
            event.details["peer"] = "another"


async def test_listeners_hear_of_a_stranger_that_is_refused():
    async with opened("tcp") as engine:
        events = []
        engine.listen_events(events.append)
        async with await anyio.connect_tcp(engine.address.host, engine.address.port) as stream:
            await stream.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
            await until(lambda: events)
        assert events[0].name == "connection.refused"
        assert events[0].details["reason"]
        assert engine.peers == ()


async def test_a_listener_that_was_stopped_hears_nothing_more():
    async with pair("tcp") as (left, right):
        kept, stopped = [], []
        left.listen_events(kept.append)
        stop = left.listen_events(stopped.append)
        stop()
        stop()
        await left.connect(right.address)
        assert len(kept) == 1
        assert stopped == []


@pytest.mark.anyio
async def test_statistics_count_the_bytes_that_each_rail_has_carried():
    """Over simulated NICs of which one is pinned, then both; what fails is not counted."""
    network = fabric()
    async with network.open_engine(["sim0", "sim1"]) as left, network.open_engine(["sim0", "sim1"]) as right:
        await left.connect(right.address)
        local, remote = left.register(bytearray(1 << 20)), across(left, right, bytearray(1 << 20))
        before = left.statistics().carried
        assert len(before) == len(left.rails) == 2
        await left.write(local, remote, rail=1)
        pinned = left.statistics().carried
        assert (pinned[0] - before[0], pinned[1] - before[1]) == (0, 1 << 20)
        await left.write(local, remote)
        both = left.statistics().carried
        assert sum(both) - sum(pinned) == 1 << 20
        assert min(both[0] - pinned[0], both[1] - pinned[1]) > 0
        assert sum(right.statistics().carried) < 1 << 16


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["local", "socket"])
async def test_statistics_count_the_bytes_that_peers_have_read_and_written_here(provider):
    """Of a read and of a write the side that does nothing counts them, and one that is refused is none."""
    async with aiote.open_engine(provider=provider) as left, aiote.open_engine(provider=provider) as right:
        await left.connect(right.address)
        local, remote = left.register(bytearray(1 << 20)), across(left, right, bytearray(1 << 20))
        closed = left.attach(right.register(bytearray(64), "read").descriptor)
        before, (idle,) = right.statistics().served[0], left.statistics().served
        await left.read(remote, local)
        assert right.statistics().served[0] - before == 1 << 20
        await left.write(local[: 1 << 19], remote[: 1 << 19])
        assert right.statistics().served[0] - before == 3 << 19
        with pytest.raises(aiote.AioteError):
            await left.write(local[:64], closed)
        assert right.statistics().served[0] - before == 3 << 19
        assert left.statistics().served[0] - idle < 1 << 16
    assert sum(right.statistics().carried) < 1 << 16


@pytest.mark.anyio
async def test_what_a_nic_serves_by_itself_is_not_said():
    async with fabric().open_engine(["sim0", "sim1"]) as engine:
        assert engine.statistics().served == (None, None)
