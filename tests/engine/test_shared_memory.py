"""Memory that engines of one host share: what both sides see, how it ends, and what is left when one side is killed."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

import aiote
from aiote.core.address import Address
from aiote.core.control_frames import ShareRequest
from aiote.core.descriptor import SharedDescriptor
from aiote.core.handshake import OLDEST
from aiote.links import sharing
from aiote_native.system.wakeups import SharedPages
from support.engines.opening import linked, opened, pair, served_on, until
from support.rails.shared_memory import SIZE, descriptors, mappings


@pytest.fixture(autouse=True)
def collected() -> None:
    """Let go of what other tests of this process have left to the collector."""
    gc.collect()


@pytest.mark.anyio
@pytest.mark.parametrize("provider", ["local", "socket"])
async def test_both_sides_see_the_stores_of_the_other(provider):
    async with pair(provider) as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        mapped = await user.map_memory(memory.descriptor, owner=owner.address)
        assert memory.nbytes == mapped.nbytes == SIZE
        assert bytes(memory.view) == bytes(SIZE)
        mapped.view[SIZE - 1] = 7
        memory.view[0] = 9
        assert (memory.view[SIZE - 1], mapped.view[0]) == (7, 9)
        assert (mapped.owner, mapped.descriptor) == (owner.address, memory.descriptor)
        assert [peer.shares_memory for peer in (*owner.peers, *user.peers)] == [True, True]
        await served_on(owner, user)
        mapped.close()
        memory.close()
        assert mappings() == 0


def allocated(memory: aiote.SharedMemory) -> int:
    """Return the bytes that the kernel has allocated for shared memory."""
    return os.fstat(memory._pages.descriptor).st_blocks * 512


@pytest.mark.parametrize("reserve", [True, False])
async def test_pages_are_allocated_at_once_or_when_they_are_touched(reserve):
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(64 << 20, [user.address], reserve=reserve)
        assert allocated(memory) == (64 << 20 if reserve else 0)
        mapped = await user.map_memory(memory.descriptor)
        mapped.view[5 << 20] = 1
        assert memory.view[5 << 20] == 1
        assert 0 < allocated(memory) <= 64 << 20
        assert reserve or allocated(memory) < 4 << 20


async def test_where_the_kernel_may_refuse_a_page_all_are_allocated_at_once(monkeypatch, tmp_path):
    """A refused page would be a SIGBUS."""
    told, commits_strictly = tmp_path / "overcommit_memory", sharing.commits_strictly
    async with opened("local") as owner:
        for setting, strict in ((None, True), ("0\n", False), ("1\n", False), ("2\n", True)):
            if setting is not None:
                told.write_text(setting)
            assert commits_strictly(str(told)) == strict
            monkeypatch.setattr(sharing, "commits_strictly", lambda strict=strict: strict)
            memory = await owner.share_memory(1 << 20, [], reserve=False)
            assert allocated(memory) == (1 << 20 if strict else 0)


async def test_the_memory_of_an_engine_is_one_and_that_of_two_calls_is_two():
    async with linked("local") as (owner, user), opened("local") as third:
        first, second = [await owner.share_memory(SIZE, [user.address, third.address]) for _ in range(2)]
        mapped = [await engine.map_memory(first.descriptor) for engine in (user, user, third)]
        mapped[0].view[1] = 3
        assert [one.view[1] for one in (first, second, *mapped)] == [3, 0, 3, 3, 3]
        # Another engine that was named may use the descriptor of a mapping.
        (await third.map_memory(mapped[0].descriptor)).close()
        mapped[0].close()
        assert mapped[1].view[1] == 3


async def test_shared_memory_can_be_registered():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [])
        region = owner.register(memory.view)
        await user.write(user.register(b"x" * SIZE), user.attach(region.descriptor))
        assert bytes(memory.view) == b"x" * SIZE
        memory.close()
        assert mappings() == 1
        await region.aclose()
        assert mappings() == 0


async def test_a_view_keeps_the_pages_after_the_close():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        with await user.map_memory(memory.descriptor) as mapped:
            view = mapped.view
        memory.close()
        memory.close()
        view[3] = 1
        assert (mapped.closed, memory.closed) == (True, True)
        assert "closed" in repr(mapped)
        with pytest.raises(aiote.ClosedError, match="is closed"):
            _ = mapped.view
        assert mappings() == 1
        view.release()
        assert mappings() == 0


async def test_wrong_arguments_are_refused():
    async with linked("local") as (owner, user):
        for nbytes in (0, -1, 1 << 46, 1.5, None):
            with pytest.raises(aiote.UsageError, match="share_memory: nbytes"):
                await owner.share_memory(nbytes, [])  # type: ignore[arg-type]
        for peers in (str(user.address), owner.peers[0], user.address):
            with pytest.raises(aiote.UsageError, match="a list of peers"):
                await owner.share_memory(SIZE, peers)  # type: ignore[arg-type]
        with pytest.raises(aiote.UsageError, match="must name one engine"):
            await owner.share_memory(SIZE, ["127.0.0.1:9"])
        for text in (b"", b"aioS", owner.register(b"x").descriptor):
            with pytest.raises(aiote.UsageError, match="do not describe shared memory"):
                await user.map_memory(text)
        memory = await owner.share_memory(SIZE, [user.address])
        with pytest.raises(aiote.UsageError, match="this is the engine's own address"):
            await owner.map_memory(memory.descriptor)
        with pytest.raises(aiote.UsageError, match="the memory belongs to"):
            await user.map_memory(memory.descriptor, owner=user.address)
        with pytest.raises(aiote.UsageError, match="an owner with its identity"):
            SharedDescriptor(Address("h", 1), 1, 1)


async def test_a_peer_of_another_host_maps_nothing(monkeypatch):
    hosts = iter((b"a" * 32, b"b" * 32))
    monkeypatch.setattr("aiote.runtime.host_identity", lambda: next(hosts))
    async with linked("socket") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        assert not (await user.connect(owner.address)).shares_memory
        with pytest.raises(aiote.UsageError, match="runs on another host"):
            await user.map_memory(memory.descriptor)
        (connection,) = owner._links._connections.values()
        asked = ShareRequest(1, memory._described.memory, b"")
        assert "no such memory" in owner._links.sharing._give(connection, asked)


@pytest.mark.parametrize("older", ["owner", "user"])
async def test_an_engine_of_an_older_protocol_connects_and_shares_nothing(older, monkeypatch):
    async with pair("local") as (owner, user):
        links = {"owner": owner, "user": user}[older]._links
        monkeypatch.setattr(links, "_handshake", replace(links._handshake, versions=(OLDEST, OLDEST)))
        peers = [await user.connect(owner.address), await owner.connect(user.address)]
        assert [peer.shares_memory for peer in peers] == [False, False]
        memory = await owner.share_memory(SIZE, [user.address])
        with pytest.raises(aiote.UsageError, match="an aiote that does not share memory"):
            await user.map_memory(memory.descriptor)
        await served_on(owner, user)


@pytest.mark.parametrize("nbytes", [SIZE, 17 << 20])
async def test_the_kernels_refusal_is_an_error(nbytes):
    """Memory of 16 MiB and more is allocated in a thread."""
    async with linked("local") as (owner, _):
        before = descriptors()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(aiote.FabricError, match="share memory") as raised:
                await owner.share_memory(nbytes, [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.errno == errno.EFBIG
        assert (descriptors(), mappings()) == (before, 0)
        with pytest.raises(aiote.FabricError, match="more than this host has"):
            await owner.share_memory((1 << 46) - 1, [])
        with await owner.share_memory(nbytes, []) as memory:
            assert bytes(memory.view[-8:]) == bytes(8)


async def test_a_lack_of_descriptors_is_an_error():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        before = descriptors()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(aiote.FabricError, match="share memory"):
                await owner.share_memory(SIZE, [])
            with pytest.raises(aiote.FabricError, match="cannot open a socket"):
                await user.map_memory(memory.descriptor)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (descriptors(), mappings()) == (before, 1)
        (await user.map_memory(memory.descriptor)).close()


@pytest.mark.parametrize("ending", ["cancelled", "closed"])
async def test_memory_whose_allocation_was_abandoned_is_freed(ending, monkeypatch):
    """The thread ends first."""
    async with opened("local") as owner:
        before = descriptors()

        async def in_thread(function: Any) -> None:
            function()
            if ending == "closed":
                await owner.aclose()
            else:
                raise KeyboardInterrupt

        monkeypatch.setattr(sharing, "in_thread", in_thread)
        with pytest.raises(aiote.ClosedError if ending == "closed" else KeyboardInterrupt) as raised:
            await owner.share_memory(sharing.IN_THREAD, [])
        # The error keeps the frames that had the memory.
        assert raised.value.__traceback__ is not None
        assert mappings() == 0
        assert descriptors() <= before


def test_the_owners_memory_cannot_change_its_length():
    pages = SharedPages(SIZE)
    for length in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(pages.descriptor, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pages.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(pages.descriptor)
    assert os.fstat(pages.descriptor).st_blocks * 512 >= SIZE
    with pytest.raises(RuntimeError, match="mapped already"):
        pages.__init__(SIZE)  # type: ignore[misc]
    view = memoryview(pages)
    pages.close()
    assert (pages.descriptor, pages.address != 0) == (-1, True)
    with pytest.raises(BufferError, match="closed"):
        memoryview(pages)
    view.release()
    assert pages.address == 0
    with pytest.raises(ValueError, match="at least one byte"):
        SharedPages(0)


@pytest.mark.anyio
async def test_a_cancelled_or_lost_map_leaves_nothing(monkeypatch):
    async with linked("local") as (silent, user):
        memory = await silent.share_memory(SIZE, [user.address])
        before = descriptors()
        with anyio.CancelScope() as scope:
            monkeypatch.setattr(silent._links.sharing, "_give", lambda *_: scope.cancel() or "")
            await user.map_memory(memory.descriptor)
        assert scope.cancelled_caught
        await until(lambda: descriptors() == before)
        lose = silent.peers[0].disconnect
        monkeypatch.setattr(silent._links.sharing, "_give", lambda *_: lose("enough") or "")
        with pytest.raises(aiote.PeerLostError, match="enough"):
            await user.map_memory(memory.descriptor)
        await until(lambda: descriptors() <= before)
        assert mappings() == 1
        assert not user._links.sharing._asked


async def test_an_engine_that_is_closed_as_the_descriptor_comes_maps_nothing(monkeypatch):
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        answered = user._links.sharing._answered

        async def closing(asked: Any) -> None:
            await answered(asked)
            user.abort()

        monkeypatch.setattr(user._links.sharing, "_answered", closing)
        with pytest.raises(aiote.ClosedError):
            await user.map_memory(memory.descriptor)
        assert mappings() == 1


async def test_the_close_of_an_engine_closes_its_memory():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        mapped = await user.map_memory(memory.descriptor)
        view = mapped.view
        await owner.aclose()
        assert memory.closed
        view[0] = 1
        assert not mapped.closed
        await user.aclose()
        assert mapped.closed
        mapped.close()
        with pytest.raises(aiote.ClosedError):
            await user.map_memory(b"")
        with pytest.raises(aiote.ClosedError):
            await user.share_memory(SIZE, [])
        assert mappings() == 1
        del view
        gc.collect()
        assert mappings() == 0


async def test_the_mapping_of_a_lost_owner_stays_until_it_is_closed():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        mapped = await user.map_memory(memory.descriptor)
        memory.view[0] = 1
        user.find_peer(owner.address).disconnect()
        memory.close()
        assert (mapped.view[0], mapped.closed, mappings()) == (1, False, 1)
        mapped.close()
        assert mappings() == 0


OWNER = """
    import asyncio, os, sys
    import aiote

    async def main():
        async with aiote.open_engine("local") as engine:
            print(engine.address, flush=True)
            user = aiote.Address.parse(sys.stdin.readline().strip())
            memory = await engine.share_memory(1 << 20, [user])
            memory.view[:4] = b"here"
            print(memory.descriptor.hex(), flush=True)
            while memory.view[4] == 0:
                await asyncio.sleep(0.01)
            print("seen", flush=True)
            await engine.wait_closed()

    asyncio.run(main())
