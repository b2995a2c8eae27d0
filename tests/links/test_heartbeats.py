"""Silence: a peer that is stopped is lost, one that is merely late is not."""

from __future__ import annotations

import re
import sys
import time
from contextlib import AsyncExitStack

import anyio
import pytest

import aiote
from aiote.aio import current_loop
from aiote.core.control import ControlProtocol
from aiote.links.heartbeat_timer import HeartbeatTimer
from aiote.rails import BeatCounts
from aiote.testing import Fabric, run
from support.engines.opening import LOST_SOON, PATIENCE_S, go_round, linked, opened, pair, served_by_process, until

pytestmark = [pytest.mark.libfabric, pytest.mark.one_library]

SILENT = f"it has been silent for {LOST_SOON['heartbeat_timeout']} s"
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""


@pytest.mark.anyio
@served_by_process
async def test_a_stopped_peer_is_lost(provider, child):
    """Nothing of it is closed and nothing fails: only silence tells."""
    stopped = child()
    told: list[aiote.Event] = []
    with anyio.fail_after(PATIENCE_S):
        await stopped.open(provider, size=8 << 20, heartbeat_timeout=NEVER_S)
        async with opened(provider, **LOST_SOON) as engine:
            engine.listen_events(told.append)
            peer = await engine.connect(stopped.address)
            await stopped.stop()
            stuck = engine.submit_write(engine.register(bytearray(8 << 20)), engine.attach(stopped.descriptor))
            # A write that stands still may be noticed as soon as the silence.
            reason = await peer.wait_closed()
            assert reason == SILENT or "makes no progress" in reason
            with pytest.raises(aiote.TransferError, match=rf"write of 8388608 bytes.*{re.escape(reason)}") as caught:
                await stuck
            # Nobody knows what it will yet read from its sockets.
            assert not caught.value.confirmed
            assert isinstance(caught.value.cause, aiote.PeerError)
            assert str(stopped.address) in str(caught.value)
            with pytest.raises(aiote.PeerError, match=re.escape(reason)):
                await engine.send(peer, b"x")
            lost = [event for event in told if event.name == "peer.lost"]
            assert [(one.details["peer"], one.details["reason"]) for one in lost] == [(str(stopped.address), reason)]
            assert engine.peers == ()

            # Awake again it learns what became of it, and both may begin anew.
            stopped.resume()
            while (await stopped.ask("peers"))["peers"]:
                await anyio.sleep(0.005)
            again = await engine.connect(stopped.address)
            assert again is not peer
            await engine.write(engine.register(b"a" * 4096), engine.attach(stopped.descriptor)[:4096])


@pytest.mark.parametrize("seed", range(5))
def test_silence_is_found_at_the_limit(seed):
    """In virtual time, on which nothing holds anybody up: not after it, and at most two intervals before."""

    async def main(fabric: Fabric) -> None:
        config = aiote.EngineConfig(**LOST_SOON)
        async with fabric.open_engine(config=config) as engine, fabric.open_engine() as silent:
            peer = await engine.connect(silent.address)
            await anyio.sleep(seed / 3)
            fabric.partition(silent)
            stopped = fabric.now
            assert await peer.wait_closed() == SILENT
            before = LOST_SOON["heartbeat_timeout"] - (fabric.now - stopped)
            assert 0 <= before <= 2 * LOST_SOON["heartbeat_interval"]
            with pytest.raises(aiote.PeerError, match="silent"):
                await engine.send(peer, b"x")

    run(main, seed)


async def test_the_stopped_side_does_not_lose_its_peers(child):
    """A stop shorter than the limit of the others: the stopped one heard nothing because it did not listen."""
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp", **LOST_SOON)
        async with opened("tcp", heartbeat_interval=0.1, heartbeat_timeout=NEVER_S) as engine:
            peer = await engine.connect(stopped.address)
            await stopped.stop()
            await anyio.sleep(LOST_SOON["heartbeat_timeout"] + 0.3)
            stopped.resume()
            await anyio.sleep(2 * LOST_SOON["heartbeat_interval"])
            assert (await stopped.ask("peers"))["peers"] == [str(engine.address)]
            assert not peer.lost


@pytest.mark.blocking_allowed("the loop is held up on purpose")
async def test_a_loop_that_is_busy_itself_does_not_lose_its_peers(child):
    calm = child()
    with anyio.fail_after(PATIENCE_S):
        await calm.open("tcp", heartbeat_interval=0.1, heartbeat_timeout=NEVER_S)
        async with linked("tcp", **LOST_SOON) as (left, right):
            await left.connect(calm.address)
            before = set(left.peers)
            time.sleep(LOST_SOON["heartbeat_timeout"] + 0.3)
            await anyio.sleep(2 * LOST_SOON["heartbeat_interval"])
            assert set(left.peers) == before
            assert len(left.peers) == 2
            assert len(right.peers) == 1
            assert not any(peer.lost for peer in before)
            await left.send(right.address, b"still there")
            assert (await right.recv()).data == b"still there"


async def idle_peers_stay(*providers: str) -> None:
    """Check it over all providers at once, for longer than the limit."""
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(linked(provider, **LOST_SOON)) for provider in providers]
        before = [left.peers + right.peers for left, right in pairs]
        await anyio.sleep(LOST_SOON["heartbeat_timeout"] + 0.3)
        assert [left.peers + right.peers for left, right in pairs] == before
        assert {len(peers) for peers in before} == {2}


