"""What every kind of rail does at the end: cancellation, links that are closed or fail, memory that is in use."""

from __future__ import annotations

import errno
import gc
import random
import sys
from functools import partial

import numpy as np
import pytest

from aiote.rails import Operation, PageIndex, StatusError
from support.rails.rail_pair import Memory, Pair, Rails, Side, filled

pytestmark = pytest.mark.libfabric

SIZE = 1 << 20
IMM = 77


def load(here: Side, there: Side, link, count: int) -> tuple[list[Operation], Memory, Memory]:
    """Start writes, reads, pages and messages; return them, the memory here that is read into, and the target there."""
    source, fetched = here.register(filled(SIZE)), here.register(SIZE)
    target, origin = there.register(SIZE), there.register(filled(SIZE, 2))
    done = []
    for number in range(count):
        size, place = (SIZE, 0) if number % 50 == 0 else (1000, number * 1000 % (SIZE - 1000))
        done.append(here.write(link, source, target.remote, size, at=(place, place), imm=IMM))
        done.append(here.write(link, fetched, origin.remote, size, at=(place, place), reads=True))
        done.append(here.send(link, b"x" * number))
        done.append(here.write_pages(link, source, range(50), target.remote, range(50), 100))
    return done, fetched, target


def test_closing_a_link_ends_everything_once(pair: Pair):
    """At any moment: every operation is over at the next reaping, and memory here is never written again."""
    for turns in (0, 1, 3, 10):
        ab, ba = pair.rails.join(pair.a, pair.b) if turns else (pair.ab, pair.ba)
        mine, fetched, _ = load(pair.a, pair.b, ab, 100)
        theirs, brought, target = load(pair.b, pair.a, ba, 100)
        for _ in range(turns):
            pair.rails.drive(lambda: True)
        pair.a.close_link(ab)
        pair.a.core.reap()
        assert all(operation.is_over for operation in mine)
        assert fetched.local.in_flight == 0
        # Nothing is read into this memory any more, nor written by the peer to that of the link that is gone.
        fetched.array[:], target.array[:] = 7, 9
        for _ in range(20):
            pair.rails.drive(lambda: True)
        pair.b.close_link(ba)
        pair.rails.rest()
        assert all(operation.is_over for operation in theirs)
        assert (fetched.array == 7).all()
        assert (target.array == 9).all()
        assert brought.local.in_flight == 0
        assert {operation.errno for operation in mine + theirs} != {0}
    assert len(pair.a.ended) == len(set(pair.a.ended)) == 1600
    assert len(pair.b.ended) == len(set(pair.b.ended)) == 1600
    assert pair.a.core.statistics()["outstanding"] == pair.a.core.statistics()["queued"] == 0


