"""What is awaited natively: counts through handles and waits, in every order of their ends, and values in memory."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aiote_native.counters.waits import CounterWait, ValueWatch, read_value
from aiote_native.engine.core import Core
from aiote_native.system.buffers import acquire
from support.machine import LONG
from support.rails.rail_pair import KINDS, LIMIT_S, Kind, Pair, opened, readable

SHM = next(kind for kind in KINDS if kind.provider == "shm")
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.provider)


class Wait(CounterWait):
    """A wait that can be referred to weakly, and counts how often it was told to be over."""

    __slots__ = ("__weakref__", "told")

    def __init__(self) -> None:
        self.told: list[int] = []
        self.on_over = self.told.append


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with opened(SHM, threaded=getattr(request, "param", False)) as rails:
        yield Pair.of(rails)


def arrive(pair: Pair, imm: int, count: int = 1) -> None:
    """Have so many immediates arrive at b, counted by its core and not yet reaped there."""
    wanted = pair.b.core.statistics()["immediates"] + count
    for _ in range(count):
        pair.a.write(pair.ab, imm=imm)
    while pair.b.core.statistics()["immediates"] < wanted:
        if not pair.rails.threaded:
            pair.a.core.progress()
            pair.b.core.progress()
    pair.rails.drive(lambda: pair.a.core.statistics()["outstanding"] == 0, pair.a)


STEPS = ("arrive", "take", "cancel", "close", "reap", "forget")


def outcome(order: tuple[str, ...]) -> tuple[int, bool]:
    """Say what an order of steps comes to: counts that are left, and whether the wait is told of its end."""
    units, state, queued, told, closed = 0, "pending", False, False, False
    for step in order:
        match step, state:
            case "arrive", "pending":
                state, queued = "satisfied", True
            case "arrive", _:
                units += 1
            case "take", "satisfied":
                state = "over"
            case "cancel", "pending":
                state, told = "over", True
            case "cancel", "satisfied":
                state, units = "over", units + 1
            case "close", _:
                closed = True
            case "reap", _:
                told, queued = told or queued, False
    assert closed
    # What is satisfied and was never taken stays consumed: the last reap tells whoever waits.
    return units, told or queued


@pytest.mark.libfabric
@pytest.mark.parametrize("pair", [False, True], indirect=True, ids=["loop", "thread"])
def test_the_ends_of_a_wait_come_in_any_order(pair: Pair):
    """Arrival, take, cancel, the handle's close, reaping, and the last reference dropped: all 720 orders."""
    core = pair.b.core
    for number, order in enumerate(itertools.permutations(STEPS)):
        handle, waiting = core.counter(number), Wait()
        handle.wait(waiting, 1)
        told = waiting.told
        held: list[Any] = [waiting]
        del waiting
        for step in order:
            match step:
                case "arrive":
                    arrive(pair, number)
                case "take" | "cancel" if held:
                    getattr(held[0], step)()
                case "close":
                    handle.close()
                case "reap":
                    core.reap()
                case "forget":
                    held.clear()
        pair.rails.drive(lambda: True)
        gone = order.index("forget")
        done = tuple(step for at, step in enumerate(order) if step not in ("take", "cancel") or at < gone)
        units, over = outcome(done)
        left = core.counter(number)
        assert (left.value, len(told)) == (units, over), order
        left.close(discard=True)
        if held:
            held[0].take()
    assert pair.a.core.statistics()["immediates"] == 0
    assert pair.b.failed == []


@pytest.mark.libfabric
def test_a_wait_that_is_over_is_freed(pair: Pair):
    """Taken, cancelled while pending, cancelled when satisfied, or left by a core that closes."""
    core, refs = pair.b.core, []
    handle = core.counter(1)
    for end in ("take", "cancel", "cancel later"):
        waiting = Wait()
        refs.append(weakref.ref(waiting))
        handle.wait(waiting, 1)
        if end != "cancel":
            arrive(pair, 1)
        getattr(waiting, end.split()[0])()
        pair.rails.drive(lambda: True)
        del waiting
        gc.collect()
        assert refs[-1]() is None, end
    pair.rails.rest()
    assert handle.value == 1
    handle.close(discard=True)
    assert not core.is_counted(1)


def test_a_core_that_closes_ends_its_waits():
    """Pending ones and watched values, unsatisfied and told once, with nothing left behind."""
    core, value = Core(), np.zeros(1, np.uint32)
    handle, waits, told = core.counter(1), [Wait() for _ in range(3)], []
    for waiting in waits:
        handle.wait(waiting, 5)
    watched = ValueWatch(acquire(value))
    watched.on_over = told.append
    core.watch(watched, 0)
    core.close()
    assert [(waiting.is_over, waiting.satisfied, len(waiting.told)) for waiting in waits] == [(True, False, 1)] * 3
    assert (watched.is_over, len(told)) == (True, 1)
    for waiting in waits:
        waiting.cancel()
        waiting.take()
    watched.cancel()
    handle.close()
    refs = [weakref.ref(waiting) for waiting in waits]
    del waits, waiting, told, watched
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


