"""What every kind of rail does with messages: pools, credits, and senders that wait instead of anything being lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from aiote.rails import PeerLink
from support.rails.rail_pair import Pair, Rails, Side

pytestmark = pytest.mark.libfabric

SLOTS, BYTES = 4, 1000


@pytest.fixture
def pair(rails: Rails) -> Pair:
    """Two rail sets with small pools."""
    return Pair.of(rails, pools=((SLOTS, BYTES), (SLOTS, BYTES)))


def numbered(count: int, seed: int = 1) -> list[bytes]:
    """Return so many different messages of any length that the pool takes."""
    draw = random.Random(seed)
    return [number.to_bytes(4) + draw.randbytes(draw.randrange(BYTES - 3)) for number in range(count)]


def take_all(side: Side, link: PeerLink) -> list[bytes]:
    found = []
    while (payload := side.take(link)) is not None:
        found.append(payload)
    return found


def receive(pair: Pair, expected: list[bytes]) -> None:
    """Drive until b has these messages, in any order, and no others come."""
    found: list[bytes] = []

    def complete() -> bool:
        found.extend(take_all(pair.b, pair.ba))
        return len(found) >= len(expected)

    pair.rails.drive(complete)
    pair.rails.rest()
    assert Counter(found + take_all(pair.b, pair.ba)) == Counter(expected)


def test_messages_arrive_and_are_confirmed(pair: Pair):
    payloads = numbered(SLOTS)
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    receive(pair, payloads)
    pair.rails.finish(*done)
    assert [operation.confirmed_bytes for operation in done] == [len(payload) for payload in payloads]


def test_the_longest_and_the_empty_message_arrive_and_a_longer_one_is_refused(pair: Pair):
    payloads = [b"", b"x" * BYTES, b"", b"\0" * BYTES]
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    with pytest.raises(ValueError, match=f"{BYTES + 1} bytes, but the peer accepts at most {BYTES}"):
        pair.a.send(pair.ab, b"x" * (BYTES + 1))
    receive(pair, payloads)
    pair.rails.finish(*done)


def test_a_sender_that_outruns_the_pool_waits(pair: Pair):
    """Nobody takes anything: as many as the pool has slots arrive, the others wait at the sender."""
    payloads = numbered(5 * SLOTS)
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    pair.rails.drive(lambda: pair.ba.messages == SLOTS)
    pair.rails.rest()
    assert pair.ba.messages == pair.b.core.inbox == SLOTS
    assert sum(operation.is_over for operation in done) == SLOTS
    assert pair.a.core.statistics()["queued"] == 4 * SLOTS
    receive(pair, payloads)
    pair.rails.finish(*done)


def test_one_way_traffic_gets_its_credits_by_themselves(pair: Pair):
    """Nothing flows back that could carry them, through hundreds of pools' worth."""
    payloads = numbered(100 * SLOTS)
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    receive(pair, payloads)
    pair.rails.finish(*done)
    assert pair.b.ended == []
    assert pair.b.core.statistics()["posted"] >= 50


def test_taking_one_by_one_never_stalls(pair: Pair):
    """Each message is sent only after the last was taken, so credits come back a slot at a time."""
    for payload in numbered(10 * SLOTS):
        done = pair.a.send(pair.ab, payload)
        pair.rails.drive(lambda: pair.ba.messages == 1)
        assert take_all(pair.b, pair.ba) == [payload]
        pair.rails.finish(done)


def test_messages_of_both_sides_cross(pair: Pair):
    """Both send more than the pools hold before either takes anything."""
    sent = numbered(50, 1), numbered(50, 2)
    got: tuple[list[bytes], list[bytes]] = ([], [])
    for there, here in zip(*sent, strict=True):
        pair.a.send(pair.ab, there)
        pair.b.send(pair.ba, here)
    pair.rails.rest()
    assert pair.ab.messages == pair.ba.messages == SLOTS

    def complete() -> bool:
        got[0].extend(take_all(pair.b, pair.ba))
        got[1].extend(take_all(pair.a, pair.ab))
        return len(got[0]) + len(got[1]) == 100

    pair.rails.drive(complete)
    pair.rails.drive(lambda: len(pair.a.ended) == len(pair.b.ended) == 50)
    assert [Counter(found) for found in got] == [Counter(payloads) for payloads in sent]
    assert {operation.errno for operation in pair.a.ended + pair.b.ended} == {0}


def test_pools_of_different_sizes_bound_what_each_side_is_sent(rails: Rails):
    """Each side's own numbers bound what is sent to it; the smallest pool has one slot."""
    pair = Pair.of(rails, pools=((1, 10), (7, 5000)))
    assert (pair.ab.message_limit, pair.ba.message_limit) == (5000, 10)
    long, short = [bytes([number]) * 5000 for number in range(30)], [bytes([number]) * 10 for number in range(30)]
    got: tuple[list[bytes], list[bytes]] = ([], [])
    for there, here in zip(long, short, strict=True):
        pair.a.send(pair.ab, there)
        pair.b.send(pair.ba, here)
    with pytest.raises(ValueError, match="at most 10"):
        pair.b.send(pair.ba, b"x" * 11)
    pair.rails.rest()
    assert (pair.ab.messages, pair.ba.messages) == (1, 7)

    def complete() -> bool:
        got[0].extend(take_all(pair.b, pair.ba))
        got[1].extend(take_all(pair.a, pair.ab))
        return len(got[0]) + len(got[1]) == 60

    rails.drive(complete)
    assert Counter(got[0]) == Counter(long)
    assert Counter(got[1]) == Counter(short)


def test_a_waiting_message_can_be_withdrawn(pair: Pair):
    """One that waits for a credit is over at once and never arrives; one that was posted arrives."""
    payloads = numbered(3 * SLOTS)
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    pair.rails.drive(lambda: pair.ba.messages == SLOTS)
    pair.rails.rest()
    gone = {SLOTS, SLOTS + 2, 3 * SLOTS - 1}
    for number in (0, *gone):
        pair.a.cancel(done[number])
    pair.rails.drive(lambda: all(done[number].is_over for number in gone))
    assert [done[number].was_cancelled for number in range(3 * SLOTS)] == [n in gone for n in range(3 * SLOTS)]
    kept = [payload for number, payload in enumerate(payloads) if number not in gone]
    receive(pair, kept)
    pair.rails.drive(lambda: len(pair.a.ended) == 3 * SLOTS)
    assert [operation.errno > 0 for operation in done] == [n in gone for n in range(3 * SLOTS)]


def test_what_had_arrived_survives_the_link(pair: Pair):
    """Messages that came before the end can be taken after it; those that wait at the sender end with an error."""
    payloads = numbered(3 * SLOTS)
    done = [pair.a.send(pair.ab, payload) for payload in payloads]
    pair.rails.drive(lambda: pair.ba.messages == SLOTS)
    pair.rails.rest()
    pair.b.close_link(pair.ba)
    assert pair.ba.messages == SLOTS
    assert pair.b.core.inbox == 0
    pair.a.close_link(pair.ab)
    pair.rails.drive(lambda: all(operation.is_over for operation in done))
    arrived = take_all(pair.b, pair.ba)
    assert len(arrived) == SLOTS
    assert not Counter(arrived) - Counter(payloads)
    assert sum(operation.errno == 0 for operation in done) == SLOTS
    with pytest.raises(RuntimeError, match="closed"):
        pair.a.send(pair.ab, b"late")
