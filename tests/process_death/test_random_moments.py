"""A peer that fails at a random moment, in the midst of every verb: each await ends, and what comes after is as new.

A run is repeated with the seed that a failed one printed: RANDOM_POINTS_SEED=<seed> pytest ...
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

import aiote
from support.engines.every_verb import ECHOED, Mix
from support.engines.opening import LOST_SOON, opened, real_provider, served_on, until
from support.machine import LONG, SLOWER
from support.process.children import Child

pytestmark = pytest.mark.libfabric

ROUNDS = int(os.environ.get("RANDOM_POINTS_ROUNDS", "10" if LONG else "4" if SLOWER == 1 else "2"))
ALL_S = 100
"""What all rounds of a test may take."""
SIZE = 1 << 18
POOL = 16
NAME = bytes(range(16))
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""


@pytest.fixture
def moments() -> random.Random:
    """Draw the moments; the seed is among what a failed test has printed."""
    seed = int(os.environ.get("RANDOM_POINTS_SEED", "0")) or secrets.randbits(32)
    print(f"RANDOM_POINTS_SEED={seed}")
    return random.Random(seed)


class Survivor:
    """The engine that has to live on, and its other peer; `target` is where the failing one writes."""

    def __init__(self, engine: aiote.Engine, other: aiote.Engine) -> None:
        self.engine = engine
        self.other = other
        self.target = engine.register(bytearray(SIZE))

    async def busy_with(self, child: Child) -> Mix:
        """Have every verb under way, both ways."""
        peer = await self.engine.connect(child.address)
        await child.ask("take")
        await child.ask("flood", descriptor=self.target.descriptor.hex(), imm=ECHOED)
        return Mix(self.engine, peer, child.descriptor)

    async def outlives(self, mix: Mix, child: Child) -> None:
        """Check that every verb ends, with an error that names the peer, and that the other is served on."""
        ended = await mix.over()
        assert set(ended) == set(mix.verbs)
        assert all(str(child.address) in text for text in ended.values()), ended
        await served_on(self.engine, self.other)

    async def finds_anew(self, address: aiote.Address, descriptor: bytes, child: Child) -> None:
        """Check that what is addressed to the last life fails and changes nothing in the new one, which is found."""
        assert (child.address.host, child.address.port, child.address.identity) == (address.host, address.port, NAME)
        assert child.address.incarnation != address.incarnation
        source = self.engine.register(b"\5" * 64)
        with pytest.raises(aiote.PeerError, match="restarted"):
            await self.engine.write(source, self.engine.attach(descriptor)[:64])
        with pytest.raises(aiote.PeerError, match="restarted"):
            await self.engine.send(address, b"to the dead")
        assert (await child.ask("contents"))["bytes"] == [0]
        await self.engine.write(source, self.engine.attach(child.descriptor)[:64])
        assert (await child.ask("contents"))["bytes"] == [0, 5]
        await source.aclose()


@asynccontextmanager
async def survivor(provider: str, **settings: float) -> AsyncIterator[Survivor]:
    with anyio.fail_after(ALL_S):
        async with opened(provider, **settings) as engine, opened(provider, heartbeat_timeout=NEVER_S) as other:
            await engine.connect(other.address)
            yield Survivor(engine, other)


async def opened_child(child: Child, provider: str, port: int = 0) -> Child:
    await child.open(provider, SIZE, identity=NAME, port=port, heartbeat_timeout=NEVER_S)
    return child


@real_provider
async def test_every_await_ends_when_the_peer_is_killed(provider, child, moments):
    async with survivor(provider, heartbeat_timeout=NEVER_S) as ours:
        victim = await opened_child(child(), provider)
        for _ in range(ROUNDS):
            heir = child()
            mix = await ours.busy_with(victim)
            await anyio.sleep(moments.uniform(0, 0.05))
            victim.kill()
            await ours.outlives(mix, victim)
            await victim.gone()
            await opened_child(heir, provider, victim.address.port)
            await ours.finds_anew(victim.address, victim.descriptor, heir)
            victim = heir


@real_provider
async def test_every_await_ends_when_the_peer_is_stopped(provider, child, moments):
    async with survivor(provider, **LOST_SOON) as ours:
        victim = await opened_child(child(), provider)
        for _ in range((ROUNDS + 3) // 4):  # each takes the whole limit
            mix = await ours.busy_with(victim)
            await anyio.sleep(moments.uniform(0, 0.05))
            await victim.stop()
            await ours.outlives(mix, victim)
            victim.resume()
            while (await victim.ask("peers"))["peers"]:
                await anyio.sleep(0.005)


@real_provider
async def test_every_await_ends_when_the_peer_closes(provider, child, moments):
    async with survivor(provider, heartbeat_timeout=NEVER_S) as ours:
        victim = await opened_child(child(), provider)
        for _ in range(ROUNDS):
            mix = await ours.busy_with(victim)
            await anyio.sleep(moments.uniform(0, 0.05))
            victim.tell("close")
            await ours.outlives(mix, victim)
            await victim.answer()
            address, descriptor = victim.address, victim.descriptor
            await opened_child(victim, provider, address.port)
            await ours.finds_anew(address, descriptor, victim)


@real_provider
async def test_senders_to_a_full_receiver_wait_and_lose_nothing(provider, child, moments):
    """One that takes some messages and then no more: who sends waits, nothing is lost, all else goes on."""
    async with survivor(provider, heartbeat_timeout=NEVER_S, message_pool=POOL) as ours:
        slow = await opened_child(child(), provider)
        peer = await ours.engine.connect(slow.address)
        for _ in range(ROUNDS):
            mix = Mix(ours.engine, peer, slow.descriptor)
            taken = moments.randrange(40)
            await slow.ask("take", n=taken)
            # Credits come back by half pools, so fewer than that may be owed.
            await until(lambda mix=mix, taken=taken: mix.done["send"] > taken + POOL // 2)
            for name in set(mix.verbs) - {"send", "wait"}:
                more = mix.done[name] + 2
                await until(lambda mix=mix, name=name, more=more: mix.done[name] >= more)
            assert mix.done["send"] <= taken + POOL
            await mix.cancel()
            assert mix.ended == {}
            assert not peer.lost
            await slow.ask("take", n=mix.done["send"] - taken)
            await served_on(ours.engine, ours.other)
