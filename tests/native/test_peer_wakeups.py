"""Wake-ups of peers: what is accepted from a peer, slots, and wake-ups that come."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aiote.errors import FabricError
from aiote_native.counters.waits import CounterWait
from aiote_native.engine.core import Core
from aiote_native.system.wakeups import PeerWakeup, WakeupEvent, parse_address
from support.engines.wakeup_page import PAGE, own_page
from support.rails.rail_pair import KINDS, Pair, opened

SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
SECRET = 16
SHM = next(kind for kind in KINDS if kind.provider == "shm")


@pytest.fixture
def somebody() -> Iterator[WakeupEvent]:
    wakeup = WakeupEvent()
    yield wakeup
    wakeup.close()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def memory(length: int, seals: int) -> int:
    """Return a memfd as a peer might send one."""
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def socket_of(wakeup: WakeupEvent) -> str:
    return wakeup.address[SECRET:].decode().replace("\0", "@")


def woken(wakeup: WakeupEvent) -> int:
    """Take the wake-ups that came, and return how many."""
    taken = 0
    with socket.socket(fileno=os.dup(wakeup.socket_fd)) as heard:
        while select.select([heard], [], [], 0)[0]:
            assert heard.recv(1000) == wakeup.address[:SECRET]
            taken += 1
    return taken


def test_the_own_page_is_sealed():
    """No peer that maps it can be made to fault, and no peer can write it or make it shrink."""
    wakeup = WakeupEvent()
    assert fcntl.fcntl(wakeup.memory_fd, fcntl.F_GET_SEALS) & (SHRINK | GROW | SEAL) == SHRINK | GROW | SEAL
    with pytest.raises(PermissionError):
        mmap.mmap(wakeup.memory_fd, PAGE)
    with pytest.raises(PermissionError):
        os.pwrite(wakeup.memory_fd, b"x", 0)
    assert os.fstat(wakeup.memory_fd).st_size == PAGE
    for length in (0, PAGE - 1, PAGE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(wakeup.memory_fd, length)
    assert not os.get_inheritable(wakeup.memory_fd)
    assert not os.get_inheritable(wakeup.socket_fd)
    wakeup.close()


def test_a_page_never_shrinks_on_a_kernel_that_knows_less_of_sealing(monkeypatch):
    """Before Linux 5.1 a page cannot be kept from being mapped for writing; it never shrinks all the same."""
    real = fcntl.fcntl

    def old(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & 0x10:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", old)
    wakeup = WakeupEvent()
    assert real(wakeup.memory_fd, fcntl.F_GET_SEALS) == SHRINK | GROW | SEAL
    wakeup.close()


def test_strangers_do_not_get_into_the_queue():
    """Anybody on the host may read its name and write to it: what does not begin with the secret is not kept."""
    wakeup = WakeupEvent()
    secret, name = parse_address(wakeup.address)
    assert socket_of(wakeup) in Path("/proc/net/unix").read_text()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        # Its own buffer is emptied by the kernel, perhaps a moment later.
        stranger.settimeout(60)
        guesses = [b"", b"x", secret[:-1], b"x" + secret, secret[:-1] + b"x", secret[:-1] + bytes([secret[-1] ^ 1])]
        for guess in guesses:
            for _ in range(1000):
                stranger.sendto(guess, name)
        assert not select.select([wakeup.socket_fd], [], [], 0)[0]
        stranger.sendto(secret, name)
    assert woken(wakeup) == 1
    wakeup.close()


def test_no_peer_can_take_anothers_rings_or_hold_it_up():
    """Each has a socket of its own: one that fills the queue only keeps the engine awake."""
    wakeup = WakeupEvent()
    page = os.dup(wakeup.memory_fd)
    peer = PeerWakeup(page, wakeup.address)
    assert not os.get_blocking(peer.socket_fd)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hostile:
        hostile.setblocking(False)
        secret, name = parse_address(wakeup.address)
        with pytest.raises(BlockingIOError):
            for _ in range(10_000):
                hostile.sendto(secret, name)
    with socket.socket(fileno=os.dup(peer.socket_fd)) as honest, pytest.raises(BlockingIOError):
        honest.send(secret)
    assert select.select([wakeup.socket_fd], [], [], 0)[0]
    peer.close()
    wakeup.close()


def test_closing_is_idempotent_and_closes_both():
    wakeup = WakeupEvent()
    fds = wakeup.memory_fd, wakeup.socket_fd
    peer = PeerWakeup(os.dup(fds[0]), wakeup.address)
    theirs = peer.socket_fd
    for _ in range(2):
        wakeup.close()
        peer.close()
    assert not any(is_open(fd) for fd in (*fds, theirs))
    assert (wakeup.memory_fd, wakeup.socket_fd, peer.socket_fd) == (-1, -1, -1)


def test_a_closed_event_takes_slots_back_without_harm():
    wakeup = WakeupEvent()
    slot, _ = wakeup.take_slot()
    wakeup.close()
    wakeup.free_slot(slot)
    wakeup.free_slot(0)


def test_a_peer_keeps_its_page_when_the_owner_is_gone():
    wakeup = WakeupEvent()
    peer = PeerWakeup(os.dup(wakeup.memory_fd), wakeup.address)
    wakeup.close()
    assert is_open(peer.socket_fd)
    peer.close()


@pytest.mark.parametrize("seals", [0, GROW, GROW | SEAL, fcntl.F_SEAL_WRITE | GROW])
def test_a_page_that_could_shrink_is_refused(seals, somebody):
    fd = memory(PAGE, seals)
    with pytest.raises(ValueError, match="not sealed against shrinking"):
        PeerWakeup(fd, somebody.address)
    assert not is_open(fd)


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE + 1, 2 << 20])
def test_a_page_of_another_size_is_refused(length, somebody):
    fd = memory(length, SHRINK)
    with pytest.raises(ValueError, match=f"has {length} bytes, expected {PAGE}"):
        PeerWakeup(fd, somebody.address)
    assert not is_open(fd)


def test_what_is_no_memory_is_refused(tmp_path, somebody):
    """A file has no seals; whatever came is closed."""
    path = tmp_path / "page"
    path.write_bytes(bytes(PAGE))
    for fd in (os.open(path, os.O_RDWR), *os.pipe(), os.eventfd(0)):
        with pytest.raises((OSError, ValueError)):
            PeerWakeup(fd, somebody.address)
        assert not is_open(fd)


def test_only_an_engines_socket_is_woken(somebody):
    """A peer must not have us write to whatever else listens on this host."""
    secret, name = parse_address(somebody.address)
    for address in (b"", secret, secret + b"\0dbus", secret + name[1:], somebody.address + b"x", somebody.address[1:]):
        fd = memory(PAGE, SHRINK)
        with pytest.raises(ValueError, match="not the address of a wake-up socket"):
            PeerWakeup(fd, address)
        assert not is_open(fd)
    fd = memory(PAGE, SHRINK)
    with pytest.raises(ConnectionRefusedError):
        PeerWakeup(fd, secret + name[:-1] + bytes([name[-1] ^ 1]))
    assert not is_open(fd)


def test_a_page_that_cannot_be_written_is_good_enough(somebody):
    """The peer's page is only read: one that is sealed against writing serves."""
    fd = memory(PAGE, SHRINK | GROW | fcntl.F_SEAL_WRITE)
    PeerWakeup(fd, somebody.address).close()
    assert not is_open(fd)


