"""aiote.connectors.torch in torch: its registry, its Work and its bootstrap, with tensors on the CPU.

`make test-connectors` runs this in an environment with torch 2.13 and the transports of 2.15; it is no part of
`make test`. What torch's own tests of transports check is here, and what aiote promises beyond.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed._transport import (
    Memory,
    MemoryView,
    MutableMemoryView,
    RemoteBuffer,
    available_transports,
    new_transport,
    new_transport_rank,
    wait_all,
)

import torch_peer
from aiote import bridge as bridges
from aiote.connectors.torch import AioteRemoteBuffer, AioteTransport, AioteWork

MIB = 1 << 20
SOON_S = 60
"""What takes longer hangs: far above heartbeat_timeout, for machines on which other things run."""


class Pair:
    """Two transports of this process that are each other's peers."""

    def __init__(self) -> None:
        self.a, self.b = new_transport("aiote", "cpu"), new_transport("aiote", "cpu")
        self.a.connect(self.b.bind())
        self.b.connect(self.a.bind())


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.a.close()
    made.b.close()


class Other:
    """A transport to another process, and that process."""

    def __init__(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=torch_peer.serve, args=(theirs, store.port), daemon=True)
        self.process.start()
        theirs.close()
        assert self.connection.recv() == "imported"
        self.transport = new_transport_rank(
            "aiote", "cpu", store=store, rank=0, peer_rank=1, bootstrap_timeout=torch_peer.PATIENCE_S
        )
        assert self.connection.recv() == "connected"

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.hear()

    def tell(self, name: str, *arguments: Any) -> None:
        self.connection.send((name, arguments))

    def hear(self) -> Any:
        assert self.connection.poll(SOON_S)
        return self.connection.recv()

    def expose(self, name: str, nbytes: int, value: int = 0) -> AioteRemoteBuffer:
        return AioteRemoteBuffer.deserialize(self.ask("expose", name, nbytes, value))

    def memory(self, nbytes: int, value: int = 0) -> tuple[torch.Tensor, Any]:
        tensor = torch.full((nbytes,), value, dtype=torch.uint8)
        return tensor, self.transport.register_memory(tensor)

    def close(self) -> None:
        self.transport.close(timeout=SOON_S)
        self.connection.close()
        self.process.join(SOON_S)
        assert self.process.exitcode is not None


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.close()
    assert made.process.exitcode == 0


@pytest.fixture
def mortal() -> Iterator[Other]:
    """One whose process a test may kill."""
    made = Other()
    yield made
    made.close()


# What torch's tests ask of every transport.


def test_it_is_found_by_its_entry_point():
    assert "aiote" in available_transports()
    with new_transport("AIOTE") as transport:
        assert type(transport) is AioteTransport
        assert not transport.connected()


def test_what_it_hands_out_is_what_torch_expects(pair):
    memory = pair.a.register_memory(torch.arange(8.0))
    assert isinstance(memory, Memory)
    assert isinstance(memory.to_view(), MemoryView)
    assert not isinstance(memory.to_view(), MutableMemoryView)
    assert isinstance(memory.to_mutable_view(), MutableMemoryView)
    assert isinstance(memory.to_remote_buffer(), RemoteBuffer)
    assert pair.a.connected()
    with pytest.raises(RuntimeError, match="already connected"):
        pair.a.connect(pair.b.bind())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.int64])
def test_tensors_go_both_ways(pair, other, dtype):
    tensor = (torch.arange(1000) % 2).to(dtype).reshape(10, 100)
    for transport, target in ((pair.a, pair.b), (other.transport, None)):
        memory = transport.register_memory(tensor)
        if target is None:
            remote = other.expose("both", tensor.nbytes)
        else:
            received = torch.empty_like(tensor)
            remote = target.register_memory(received).to_remote_buffer()
        assert transport.write(memory.to_view(), remote) == 0
        back = torch.zeros_like(tensor)
        assert transport.read(transport.register_memory(back).to_mutable_view(), remote) == 0
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_partial_views_and_reuse(other):
    source, memory = other.memory(4096)
    source[:] = torch.arange(4096) % 251
    remote = other.expose("partial", 4096)
    back, mine = other.memory(4096)
    for start, length in ((0, 16), (100, 1000), (4095, 1), (4096, 0), (7, 4089)):
        other.transport.write(memory.to_view(start, length), remote)
        other.transport.read(mine.to_mutable_view(start, length), remote)
        assert torch.equal(back[start : start + length], source[start : start + length])


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4097), (4097, 0), (4096, 1), (1, -1)])
def test_views_outside_of_the_memory_are_refused(other, offset, length):
    _, memory = other.memory(4096)
    with pytest.raises(ValueError, match="memory"):
        memory.to_view(offset, length)
    with pytest.raises(ValueError, match="memory"):
        memory.to_mutable_view(offset, length)


