"""Engines that close in an orderly way with transfers under way: their own, and their peers'."""

from __future__ import annotations

import contextlib

import anyio
import pytest

import aiote
from support.engines.opening import (
    PATIENCE_S,
    each_provider,
    go_round,
    opened,
    pair,
    real_provider,
    run_script,
    served_by_process,
    until,
)
from support.engines.raw_clients import Stranger
from support.engines.wakeup_page import BUSY, own_page

pytestmark = pytest.mark.libfabric

BIG = 8 << 20
NEVER_S = 1000.0
"""A heartbeat timeout that no test waits for: what ends sooner did not end by it."""


class Awaiting:
    """Awaits that are under way on an engine, and what became of each."""

    def __init__(self) -> None:
        self.ended: dict[str, BaseException | str] = {}

    async def watch(self, name: str, what) -> None:
        try:
            self.ended[name] = str(await what)
        except aiote.AioteError as error:
            self.ended[name] = error


@pytest.mark.anyio
@served_by_process
@pytest.mark.parametrize("how", ["aclose", "abort"])
async def test_closing_ends_everything_of_its_own(provider, how, child):
    stopped = child()
    waits = Awaiting()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine:
            peer = await engine.connect(stopped.address)
            await stopped.stop()
            remote = engine.attach(stopped.descriptor)
            memory = bytearray(b"m" * BIG)
            local = engine.register(memory)
            transfers = {
                "write": engine.submit_write(local, remote),
                "pages": engine.submit_write_pages(
                    aiote.Pages(local, range(2048), 4096), aiote.Pages(remote, range(2048), 4096), 1
                ),
                "send": [engine.submit_send(peer, bytes(16000)) for _ in range(40)][-1],
            }
            async with anyio.create_task_group() as group:
                for name, transfer in transfers.items():
                    group.start_soon(waits.watch, name, transfer)
                group.start_soon(waits.watch, "recv", engine.recv())
                group.start_soon(waits.watch, "counter", engine.counter(4).wait(1))
                group.start_soon(waits.watch, "closed", peer.wait_closed())
                group.start_soon(waits.watch, "connect", engine.connect(f"127.0.0.1:{stopped.address.port}"))
                group.start_soon(waits.watch, "region", local.aclose())
                await until(lambda: waits.ended)
                await go_round()
                assert set(waits.ended) == {"connect"}
                if how == "aclose":
                    await engine.aclose()
                else:
                    engine.abort()
                    engine.abort()
            for name in transfers:
                error = waits.ended[name]
                assert isinstance(error, aiote.TransferError)
                assert str(stopped.address) in str(error)
                assert "engine was" in str(error)
            assert isinstance(waits.ended["recv"], aiote.ClosedError)
            assert isinstance(waits.ended["counter"], aiote.ClosedError)
            assert "engine was" in str(waits.ended["closed"])
            assert "engine was" in str(peer.reason)
            # No NIC holds the memory any more: it may be resized, which an exported buffer forbids.
            memory.clear()
        with pytest.raises(aiote.ClosedError):
            await engine.send(stopped.address, b"x")


@pytest.mark.anyio
async def test_closing_ends_connects(child):
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open("tcp")
        await stopped.stop()
        waits = Awaiting()
        async with anyio.create_task_group() as group:
            async with opened("tcp", heartbeat_timeout=NEVER_S) as engine:
                group.start_soon(waits.watch, "by address", engine.connect(stopped.address))
                group.start_soon(waits.watch, "by place", engine.connect(f"127.0.0.1:{stopped.address.port}"))
                pending = engine.submit_send(stopped.address, b"never")
                await go_round()
                assert waits.ended == {}
        assert all(isinstance(error, aiote.PeerError) for error in waits.ended.values())
        assert set(waits.ended) == {"by address", "by place"}
        with pytest.raises(aiote.PeerError, match="its engine was closed|the engine was"):
            await pending


@pytest.mark.anyio
@each_provider
async def test_transfers_end_when_the_peer_closes_in_the_middle(provider):
    """It says goodbye; whatever was under way to it ends with that."""
    with anyio.fail_after(PATIENCE_S):
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine, opened(provider) as other:
            async with opened(provider, heartbeat_timeout=NEVER_S) as leaving:
                peer = await engine.connect(leaving.address)
                await engine.connect(other.address)
                remote = engine.attach(leaving.register(bytearray(BIG)).descriptor)
                local = engine.register(bytearray(BIG))
                transfers = [engine.submit_write(local, remote) for _ in range(8)]
                transfers += [engine.submit_read(remote, engine.register(bytearray(BIG))) for _ in range(8)]
                transfers += [engine.submit_send(peer, bytes(16000)) for _ in range(40)]
                await leaving.aclose()
            failed = []
            for transfer in transfers:
                try:
                    await transfer
                except aiote.TransferError as error:
                    failed.append(str(error))
            assert failed
            assert all(str(leaving.address) in text for text in failed)
            assert await peer.wait_closed()
            await local.aclose()
            await engine.send(other.address, b"on")
            assert (await other.recv()).data == b"on"


@each_provider
async def test_a_goodbye_says_why(provider):
    """Both ways: the one that was connected to closes, and the one that connected."""
    for connects in (0, 1):
        async with pair(provider, heartbeat_timeout=NEVER_S) as engines:
            await engines[connects].connect(engines[1 - connects].address)
            await until(lambda engines=engines: all(engine.peers for engine in engines))
            (ours,), (theirs,) = engines[0].peers, engines[1].peers
            await engines[0].aclose()
            assert await ours.wait_closed() == "its engine was closed"
            assert await theirs.wait_closed() == "it closed the connection: its engine was closed"


