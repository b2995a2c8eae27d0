"""Reads and writes that a thread waits for without the bridge's loop; `test_transfers` has what ends them early."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import aiote
from aiote import bridge as bridges
from support.engines.opening import LOST_SOON, PATIENCE_S, each_progress, real_provider, served_by_process
from support.service.bridges import aside, bridge_to, memory_elsewhere, value

pytestmark = pytest.mark.libfabric

SIZE = 4 << 20
IMM = 7


@real_provider
@each_progress
def test_bytes_and_counts_are_where_they_belong(provider, progress):
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    back = np.zeros_like(data)
    with memory_elsewhere(provider, SIZE, IMM) as (descriptor, there, counts):
        with bridge_to(provider, progress=progress) as bridge:
            with bridge.register(data, "local") as mine, bridge.register(back, "local") as read:
                remote = bridge.attach(descriptor)
                for start, stop in [(0, 8), (8, 70_000), (70_000, SIZE), (5, 5)]:
                    bridge.write(mine.region[start:stop], remote[start:stop])
                assert np.array_equal(there, data)
                bridge.read(remote, read.region)
                assert np.array_equal(back, data)
                there[:] = 0
                for start in range(0, 4096, 8):
                    bridge.write_imm(mine.region[start : start + 8], remote[start : start + 8], IMM)
                bridge.write_imm(None, remote.owner, IMM)
                assert np.array_equal(there[:4096], data[:4096])
                for _ in range(513):
                    counts.get(timeout=PATIENCE_S)
                assert counts.empty()
                assert bridge.call(outstanding(bridge)) == 0


@real_provider
@each_progress
def test_pages_are_where_they_belong_and_each_counts(provider, progress):
    """Of slices, with strides and offsets of each side's own; what pages there are not stays as it is."""
    page, count = 4096, 48
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    back = np.zeros_like(data)
    here, away = (np.random.default_rng(seed).permutation(60)[:count] for seed in (2, 3))
    with memory_elsewhere(provider, SIZE, IMM) as (descriptor, there, counts), bridge_to(provider) as bridge:
        with bridge.register(data, "local") as mine, bridge.register(back, "local") as read:
            theirs = aiote.Pages(bridge.attach(descriptor)[100:], away, page, stride=page + 8, offset=12)
            bridge.write_pages(aiote.Pages(mine.region[64:], here, page, stride=2 * page, offset=4), theirs, IMM)
            expected = np.zeros_like(data)
            for near, far in zip(here, away, strict=True):
                at, to = 68 + near * 2 * page, 112 + far * (page + 8)
                expected[to : to + page] = data[at : at + page]
            assert np.array_equal(there, expected)
            for _ in range(count):
                counts.get(timeout=PATIENCE_S)
            bridge.read_pages(theirs, aiote.Pages(read.region, range(count), page))
            for place, far in enumerate(away):
                to = 112 + far * (page + 8)
                assert np.array_equal(back[place * page : (place + 1) * page], expected[to : to + page])
            assert not back[count * page :].any()
            nothing = aiote.Pages(mine.region, [], page)
            bridge.write_pages(nothing, aiote.Pages(bridge.attach(descriptor), [], page), IMM)
            with pytest.raises(aiote.UsageError, match="48"):
                bridge.write_pages(aiote.Pages(mine.region, [0], page), theirs)
            with pytest.raises(aiote.UsageError, match="page_bytes|bytes"):
                bridge.write_pages(aiote.Pages(mine.region, range(count), 8), theirs)
            assert counts.empty()
            assert bridge.call(outstanding(bridge)) == 0


async def outstanding(bridge: bridges.Bridge) -> int:
    return bridge.engine.statistics().outstanding


@real_provider
@each_progress
def test_many_threads_at_a_time_and_the_loop_beside_them(provider, progress):
    part = SIZE // 64
    data = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    with memory_elsewhere(provider, SIZE) as (descriptor, there, _), bridge_to(provider, progress=progress) as bridge:
        with bridge.register(data, "local") as mine:
            remote = bridge.attach(descriptor)

            def write(number: int) -> None:
                span = slice(number * part, (number + 1) * part)
                if number % 4:
                    bridge.write(mine.region[span], remote[span])
                else:
                    bridge.call(bridge.engine.write(mine.region[span], remote[span]))

            for _ in range(3):
                there[:] = 0
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(write, range(64)))
                assert np.array_equal(there, data)


@pytest.mark.parametrize("provider", ["local", "socket", "tcp", "shm"])
def test_a_loop_that_is_held_up_holds_up_nobody(provider):
    """Nothing on the way of a transfer that goes well is the loop's."""
    with memory_elsewhere(provider, SIZE) as (descriptor, there, _), bridge_to(provider) as bridge:
        with bridge.register(np.full(SIZE, 3, np.uint8), "local") as mine:
            remote, begun, over = bridge.attach(descriptor), threading.Event(), threading.Event()
            # The first connects, and the next one learns of the connection.
            for _ in range(2):
                bridge.write(mine.region[:8], remote[:8])

            async def hold() -> bool:
                begun.set()
                return over.wait(PATIENCE_S)

            held = bridge.submit(hold())
            assert begun.wait(PATIENCE_S)
            try:
                bridge.write(mine.region, remote)
                assert (there == 3).all()
            finally:
                over.set()
            assert held.result(PATIENCE_S)


