"""Idle is idle: with nothing to do nobody is called, whatever happened before, and no descriptor spins.

What is counted is the process's CPU time and the rounds of progress, not anybody's clock. The bounds are generous: a
descriptor that spins takes all of a core and does thousands of rounds, a timer for each of ten peers or a tick that
never ends is well above.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import anyio
import pytest

import aiote
from crowd import Crowd
from engines import PATIENCE_S, across, each_progress, each_provider, opened, real_provider, until
from strangers import Stranger, refusals, stranger

pytestmark = pytest.mark.libfabric

PEERS = 10
WINDOW_S = 1.0
MOST_CPU_S = 0.15 * WINDOW_S
MOST_ROUNDS = 8
MOST_SLEEPS = 60 * WINDOW_S


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    made.end()


async def settle(*engines: aiote.Engine) -> None:
    """Wait until no engine does a round any more: what was under way is over, and what spins never gets here."""
    with anyio.fail_after(PATIENCE_S):
        before = None
        while before != (before := [engine.statistics().rounds for engine in engines]):
            await anyio.sleep(0.15)


async def assert_idle(*engines: aiote.Engine) -> None:
    """Sleep for a while and find that nothing was done meanwhile, but for heartbeats."""
    await settle(*engines)
    rounds = sum(engine.statistics().rounds for engine in engines)
    cpu, sleeps = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    await anyio.sleep(WINDOW_S)
    assert sum(engine.statistics().rounds for engine in engines) - rounds <= MOST_ROUNDS * len(engines)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - sleeps <= MOST_SLEEPS
    assert time.process_time() - cpu <= MOST_CPU_S


@real_provider
@each_progress
async def test_ten_regions_and_ten_peers(provider, progress, crowd):
    """Nothing outstanding; then a wait for a count that nobody adds to, and one for a message that nobody sends."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, progress=progress) as engine:
            regions = [engine.register(bytearray(4096)) for _ in range(10)]
            await crowd.join(provider, engine.address, PEERS)
            await until(lambda: len(engine.peers) == PEERS)
            await assert_idle(engine)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.counter(5).wait, 1)
                group.start_soon(engine.recv)
                await assert_idle(engine)
                group.cancel_scope.cancel()
            assert len(engine.peers) == PEERS
            assert len(regions) == 10


@pytest.mark.anyio
@each_provider
async def test_after_traffic(provider):
    async with opened(provider) as left, opened(provider) as right:
        source, target = left.register(bytes(1 << 20)), across(left, right, bytearray(1 << 20))
        for _ in range(5):
            await left.write_imm(source, target, 1)
            await left.send(right.address, b"hello")
            await right.recv()
        await right.counter(1).wait(5)
        await assert_idle(left, right)


async def killed(engine: aiote.Engine, crowd: Crowd, provider: str) -> None:
    await crowd.join(provider, engine.address, 3)
    await until(lambda: len(engine.peers) == 3)
    crowd.kill()
    await until(lambda: not engine.peers)


async def strangers(engine: aiote.Engine, _crowd: Crowd, _provider: str) -> None:
    """One is refused, one hangs up in the middle, one stays and says nothing."""
    reasons = refusals(engine)
    async with stranger(engine.address) as one:
        await one.say(b"GET / HTTP/1.1\r\n\r\n")
        await one.hear(until_end=True)
    async with stranger(engine.address) as one:
        await one.say(b"\0\0\0\x50\x01")
    await until(lambda: len(reasons) == 2)


async def a_refused_write(engine: aiote.Engine, _crowd: Crowd, provider: str) -> None:
    """The target's NIC does not know the key any more; shm has no such guard and is left alone."""
    async with opened(provider) as other:
        region = other.register(bytearray(1 << 20))
        remote = engine.attach(region.descriptor)
        await engine.write(engine.register(bytes(1 << 20)), remote)
        if provider == "tcp":
            await region.aclose()
            with pytest.raises(aiote.TransferError):
                await engine.write(engine.register(bytes(1 << 20)), remote)


async def writes_cut_short(engine: aiote.Engine, _crowd: Crowd, provider: str) -> None:
    """Their peer is closed under them."""
    async with opened(provider) as other:
        await engine.connect(other.address)
        writes = [engine.submit_write_imm(None, other.address, 3) for _ in range(100)]
    for write in writes:
        with contextlib.suppress(aiote.TransferError, aiote.PeerError):
            await write


async def nobody_there(engine: aiote.Engine, _crowd: Crowd, _provider: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(aiote.PeerError):
            await engine.connect(f"127.0.0.1:{closed.getsockname()[1]}")


async def silence(engine: aiote.Engine, _crowd: Crowd, _provider: str) -> None:
    """Whoever is dialled says nothing, until the attempt is given up."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(aiote.PeerError):
        await engine.connect(f"127.0.0.1:{server.getsockname()[1]}")


TROUBLES: list[Callable[[aiote.Engine, Crowd, str], Awaitable[None]]] = [
    killed,
    strangers,
    a_refused_write,
    writes_cut_short,
    nobody_there,
    silence,
]


@real_provider
@each_progress
async def test_after_trouble(provider, progress, crowd):
    """One after the other, on one engine, which goes on serving."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, progress=progress, heartbeat_limit=1.5) as engine:
            for trouble in TROUBLES:
                await trouble(engine, crowd, provider)
                await settle(engine)
            await assert_idle(engine)
            async with opened(provider) as other:
                await other.send(engine.address, b"still well")
                assert (await engine.recv()).data == b"still well"


async def test_a_silent_stranger_costs_nothing():
    async with opened("tcp", heartbeat_limit=1000.0) as engine:
        silent = [Stranger() for _ in range(20)]
        for one in silent:
            await one.dial(engine.address)
        await anyio.sleep(0.05)
        await assert_idle(engine)
        for one in silent:
            one.socket.close()