def test_the_other_process_writes_here(other):
    tensor, memory = other.memory(MIB)
    other.expose("theirs", MIB, 8)
    other.ask("write", "theirs", memory.to_remote_buffer().serialize())
    assert torch.equal(tensor, torch.full_like(tensor, 8))


# Work.


@contextmanager
def stopped(other: Other) -> Iterator[None]:
    """Keep the other process from answering, so that a transfer stays under way."""
    os.kill(other.process.pid, signal.SIGSTOP)
    yield
    os.kill(other.process.pid, signal.SIGCONT)


def test_a_wait_that_times_out_leaves_the_work_pending(other):
    tensor, memory = other.memory(64 * MIB)
    remote = other.expose("pending", 64 * MIB, 5)
    with stopped(other):
        work = other.transport.read(memory.to_mutable_view(), remote, async_op=True)
        with pytest.raises(TimeoutError, match="pending"):
            work.wait(timedelta(microseconds=1))
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert not work.get_future().done()
        with pytest.raises(RuntimeError, match="pending"):
            other.transport.unregister_memory(memory)
    assert work.wait(timedelta(seconds=SOON_S))
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == []
    assert torch.equal(tensor, torch.full_like(tensor, 5))
    other.transport.unregister_memory(memory)


def test_an_error_is_the_end(other):
    _, memory = other.memory(4096)
    remote = other.expose("gone", 4096)
    other.ask("unregister", "gone")
    work = other.transport.write(memory.to_view(), remote, async_op=True)
    for _ in range(2):
        with pytest.raises(Exception, match=r".") as raised:
            work.wait(timedelta(seconds=SOON_S))
        assert not isinstance(raised.value, TimeoutError)
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is raised.value
    with pytest.raises(type(raised.value)):
        work.get_future().wait()


def test_a_future_ends_without_a_loop_and_calls_back(other):
    _, memory = other.memory(MIB, 1)
    remote = other.expose("future", MIB)
    seen: list[Any] = []
    called = threading.Event()
    work = other.transport.write(memory.to_view(), remote, async_op=True)
    work.get_future().add_done_callback(
        lambda future: (seen.append((future.wait(), work.is_completed())), called.set())
    )
    assert called.wait(SOON_S)
    assert seen == [([], True)]


def test_wait_all_raises_what_failed_and_times_out(other):
    _, memory = other.memory(4096)
    good, bad = other.expose("good", 4096), other.expose("bad", 4096)
    other.ask("unregister", "bad")

    async def main() -> None:
        works = [other.transport.write(memory.to_view(), remote, async_op=True) for remote in (good, bad, good)]
        with pytest.raises(Exception, match=r".") as raised:
            await wait_all(works, timeout=SOON_S)
        assert raised.value is works[1].exception()
        _, large = other.memory(64 * MIB)
        target = other.expose("large", 64 * MIB)
        with stopped(other):
            work = other.transport.write(large.to_view(), target, async_op=True)
            with pytest.raises(TimeoutError):
                await wait_all([work], timeout=0.0)
        await wait_all([work], timeout=SOON_S)

    asyncio.run(main())


