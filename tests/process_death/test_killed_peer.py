"""A peer that is killed with everything under way: each await that depends on it ends, with an error that says so."""

from __future__ import annotations

import re

import anyio
import pytest

import aiote
from support.engines.opening import PATIENCE_S, go_round, opened, real_provider, served_by_process, served_on, until

pytestmark = pytest.mark.libfabric

BIG = 8 << 20
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""


def stuck_with(engine: aiote.Engine, peer: aiote.Peer, descriptor: bytes) -> dict[str, aiote.Transfer]:
    """Start one of each kind toward a peer that is stopped: too much of each for any buffer on the way."""
    remote = engine.attach(descriptor)
    pages = list(range(BIG // 4096))
    memory = [engine.register(bytearray(BIG)) for _ in range(3)]
    return {
        f"write of {BIG} bytes": engine.submit_write(memory[0], remote),
        f"write_imm of {BIG} bytes": engine.submit_write_imm(memory[0], remote, 9),
        f"write_pages of {len(pages)} pages of 4096 bytes": engine.submit_write_pages(
            aiote.Pages(memory[1], pages, 4096), aiote.Pages(remote, pages, 4096), 9
        ),
        "write_imm of immediate 0x9 alone": engine.submit_write_imm(None, peer, 9),
        f"read of {BIG} bytes": engine.submit_read(remote, memory[2]),
        "send of 16000 bytes": [engine.submit_send(peer, bytes(16000)) for _ in range(40)][-1],
    }


@pytest.mark.anyio
@served_by_process
async def test_everything_under_way_ends_when_the_peer_is_killed(provider, child):
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine, opened(provider) as other:
            await engine.connect(other.address)
            peer = await engine.connect(killed.address)
            # Stopped first, so that nothing can be over when it is killed.
            await killed.stop()
            stuck = stuck_with(engine, peer, killed.descriptor)
            # What a stopped process has no part in may be over: shm reads its memory without it.
            await served_on(engine, other)
            assert not stuck[f"write of {BIG} bytes"].done()
            assert not stuck["send of 16000 bytes"].done()
            killed.kill()
            reason = await peer.wait_closed()
            assert reason
            failed = 0
            for description, transfer in stuck.items():
                try:
                    await transfer
                except aiote.TransferError as error:
                    failed += 1
                    assert description in str(error)
                    assert str(error).count(str(killed.address)) == 1
                    assert error.transfer is transfer
                    assert isinstance(error.cause, aiote.AioteError)
                    assert error.__cause__ is error.cause
                else:
                    assert provider == "shm"
            assert failed >= 3
            assert engine.peers[0].address == other.address
            assert len(engine.peers) == 1
            with pytest.raises(aiote.PeerError, match=re.escape(f"send of 1 bytes: peer {killed.address}: {reason}")):
                await engine.send(peer, b"x")
            await killed.gone()
            with pytest.raises(aiote.PeerError, match="its control port cannot be reached"):
                await engine.connect(killed.address)
            with pytest.raises(aiote.PeerError, match=re.escape(f"read of 8 bytes: peer {killed.address}: ")):
                await engine.read(engine.attach(killed.descriptor)[:8], engine.register(bytearray(8)))
            await served_on(engine, other)


@real_provider
async def test_transfers_by_the_thousand_end_when_the_peer_is_killed(provider, child):
    """Writes and reads by the thousand toward it and from it, and a kill at no particular moment."""
    killed = child()
    ended: list[str] = []
    done = 0
    with anyio.fail_after(PATIENCE_S):
        await killed.open(provider, size=1 << 16)
        async with opened(provider) as engine, opened(provider) as other:
            await engine.connect(other.address)
            peer = await engine.connect(killed.address)
            remote = engine.attach(killed.descriptor)

            async def work(kind: str) -> None:
                nonlocal done
                local = engine.register(bytearray(1 << 16))
                pages = aiote.Pages(local, range(16), 4096)
                verbs = {
                    "write": lambda: engine.write_imm(local, remote, 1),
                    "read": lambda: engine.read(remote, local),
                    "pages": lambda: engine.write_pages(pages, aiote.Pages(remote, range(16), 4096)),
                }
                try:
                    while True:
                        await verbs[kind]()
                        done += 1
                except (aiote.TransferError, aiote.PeerError) as error:
                    assert str(killed.address) in str(error)
                    ended.append(kind)

            kinds = ["write", "read", "pages"] * 4
            target = engine.register(bytearray(1 << 16))
            with engine.counter(77) as arrivals:
                await killed.ask("flood", descriptor=target.descriptor.hex(), imm=77)
                async with anyio.create_task_group() as group:
                    for kind in kinds:
                        group.start_soon(work, kind)
                    await arrivals.wait(10)
                    await until(lambda: done >= 50)
                    killed.kill()
            assert sorted(ended) == sorted(kinds)
            assert await peer.wait_closed()
            await served_on(engine, other)
            # Nothing of the dead peer holds the memory that it was writing to.
            await target.aclose()


@real_provider
async def test_connecting_to_a_stopped_peer_ends_when_it_is_killed(provider, child):
    """Stopped before: its kernel accepts, and nobody speaks; then it dies."""
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open(provider)
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine:
            await killed.stop()
            ended: list[str] = []

            async def connect() -> None:
                with pytest.raises(aiote.PeerError) as caught:
                    await engine.connect(killed.address)
                ended.append(str(caught.value))

            async with anyio.create_task_group() as group:
                group.start_soon(connect)
                group.start_soon(connect)
                await go_round()
                assert ended == []
                killed.kill()
            assert len(ended) == 2
            assert all(str(killed.address) in text for text in ended)
            assert engine.peers == ()


@real_provider
async def test_connecting_ends_when_the_peer_is_killed_in_the_handshake(provider, child):
    """At some moment of the handshake, the channels, or just after."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine, opened(provider) as other:
            await engine.connect(other.address)
            for turns in (3, 12, 24):
                killed = child()
                await killed.open(provider)
                ended: list[str] = []

                async def connect(killed=killed, ended=ended) -> None:
                    try:
                        ended.append(await (await engine.connect(killed.address)).wait_closed())
                    except aiote.PeerError as error:
                        ended.append(error.reason)

                async with anyio.create_task_group() as group:
                    group.start_soon(connect)
                    for _ in range(turns):
                        await anyio.sleep(0)
                    killed.kill()
                assert len(ended) == 1
                assert ended[0]
            await served_on(engine, other)


async def test_a_counter_that_waits_for_a_killed_peer_is_the_callers_to_end(child):
    """A count may come from anybody, so no death ends the wait; the end of the peer can be awaited beside it."""
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open("tcp", size=64)
        async with opened("tcp", heartbeat_timeout=NEVER_S) as engine, opened("tcp") as other:
            target = engine.register(bytearray(64))
            peer = await engine.connect(killed.address)
            outcome: list[str] = []
            with engine.counter(5) as counter:
                async with anyio.create_task_group() as group:

                    async def watch() -> None:
                        outcome.append(await peer.wait_closed())
                        group.cancel_scope.cancel()

                    group.start_soon(watch)
                    await killed.stop()
                    killed.kill()
                    await counter.wait(1)
                assert len(outcome) == 1
                assert counter.value == 0
                # The cancelled wait consumed nothing, and the count goes on.
                await other.write_imm(other.register(b"x" * 64), other.attach(target.descriptor), 5)
                await counter.wait(1)
