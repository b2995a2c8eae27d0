"""Transfers of hosts that call synchronously: nothing is written once a call has ended, whatever ended it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import LOST_SOON, PATIENCE_S, real_provider, served_by_process
from support.service.bridges import bridge_to, memory_elsewhere, write_to

pytestmark = pytest.mark.libfabric

SIZE = 4 << 20
LIMITS = {"largest_message": SIZE // 16}
TIMES = 8
"""How often each is tried; the moment is another each time."""


class Way:
    """One transfer: a coroutine, and how a thread waits for it, by a call of that or `plain`."""

    def __init__(self, bridge: bridges.Bridge, mine: aiote.Region, descriptor: bytes, verb: str, plain: bool) -> None:
        self._bridge, self._mine, self._verb, self._plain = bridge, mine, verb, plain
        self._remote = bridge.attach(descriptor)

    async def work(self) -> None:
        engine = self._bridge.engine
        await (
            engine.write(self._mine, self._remote) if self._verb == "write" else engine.read(self._remote, self._mine)
        )

    def wait(self, by: bridges.Bridge, timeout: float | None = None) -> None:
        if not self._plain:
            by.call(self.work(), timeout)
        elif self._verb == "write":
            by.write(self._mine, self._remote, timeout)
        else:
            by.read(self._remote, self._mine, timeout)


Ending = Callable[[bridges.Bridge, int, Way], None]


@pytest.fixture
def bridge(provider):
    with bridge_to(provider, **LIMITS) as bridge:
        yield bridge


@pytest.fixture
def other(provider):
    with memory_elsewhere(provider, SIZE, **LIMITS) as (descriptor, memory, _):
        yield descriptor, memory


def by_future(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    """Cancel it from another thread."""
    call = bridge.submit(way.work())
    cancelling = threading.Thread(target=lambda: (pass_time(bridge, turns), call.cancel()))
    cancelling.start()
    concurrent.futures.wait([call], PATIENCE_S)
    assert call.done()
    cancelling.join()


def by_timeout(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    with contextlib.suppress(TimeoutError):
        way.wait(bridge, turns * 1e-4)


def by_interrupt(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    main = threading.main_thread().ident
    over = threading.Event()

    def interrupt() -> None:
        pass_time(bridge, turns)
        # Where the call is over before, the interrupt is for this thread's wait.
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        thread.start()
        way.wait(bridge)
        over.wait(PATIENCE_S)
    thread.join()


def by_loop(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    """Cancel it on an event loop of the host's."""

    async def wait() -> None:
        task = asyncio.ensure_future(bridge.run(way.work()))
        await asyncio.sleep(0)
        for _ in range(turns):
            await bridge.run(asyncio.sleep(0))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(wait())


