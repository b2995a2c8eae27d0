"""A peer that lies about shared memory, hands over something else, asks for too much, or says nothing."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

import aiote
from aiote.aio import hand_over
from aiote.core.control_frames import ShareRefused, ShareRequest
from aiote.core.descriptor import SharedDescriptor
from aiote.links.sharing import MAX_GRANTS, _Asked
from aiote_native.system.wakeups import SEALS, SharedPages
from support.engines.opening import linked, opened, pair, served_on, until
from support.rails.shared_memory import F_SEAL_FUTURE_WRITE, SIZE, descriptors, forged, mappings, read_only

NOT_MEMORY = "a descriptor is not shared memory"
LENGTH_SEALS = "not sealed against shrinking and growing"


async def test_only_named_peers_map_memory():
    async with pair("local") as (owner, user), opened("local") as other:
        memory = await owner.share_memory(SIZE, [other.address])
        nobody = await owner.share_memory(SIZE, [])
        for one in (memory, nobody):
            with pytest.raises(aiote.PeerError, match="no such memory is shared"):
                await user.map_memory(one.descriptor)
        (await other.map_memory(memory.descriptor)).close()
        guess = SharedDescriptor(owner.address, memory._described.memory ^ 1, SIZE)
        with pytest.raises(aiote.PeerError, match="no such memory is shared"):
            await other.map_memory(bytes(guess))
        memory.close()
        with pytest.raises(aiote.PeerError, match="no such memory is shared"):
            await other.map_memory(memory.descriptor)
        await served_on(owner, user)


async def test_a_peer_gets_a_descriptor_so_often_and_no_more():
    """What could not be sent does not count."""
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        before = descriptors()
        connection = owner.find_peer(user.address)._connection
        unsent = ShareRequest(1, memory._described.memory, b"nowhere")
        assert "is not the address of a wake-up" in owner._links.sharing._give(connection, unsent)
        for _ in range(MAX_GRANTS):
            (await user.map_memory(memory.descriptor)).close()
        await until(lambda: descriptors() == before)
        with pytest.raises(aiote.PeerError, match=f"got the memory {MAX_GRANTS} times"):
            await user.map_memory(memory.descriptor)
        await until(lambda: descriptors() == before)


async def test_what_one_peer_can_make_us_map_is_bounded(monkeypatch):
    async with linked("local", max_mapped_bytes=2 * SIZE) as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        first, _second = [await user.map_memory(memory.descriptor) for _ in range(2)]
        with pytest.raises(aiote.UsageError, match="max_mapped_bytes"):
            await user.map_memory(memory.descriptor)
        view = first.view
        first.close()
        with pytest.raises(aiote.UsageError, match="2 mappings with"):
            await user.map_memory(memory.descriptor)
        view.release()
        monkeypatch.setattr("aiote.links.sharing.MAX_MAPPINGS", 1)
        with pytest.raises(aiote.UsageError, match="1 mappings with"):
            await user.map_memory(memory.descriptor)
        monkeypatch.undo()
        (await user.map_memory(memory.descriptor)).close()
        huge = SharedDescriptor(owner.address, memory._described.memory, (1 << 64) - 1)
        with pytest.raises(aiote.UsageError, match="max_mapped_bytes"):
            await user.map_memory(bytes(huge))


async def test_requests_at_once_do_not_exceed_the_bound():
    async with linked("local", max_mapped_bytes=2 * SIZE) as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        found: list[Any] = []

        async def map_one() -> None:
            with suppress(aiote.UsageError):
                found.append(await user.map_memory(memory.descriptor))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(map_one)
        assert len(found) == 2


def a_socket() -> list[int]:
    with socket.socket() as made:
        return [os.dup(made.fileno())]


def a_file_in_memory() -> list[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as made:
        os.truncate(made.fileno(), SIZE)
        return [os.dup(made.fileno())]


LIES: dict[str, tuple[Callable[[], list[int]], str]] = {
    "nothing": (list, "handed over 0 descriptors"),
    "two": (lambda: [forged(), forged()], "handed over 2 descriptors"),
    "many": (lambda: [forged() for _ in range(20)], "not all descriptors came"),
    "shorter": (lambda: [forged(SIZE - 1)], f"has {SIZE - 1} bytes, expected {SIZE}"),
    "longer": (lambda: [forged(SIZE + 1)], f"has {SIZE + 1} bytes, expected {SIZE}"),
    "as many pages": (lambda: [forged(4 * 4096)], f"has {4 * 4096} bytes, expected {SIZE}"),
    "a tebibyte": (lambda: [forged(1 << 40)], f"has {1 << 40} bytes, expected {SIZE}"),
    "empty": (lambda: [forged(0)], "has 0 bytes"),
    "unsealed": (lambda: [forged(seals=0)], LENGTH_SEALS),
    "may grow": (lambda: [forged(seals=fcntl.F_SEAL_SHRINK)], LENGTH_SEALS),
    "may shrink": (lambda: [forged(seals=fcntl.F_SEAL_GROW)], LENGTH_SEALS),
    "not for writing": (lambda: [forged(seals=SEALS | fcntl.F_SEAL_WRITE)], "cannot be written"),
    "not for writing later": (lambda: [forged(seals=SEALS | F_SEAL_FUTURE_WRITE)], "cannot be written"),
    "read-only": (lambda: [read_only()], "cannot be written"),
    "a file": (lambda: [os.open(__file__, os.O_RDONLY)], NOT_MEMORY),
    "a file in memory": (a_file_in_memory, LENGTH_SEALS),
    "a directory": (lambda: [os.open("/", os.O_RDONLY)], NOT_MEMORY),
    "a path": (lambda: [os.open("/", os.O_PATH)], NOT_MEMORY),
    "a socket": (a_socket, NOT_MEMORY),
    "a pipe": (lambda: list(os.pipe()), NOT_MEMORY),
    "memory and a pipe": (lambda: [forged(), *os.pipe()], NOT_MEMORY),
}


def lying(make: Callable[[], list[int]]) -> Callable[[Any, ShareRequest], str]:
    """Return an owner's way to hand over what it likes."""

    def give(_connection: Any, request: ShareRequest) -> str:
        chosen = make()
        hand_over(request.address, chosen, b"")
        for one in chosen:
            os.close(one)
        return ""

    return give