def test_slots_are_told_apart_until_they_run_out():
    wakeup = WakeupEvent()
    slots = [wakeup.take_slot() for _ in range(1000)]
    assert sorted(slots) == [(slot, 2) for slot in range(1000)]
    assert [wakeup.take_slot(), wakeup.take_slot()] == [(-1, 0), (-1, 0)]
    for slot in (7, 7, 999):
        wakeup.free_slot(slot)
    # In a new generation: what the old peer knows of it opens nothing.
    assert {wakeup.take_slot(), wakeup.take_slot()} == {(7, 4), (999, 4)}
    for nonsense in (-1, 1000, 2**31 - 1):
        wakeup.free_slot(nonsense)
    assert wakeup.take_slot() == (-1, 0)
    wakeup.close()


def test_a_freed_slot_says_that_nobody_waits():
    wakeup = WakeupEvent()
    with own_page(wakeup) as page:
        slot, _ = wakeup.take_slot()
        place = slice(64 + 4 * slot, 68 + 4 * slot)
        page[place] = b"\x05\0\0\0"
        wakeup.free_slot(slot)
        assert page[place] == bytes(4)
    wakeup.close()


def test_a_core_says_whether_it_sleeps():
    """The epoch is odd while it is safe to sleep, and grows with every sleep."""
    core = Core(spin_us=0, wakeup_event=True)
    with mmap.mmap(core.wakeup_event.memory_fd, PAGE, prot=mmap.PROT_READ) as page:
        epochs = []
        for _ in range(5):
            while core.progress():
                assert page[0] % 2 == 0
            epochs.append(int.from_bytes(page[:4], "little"))
    assert all(epoch % 2 for epoch in epochs)
    assert epochs == sorted(set(epochs))
    core.close()


