"""More than two engines: a mesh, both providers at once, other threads, other processes, and those that cannot talk."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading

import anyio
import numpy as np
import pytest

import aiote
from support.engines.opening import PATIENCE_S, across, each_progress, each_provider, opened, pair, two_kinds, until
from support.process.data_exchange import exchange

pytestmark = pytest.mark.libfabric


@pytest.mark.anyio
@each_provider
async def test_four_engines_in_a_full_mesh_get_their_own_bytes_and_counts(provider):
    """Everybody connects to everybody at once and writes to everybody; nobody gets another's bytes or counts."""
    async with opened(provider) as a, opened(provider) as b, opened(provider) as c, opened(provider) as d:
        await mesh([a, b, c, d])


async def mesh(engines: list[aiote.Engine]) -> None:
    count = len(engines)
    memories = [np.zeros((count, 100), np.uint8) for _ in engines]
    descriptors = [engine.register(memory).descriptor for engine, memory in zip(engines, memories, strict=True)]

    async def write(here: int, there: int) -> None:
        engine = engines[here]
        remote = engine.attach(descriptors[there])[100 * here : 100 * here + 100]
        await engine.write_imm(engine.register(bytes([10 + here]) * 100), remote, here)
        await engine.send(remote.owner, b"%d" % here)

    async def expect(here: int) -> None:
        for there in set(range(count)) - {here}:
            await engines[here].counter(there).wait(1)
        got = sorted([(await engines[here].recv()).data for _ in range(count - 1)])
        assert got == [b"%d" % there for there in range(count) if there != here]

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for here in range(count):
                group.start_soon(expect, here)
                for there in set(range(count)) - {here}:
                    group.start_soon(write, here, there)
    for here, memory in enumerate(memories):
        assert memory[:, 0].tolist() == [0 if there == here else 10 + there for there in range(count)]
        assert (memory == memory[:, :1]).all()
        assert len(engines[here].peers) == count - 1


@pytest.mark.anyio
@each_provider
async def test_two_that_connect_to_each_other_at_once_have_one_connection(provider):
    for _ in range(5):
        async with pair(provider) as (left, right):
            peers = {}

            async def connect(here: aiote.Engine, there: aiote.Engine, peers: dict) -> None:
                peers[here] = await here.connect(there.address)

            async with anyio.create_task_group() as group:
                group.start_soon(connect, left, right, peers)
                group.start_soon(connect, right, left, peers)
            await until(lambda: left.peers and right.peers)
            assert left.peers == (peers[left],)
            assert right.peers == (peers[right],)
            await left.send(peers[left], b"to the right")
            await right.send(peers[right], b"to the left")
            assert (await right.recv()).data == b"to the right"
            assert (await left.recv()).data == b"to the left"


async def test_engines_of_two_providers_work_in_one_process():
    async with pair("tcp") as (a, b), pair("shm") as (c, d):
        for left, right in ((a, b), (c, d)):
            target = bytearray(5)
            await left.write(left.register(b"hello"), across(left, right, target))
            assert target == b"hello"


async def test_engines_without_a_rail_in_common_cannot_connect():
    async with opened("tcp") as left, opened("shm") as right:
        with pytest.raises(aiote.PeerError, match=r"no rail in common: .*tcp.*shm") as caught:
            await left.connect(right.address)
        assert caught.value.peer == str(right.address)
        with pytest.raises(aiote.PeerError, match="no rail in common"):
            await right.send(left.address, b"x")


@pytest.mark.anyio
async def test_connecting_by_text_or_by_place_gives_the_same_peer():
    async with pair("tcp") as (left, right):
        peer = await left.connect(str(right.address))
        assert await left.connect(f"127.0.0.1:{right.address.port}") is peer
        assert await left.connect(right.address) is peer
        assert peer.address == right.address
        assert repr(peer) == f"<Peer {right.address}, connected>"
    async with pair("tcp") as (left, right):
        peer = await left.connect(f"127.0.0.1:{right.address.port}")
        assert peer.address == right.address


@pytest.mark.parametrize("target", ["nonsense", "http://127.0.0.1:80", 5, None, b"127.0.0.1:80"])
async def test_connecting_to_what_is_no_address_is_refused(target):
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError):
            await engine.connect(target)


async def test_connecting_to_oneself_is_refused():
    async with opened("tcp") as engine:
        with pytest.raises(aiote.UsageError, match="own address: an engine has no connection to itself"):
            await engine.connect(engine.address)


async def test_connecting_to_where_nobody_listens_fails():
    async with opened("tcp") as engine:
        async with opened("tcp") as other:
            address = other.address
        with pytest.raises(aiote.PeerError, match="cannot be reached") as caught:
            await engine.connect(address)
        assert caught.value.peer == str(address)


async def test_a_lost_peer_stays_lost_and_its_successor_is_another():
    async with opened("tcp") as left:
        async with opened("tcp", identity=b"sixteen bytes id") as right:
            old = await left.connect(right.address)
        await old.wait_closed()
        assert "lost" in repr(old)
        async with opened("tcp", identity=b"sixteen bytes id", port=right.address.port) as right:
            new = await left.connect(right.address)
            assert new is not old
            with pytest.raises(aiote.PeerError):
                await left.send(old, b"x")
            await left.send(new, b"x")
            assert (await right.recv()).data == b"x"


def serve(provider: str, progress: str, addresses: queue.Queue, results: queue.Queue) -> None:
    """Run an engine on a loop of this thread: answer one message, and count one write."""

    async def run() -> None:
        async with opened(provider, progress=progress) as engine:
            memory = bytearray(4)
            addresses.put((engine.address, engine.register(memory).descriptor))
            message = await engine.recv()
            await engine.send(message.source, message.data.upper())
            await engine.counter(1).wait(1)
            results.put(bytes(memory))
            await message.source.wait_closed()

    asyncio.run(run())


@each_provider
@each_progress
@pytest.mark.blocking_allowed("another thread's loop is waited for")
async def test_engines_on_the_loops_of_two_threads_serve_each_other(provider, progress):
    addresses, results = queue.Queue(), queue.Queue()
    thread = threading.Thread(target=serve, args=(provider, progress, addresses, results))
    thread.start()
    address, descriptor = await asyncio.to_thread(addresses.get, timeout=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S), opened(provider, progress=progress) as engine:
        await engine.send(address, b"shout")
        assert (await engine.recv()).data == b"SHOUT"
        await engine.write_imm(engine.register(b"data"), engine.attach(descriptor), 1)
        assert await asyncio.to_thread(results.get, timeout=PATIENCE_S) == b"data"
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive()


@two_kinds
def test_engines_in_spawned_processes_write_and_read_each_others_memory(provider, progress):
    """Two processes find each other through queues, write to each other's memory, count, read back, and say goodbye."""
    context = multiprocessing.get_context("spawn")
    queues = context.Queue(), context.Queue()
    results = context.Queue()
    children = [
        context.Process(target=exchange, args=(provider, progress, queues[i], queues[1 - i], results, i))
        for i in range(2)
    ]
    for child in children:
        child.start()
    try:
        got = sorted(results.get(timeout=PATIENCE_S) for _ in children)
        for child in children:
            child.join(PATIENCE_S)
        assert [child.exitcode for child in children] == [0, 0]
        assert got == [(0, "ok"), (1, "ok")]
    finally:
        for child in children:
            child.kill()
            child.join()
            child.close()
        for each in (*queues, results):
            each.close()
            each.join_thread()