async def test_idle_peers_stay():
    await idle_peers_stay("tcp", "shm", "local", "socket", "sim")


@pytest.mark.parametrize("provider", ["verbs"])
async def test_idle_peers_stay_over_nics(provider):
    await idle_peers_stay(provider)


@pytest.mark.virtual_time
async def test_idle_peers_stay_for_many_times_the_limit():
    async with linked("sim", heartbeat_interval=0.1, heartbeat_timeout=0.6) as (left, right):
        before = left.peers + right.peers
        await anyio.sleep(50)
        assert left.peers + right.peers == before
        assert len(before) == 2


@pytest.mark.virtual_time
@pytest.mark.parametrize("dials", ["quick", "slow"])
async def test_engines_of_different_patience_keep_each_other(dials):
    """Each speaks as often as the other wants to hear, however rarely it would by itself."""
    async with opened("sim", heartbeat_interval=0.05, heartbeat_timeout=0.4) as quick:
        async with opened("sim", heartbeat_interval=5, heartbeat_timeout=60) as slow:
            here, there = (quick, slow) if dials == "quick" else (slow, quick)
            peer = await here.connect(there.address)
            await anyio.sleep(60)
            assert not peer.lost
            assert len(quick.peers) == len(slow.peers) == 1


@pytest.mark.anyio
async def test_one_timer_serves_all_peers(monkeypatch):
    """None while there is nobody; one for all; none again when all are gone, and it starts anew for the next."""
    running: list[int] = []
    run = HeartbeatTimer._run

    async def counted(self: HeartbeatTimer) -> None:
        running.append(1)
        try:
            await run(self)
        finally:
            running.pop()

    monkeypatch.setattr(HeartbeatTimer, "_run", counted)
    with anyio.fail_after(PATIENCE_S):
        async with opened("tcp") as engine:
            for _ in range(2):
                async with opened("tcp") as one, opened("tcp") as two, opened("tcp") as three:
                    assert running == []
                    for other in (one, two, three):
                        await engine.connect(other.address)
                    await until(lambda: len(running) == 4)  # one of each engine
                    await go_round()
                    assert len(running) == 4
                await until(lambda: not running)


async def test_an_interval_that_no_network_keeps_is_refused():
    with pytest.raises(aiote.UsageError, match=r"heartbeat_interval=0\.005: expected at least 0\.01 seconds"):
        opened("tcp", heartbeat_interval=0.005)


async def test_one_lost_peer_harms_no_other(child):
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp", heartbeat_timeout=NEVER_S)
        async with pair("tcp", **LOST_SOON) as (left, right):
            lost = await left.connect(stopped.address)
            await left.connect(right.address)
            await stopped.stop()
            memory = bytearray(1 << 16)
            source, target = left.register(b"w" * (1 << 16)), left.attach(right.register(memory).descriptor)
            rounds = 0
            while not lost.lost:
                await left.write(source, target)
                rounds += 1
                await anyio.sleep(0)
            assert rounds
            assert memory == b"w" * (1 << 16)
            await until(lambda: len(left.peers) == 1)
            await left.write(source, target)


async def test_a_killed_peer_is_lost_before_any_time_limit(child):
    """Killed: the kernel closes what it had, and that is noticed without waiting for any limit."""
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open("tcp")
        async with opened("tcp", heartbeat_timeout=NEVER_S) as engine:
            peer = await engine.connect(killed.address)
            killed.kill()
            assert await peer.wait_closed()


@pytest.mark.anyio
async def test_over_plain_tcp_no_heartbeat_wakes_a_task(monkeypatch):
    """One pass sends and hears them all, so a thousand idle peers cost system calls and little more."""
    processed: list[int] = []
    receive, send = ControlProtocol.receive, ControlProtocol.send
    monkeypatch.setattr(ControlProtocol, "receive", lambda *given: processed.append(0) or receive(*given))
    monkeypatch.setattr(ControlProtocol, "send", lambda *given: processed.append(1) or send(*given))
    with anyio.fail_after(PATIENCE_S):
        async with linked("socket", heartbeat_interval=0.1, heartbeat_timeout=NEVER_S) as (left, right):

            def carried() -> int:
                ours, theirs = left.statistics(), right.statistics()
                return min(ours.heartbeats_heard, ours.heartbeats_sent, theirs.heartbeats_heard, theirs.heartbeats_sent)

            await until(lambda: carried() > 1)
            # If the machine stands still, two come together, and the loop reads them: look again.
            before = -1
            while len(processed) != before:
                before, seen = len(processed), carried()
                await until(lambda seen=seen: carried() >= seen + 5)
            await left.send(right.address, b"still in order")
            assert (await right.recv()).data == b"still in order"


@pytest.mark.anyio
async def test_a_beat_that_fails_stops_no_other(monkeypatch):
    reported: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: reported.append(kind))
    beats: list[float] = []

    def fails(_now: float) -> float:
        raise ValueError("on purpose")

    def works(now: float) -> float:
        beats.append(now)
        return now + 0.001

    with anyio.fail_after(PATIENCE_S):
        heartbeats = HeartbeatTimer(current_loop(), BeatCounts())
        heartbeats.add(fails)
        heartbeats.add(works)
        await until(lambda: len(beats) > 3)
        await heartbeats.close()
    assert reported == [ValueError]
