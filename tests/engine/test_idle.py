"""Idle is idle: with nothing to do nobody is called, whatever happened before, and no descriptor spins.

That what is not idle is found is tested first, without any engine.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import anyio
import pytest

import aiote
from support.engines.idle_engines import IdleEngines
from support.engines.opening import PATIENCE_S, across, each_progress, each_provider, opened, real_provider, until
from support.engines.raw_clients import Stranger, refusals, stranger
from support.process.idleness import MOST_ROUNDS, assert_idle, come_to_rest

pytestmark = pytest.mark.libfabric

PEERS = 10


@pytest.fixture
def crowd() -> Iterator[IdleEngines]:
    made = IdleEngines()
    yield made
    made.end()


async def ticking(seconds: float) -> None:
    """Wake up far more often than any heartbeat, for so long."""
    until_s = anyio.current_time() + seconds
    while anyio.current_time() < until_s:
        await anyio.sleep(0.005)


async def found() -> None:
    """Wait until something is found not to be idle: on a busy machine it may hardly run for some windows."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                await assert_idle(windows=2)
            except AssertionError as error:
                assert "none of 2 windows" in str(error)
                return


@pytest.mark.one_library
async def test_a_timer_that_never_ends_is_found():
    async with anyio.create_task_group() as group:
        group.start_soon(ticking, 1000)
        await found()
        group.cancel_scope.cancel()


@pytest.mark.one_library
async def test_a_thread_that_spins_is_found():
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        await found()
    finally:
        over.set()
        thread.join()


@pytest.mark.one_library
async def test_rounds_of_progress_are_found():
    """An engine that seems to rest, and does one round too many in every window."""
    rounds = itertools.chain([0, 0], itertools.count(step=MOST_ROUNDS + 1))
    engine = SimpleNamespace(statistics=lambda: SimpleNamespace(rounds=next(rounds)))
    with pytest.raises(AssertionError, match="none of 2 windows"):
        await assert_idle(engine, windows=2)  # type: ignore[arg-type]


@pytest.mark.one_library
async def test_one_quiet_window_is_enough():
    async with anyio.create_task_group() as group:
        group.start_soon(ticking, 0.9)
        await assert_idle()


@real_provider
@each_progress
async def test_an_engine_with_ten_regions_and_ten_peers_does_nothing_when_idle(provider, progress, crowd):
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
async def test_an_engine_does_nothing_after_traffic(provider):
    async with opened(provider) as left, opened(provider) as right:
        source, target = left.register(bytes(1 << 20)), across(left, right, bytearray(1 << 20))
        for _ in range(5):
            await left.write_imm(source, target, 1)
            await left.send(right.address, b"hello")
            await right.recv()
        await right.counter(1).wait(5)
        await assert_idle(left, right)


async def killed(engine: aiote.Engine, crowd: IdleEngines, provider: str) -> None:
    await crowd.join(provider, engine.address, 3)
    await until(lambda: len(engine.peers) == 3)
    crowd.kill()
    await until(lambda: not engine.peers)


async def strangers(engine: aiote.Engine, _crowd: IdleEngines, _provider: str) -> None:
    """One is refused, one hangs up in the middle, one stays and says nothing."""
    reasons = refusals(engine)
    async with stranger(engine.address) as one:
        await one.say(b"GET / HTTP/1.1\r\n\r\n")
        await one.hear(until_end=True)
    async with stranger(engine.address) as one:
        await one.say(b"\0\0\0\x50\x01")
    await until(lambda: len(reasons) == 2)


async def a_refused_write(engine: aiote.Engine, _crowd: IdleEngines, provider: str) -> None:
    """The target's NIC does not know the key any more; shm has no such guard and is left alone."""
    async with opened(provider) as other:
        region = other.register(bytearray(1 << 20))
        remote = engine.attach(region.descriptor)
        await engine.write(engine.register(bytes(1 << 20)), remote)
        if provider == "tcp":
            await region.aclose()
            with pytest.raises(aiote.TransferError):
                await engine.write(engine.register(bytes(1 << 20)), remote)


async def writes_cut_short(engine: aiote.Engine, _crowd: IdleEngines, provider: str) -> None:
    """Their peer is closed under them."""
    async with opened(provider) as other:
        await engine.connect(other.address)
        writes = [engine.submit_write_imm(None, other.address, 3) for _ in range(100)]
    for write in writes:
        with contextlib.suppress(aiote.TransferError, aiote.PeerError):
            await write


async def nobody_there(engine: aiote.Engine, _crowd: IdleEngines, _provider: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(aiote.PeerError):
            await engine.connect(f"127.0.0.1:{closed.getsockname()[1]}")


async def silence(engine: aiote.Engine, _crowd: IdleEngines, _provider: str) -> None:
    """Whoever is dialled says nothing, until the attempt is given up."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(aiote.PeerError):
        await engine.connect(f"127.0.0.1:{server.getsockname()[1]}")


TROUBLES: list[Callable[[aiote.Engine, IdleEngines, str], Awaitable[None]]] = [
    killed,
    strangers,
    a_refused_write,
    writes_cut_short,
    nobody_there,
    silence,
]


@real_provider
@each_progress
async def test_an_engine_does_nothing_after_failures(provider, progress, crowd):
    """One after the other, on one engine, which goes on serving."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, progress=progress, connect_timeout=2.0) as engine:
            for trouble in TROUBLES:
                await trouble(engine, crowd, provider)
                await come_to_rest(engine)
            await assert_idle(engine)
            async with opened(provider) as other:
                await other.send(engine.address, b"still well")
                assert (await engine.recv()).data == b"still well"


async def test_a_silent_stranger_costs_nothing():
    async with opened("tcp", heartbeat_timeout=1000.0) as engine:
        silent = [Stranger() for _ in range(20)]
        for one in silent:
            await one.dial(engine.address)
        await assert_idle(engine)
        for one in silent:
            one.socket.close()