@pytest.mark.blocking_allowed("it opens files")
@pytest.mark.parametrize("lie", LIES)
async def test_memory_that_is_not_what_was_described_is_refused(lie, monkeypatch):
    """At once, with the reason; no descriptor or mapping stays, and the peer is still served."""
    make, expected = LIES[lie]
    gc.collect()  # what other tests of this process have left to the collector
    held = mappings()
    async with linked("local") as (liar, user):
        memory = await liar.share_memory(SIZE, [user.address])
        monkeypatch.setattr(liar._links.sharing, "_give", lying(make))
        before = descriptors()
        with pytest.raises(aiote.PeerError, match=expected):
            await user.map_memory(memory.descriptor)
        await until(lambda: descriptors() == before)
        assert mappings() == held + 1
        assert not user._links.sharing._asked
        await served_on(user, liar)


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/hugepages/hugepages-2048kB"), reason="needs huge pages of 2 MiB")
def test_huge_pages_are_refused():
    """None of them may be left when one is touched, which would be SIGBUS."""
    huge = forged(2 << 20, flags=os.MFD_HUGETLB)
    try:
        with pytest.raises(ValueError, match="has huge pages"):
            SharedPages.taken(huge, 2 << 20)
    finally:
        os.close(huge)


def test_memory_of_another_user_is_refused(monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    made = forged()
    with pytest.raises(ValueError, match="belongs to user"):
        SharedPages.taken(made, SIZE)
    os.close(made)


def test_memory_that_was_taken_keeps_its_length():
    """The peer has the descriptor as well; no call through it shortens what is mapped, or takes the right to write."""
    made = forged()
    kept = os.dup(made)
    pages = SharedPages.taken(made, SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made)
    for length in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(kept, length)
    with pytest.raises(PermissionError):
        fcntl.fcntl(kept, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(kept)
    with memoryview(pages) as view:
        view[SIZE - 1] = 1
    pages.close()


async def in_no_time(seconds: float, wait: Any) -> bool:
    """Be out of time at once, in the place of `run_within`."""
    return False


async def test_an_owner_that_does_not_answer_ends_the_wait(monkeypatch):
    async with linked("local") as (silent, user):
        memory = await silent.share_memory(SIZE, [user.address])
        monkeypatch.setattr(silent._links.sharing, "_give", lambda *_: "")
        monkeypatch.setattr("aiote.links.sharing.run_within", in_no_time)
        before = descriptors()
        with pytest.raises(aiote.PeerError, match="gave no descriptor within"):
            await user.map_memory(memory.descriptor)
        await until(lambda: descriptors() == before)
        assert not user._links.sharing._asked


async def test_an_answer_that_comes_late_or_again_leaves_nothing(monkeypatch):
    """Descriptors that nobody asked for, or asks for any longer, reach no socket, or are closed."""
    async with linked("local") as (owner, user):
        memory = await owner.share_memory(SIZE, [user.address])
        give, asked = owner._links.sharing._give, []

        def twice(connection: Any, request: ShareRequest) -> str:
            asked.append(request)
            connection.control.send(ShareRefused(request.request + 1, "another one"))
            return give(connection, request) + give(connection, request)

        monkeypatch.setattr(owner._links.sharing, "_give", twice)
        before = descriptors()
        mapped = await user.map_memory(memory.descriptor)
        await until(lambda: descriptors() == before)
        mapped.close()
        with pytest.raises(aiote.FabricError, match="not reachable"):
            hand_over(asked[0].address, [memory._pages.descriptor], b"")
        owner.find_peer(user.address)._connection.control.send(ShareRefused(asked[0].request, "too late"))
        await served_on(owner, user)
        assert mappings() == 1


async def test_a_descriptor_that_comes_after_the_end_is_closed():
    async with linked("local") as (owner, _):
        asked = _Asked(owner.peers[0]._connection, SIZE)
        before = descriptors()
        asked.end()
        asked.take([forged()], None)
        await until(lambda: descriptors() == before)


async def test_a_peer_refuses_only_what_it_was_asked_for(monkeypatch):
    """A third engine that guesses the number of a request does not end it."""
    async with linked("local") as (owner, user), opened("local") as third:
        await third.connect(user.address)
        memory = await owner.share_memory(SIZE, [user.address])
        give = owner._links.sharing._give

        def late(connection: Any, request: ShareRequest) -> str:
            (from_third,) = (one for key, one in user._links._connections.items() if key[0] == third.address.identity)
            user._links.sharing.receive(from_third, ShareRefused(request.request, "me"), lambda _: None)
            return give(connection, request)

        monkeypatch.setattr(owner._links.sharing, "_give", late)
        (await user.map_memory(memory.descriptor)).close()


async def test_a_peer_that_chooses_our_number_closes_nothing_of_ours(monkeypatch):
    async with linked("local") as (victim, liar):
        ours = await victim.share_memory(SIZE, [liar.address])
        monkeypatch.setattr("aiote.links.sharing.secrets.randbits", lambda _: ours._described.memory)
        theirs = await liar.share_memory(SIZE, [victim.address])
        (await victim.map_memory(theirs.descriptor)).close()
        mapped = await liar.map_memory(ours.descriptor)
        mapped.view[0] = 5
        assert (ours.view[0], theirs.view[0]) == (5, 0)
