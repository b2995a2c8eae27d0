"""Sleeping and waking: whatever order things happen in, what arrives is noticed, and nobody is left asleep.

A core that said that it is safe to sleep is not called again before its descriptor is readable or something was
submitted to it; so a single wake-up that is lost, in tens of thousands of random interleavings, stops the test.
"""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from aiote_native.engine.core import Core
from support.rails.rail_pair import KINDS, LIMIT_S, Kind, Pair, Side, filled, opened, readable

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.provider)
IMM = 3


class Interleaving:
    """Two cores and a scheduler that does one small step at a time, in random order."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.draw = pair, random.Random(seed)
        self.sides = ((pair.a, pair.ab, pair.b), (pair.b, pair.ba, pair.a))
        self.posted = {id(pair.a): 0, id(pair.b): 0}
        self.handles = {id(side): side.count(IMM) for side in (pair.a, pair.b)}
        self.memory = {id(side): side.register(filled(4096)) for side in (pair.a, pair.b)}

    def post(self, here: Side, link, there: Side) -> None:
        length = self.draw.choice((0, 0, 8, 4096))
        if length:
            here.write(link, self.memory[id(here)], self.memory[id(there)].remote, length, imm=IMM)
        else:
            here.write(link, imm=IMM)
        self.posted[id(here)] += 1

    def step(self, side: Side) -> None:
        """Let one side have a round, if its loop would give it one."""
        side.turn(not side.awake and bool(readable(side.core.fd)))

    def all_arrived(self) -> bool:
        return all(
            len(here.ended) == self.posted[id(here)] == self.handles[id(there)].value for here, _, there in self.sides
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            here, link, there = self.draw.choice(self.sides)
            if self.draw.random() < 0.3 and self.posted[id(here)] - len(here.ended) < 50:
                self.post(here, link, there)
            else:
                self.step(here)
            if self.draw.random() < 0.02:
                self.pair.rails.drive(self.all_arrived)
        self.pair.rails.drive(self.all_arrived)


@pytest.mark.libfabric
@kinds
@pytest.mark.parametrize("spin_us", [0, 20])
def test_no_wake_up_is_lost_in_any_order(kind: Kind, spin_us):
    with opened(kind, spin_us=spin_us) as rails:
        order = Interleaving(Pair.of(rails), spin_us)
        order.run(30_000)
        slept = [side.core.statistics()["sleeps"] for side in rails.sides]
        assert min(slept) > 500
        assert all(operation.errno == 0 for side in rails.sides for operation in side.ended)
        assert min(order.posted.values()) > 1000


@pytest.mark.libfabric
@kinds
def test_no_wake_up_is_lost_between_native_threads(kind: Kind):
    """Both threads fall asleep all the time; the posts come after random pauses, on the edge of that."""
    with opened(kind, threaded=True) as rails:
        pair, draw = Pair.of(rails), random.Random(4)
        handles = pair.a.count(IMM), pair.b.count(IMM)
        for _ in range(1500):
            waits = [side.wait(handle, 1) for side, handle in zip((pair.a, pair.b), handles, strict=True)]
            pair.a.write(pair.ab, imm=IMM)
            spin(draw.random() * 60e-6)
            pair.b.write(pair.ba, imm=IMM)
            for side, waiting in ((pair.a, waits[0]), (pair.b, waits[1])):
                while not waiting.is_over:
                    assert readable(side.core.fd, seconds=LIMIT_S), "the thread never told its loop"
                    side.core.reap()
                waiting.take()
        rails.drive(lambda: len(pair.a.ended) == len(pair.b.ended) == 1500)
        assert min(side.core.statistics()["sleeps"] for side in rails.sides) > 500


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.libfabric
@kinds
def test_posts_from_many_threads_all_arrive_and_end(kind: Kind):
    """Submitting, reaping and progress on a native thread share one lock, whoever holds the GIL."""
    with opened(kind, threaded=True) as rails:
        pair = Pair.of(rails)
        handle = pair.b.count(IMM)

        def post() -> None:
            for _ in range(500):
                pair.a.write(pair.ab, imm=IMM)

        threads = [threading.Thread(target=post) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rails.arrived(pair.b.wait(handle, 2000))
        rails.drive(lambda: len(pair.a.ended) == 2000)


@pytest.mark.libfabric
@kinds
def test_waiting_for_a_count_does_not_keep_anybody_awake(kind: Kind):
    """What is awaited spins for a bounded time, then sleeps on the descriptor for as long as it takes."""
    with opened(kind, spin_us=100) as rails:
        pair = Pair.of(rails)
        waiting = pair.b.wait(pair.b.count(IMM), 1)
        rails.rest()
        assert rails.wakeups() < 10
        pair.a.write(pair.ab, imm=IMM)
        assert readable(pair.b.core.fd, seconds=LIMIT_S)
        rails.arrived(waiting)


def rest(core: Core) -> None:
    until = time.monotonic() + LIMIT_S
    while core.progress() or readable(core.fd):
        assert time.monotonic() < until, "it never rests"


@pytest.mark.parametrize("wakeup_event", [False, True])
def test_a_core_alone_rests_and_is_woken(wakeup_event):
    core = Core(spin_us=0, wakeup_event=wakeup_event)
    rest(core)
    for _ in range(100):
        assert not readable(core.fd)
        core.wake()
        core.wake()
        assert readable(core.fd)
        rest(core)
    core.close()


def test_a_core_can_be_woken_from_another_thread_while_its_loop_sleeps():
    core = Core(spin_us=0)
    rest(core)
    thread = threading.Thread(target=core.wake)
    thread.start()
    assert readable(core.fd, seconds=LIMIT_S)
    thread.join()
    core.close()


@pytest.mark.parametrize("wakeup_event", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_closed_core_touches_no_descriptor(wakeup_event, threaded):
    """Its numbers are somebody else's by then."""
    core = Core(spin_us=0, threaded=threaded, wakeup_event=wakeup_event)
    core.close()
    core.close()
    pipes = [os.pipe() for _ in range(4)]
    files = [os.memfd_create("other") for _ in range(4)]
    core.wake()
    assert core.reap() == []
    assert [os.fstat(fd).st_size for fd in files] == [0] * 4
    assert not readable(*(pipe[0] for pipe in pipes))
    for call in (core.progress, lambda: core.add_peer(None), lambda: core.counter(1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    for fd in (*files, *(fd for pipe in pipes for fd in pipe)):
        os.close(fd)


@pytest.mark.leaks_allowed("counts its own threads")
def test_threads_end_with_their_cores():
    def tasks() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    before = tasks()
    cores = [Core(threaded=True) for _ in range(8)]
    # Told apart by their numbers: another test's thread may end meanwhile.
    started = tasks() - before
    assert len(started) == 8
    cores[0].stop_thread()
    cores[0].stop_thread()
    assert not cores[0].threaded
    for core in cores:
        core.close()
    until = time.monotonic() + LIMIT_S
    while tasks() & started:  # joined threads linger in /proc for a moment
        assert time.monotonic() < until


def test_a_core_is_opened_once():
    core = Core()
    with pytest.raises(RuntimeError, match="already"):
        core.__init__()
    core.close()


@pytest.mark.libfabric
@kinds
def test_a_small_write_does_not_wait_behind_many_pages(kind: Kind):
    """A transfer of a hundred thousand pages does not keep a small write from its turn."""
    with opened(kind) as rails:
        pair: Pair = Pair.of(rails)
        source, target = pair.a.register(filled(1 << 20)), pair.b.register(1 << 20)
        pages = [0] * 100_000
        long = pair.a.write_pages(pair.ab, source, pages, target.remote, pages, 8)
        short = pair.a.write(pair.ab, source, target.remote, 8)
        rails.finish(short)
        assert not long.is_over
        assert long.confirmed_bytes < long.total_bytes
        pair.a.cancel(long)
        rails.drive(lambda: long.is_over)


def test_statistics_grow_and_name_what_they_count():
    core = Core(spin_us=0)
    rest(core)
    counted = core.statistics()
    assert counted["sleeps"] >= 1
    assert counted["rounds"] >= 2
    assert set(counted) >= {"posted", "completed", "outstanding", "queued", "immediates", "counters", "inbox"}
    assert counted["posted"] == counted["outstanding"] == counted["counters"] == 0
    core.close()


@pytest.mark.libfabric
@kinds
def test_the_table_of_immediates_is_bounded(kind: Kind):
    """Values that nobody asked for fill it; the peer that sent one too many is given up, and nothing crashes."""
    with opened(kind) as rails:
        a, b = rails.side(), rails.side(counters=10)
        pair = Pair(rails, a, b, *rails.join(a, b))
        for imm in range(10):
            a.write(pair.ab, imm=imm)
        rails.drive(lambda: b.core.statistics()["counters"] == 10)
        with pytest.raises(OverflowError, match="10 immediates are in use"):
            b.core.counter(10)
        a.write(pair.ab, imm=5)
        rails.rest()
        assert b.failed == []
        a.write(pair.ab, imm=11)
        rails.drive(lambda: b.failed == [pair.ba])
        assert pair.ba.failed == 28  # ENOSPC
        assert [b.count(imm).value for imm in range(10)] == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1]


def test_reaping_a_core_without_events_gives_nothing():
    core = Core()
    assert [core.reap() for _ in range(3)] == [[]] * 3
    core.close()