def test_a_thousand_transfers_overlap(other):
    count, size = 1000, 16 * 1024
    source, memory = other.memory(count * size)
    source[:] = torch.arange(count * size) % 253
    back, mine = other.memory(count * size)
    targets = [other.expose(f"many.{number}", size) for number in range(count)]
    works: list[AioteWork] = [
        other.transport.write(memory.to_view(n * size, size), target, async_op=True) for n, target in enumerate(targets)
    ]
    for work in works:
        assert work.wait(timedelta(seconds=SOON_S))

    async def main() -> None:
        reads = [
            other.transport.read_async(mine.to_mutable_view(n * size, size), target) for n, target in enumerate(targets)
        ]
        await asyncio.gather(*reads)

    asyncio.run(main())
    assert torch.equal(back, source)


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_time_outs_that_are_none_are_refused(other, timeout):
    _, memory = other.memory(64)
    remote = other.expose("none", 64)
    for call in (
        lambda: other.transport.write(memory.to_view(), remote, timeout=timeout),
        lambda: other.transport.bind(timeout=timeout),
        lambda: other.transport.close(timeout=timeout),
        lambda: memory.to_remote_buffer(timeout=timeout),
    ):
        with pytest.raises(ValueError, match="timeout"):
            call()


# What is refused.


MEMORY = b'{"type":"aiote-memory","endpoint":"a"'
MALFORMED = [b"", b"{", b"\xff", b"null", MEMORY + b"}", MEMORY + b',"descriptor":"AAAA","version":1}']
MALFORMED += [MEMORY + b',"descriptor":"","version":2}', b'{"type":"other","endpoint":"a","descriptor":""}']


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_descriptors_are_refused(data):
    with pytest.raises(ValueError, match="malformed"):
        AioteRemoteBuffer.deserialize(data)


def test_other_peers_and_sizes_are_refused(pair, other):
    _, memory = other.memory(4096)
    with pytest.raises(TypeError):
        AioteRemoteBuffer.deserialize("text")  # type: ignore[arg-type]
    elsewhere = pair.b.register_memory(torch.zeros(4096, dtype=torch.uint8)).to_remote_buffer()
    with pytest.raises(ValueError, match="connected peer"):
        other.transport.write(memory.to_view(), elsewhere)
    remote = other.expose("small", 100)
    forged = AioteRemoteBuffer(remote.endpoint, elsewhere.descriptor)
    with pytest.raises(ValueError, match="connected peer"):
        other.transport.write(memory.to_view(), forged)
    with pytest.raises(ValueError, match="fit"):
        other.transport.write(memory.to_view(), remote)
    with pytest.raises(TypeError):
        other.transport.read(memory.to_view(0, 10), remote)
    with pytest.raises(TypeError):
        other.transport.write(pair.a.register_memory(torch.zeros(4)).to_view(), remote)
    with pytest.raises(TypeError):
        other.transport.write(memory.to_view(0, 10), object())


def test_what_cannot_be_registered_is_refused(pair):
    with pytest.raises(TypeError):
        pair.a.register_memory(b"bytes")
    with pytest.raises(ValueError, match="contiguous"):
        pair.a.register_memory(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ValueError, match="empty"):
        pair.a.register_memory(torch.zeros(0))
    with pytest.raises(ValueError, match="expected a tensor on"):
        pair.a.register_memory(torch.zeros(4, device="meta"))
    with pytest.raises(RuntimeError) as raised:
        new_transport("aiote", "cuda")
    assert "CPU" in str(raised.value.__cause__)
    tensor = torch.zeros(16, dtype=torch.uint8)
    memory = pair.a.register_memory(tensor)
    tensor.resize_(1 << 20)
    with pytest.raises(RuntimeError, match="resized"):
        memory.to_view()


def test_registrations_share_one_lifetime(other):
    tensor = torch.zeros(4096, dtype=torch.uint8)
    first, second = other.transport.register_memory(tensor), other.transport.register_memory(tensor)
    view, remote = second.to_view(), other.expose("shared", 4096)
    other.transport.unregister_memory(first)
    other.transport.unregister_memory(first)
    other.transport.unregister_memory(second)
    with pytest.raises(RuntimeError, match="unregistered"):
        other.transport.write(view, remote)
    with pytest.raises(RuntimeError, match="unregistered"):
        second.to_remote_buffer()


# What aiote promises beyond.


def test_a_cancelled_write_writes_no_more(other):
    size = 64 * MIB
    source, memory = other.memory(size, 1)

    async def cancelled(name: str) -> None:
        remote = other.expose(name, size)
        source.fill_(1)
        other.tell("await_first", name)
        writing = asyncio.create_task(other.transport.write_async(memory.to_view(), remote))
        await asyncio.to_thread(other.hear)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        # From here on the memory is ours again.
        source.fill_(2)
        values = other.ask("values", name)
        assert values[0] + values[1] == size
        assert other.ask("values", name) == values
        other.ask("unregister", name)

    for number in range(3):
        asyncio.run(cancelled(f"cancelled.{number}"))