@pytest.mark.anyio
@each_provider
async def test_messages_that_arrived_outlive_their_sender(provider):
    async with pair(provider) as (left, right):
        for number in range(5):
            await left.send(right.address, bytes([number]))
        await until(lambda: right.statistics().inbox == 5)
        await left.aclose()
        await until(lambda: not right.peers)
        assert [(await right.recv()).data for _ in range(5)] == [bytes([number]) for number in range(5)]


@served_by_process
async def test_a_region_closes_after_the_failure_of_what_used_it(provider, child):
    killed = child()
    with anyio.fail_after(PATIENCE_S):
        await killed.open(provider, size=BIG)
        async with opened(provider) as engine:
            await engine.connect(killed.address)
            await killed.stop()
            memory = bytearray(BIG)
            local = engine.register(memory)
            transfer = engine.submit_write(local, engine.attach(killed.descriptor))
            async with anyio.create_task_group() as group:
                group.start_soon(local.aclose)
                await go_round()
                with pytest.raises(BufferError):
                    memory.clear()
                assert not transfer.done()
                killed.kill()
            assert transfer.done()
            memory.clear()
            with pytest.raises(aiote.TransferError):
                await transfer


@pytest.mark.anyio
@served_by_process
async def test_a_read_after_its_peer_has_closed_fails(provider, child):
    """Before anybody has heard of that, and while the memory is another's: what it would get is not what was lent."""
    closing = child()
    with anyio.fail_after(PATIENCE_S):
        await closing.open(provider, size=1 << 20)
        async with opened(provider, heartbeat_timeout=NEVER_S) as engine:
            remote, local = engine.attach(closing.descriptor), engine.register(bytearray(1 << 20))
            await engine.read(remote, local)
            closing.tell("abort", value=9)
            closing.hold_until_answer()
            with pytest.raises(aiote.TransferError):
                await engine.read(remote, local)


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["tcp", "socket"])
@pytest.mark.parametrize("how", ["aclose", "abort", "disconnect", "revoke"])
async def test_closing_confirms_nothing_that_a_stopped_peer_may_read_from_its_sockets(provider, how, child):
    """Continued, it writes what its kernel was sent."""
    stopped = child()
    with anyio.fail_after(PATIENCE_S):
        await stopped.open(provider, size=BIG, heartbeat_timeout=NEVER_S)
        async with opened(provider, heartbeat_timeout=NEVER_S, drain_timeout=2.0) as engine:
            peer = await engine.connect(stopped.address)
            lent = engine.register(bytearray(64)).lease(slice(0, 64), peer)
            local, remote = engine.register(bytes(BIG)), engine.attach(stopped.descriptor)
            await engine.write(local[:8], remote[:8])
            await stopped.stop()
            transfer = engine.submit_write(local, remote)
            await until(lambda: transfer.done() or engine.statistics().outstanding)
            if how == "revoke":
                await lent.revoke()
            elif how == "disconnect":
                peer.disconnect()
            elif how == "abort":
                engine.abort()
            else:
                await engine.aclose()
            with pytest.raises(aiote.TransferError) as caught:
                await transfer
            assert not caught.value.confirmed


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["shm", "local"])
@pytest.mark.parametrize("copying", [True, False])
@pytest.mark.parametrize("how", ["abort", "disconnect"])
async def test_closing_confirms_what_the_peer_cannot_be_copying(provider, copying, how):
    """The peer's own page says that it is within a call, which may copy from our memory; here it never ends."""
    async with pair(provider, progress="loop") as (left, right):
        peer = await left.connect(right.address)
        local, remote = left.register(bytearray(BIG)), left.attach(right.register(bytearray(BIG)).descriptor)
        await left.write(local, remote)
        transfer = left.submit_write(local, remote)
        left._runtime.core.progress()  # alone, so that the peer has done nothing of it
        with own_page(right._runtime.core.wakeup_event) as page:
            assert page[BUSY] % 2 == 0
            page[BUSY] ^= copying
            if how == "abort":
                left.abort()
            else:
                peer.disconnect()
            page[BUSY] ^= copying
            page.release()
        with pytest.raises(aiote.TransferError) as caught:
            await transfer
        assert caught.value.confirmed is not copying


@pytest.mark.anyio
async def test_who_connects_in_the_moment_of_a_close_is_hung_up_on(caplog):
    """The loop has seen the connection, and the one that would accept it is cancelled in the same turn."""
    for turns in (0, 1, 2):
        with anyio.fail_after(PATIENCE_S), Stranger().socket as late:
            engine = await opened("tcp")
            await go_round()
            late.connect_ex((engine.address.host, engine.address.port))
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            engine.abort()
            await anyio.wait_readable(late)
            with contextlib.suppress(ConnectionResetError):
                assert late.recv(1) == b""
    assert "InvalidStateError" not in caplog.text


@real_provider
def test_closing_after_a_write_that_was_refused_does_not_crash(provider):
    """In a process of its own: tcp of 2.5.1 crashed when it was polled after its endpoint was closed."""
    done = run_script(
        """
        import asyncio, sys
        import aiote

        async def main(provider):
            async with aiote.open_engine(provider) as engine:
                async with aiote.open_engine(provider) as other:
                    region = other.register(bytearray(1 << 20))
                    remote = engine.attach(region.descriptor)
                    await engine.connect(other.address)
                    if provider == "tcp":
                        await region.aclose()
                        try:
                            await engine.write(engine.register(bytes(1 << 20)), remote)
                        except aiote.TransferError:
                            print("refused")
                    writes = [engine.submit_write_imm(None, other.address, 3) for _ in range(100)]
                for write in writes:
                    try:
                        await write
                    except aiote.TransferError:
                        pass
            print("closed")

        asyncio.run(main(sys.argv[1]))
        """,
        provider,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == (["refused"] if provider == "tcp" else []) + ["closed"]