@pytest.mark.libfabric
def test_waits_are_served_in_order_and_a_cancelled_one_lets_others_pass(pair: Pair):
    handle = pair.b.count(4)
    first, second, third = (pair.b.wait(handle, n) for n in (5, 2, 1))
    arrive(pair, 4, 3)
    pair.rails.rest()
    assert [waiting.is_over for waiting in (first, second, third)] == [False] * 3
    first.cancel()
    pair.rails.arrived(second, third)
    assert not first.satisfied
    assert handle.value == 0


@pytest.mark.libfabric
def test_a_satisfied_wait_that_is_cancelled_serves_the_next(pair: Pair):
    """The counts are given back, and whoever waits behind gets them at once."""
    handle = pair.b.count(4)
    first, second = (pair.b.wait(handle, 2) for _ in range(2))
    arrive(pair, 4, 2)
    first.cancel()
    pair.rails.arrived(second)
    assert (first.satisfied, handle.value) == (False, 0)


@pytest.mark.libfabric
def test_a_wait_goes_on_when_its_handle_is_closed(pair: Pair):
    """The wait goes on; what it consumed is gone, and nothing of the count is left when it is over."""
    handle = pair.b.core.counter(4)
    waiting = pair.b.wait(handle, 2)
    arrive(pair, 4)
    handle.close(discard=True)
    handle.close()
    assert handle.value == 0
    assert pair.b.core.is_counted(4)
    with pytest.raises(RuntimeError, match="closed"):
        handle.wait(CounterWait(), 1)
    arrive(pair, 4)
    pair.rails.arrived(waiting)
    assert not pair.b.core.is_counted(4)


@pytest.mark.libfabric
def test_handles_share_one_count(pair: Pair):
    one, two = pair.b.core.counter(4), pair.b.core.counter(4)
    arrive(pair, 4, 3)
    assert one.value == two.value == 3
    one.close(discard=True)
    assert two.value == 3
    pair.rails.arrived(pair.b.wait(two, 2))
    two.close(discard=True)
    assert not pair.b.core.is_counted(4)
    arrive(pair, 4)
    three = pair.b.core.counter(4)
    del three
    gc.collect()
    assert pair.b.core.is_counted(4)  # a handle that is dropped discards nothing
    pair.b.core.counter(4).close(discard=True)
    assert not pair.b.core.is_counted(4)


def test_impossible_waits_are_refused():
    core = Core()
    handle, waiting = core.counter(1), CounterWait()
    for imm in (1 << 28, 2**32 - 1):
        with pytest.raises(ValueError, match="28 bits"):
            core.counter(imm)
    with pytest.raises(ValueError, match=r"2\*\*40"):
        handle.wait(waiting, (1 << 40) + 1)
    handle.wait(waiting, 0)
    assert waiting.satisfied
    with pytest.raises(RuntimeError, match="already queued"):
        handle.wait(waiting, 1)
    core.reap()
    assert waiting.is_over
    waiting.take()
    never = CounterWait()
    never.take()
    never.cancel()
    assert (never.is_over, never.satisfied) == (False, False)
    core.close()


@pytest.mark.libfabric
@(kinds if LONG else pytest.mark.parametrize("kind", KINDS[:1], ids=lambda kind: kind.provider))
def test_a_hundred_thousand_live_counters_are_told_apart(kind: Kind):
    """All awaited, all arrived at, in an order of their own, and none is mistaken for another."""
    count = 100_000
    with opened(kind) as rails:
        pair = Pair.of(rails)
        numbers = [number * 2654435761 % (1 << 28) for number in range(count)]
        assert len(set(numbers)) == count
        handles = [pair.b.core.counter(imm) for imm in numbers]
        waits = [CounterWait() for _ in numbers]
        over: list[object] = []
        for handle, waiting in zip(handles, waits, strict=True):
            waiting.on_over = over.append
            handle.wait(waiting, 1)
        assert pair.b.core.statistics()["counters"] == count
        for start in range(0, count, 10_000):
            for imm in reversed(numbers[start : start + 10_000]):
                pair.a.write(pair.ab, imm=imm)
            rails.drive(lambda start=start: len(over) == start + 10_000)
            assert all(waiting.satisfied for waiting in waits[start : start + 10_000])
            assert not any(waiting.satisfied for waiting in waits[start + 10_000 : start + 10_100])
        for handle, waiting in zip(handles, waits, strict=True):
            waiting.take()
            handle.close()
        assert pair.b.core.statistics()["counters"] == 0


WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def sleep_until(core: Core, done: Any) -> None:
    """Do what a loop does until a watch or wait is over; fail when the core sleeps for good."""
    while not done.is_over:
        if core.threaded or not core.progress():
            assert readable(core.fd, seconds=LIMIT_S), "it sleeps, and nothing wakes it"
        core.reap()