@pytest.mark.libfabric
def test_a_sleeping_peer_is_woken_and_one_that_is_awake_is_not():
    with opened(SHM) as rails:
        pair = Pair.of(rails)
        rails.rest()
        before = pair.a.core.statistics()["peer_wakeups"]
        wakeup = pair.b.core.wakeup_event
        assert woken(wakeup) == 0
        pair.a.write(pair.ab, imm=1)
        assert woken(wakeup) == 1
        assert pair.a.core.statistics()["peer_wakeups"] == before + 1
        time.sleep(0.001)  # so that the call is one round, not a slice of them
        assert pair.b.core.progress()  # awake from here on, until it says that it sleeps
        pair.a.write(pair.ab, imm=1)
        assert woken(wakeup) == 0
        assert pair.a.core.statistics()["peer_wakeups"] == before + 1
        pair.b.awake = True
        rails.drive(lambda: len(pair.a.ended) == 2)


@pytest.mark.libfabric
def test_a_slot_beyond_the_page_is_refused():
    """The number comes from the peer, and a poll reads the number that it points to."""
    with opened(SHM) as rails:
        a, b = rails.side(), rails.side()
        pending = a.rail_set.open_channel(0, 0)
        link = a.core.add_peer(b)
        wakeup = b.core.wakeup_event
        pending.map_memory([os.dup(wakeup.memory_fd)], wakeup.address)
        assert not pending.refused
        with pytest.raises(FabricError, match="wake-up slots .* expected 0 to"):
            a.rail_set.join(link, pending, pending.address, 0, 0, peer_slot=(1000, 0))
        pending.close()
        a.rail_set.free_slot(pending.slot)
        a.close_link(link)


@pytest.mark.libfabric
def test_slots_come_back_with_their_links():
    with opened(SHM) as rails:
        a, b = rails.side(), rails.side()
        free = []
        for _ in range(3):
            ab, ba = rails.join(a, b)
            taken = {a.core.wakeup_event.take_slot()[0] for _ in range(1000)} - {-1}
            free.append(len(taken))
            for slot in taken:
                a.core.wakeup_event.free_slot(slot)
            a.close_link(ab)
            b.close_link(ba)
        assert free == [999] * 3


def test_an_event_is_made_once():
    wakeup = WakeupEvent()
    with pytest.raises(RuntimeError, match="already"):
        wakeup.__init__()
    peer = PeerWakeup(os.dup(wakeup.memory_fd), wakeup.address)
    with pytest.raises(RuntimeError, match="already"):
        peer.__init__(os.dup(wakeup.memory_fd), wakeup.address)
    peer.close()
    wakeup.close()


def epoch_of(wakeup: WakeupEvent) -> int:
    """Read an own page as the peers do: odd while the engine sleeps."""
    with mmap.mmap(wakeup.memory_fd, PAGE, prot=mmap.PROT_READ) as page:
        return int.from_bytes(page[:4], sys.byteorder)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_round_in_the_threads_place_leaves_nobody_asleep_who_looks_awake():
    """Peers do not wake an engine that is awake, so the round that says so has to wake the native thread as well."""
    core = Core(threaded=True, wakeup_event=True, spin_us=50)
    try:
        wakeup = core.wakeup_event
        assert wakeup is not None
        core.counter(1).wait(CounterWait(), 1)  # something is awaited, so there is a reason to go on looking
        for _ in range(20):
            until(lambda: epoch_of(wakeup) % 2 == 1)
            before = epoch_of(wakeup)
            assert core.progress(), "it looks several times before it sleeps"
            assert epoch_of(wakeup) != before
        until(lambda: epoch_of(wakeup) % 2 == 1)
    finally:
        core.close()


def test_a_wakeup_brings_no_descriptors():
    """To take it would close them, and closing what a peer has chosen may take as long as it likes."""
    with (
        closing(WakeupEvent()) as wakeup,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer,
        socket.socket() as chosen,
    ):
        secret, name = parse_address(wakeup.address)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", chosen.fileno()))]
        try:
            peer.sendmsg([secret], rights, 0, name)
        except PermissionError:
            assert woken(wakeup) == 0
        else:
            pytest.skip("this kernel lets nobody keep descriptors out of a socket (SO_PASSRIGHTS, Linux 6.16)")
        peer.sendto(secret, name)
        assert woken(wakeup) == 1