def test_what_ends_with_its_link_says_why(pair: Pair):
    """What was queued ends with the reason of the close, what was posted with the rail's own."""
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    done = [pair.a.write(pair.ab, source, target.remote) for _ in range(500)]
    messages = [pair.a.send(pair.ab, b"x") for _ in range(100)]  # nobody takes any, so most wait for a credit
    pair.ab.close(errno.ECONNRESET)
    assert pair.ab.closed
    pair.ab.close()
    assert pair.a.core.reap() == []
    assert [operation.errno for operation in messages[16:]] == [errno.ECONNRESET] * 84
    assert all(operation.is_over for operation in done)
    assert pair.rails.threaded or done[-1].errno == errno.ECONNRESET
    # Of one that goes in several writes, some may have ended well.
    assert all((operation.confirmed_bytes == SIZE) == (operation.errno == 0) for operation in done)
    for submit in (
        partial(pair.a.write, pair.ab, source, target.remote),
        partial(pair.a.write_pages, pair.ab, source, [0], target.remote, [0], 8),
        partial(pair.a.send, pair.ab, b"x"),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            submit()
    assert source.local.in_flight == 0


def test_a_failed_link_is_told_once_and_takes_no_more(pair: Pair):
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    done = [pair.a.write(pair.ab, source, target.remote) for _ in range(500)]
    messages = [pair.a.send(pair.ab, b"x") for _ in range(100)]
    assert (pair.ab.failed, pair.ab.failed_rail) == (0, -1)
    pair.ab.fail(errno.EHOSTDOWN)
    pair.ab.fail(errno.EIO)
    pair.rails.drive(lambda: pair.a.failed == [pair.ab])
    late = [pair.a.write(pair.ab, source, target.remote, 10), pair.a.send(pair.ab, b"late")]
    pair.rails.drive(lambda: all(operation.is_over for operation in late))
    assert [operation.errno for operation in late] == [errno.EHOSTDOWN] * 2
    pair.rails.rest()
    pair.a.close_link(pair.ab)
    pair.rails.drive(lambda: all(operation.is_over for operation in done + messages))
    assert pair.a.failed == [pair.ab]
    assert pair.ab.failed == errno.EHOSTDOWN
    assert [operation.errno for operation in messages[16:]] == [errno.EHOSTDOWN] * 84
    assert pair.rails.threaded or done[-1].errno == errno.EHOSTDOWN
    assert len(pair.a.ended) == len(set(pair.a.ended)) == 602


def test_other_peers_go_on(rails: Rails):
    """A link that is closed on one side, with work under way on both, touches nobody else."""
    a, b, c = (rails.side() for _ in range(3))
    (ab, ba), (ac, ca), (bc, _) = rails.join(a, b), rails.join(a, c), rails.join(b, c)
    handle = c.count(IMM)
    load(a, b, ab, 20)
    stuck, _, _ = load(b, a, ba, 20)
    source, target = a.register(filled(SIZE)), c.register(SIZE)
    for number in range(30):
        if number == 3:
            a.close_link(ab)
        going = [
            a.write(ac, source, target.remote, 1000, at=(number * 1000,) * 2, imm=IMM),
            b.write(bc, imm=IMM),
            c.write(ca, imm=IMM),
            a.send(ac, b"x"),
        ]
        rails.finish(*going)
        rails.drive(lambda: ca.messages == 1)
        assert c.take(ca) == b"x"
    rails.arrived(c.wait(handle, 60))
    assert np.array_equal(target.array[:30_000], source.array[:30_000])
    b.close_link(ba)
    rails.drive(lambda: all(operation.is_over for operation in stuck))
    assert (ac.failed, ca.failed, bc.failed) == (0, 0, 0)


def test_what_is_queued_is_cancelled_at_once(pair: Pair):
    """It never arrives, its memory is free, and what goes before and after it is not touched."""
    count, gone = 3000, range(1500, 3000, 3)
    source, target, handle = pair.a.register(filled(SIZE)), pair.b.register(SIZE), pair.b.count(IMM)
    done = [pair.a.write(pair.ab, source, target.remote, 8, at=(8 * i, 8 * i), imm=IMM) for i in range(count)]
    for number in gone:
        pair.a.cancel(done[number])
        pair.a.cancel(done[number])
    if not pair.rails.threaded:
        pair.a.core.reap()
        assert all(done[number].is_over for number in gone)
    pair.rails.drive(lambda: len(pair.a.ended) == count)
    pair.rails.rest()
    assert len(set(pair.a.ended)) == count
    went = [operation.errno == 0 for operation in done]
    assert all(operation.errno in (0, errno.ECANCELED) for operation in done)
    assert all(went[number] for number in range(count) if number not in gone)
    assert [o.was_cancelled for o in done] == [not ok for ok in went] or pair.rails.threaded
    rows, sent = target.array.reshape(-1, 8)[:count], source.array.reshape(-1, 8)[:count]
    if not pair.rails.threaded:  # a native thread may have posted some before they were cancelled
        assert [bool(row.any()) for row in rows] == went
        assert handle.value == sum(went)
    assert all(np.array_equal(rows[number], sent[number]) for number in range(count) if went[number])
    for operation in done:
        pair.a.cancel(operation)
    assert source.local.in_flight == 0


def test_what_is_posted_drains_before_it_is_over(pair: Pair):
    """A cancelled transfer that is over writes nothing more there and touches no memory here."""
    draw = random.Random(3)
    for round_number in range(12):
        source, target = pair.a.register(filled(SIZE, round_number)), pair.b.register(SIZE)
        fetched, origin = pair.a.register(SIZE), pair.b.register(filled(SIZE))
        order = draw.sample(range(256), 256)
        content, frozen = source.array.copy(), []
        paged = pair.a.write_pages(pair.ab, source, order, target.remote, order, 4096)
        single = pair.a.write(pair.ab, fetched, origin.remote, reads=True)
        for operation, change in ((paged, source), (single, fetched)):
            operation.on_over = partial(reuse, frozen, change, target if operation is paged else None)
        for _ in range(draw.randrange(4)):
            pair.rails.drive(lambda: True)
        pair.a.cancel(paged)
        pair.a.cancel(single)
        pair.rails.drive(lambda paged=paged, single=single: paged.is_over and single.is_over)
        pair.rails.rest()
        assert np.array_equal(target.array, frozen[0])
        assert (fetched.array == 1).all()
        pages = [page.tobytes() in (bytes(4096), kept.tobytes()) for page, kept in rows(target.array, content)]
        assert all(pages)
        arrived = sum(page.any() for page, _ in rows(target.array, content))
        assert arrived * 4096 >= paged.confirmed_bytes
        assert paged.errno in (0, errno.ECANCELED)
        assert source.local.in_flight == fetched.local.in_flight == 0
    pair.rails.finish(pair.a.write(pair.ab, source, target.remote))
    assert (target.array == 1).all()


def rows(*arrays: np.ndarray):
    return zip(*(array.reshape(-1, 4096) for array in arrays), strict=True)


def reuse(frozen: list[np.ndarray], mine: Memory, theirs: Memory | None, _operation: object) -> None:
    """Keep what the target holds at this moment and use the memory here for something else."""
    if theirs is not None:
        frozen.append(theirs.array.copy())
    mine.array[:] = 1


def test_cancelling_what_is_over_or_never_began_changes_nothing(pair: Pair):
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    done, never = pair.a.write(pair.ab, source, target.remote), Operation()
    pair.rails.finish(done)
    pair.a.cancel(done)
    pair.a.cancel(never)
    pair.rails.rest()
    assert (done.was_cancelled, done.errno, never.is_over) == (False, 0, False)
    assert pair.a.ended == [done]


def test_cancelling_after_the_link_is_gone(pair: Pair):
    """The operation is over but not reaped yet, and nobody has the link any more."""
    a, b = pair.rails.side(), pair.b
    link, back = pair.rails.join(a, b)
    target = b.register(SIZE)
    done = [a.send(link, b"x" * 100) for _ in range(100)]
    done += [a.write(link, a.memories[0], target.remote, 8) for _ in range(1000) if a.memories or a.register(8)]
    a.close_link(link)
    del link
    gc.collect()
    filler = [bytearray(4096) for _ in range(200)]
    for operation in done:
        a.cancel(operation)
    pair.rails.drive(lambda: all(operation.is_over for operation in done))
    assert len(a.ended) == 1100
    assert any(operation.errno for operation in done)
    b.close_link(back)
    assert len(filler) == 200


def test_memory_in_flight_cannot_be_closed(pair: Pair):
    idle: list[int] = []
    source, target = pair.a.register(filled(SIZE)), pair.b.register(SIZE)
    source.local.on_idle = lambda: idle.append(source.local.in_flight)
    done = [pair.a.write(pair.ab, source, target.remote, imm=IMM) for _ in range(5)]
    assert source.local.in_flight == 5
    with pytest.raises(RuntimeError, match="5 transfers still use this memory"):
        source.local.close()
    with pytest.raises(BufferError):
        memory = bytearray(64)
        registered = pair.a.register(memory)
        memory.extend(b"x")
    registered.local.close()
    pair.a.memories.remove(registered)
    memory.extend(b"x")
    pair.rails.finish(*done)
    assert (source.local.in_flight, idle) == (0, [0])
    assert np.array_equal(source.array, target.array)
    pair.a.memories.remove(source)
    source.local.close()
    source.local.close()


def test_an_operation_is_submitted_once(pair: Pair):
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    operation, numbers = Operation(), PageIndex([0])
    core = pair.a.core

    def every_way() -> None:
        with pytest.raises(RuntimeError, match="already submitted"):
            core.submit_single(pair.ab, operation, False, source.local, 0, target.remote, 0, 8, -1)
        with pytest.raises(RuntimeError, match="already submitted"):
            core.submit_pages(pair.ab, operation, source.local, 0, numbers, 8, target.remote, 0, numbers, 8, 8, -1)
        with pytest.raises(RuntimeError, match="already submitted"):
            core.submit_send(pair.ab, operation, b"x")

    core.submit_single(pair.ab, operation, False, source.local, 0, target.remote, 0, 8, -1)
    every_way()
    pair.a.awake = True
    pair.rails.finish(operation)
    every_way()
    assert source.local.in_flight == 0


def test_an_exception_in_a_callback_keeps_nobody_waiting(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_value))
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    done = [pair.a.write(pair.ab, source, target.remote, 8) for _ in range(10)]
    for number, operation in enumerate(done):
        operation.on_over = partial(int, f"bad {number}")
    pair.rails.finish(*done)
    assert source.local.in_flight == 0
    assert [type(error) for error in seen] == [TypeError] * 10