@pytest.mark.parametrize("threaded", [False, True], ids=["loop", "thread"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_changed_value_is_noticed(width, threaded):
    """Whichever bytes of it change, to whichever value, and while the loop sleeps."""
    core = Core(spin_us=0, threaded=threaded)
    values = np.zeros(3, WIDTHS[width])
    top = (1 << (8 * width)) - 1
    old = 0
    for new in (1, top, top - 1, 1 << (8 * width - 1), 0, 5):
        watched = ValueWatch(acquire(values[1:2]))
        core.watch(watched, old)
        values[0], values[2] = new, top  # neighbours are not watched
        for _ in range(20):
            if not threaded:
                core.progress()
            core.reap()
        assert not watched.is_over
        timer = threading.Timer(0.002, values.__setitem__, (1, new))
        timer.start()
        sleep_until(core, watched)
        timer.join()
        assert watched.new == new == read_value(acquire(values[1:2]))
        old = new
    core.close()


@pytest.mark.parametrize("spin_us", [600_000_000, 0])
def test_an_engine_that_only_watches_spins_after_a_change(spin_us):
    core, value = Core(spin_us=spin_us), np.zeros(1, np.uint64)
    first, second = ValueWatch(acquire(value)), ValueWatch(acquire(value))
    core.watch(first, 0)
    value[0] = 1
    sleep_until(core, first)
    core.watch(second, 1)
    core.progress()  # takes note that something has happened
    assert [core.progress() for _ in range(20)] == [spin_us > 0] * 20
    second.cancel()
    core.close()


def test_a_value_that_differs_already_is_noticed_at_once():
    core, value = Core(spin_us=0), np.array([7], np.uint64)
    watched = ValueWatch(acquire(value))
    core.watch(watched, 6)
    sleep_until(core, watched)
    assert watched.new == 7
    core.close()


def test_many_watches_of_one_value_all_hear_of_a_change():
    """All hear of it; those that were cancelled do not, and a cancelled watch is over at once."""
    core, value, told = Core(spin_us=0), np.zeros(1, np.uint32), []
    watches = [ValueWatch(acquire(value)) for _ in range(50)]
    for watched in watches:
        watched.on_over = told.append
        core.watch(watched, 0)
    for watched in watches[::3]:
        watched.cancel()
        watched.cancel()
        assert watched.is_over
    assert told == watches[::3]
    value[0] = 9
    sleep_until(core, watches[1])
    assert len(told) == len(set(told)) == 50
    assert {watched.new for position, watched in enumerate(watches) if position % 3} == {9}
    assert {watched.new for watched in watches[::3]} == {0}
    for watched in watches:
        watched.cancel()
    core.close()


def test_a_watch_cancelled_before_its_change_is_reaped_tells_the_change():
    core, value, told = Core(spin_us=0), np.zeros(1, np.uint32), []
    watched = ValueWatch(acquire(value))
    watched.on_over = told.append
    core.watch(watched, 0)
    value[0] = 1
    core.progress()
    watched.cancel()
    core.reap()
    assert (told, watched.new) == ([watched], 1)
    core.close()


def test_what_cannot_be_watched():
    core, memory = Core(), np.zeros(64, np.uint8)
    for length in (3, 5, 6, 7, 9, 16):
        with pytest.raises(ValueError, match="expected 1, 2, 4 or 8"):
            ValueWatch(acquire(memory[:length]))
    base = -memory.ctypes.data % 8
    for width, shift in ((2, 1), (4, 1), (4, 2), (8, 1), (8, 4)):
        with pytest.raises(ValueError, match="aligned"):
            ValueWatch(acquire(memory[base + shift : base + shift + width]))
    watched = ValueWatch(acquire(memory[base : base + 8]))
    core.watch(watched, 0)
    with pytest.raises(RuntimeError, match="already started"):
        core.watch(watched, 0)
    watched.cancel()
    never = ValueWatch(acquire(memory[base : base + 8]))
    never.cancel()
    assert not never.is_over
    released = acquire(memory[base : base + 8])
    released.release()
    with pytest.raises(ValueError, match="released"):
        read_value(released)
    core.close()


def test_a_watch_keeps_its_memory_alive():
    core, memory = Core(spin_us=0), bytearray(8)
    watched = ValueWatch(acquire(memory))
    core.watch(watched, 0)
    del watched
    gc.collect()
    with pytest.raises(BufferError):
        memory.extend(b"x")
    core.close()
    gc.collect()
    memory.extend(b"x")


def test_watching_sleeps_between_looks():
    """A watched value costs a timer, not a processor: the loop sleeps between any two looks."""
    core, value = Core(spin_us=50), np.zeros(1, np.uint32)
    watched = ValueWatch(acquire(value))
    core.watch(watched, 0)
    while core.progress():
        pass
    before = core.statistics()["sleeps"]
    for _ in range(5):
        assert readable(core.fd, seconds=LIMIT_S)
        while core.progress():
            pass
    assert core.statistics()["sleeps"] >= before + 5
    watched.cancel()
    while core.progress() or readable(core.fd):
        pass
    core.close()
