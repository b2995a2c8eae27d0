"""Handing over what peers on one host map: strangers are not heard, and what a peer shares is checked."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

import anyio
import pytest

import aiote
from aiote.aio import Handover, current_loop, hand_over
from aiote.core.control import Authenticated
from aiote.core.control_frames import Channel, EngineOffer
from aiote_native.system.wakeups import WakeupEvent, parse_address
from support.engines.opening import PATIENCE_S, opened, served_on, until
from support.engines.raw_clients import Insider, offer, refusals
from support.engines.wakeup_page import PAGE
from support.rails.raw_ring import NUMBER, SCHEME, ring_memory

SLOT = struct.Struct("<iI")


class Hearing:
    """A Handover and what came of it."""

    def __init__(self) -> None:
        self.came: list[tuple[list[int], bytes]] = []
        self.end = Handover(current_loop(), self.on_arrival)

    def on_arrival(self, descriptors: Sequence[int], data: bytes, _error: OSError | None) -> None:
        self.came.append((list(descriptors), data))


def page(seals: int = fcntl.F_SEAL_SHRINK, length: int = PAGE) -> int:
    fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


async def test_what_is_handed_over_arrives_once():
    here = Hearing()
    mine = [page(), page(length=1)]
    hand_over(here.end.address, mine, b"with this")
    with anyio.fail_after(PATIENCE_S):
        await until(lambda: here.came and here.end.is_closed)
    ((descriptors, data),) = here.came
    assert data == b"with this"
    assert [os.fstat(fd).st_ino for fd in descriptors] == [os.fstat(fd).st_ino for fd in mine]
    assert not any(os.get_inheritable(fd) for fd in descriptors)
    with pytest.raises(aiote.FabricError, match="not reachable"):
        hand_over(here.end.address, mine, b"")
    for fd in (*descriptors, *mine):
        os.close(fd)
    here.end.close()


async def test_strangers_are_not_heard():
    """Names of sockets are public, and a flood of others must not keep the peer out."""
    here = Hearing()
    secret, name = parse_address(here.end.address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        for _ in range(10_000):
            stranger.sendto(b"x" * len(secret), name)
    assert not here.came
    mine = page()
    hand_over(here.end.address, [mine], b"")
    os.close(mine)
    with anyio.fail_after(PATIENCE_S):
        await until(lambda: here.came)
    os.close(here.came[0][0][0])
    here.end.close()


async def test_a_handover_that_nobody_takes_is_closed():
    here = Hearing()
    here.end.close()
    here.end.close()
    with anyio.fail_after(PATIENCE_S):
        await until(lambda: here.end.is_closed)
    with pytest.raises(aiote.FabricError, match="not reachable"):
        hand_over(here.end.address, [], b"")


@pytest.mark.parametrize("address", [b"", b"x" * 16, bytes(16) + b"\0dbus", bytes(16) + b"/run/systemd/notify"])
def test_nothing_is_sent_to_what_is_no_wakeup_socket(address):
    with pytest.raises(ValueError, match="not the address of a wake-up socket"):
        hand_over(address, [], b"")


SHARED = {
    "nothing": (list, "the peer shared 0 descriptors, expected 2"),
    "no ring": (lambda: [page()], "the peer shared 1 descriptors, expected 2"),
    "more than there is": (lambda: [page(), ring_memory(), page()], "the peer shared 3 descriptors, expected 2"),
    "more than can come": (lambda: [page() for _ in range(20)], "not all descriptors came"),
    "a page that could shrink": (lambda: [page(0), ring_memory()], "not sealed against shrinking"),
    "a short page": (lambda: [page(length=4096), ring_memory()], "has 4096 bytes"),
    "a file": (lambda: [os.open(__file__, os.O_RDONLY), ring_memory()], "a descriptor is not shared memory"),
    "a socket": (lambda: [page(), socket.socket().detach()], "a descriptor is not shared memory"),
    "a ring that could shrink": (lambda: [page(), ring_memory(seals=0)], "not sealed against shrinking"),
    "a ring of a page": (lambda: [page(), page()], "the ring of the peer has"),
    "the two confused": (lambda: [ring_memory(), page()], "the wake-up page of the peer has"),
}


async def share(engine: aiote.Engine, descriptors: list[int], address: bytes, own: bytes) -> None:
    """Connect as a peer does, share this, and listen until the engine hangs up."""
    insider = Insider(b"i" * 16)
    with insider.socket:
        await insider.dial(engine.address)
        await insider.next(Authenticated)
        seen = await insider.next(EngineOffer)
        await insider.tell(dataclasses.replace(offer(), rails=seen.rails))
        channel = await insider.next(Channel)
        here = Hearing()
        wakeup = SLOT.pack(0, 2) + here.end.address
        await insider.tell(Channel(0, 0, 0, address, 0, 0, wakeup))
        hand_over(channel.wakeup[SLOT.size :], descriptors, own)
        await insider.hear(until_end=True)
        for fd in [*descriptors, *(fd for came, _ in here.came for fd in came)]:
            os.close(fd)
        here.end.close()


@pytest.mark.parametrize("case", SHARED)
async def test_memory_that_a_peer_shares_is_refused_where_it_is_not_what_it_says(case, capfd):
    """At once, with the reason; the engine keeps nothing of it and goes on."""
    make, expected = SHARED[case]
    with anyio.fail_after(PATIENCE_S):
        async with opened("local") as engine, opened("local") as honest:
            reasons = refusals(engine)
            wakeup = WakeupEvent()
            await share(engine, make(), SCHEME + b"%016x" % NUMBER, wakeup.address)
            await until(lambda: reasons)
            assert expected in reasons[0]
            await served_on(engine, honest)
            wakeup.close()
    assert capfd.readouterr().err == ""


async def test_a_ring_of_another_address_is_refused():
    with anyio.fail_after(PATIENCE_S):
        async with opened("local") as engine:
            reasons = refusals(engine)
            wakeup = WakeupEvent()
            await share(engine, [page(), ring_memory()], SCHEME + b"0" * 16, wakeup.address)
            await until(lambda: reasons)
            assert "not the address of the ring" in reasons[0]
            wakeup.close()
