"""Of many channels those with nothing to say are left alone, and none of them misses what stirs it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from aiote.rails import PeerLink
from support.rails.rail_pair import Kind, Pair, Rails, Side, filled, opened

MANY = 12
"""More than are polled in every round."""
FEW = 8
"""No more than are always polled."""
CROWD = 50
"""More rings than a round looks at."""
MORE = 3000
"""Writes, more than a channel has work requests."""
IMM = 0x321


KINDS = {"socket": Kind("socket"), "local": Kind("local"), "sim": Kind("sim", nic="sim0", guards=True)}


@pytest.fixture(params=KINDS)
def rails(request: pytest.FixtureRequest) -> Iterator[Rails]:
    with opened(KINDS[request.param]) as rails:
        yield rails


def star(rails: Rails, count: int = MANY, spin_us: int = 0) -> list[Pair]:
    """Return a hub's links to many others, at rest."""
    hub, others = rails.side(spin_us=spin_us), [rails.side() for _ in range(count)]
    pairs = [Pair(rails, hub, other, *rails.join(hub, other)) for other in others]
    rails.rest()
    return pairs


def received(rails: Rails, side: Side, link: PeerLink) -> bytes:
    found: list[bytes] = []

    def look() -> bool:
        message = side.take(link)
        if message is not None:
            found.append(message)
        return bool(found)

    rails.drive(look)
    return found[0]


def test_what_comes_to_a_channel_at_rest_is_seen(rails):
    pairs = star(rails)
    handle = pairs[0].a.count(IMM)
    target = pairs[0].a.register(1 << 20)
    sources = [pair.b.register(filled(1 << 20, seed)) for seed, pair in enumerate(pairs)]
    order = random.Random(1)
    for times in range(1, 20):
        number = order.randrange(MANY)
        pair = pairs[number]
        pair.rails.finish(pair.b.write(pair.ba, sources[number], target.remote, imm=IMM))
        rails.drive(lambda times=times: handle.value == times)
        assert bytes(target.array) == bytes(sources[number].array)
        rails.rest()


def test_what_is_sent_over_a_channel_at_rest_arrives(rails):
    """Messages both ways, more of them than a pool holds, so that credits come back as well."""
    pairs = star(rails)
    order = random.Random(2)
    for times in range(60):
        pair = pairs[order.randrange(3)]
        rails.finish(pair.a.send(pair.ab, b"there %d" % times))
        assert received(rails, pair.b, pair.ba) == b"there %d" % times
        rails.finish(pair.b.send(pair.ba, b"back %d" % times))
        assert received(rails, pair.a, pair.ab) == b"back %d" % times
        if times % 3 == 0:
            rails.rest()


def test_a_read_from_a_channel_at_rest_is_answered(rails):
    pairs = star(rails)
    for seed, pair in enumerate(pairs):
        there, here = pair.b.register(filled(1 << 18, seed)), pair.a.register(1 << 18)
        rails.finish(pair.a.write(pair.ab, here, there.remote, reads=True))
        assert bytes(here.array) == bytes(there.array)
        rails.rest()


def test_ends_that_are_closed_at_rest_harm_no_other(rails):
    pairs = star(rails)
    for pair in pairs[:3]:
        pair.b.close_link(pair.ba)
        pair.a.close_link(pair.ab)
        rails.drive(lambda: True)
    for pair in pairs[3:]:
        source, target = pair.a.register(filled(4096)), pair.b.register(4096)
        rails.finish(pair.a.write(pair.ab, source, target.remote))
        assert bytes(source.array) == bytes(target.array)


def test_channels_at_rest_may_be_timed_from_then_on(rails):
    """Timed, another's functions stand in the place of the endpoint's, and none of them says what stirs it."""
    pairs = star(rails)
    for every in (1, 0, 2):
        pairs[0].a.core.time_rails(every)
        for pair in pairs[:3]:
            rails.finish(pair.a.send(pair.ab, b"there"))
            assert received(rails, pair.b, pair.ba) == b"there"
            rails.finish(pair.b.send(pair.ba, b"back"))
            assert received(rails, pair.a, pair.ab) == b"back"
        rails.rest()


def test_channels_at_rest_are_seen_where_few_are_left(rails):
    """Few channels do not come to rest, but those of many that did still have to be seen."""
    pairs = star(rails)
    for pair in pairs[FEW:]:
        pair.b.close_link(pair.ba)
        pair.a.close_link(pair.ab)
    for number, pair in enumerate(pairs[:FEW]):
        rails.finish(pair.b.send(pair.ba, b"%d" % number))
        assert received(rails, pair.a, pair.ab) == b"%d" % number


def test_one_of_many_at_rest_is_seen_beside_one_that_is_busy(rails):
    """The hub spins while a write is under way, and ends its turn with it: it never comes to look at all of them."""
    pairs = star(rails, CROWD, spin_us=60_000_000)
    busy, idle = pairs[0], pairs[CROWD // 2]
    source, target = busy.a.register(4096), busy.b.register(4096)
    number, most = 0, 500
    idle.b.send(idle.ba, b"hello")
    idle.b.turn(True)
    assert idle.a.take(idle.ab) is None
    while idle.a.take(idle.ab) is None:
        rails.finish(busy.a.write(busy.ab, source, target.remote))
        number += 1
        assert number < most, f"not seen within {most} writes"


def test_a_queue_behind_a_channel_at_rest_goes_on(rails):
    """More messages than the peer takes wait in the queue, and the credits that come to the channel start them."""
    pairs = star(rails)
    pair = pairs[-1]
    sent = [pair.a.send(pair.ab, b"%d" % number) for number in range(100)]
    rails.rest()
    assert not all(operation.is_over for operation in sent)
    # The simulated network reorders messages.
    assert {received(rails, pair.b, pair.ba) for _ in sent} == {b"%d" % number for number in range(100)}
    rails.finish(*sent)


def test_more_writes_than_a_channel_at_rest_holds_all_end(rails):
    """The rest of them waits in the peer's queue, and only a round that gives this peer its turn posts it."""
    pair = star(rails)[-1]
    source, target = pair.a.register(4096), pair.b.register(4096)
    writes = [pair.a.write(pair.ab, source, target.remote) for _ in range(MORE)]
    assert not any(write.is_over for write in writes[MORE // 2 :])
    rails.finish(*writes)