@real_provider
def test_a_thread_that_leaves_lets_the_loop_look(provider):
    """Whoever makes the last round has told the peer that this engine is awake: the answer must find somebody."""
    answers = queue.SimpleQueue[bytes]()
    own: list[aiote.Address] = []

    async def answer(engine: aiote.Engine) -> None:
        await engine.send(own[0], b"counted")

    with memory_elsewhere(provider, 64, IMM, answer) as (descriptor, _, counts), bridge_to(provider) as bridge:
        own.append(bridge.engine.address)

        async def listen() -> None:
            while True:
                answers.put((await bridge.engine.recv()).data)

        with bridge.register(np.zeros(64, np.uint8), "local") as mine:
            remote, listening = bridge.attach(descriptor), bridge.submit(listen())
            for _ in range(300):
                bridge.write_imm(mine.region, remote, IMM)
                assert answers.get(timeout=PATIENCE_S) == b"counted"
                counts.get(timeout=PATIENCE_S)
            listening.cancel()
            listening.wait_within(PATIENCE_S)


@served_by_process
@each_progress
@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_peer_that_is_lost_ends_the_transfers_to_it(provider, progress, child, how):
    await child.open(provider, 1 << 20)
    with bridge_to(provider, progress=progress, **LOST_SOON) as bridge:
        begun = threading.Semaphore(0)
        source = await bridge.register_async(bytearray(1 << 20), "local")
        remote = await asyncio.to_thread(bridge.attach, child.descriptor)

        def write_for_ever() -> None:
            bridge.write(source.region, remote)
            begun.release()
            while True:
                bridge.write(source.region, remote)

        async with asyncio.timeout(PATIENCE_S):
            waiting = [asyncio.ensure_future(asyncio.to_thread(write_for_ever)) for _ in range(2)]
            for _ in waiting:
                await asyncio.to_thread(begun.acquire)
            child.kill() if how == "kill" else await child.stop()
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, aiote.PeerError | aiote.TransferError), outcome
            assert await bridge.run(value(5)) == 5
            child.kill()
            await source.aclose()


@served_by_process
async def test_a_timeout_toward_a_stopped_peer_is_bounded_by_its_loss(provider, child):
    await child.open(provider, 1 << 20)
    with bridge_to(provider, **LOST_SOON) as bridge:
        async with asyncio.timeout(PATIENCE_S):
            source = await bridge.register_async(bytearray(1 << 20), "local")
            remote = await asyncio.to_thread(bridge.attach, child.descriptor)
            await asyncio.to_thread(bridge.write, source.region, remote)
            await child.stop()
            with pytest.raises((TimeoutError, aiote.AioteError)):
                while True:
                    await asyncio.to_thread(bridge.write, source.region, remote, 0.05)
            assert await bridge.run(outstanding(bridge)) == 0
            await source.aclose()


@real_provider
def test_a_connection_that_the_loop_closes_meanwhile_ends_them(provider):
    """Between a thread's look and its post the loop may have closed what it posts to."""
    with memory_elsewhere(provider, SIZE) as (descriptor, there, _), bridge_to(provider) as bridge:
        with bridge.register(np.full(SIZE, 9, np.uint8), "local") as mine:
            remote, over = bridge.attach(descriptor), threading.Event()
            ends = itertools.count()
            last = [0]

            def write() -> None:
                while not over.is_set():
                    with contextlib.suppress(aiote.PeerError, aiote.TransferError):
                        bridge.write(mine.region[:4096], remote[:4096], PATIENCE_S)
                    last[0] = next(ends)

            async def cut() -> None:
                for _ in range(20):
                    peer = await bridge.engine.connect(remote.owner)
                    before = last[0]
                    while last[0] < before + 5:
                        await asyncio.sleep(0)
                    peer.disconnect("cut by the test")

            threads = [threading.Thread(target=write) for _ in range(3)]
            for thread in threads:
                thread.start()
            bridge.call(cut(), PATIENCE_S)
            over.set()
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
            bridge.write(mine.region, remote)
            assert (there == 9).all()
            assert bridge.call(outstanding(bridge)) == 0


@pytest.mark.one_library
@pytest.mark.parametrize("provider", ["local"])
def test_what_cannot_be_is_refused(provider):
    with memory_elsewhere(provider, 64) as (descriptor, _, __), bridge_to(provider) as bridge:
        with bridge.register(bytearray(64), "local") as mine:
            remote = bridge.attach(descriptor)
            with pytest.raises(aiote.UsageError, match="64 bytes"):
                bridge.write(mine.region, remote[:8])
            for imm in (-1, 1 << 28, "7"):
                with pytest.raises((aiote.UsageError, TypeError)):
                    bridge.write_imm(mine.region, remote, imm)
            with pytest.raises((aiote.UsageError, TypeError, AttributeError)):
                bridge.write(bytearray(64), remote)
            with pytest.raises(aiote.UsageError, match="descriptor"):
                bridge.attach(b"none")

            async def inside() -> None:
                bridge.write(mine.region, remote)

            with pytest.raises(aiote.UsageError, match="the bridge's own thread"):
                bridge.call(inside())
            closed = bridges.acquire()
            closed.close()
            with pytest.raises(aiote.ClosedError, match="the bridge is closed"):
                closed.write(mine.region, remote)
        with pytest.raises(aiote.ClosedError):
            bridge.write(mine.region, remote)
        assert aside(bridge.call, value(1)) == 1