"""
USER = """
    import asyncio, sys
    import aiote

    async def main():
        async with aiote.open_engine("local") as engine:
            print(engine.address, flush=True)
            mapped = await engine.map_memory(bytes.fromhex(sys.stdin.readline()))
            mapped.view[4] = 1
            print("mapped", flush=True)
            await engine.wait_closed()

    asyncio.run(main())
"""


@contextmanager
def started(text: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", textwrap.dedent(text)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await anyio.to_thread.run_sync(process.stdout.readline)).strip()


@pytest.mark.blocking_allowed("it starts a process")
async def test_a_killed_owner_leaves_the_bytes_and_no_file():
    async with opened("local") as user:
        with started(OWNER) as owner:
            address = await line_of(owner)
            say(owner, str(user.address))
            mapped = await user.map_memory(bytes.fromhex(await line_of(owner)))
            peer = await user.connect(address)
            mapped.view[4] = 1
            assert await line_of(owner) == "seen"
            owner.send_signal(signal.SIGKILL)
            await peer.wait_closed()
            assert bytes(mapped.view[:5]) == b"here\1"
            mapped.view[1 << 19] = 1
            mapped.close()
            assert mappings() == 0
            assert not [name for name in os.listdir("/dev/shm") if "shared" in name and "aiote" in name]


@pytest.mark.blocking_allowed("it starts a process")
async def test_a_killed_user_leaves_the_owners_memory():
    async with opened("local") as owner:
        with started(USER) as user:
            address = await line_of(user)
            memory = await owner.share_memory(SIZE, [address])
            say(user, memory.descriptor.hex())
            assert await line_of(user) == "mapped"
            peer = await owner.connect(address)
            user.send_signal(signal.SIGKILL)
            await peer.wait_closed()
            assert memory.view[4] == 1
            memory.close()
            assert mappings() == 0


@pytest.mark.filterwarnings("ignore:This process .pid=:DeprecationWarning")
@pytest.mark.blocking_allowed("it forks, and waits for its child")
async def test_a_forked_child_leaves_the_memory_to_its_parent():
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        mapped = await user.map_memory(memory.descriptor)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                memory.close()
                mapped.close()
                memory.view[0] = 5
                status = 0 if mapped.view[0] == 5 and mappings() == 2 else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
        assert (memory.view[0], mapped.view[0]) == (5, 5)
        assert not memory.closed
        (await user.map_memory(memory.descriptor)).close()