def test_a_cancelled_or_late_read_writes_no_more(other):
    size = 64 * MIB
    tensor, memory = other.memory(size)
    remote = other.expose("source", size, 1)

    async def cancelled() -> None:
        reading = asyncio.create_task(other.transport.read_async(memory.to_mutable_view(), remote))
        while not tensor[0]:
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    async def late() -> None:
        with pytest.raises(TimeoutError):
            await other.transport.read_async(memory.to_mutable_view(), remote, timeout=0.0)

    def late_too() -> None:
        with pytest.raises(TimeoutError):
            other.transport.read(memory.to_mutable_view(), remote, timeout=0.0)

    for way in (cancelled, late, late_too):
        tensor.fill_(0)
        if way is late_too:
            late_too()
        else:
            asyncio.run(way())
        tensor.fill_(9)
        assert other.ask("values", "source")[1] == size
        assert torch.equal(tensor, torch.full_like(tensor, 9))


@pytest.mark.parametrize("awaited", [False, True])
def test_closing_drains(awaited):
    with new_transport("aiote", "cpu") as b:
        a = new_transport("aiote", "cpu")
        a.connect(b.bind())
        b.connect(a.bind())
        source, target = torch.full((64 * MIB,), 7, dtype=torch.uint8), torch.zeros(64 * MIB, dtype=torch.uint8)
        work = a.write(a.register_memory(source).to_view(), b.register_memory(target).to_remote_buffer(), async_op=True)
        if awaited:
            asyncio.run(a.close_async())
        else:
            a.close()
        assert work.is_success()
        assert torch.equal(source, target)
        a.close()
        assert not a.connected()
        with pytest.raises(RuntimeError, match="closed"):
            a.register_memory(source)


def test_a_close_that_times_out_may_be_called_again(mortal):
    _, memory = mortal.memory(64 * MIB)
    remote = mortal.expose("closing", 64 * MIB, 4)
    with stopped(mortal):
        work = mortal.transport.read(memory.to_mutable_view(), remote, async_op=True)
        with pytest.raises(TimeoutError):
            mortal.transport.close(timeout=0.0)
        with pytest.raises(TimeoutError):
            asyncio.run(mortal.transport.close_async(timeout=0.0))
        with pytest.raises(RuntimeError, match="closed"):
            mortal.transport.read(memory.to_mutable_view(), remote)
    mortal.transport.close(timeout=SOON_S)
    assert work.is_success()


@pytest.mark.parametrize("how", ["sync", "work", "awaited"])
def test_a_peer_that_is_killed_ends_what_waits_for_it(mortal, how):
    tensor, memory = mortal.memory(512 * MIB)
    remote = mortal.expose("killed", 512 * MIB, 1)

    def kill() -> None:
        while not tensor[0]:
            pass
        mortal.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    view = memory.to_mutable_view()
    with pytest.raises(Exception, match=r".") as raised:
        if how == "sync":
            mortal.transport.read(view, remote)
        elif how == "work":
            mortal.transport.read(view, remote, async_op=True).wait()
        else:
            asyncio.run(mortal.transport.read_async(view, remote))
    killer.join()
    assert not isinstance(raised.value, TimeoutError)
    assert time.monotonic() - started < torch_peer.LOST_S
    assert not mortal.transport.connected()
    with pytest.raises(Exception, match=r"."):
        mortal.transport.read(view, remote)
    tensor.fill_(9)
    assert torch.equal(tensor, torch.full_like(tensor, 9))


def test_nothing_is_left_registered():
    with bridges.acquire() as bridge:
        before, made = len(bridge._thread.memory._table), Pair()
        memory = made.a.register_memory(torch.zeros(4096))
        made.a.write(memory.to_view(0, 0), made.b.register_memory(torch.zeros(4096)).to_remote_buffer())
        made.a.close()
        made.b.close()
        assert len(bridge._thread.memory._table) == before