def by_close(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    """Close one of two bridges to the engine."""
    with bridges.acquire() as second:
        call = second.submit(way.work())
        pass_time(bridge, turns)
    assert call.done()
    with contextlib.suppress(aiote.ClosedError):
        call.result()


def by_close_meanwhile(bridge: bridges.Bridge, turns: int, way: Way) -> None:
    """Close one of two bridges to the engine, in whose transfer another thread is."""
    with bridges.acquire() as second, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(way.wait, second)
        pass_time(bridge, turns)
        second.close()
        with contextlib.suppress(aiote.ClosedError):
            waiting.result(PATIENCE_S)


def pass_time(bridge: bridges.Bridge, turns: int) -> None:
    for _ in range(turns):
        bridge.call(asyncio.sleep(0))


CALLED = [by_future, by_timeout, by_interrupt, by_loop, by_close, by_close_meanwhile]
PLAIN = [by_timeout, by_interrupt, by_close_meanwhile]


@real_provider
@pytest.mark.parametrize(("ending", "plain"), [*((one, False) for one in CALLED), *((one, True) for one in PLAIN)])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_nothing_is_written_after_a_call_has_ended(provider, bridge, other, ending: Ending, plain: bool, verb):
    descriptor, there = other
    here = np.zeros(SIZE, np.uint8)
    source, target = (here, there) if verb == "write" else (there, here)
    with bridge.register(here, "local") as mine:
        way = Way(bridge, mine.region, descriptor, verb, plain)
        way.wait(bridge)
        for number in range(TIMES):
            source[:] = number + 1
            ending(bridge, number * 3, way)
            before = zlib.crc32(target)
            source[:] = 0xFF
            pass_time(bridge, 30)
            assert bridge.engine.statistics().outstanding == 0
            assert zlib.crc32(target) == before
            assert target.max() < 0xFF
        assert not bridge._thread.transfers
        way.wait(bridge)
        assert (target == 0xFF).all()


@real_provider
def test_writes_of_many_threads_at_a_time_all_arrive(provider, bridge, other):
    descriptor, there = other
    part = SIZE // 64
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)

    def write(number: int) -> None:
        with bridge.register(data[number * part : (number + 1) * part], "local") as mine:
            bridge.call(write_to(bridge.engine, mine.region, descriptor, number * part))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    assert np.array_equal(there, data)


@served_by_process
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_peer_that_is_lost_ends_the_calls_that_wait_for_it(provider, child, how):
    """Calls of two threads and of a loop; and the bridge works on."""
    await child.open(provider, 1 << 20)
    with bridge_to(provider, **LOST_SOON) as bridge:
        begun = threading.Semaphore(0)

        async def write_for_ever() -> None:
            remote = bridge.engine.attach(child.descriptor)
            async with bridge.engine.register(bytearray(1 << 20)) as source:
                peer = await bridge.engine.connect(remote.owner)
                await bridge.engine.write(source, remote)
                begun.release()
                while not peer.lost:
                    await bridge.engine.write(source, remote)
                raise aiote.PeerLostError(peer.address, peer.reason)

        async with asyncio.timeout(PATIENCE_S):
            waiting = [asyncio.ensure_future(asyncio.to_thread(bridge.call, write_for_ever())) for _ in range(2)]
            waiting.append(asyncio.ensure_future(bridge.run(write_for_ever())))
            for _ in waiting:
                await asyncio.to_thread(begun.acquire)
            child.kill() if how == "kill" else await child.stop()
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, aiote.PeerError | aiote.TransferError), outcome
            assert await bridge.run(asyncio.sleep(0, 5)) == 5
            child.kill()


@served_by_process
async def test_a_timeout_toward_a_stopped_peer_is_bounded_by_its_loss(provider, child):
    await child.open(provider, 1 << 20)
    with bridge_to(provider, **LOST_SOON) as bridge:
        async with asyncio.timeout(PATIENCE_S):
            source = await bridge.register_async(bytearray(1 << 20), "local")
            await bridge.run(write_to(bridge.engine, source.region, child.descriptor))
            await child.stop()
            with pytest.raises((TimeoutError, aiote.AioteError)):
                while True:
                    work = write_to(bridge.engine, source.region, child.descriptor)
                    await asyncio.to_thread(bridge.call, work, 0.05)
            assert bridge.engine.statistics().outstanding == 0


@pytest.mark.one_library
@pytest.mark.parametrize("provider", ["local"])
async def test_messages_and_counters_go_through_the_bridges_engine(provider, child):
    """The other verbs, as a connector's coroutines use them."""
    await child.open(provider, 1 << 16)
    with bridge_to(provider) as bridge:

        async def exchange() -> int:
            engine = bridge.engine
            async with await bridge.register_async(bytearray(1 << 16)) as mine:
                child.tell("flood", descriptor=mine.descriptor.hex(), imm=7)
                with engine.counter(7) as arrivals:
                    await arrivals.wait(3)
                    return arrivals.value

        assert await bridge.run(exchange()) >= 0
        await child.answer()
