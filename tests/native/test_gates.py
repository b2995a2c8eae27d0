"""Gates: what was posted over a rail without a wait descriptor stays undone once its poster has shut its gate."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from aiote_native.system.wakeups import WakeupEvent
from support.engines.wakeup_page import BUSY, GATES, own_page
from support.rails.rail_pair import KINDS, Pair, Rails, filled, opened

pytestmark = pytest.mark.libfabric

SHM = next(kind for kind in KINDS if kind.provider == "shm")
TCP = next(kind for kind in KINDS if kind.provider == "tcp")
SIZE = 1 << 20
PACE = 1 << 20
PIECE = PACE // 16
WITHIN = (4711).to_bytes(4, "little")  # an odd epoch


@pytest.fixture
def rails() -> Iterator[Rails]:
    with opened(SHM) as rails:
        yield rails


def numbers(page: memoryview, place: int) -> list[int]:
    return [int.from_bytes(page[at : at + 4], "little") for at in range(place, place + 4000, 4)]


@pytest.mark.parametrize("under_way", [True, False])
def test_closing_a_link_with_transfers_under_way_shuts_its_gate(rails, under_way):
    """Without any it stays open, for the peer may still have to take messages that were sent to it."""
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    rails.finish(pair.a.write(pair.ab, source, target.remote))
    with own_page(pair.a.core.wakeup_event) as page:
        (gate,) = [number for number in numbers(page, GATES) if number]
        assert gate % 2 == 0
        if under_way:
            pair.a.write(pair.ab, source, target.remote)
        pair.a.close_link(pair.ab)
        assert [number for number in numbers(page, GATES) if number] == [gate | under_way]
        assert not any(number % 2 for number in numbers(page, BUSY))


def test_closing_before_the_peer_has_looked_shuts_the_gate(rails):
    """What would greet it names memory that is gone, and shm of 1.17 crashes on that."""
    pair = Pair.of(rails, greeted=False)
    with own_page(pair.a.core.wakeup_event) as page:
        (gate,) = [number for number in numbers(page, GATES) if number]
        pair.a.close_link(pair.ab)
        assert [number for number in numbers(page, GATES) if number] == [gate | 1]
    rails.drive(lambda: pair.ba.failed)
    assert pair.ba.failed == errno.ENOTCONN


def test_a_link_is_quiet_when_its_peer_is_not_within_a_call(rails):
    """`busy` is the peer's number, in the peer's page."""
    pair = Pair.of(rails)
    assert not pair.ab.quiet  # it is open
    with own_page(pair.b.core.wakeup_event) as page:
        slot = taken(pair.b.core.wakeup_event)
        place = slice(BUSY + 4 * slot, BUSY + 4 * slot + 4)
        page[place] = b"\1\0\0\0"
        pair.a.close_link(pair.ab)
        assert not pair.ab.quiet
        page[place] = bytes(4)
        assert pair.ab.quiet


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_link_that_is_closed_under_a_call_of_its_peer_says_so(rails, under_way, again):
    """Not where nothing was under way, nor where the peer has closed its end: then it calls for another link."""
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    rails.finish(pair.a.write(pair.ab, source, target.remote))
    with own_page(pair.b.core.wakeup_event) as page:
        slot = 4 * taken(pair.b.core.wakeup_event)
        if under_way:
            pair.a.write(pair.ab, source, target.remote)
        page[BUSY + slot : BUSY + slot + 4] = WITHIN
        page[GATES + slot] += 2 * again
        pair.a.close_link(pair.ab)
        assert pair.ab.unsettled == (under_way and not again)


def taken(wakeup: WakeupEvent) -> int:
    """Return the one slot that a peer has."""
    free = [wakeup.take_slot()[0] for _ in range(999)]
    assert wakeup.take_slot() == (-1, 0)
    for slot in free:
        wakeup.free_slot(slot)
    return 499_500 - sum(free)


def test_a_peer_with_a_shut_gate_is_not_polled(rails):
    """By the shut gate alone: the link of the other side stays open, as that of a stopped process does."""
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    rails.finish(pair.a.write(pair.ab, source, target.remote))
    target.array[:] = 0
    with own_page(pair.a.core.wakeup_event) as page:
        operation = pair.a.write(pair.ab, source, target.remote)
        slot = taken(pair.a.core.wakeup_event)
        page[GATES + 4 * slot : GATES + 4 * slot + 4] = b"\1\0\0\0"
        for _ in range(100):
            pair.b.turn(True)
        assert [link.failed for link in pair.b.failed] == [errno.ENOTCONN]
        assert not target.array.any()
        assert not operation.is_over


def test_no_more_than_the_pace_is_posted_within_one_call_of_the_peers(rails):
    """Its epoch is put back after each of its calls, as if they were one that the poster keeps going."""
    pair = Pair.of(rails)
    source, target = pair.a.register(filled(4 * PACE)), pair.b.register(4 * PACE)
    places = range(0, 4 * PACE, PIECE)
    with own_page(pair.b.core.wakeup_event) as page:
        at = BUSY + 4 * taken(pair.b.core.wakeup_event)
        page[at : at + 4] = WITHIN
        writes = [pair.a.write(pair.ab, source, target.remote, PIECE, at=(place, place)) for place in places]
        for _ in range(2000):
            pair.b.turn(True)
            page[at : at + 4] = WITHIN
            pair.a.turn(True)
        assert sum(write.is_over for write in writes) == PACE // PIECE
        page[at : at + 4] = bytes(4)  # it has left that call
    rails.finish(*writes)
    assert (target.array == source.array).all()


def test_tcp_has_no_gates():
    """Its descriptor is the kernel's: who reads it is asked over the control plane."""
    with opened(TCP) as rails:
        pair = Pair.of(rails)
        pair.a.close_link(pair.ab)
        assert not pair.ab.quiet