def test_callbacks_may_do_anything(pair: Pair):
    """Submit, cancel, reap, close the link: all from within a callback."""
    source, target = pair.a.register(filled(64)), pair.b.register(64)
    later: list[Operation] = []

    def more(operation: Operation) -> None:
        pair.a.ended.append(operation)
        if len(later) < 50:
            later.append(pair.a.write(pair.ab, source, target.remote, 8))
            later[-1].on_over = more
            pair.a.core.reap()
        elif not pair.ab.closed:
            pair.a.write(pair.ab, source, target.remote, 8)
            pair.a.close_link(pair.ab)
            pair.a.core.reap()

    first = pair.a.write(pair.ab, source, target.remote, 8)
    first.on_over = more
    pair.rails.drive(lambda: len(pair.a.ended) == 52)
    assert pair.ab.closed
    assert source.local.in_flight == 0
    assert [operation.errno for operation in later] == [0] * 50


def test_operations_nobody_holds_are_carried_out(pair: Pair):
    source, target, seen = pair.a.register(filled(64)), pair.b.register(64), []
    for number in range(8):
        operation = Operation()
        operation.on_over = lambda operation: seen.append(operation.errno)
        pair.a.core.submit_single(pair.ab, operation, False, source.local, 0, target.remote, 8 * number, 8, -1)
        del operation
    gc.collect()
    pair.a.awake = True
    pair.rails.drive(lambda: len(seen) == 8)
    assert seen == [0] * 8
    assert np.array_equal(target.array, np.tile(source.array[:8], 8))


def test_a_core_with_peers_and_a_rail_with_memory_stay_open(rails: Rails):
    pair = Pair.of(rails)
    with pytest.raises(RuntimeError, match="1 peers are still open"):
        pair.a.core.close()
    rails.finish(pair.a.write(pair.ab, imm=IMM))
    memory = pair.a.register(64)
    with pytest.raises((RuntimeError, StatusError), match="still open"):
        pair.a.rail_set.rails[0].close()
    pair.a.memories.remove(memory)
    memory.local.close()
    rails.finish(pair.a.write(pair.ab, imm=IMM))
