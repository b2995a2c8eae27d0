"""What every kind of rail does about sleeping: what arrives wakes whoever sleeps, and nothing else does."""

from __future__ import annotations

import errno
import select

import pytest

from aiote.rails import RemoteMemory
from support.rails.rail_pair import LIMIT_S, Kind, Pair, Rails, Side, filled, opened

pytestmark = pytest.mark.libfabric

IMM = 9
FEW = 20  # wake-ups in a tenth of a second that a late timer or two explain; a descriptor that spins gives thousands


def wakes(side: Side) -> bool:
    """Tell whether the side's descriptor becomes readable, with nobody making progress meanwhile."""
    return bool(select.select([side.core.fd], [], [], LIMIT_S)[0])


def test_a_post_wakes_a_peer_that_sleeps(pair: Pair):
    """Immediates and messages, in both directions; the sender posts and does nothing more."""
    for here, there, link, back in ((pair.a, pair.b, pair.ab, pair.ba), (pair.b, pair.a, pair.ba, pair.ab)):
        handle = there.count(IMM)
        there.core.expect_messages(+1)
        for _ in range(5):
            waiting = there.wait(handle, 1)
            pair.rails.rest()
            assert not select.select([there.core.fd], [], [], 0)[0]
            here.write(link, imm=IMM)
            assert wakes(there)
            pair.rails.arrived(waiting)
            pair.rails.rest()
            here.send(link, b"hello")
            assert wakes(there)
            pair.rails.drive(lambda back=back: back.messages == 1)
            assert there.take(back) == b"hello"
        there.core.expect_messages(-1)


def test_a_completion_wakes_the_sender_that_sleeps(pair: Pair):
    """It sleeps with work outstanding until the target has made progress."""
    source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
    for length in (8, 1 << 20):
        done = pair.a.write(pair.ab, source, target.remote, length, imm=IMM)
        if not pair.rails.threaded:
            pair.rails.drive(lambda: not pair.a.awake, pair.a)
        pair.rails.drive(lambda done=done: done.is_over)
        assert done.errno == 0
    pair.rails.rest()
    assert pair.rails.wakeups() < FEW


def test_wake_is_heard_once(pair: Pair):
    pair.rails.rest()
    before = pair.a.core.statistics()["rounds"]
    pair.a.core.wake()
    if pair.rails.threaded:  # the native thread hears it, and has nothing to tell
        pair.rails.drive(lambda: pair.a.core.statistics()["rounds"] > before)
    else:
        assert wakes(pair.a)
    pair.rails.rest()
    assert pair.rails.wakeups() < FEW


def test_nobody_spins_after_traffic(pair: Pair):
    source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
    pair.rails.finish(
        *(pair.a.write(pair.ab, source, target.remote, imm=IMM) for _ in range(10)),
        *(pair.a.write(pair.ab, source, target.remote, reads=True) for _ in range(10)),
        *(pair.b.write(pair.ba, imm=IMM) for _ in range(1000)),
        *(pair.b.send(pair.ba, b"x") for _ in range(16)),
    )
    pair.rails.rest()
    assert pair.rails.wakeups() < FEW


def test_nobody_spins_while_messages_lie_untaken(pair: Pair):
    """A full pool, a sender that waits for credits, and counts that nobody asked for: all at rest."""
    pair.b.core.expect_messages(+1)
    for _ in range(40):
        pair.a.send(pair.ab, b"x")
        pair.a.write(pair.ab, imm=IMM)
    pair.rails.drive(lambda: pair.ba.messages == 16)
    pair.rails.rest()
    assert pair.rails.wakeups() < FEW
    pair.b.core.expect_messages(-1)


def test_nobody_spins_after_an_error(pair: Pair):
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    if pair.rails.kind.guards:
        done = pair.a.write(
            pair.ab, source, RemoteMemory(64, True, [(key + 1, base) for key, base in target.local.keys])
        )
        pair.rails.drive(lambda: done.is_over)
        assert done.errno > 0
        pair.rails.rest()
        assert pair.rails.wakeups() < FEW
    pair.ab.fail(errno.EIO)
    pair.a.awake = True
    pair.rails.drive(lambda: pair.a.failed == [pair.ab])
    pair.rails.rest()
    assert pair.rails.wakeups() < FEW


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_nobody_spins_after_a_link_was_closed(rails: Rails, busy):
    """Neither the side that closed it, nor the one that still has its end, nor one that has others; then all go on."""
    a, b, c = (rails.side() for _ in range(3))
    (ab, ba), (ac, _), (bc, _) = rails.join(a, b), rails.join(a, c), rails.join(b, c)
    source, target = a.register(filled(1 << 16)), b.register(1 << 16)
    if busy:
        for _ in range(50):
            a.write(ab, source, target.remote, imm=IMM)
            b.write(ba, target, source.remote)
            b.send(ba, b"x")
        rails.drive(lambda: True)
    a.close_link(ab)
    for _ in range(20):
        rails.drive(lambda: True)
    if not busy:  # what is under way on an end that nobody shares may be looked after by a timer
        rails.rest()
        assert rails.wakeups() < FEW
    b.close_link(ba)
    rails.rest()
    assert rails.wakeups() < FEW
    rails.finish(a.write(ac, imm=IMM), b.write(bc, imm=IMM))
    rails.rest()
    assert rails.wakeups() < FEW


def test_the_loop_is_told_once_of_many_things(kind: Kind):
    """A native thread makes the descriptor readable at the first of them; reaping takes all and makes it quiet."""
    with opened(kind, threaded=True) as rails:
        pair = Pair.of(rails)
        handle = pair.b.count(IMM)
        waits = [pair.b.wait(handle, 1) for _ in range(100)]
        pair.rails.rest()
        done = [pair.a.write(pair.ab, imm=IMM) for _ in range(100)]
        for side, things in ((pair.b, waits), (pair.a, done)):
            told = 0
            while not all(thing.is_over for thing in things):
                assert wakes(side)
                side.core.reap()
                assert (told := told + 1) <= 100
            assert not select.select([side.core.fd], [], [], 0)[0]
        for waiting in waits:
            waiting.take()


def test_a_failure_is_told_to_a_loop_that_sleeps(kind: Kind):
    with opened(kind, threaded=True) as rails:
        pair = Pair.of(rails)
        pair.rails.rest()
        pair.ab.fail(errno.EIO)
        assert wakes(pair.a)
        assert pair.a.core.reap() == [pair.ab]
        assert pair.a.core.reap() == []
        assert not select.select([pair.a.core.fd], [], [], 0)[0]
