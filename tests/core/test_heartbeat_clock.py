from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.heartbeat_clock import HeartbeatClock
from aiote.errors import UsageError

INTERVAL, LIMIT = 1.0, 4.0
# Quarters are exact in binary: what the rule says can be compared without tolerance.
QUARTERS = st.integers(0, 60).map(lambda quarters: quarters / 4)


def listening(beat: HeartbeatClock, start: float, stop: float, step: float = 0.25) -> float | None:
    """Look again and again, never an interval apart; return when the peer was first found expired."""
    now = start
    while now <= stop:
        if beat.is_expired(now):
            return now
        now += step
    return None


def started(at: float = 0.0) -> HeartbeatClock:
    beat = HeartbeatClock(INTERVAL, LIMIT)
    beat.record_heard(at)
    beat.record_sent(at)
    return beat


def test_a_heartbeat_is_due_every_interval() -> None:
    beat = HeartbeatClock(INTERVAL, LIMIT)
    assert beat.is_due(10.0)
    assert beat.is_due(10.0)
    beat.record_sent(10.0)
    assert not beat.is_due(10.75)
    assert beat.is_due(11.0)


def test_a_heartbeat_is_due_as_often_as_the_peer_wants_it() -> None:
    """That says nothing of when the peer expires, or of how often this side has to look."""
    for told in (0.25, 3.0):
        beat = HeartbeatClock(INTERVAL, LIMIT, told)
        beat.record_sent(10.0)
        assert beat.next_deadline(10.0) == 10.0 + min(told, INTERVAL / 2)
        assert not beat.is_due(10.0 + told - 0.125)
        assert beat.is_due(10.0 + told)
        assert listening(beat, 10.0, 30.0) == 10.0 + LIMIT


def test_a_heartbeat_may_go_early() -> None:
    beat = started(10.0)
    assert not beat.is_due(10.5, 0.25)
    assert beat.is_due(10.75, 0.25)
    assert not beat.is_due(10.75)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=60))
def test_many_connections_under_one_timer_wake_it_a_few_times_an_interval(phases: list[float]) -> None:
    """Whenever each began, and none is told later than it wants."""
    beats = [started(phase) for phase in phases]
    now, wakes, longest = 1.0, [], 0.0
    while now < 21.0:
        wakes.append(now)
        for beat in beats:
            beat.record_heard(now)
            if beat.is_due(now, 0.25):
                longest = max(longest, now - beat._sent)
                beat.record_sent(now)
        now = max(now + 0.001, min(beat.next_deadline(now) for beat in beats))
    assert longest <= INTERVAL + 0.001
    assert len([wake for wake in wakes if wake >= 11.0]) <= 10 * 4 + 1


@given(st.floats(-1e6, 1e6, width=32))
def test_a_silent_peer_expires_at_the_limit_and_not_before(start: float) -> None:
    start = round(start * 4) / 4
    assert listening(started(start), start, start + 10) == start + LIMIT


@given(QUARTERS)
def test_the_first_call_of_any_kind_counts_as_hearing(start: float) -> None:
    assert listening(HeartbeatClock(INTERVAL, LIMIT), start, start + 10) == start + LIMIT


def test_any_sign_of_life_starts_the_silence_anew() -> None:
    beat = started()
    for now in (0.75, 1.5, 2.25, 3.0):
        assert not beat.is_expired(now)
    beat.record_heard(3.75)
    assert listening(beat, 4.0, 20.0) == 3.75 + LIMIT


@given(st.floats(1.001, 1e6))
def test_a_stall_gives_at_least_an_interval_and_only_one(gap: float) -> None:
    beat = started()
    assert not beat.is_expired(gap)
    end = max(LIMIT, gap + INTERVAL)
    late = math.nextafter(end, 0)
    for part in range(1, 20):
        assert not beat.is_expired(gap + (late - gap) * part / 20)
    assert beat.is_expired(end)


def test_a_stall_that_costs_the_peer_nothing_gives_nothing() -> None:
    beat = started()
    assert not beat.is_expired(2.0)
    assert listening(beat, 2.25, 20.0) == LIMIT


def test_a_stall_that_gives_nothing_uses_up_nothing() -> None:
    beat = started()
    for now in (1.25, 2.5, 10.0, 20.0, 30.0, 40.0):
        assert not beat.is_expired(now)
    assert beat.is_expired(50.0)


def test_two_calls_exactly_an_interval_apart_are_no_stall() -> None:
    assert listening(started(), 0.0, 20.0, step=INTERVAL) == LIMIT


def test_a_stall_shortly_before_the_limit_moves_it() -> None:
    beat = started()
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        assert not beat.is_expired(now)
    assert not beat.is_expired(3.75)
    assert listening(beat, 4.0, 20.0) == 4.75


def test_what_was_heard_after_a_stall_saves_the_peer() -> None:
    beat = started()
    assert not beat.is_expired(100.0)
    beat.record_heard(100.5)
    assert listening(beat, 100.75, 120.0) == 104.5


@given(st.lists(st.floats(1.001, 50.0), min_size=5, max_size=30))
def test_a_side_that_keeps_on_stalling_finds_a_dead_peer_dead(gaps: list[float]) -> None:
    beat, now, graces = started(), 0.0, 0
    for gap in gaps:
        now += gap
        if beat.is_expired(now):
            return
        graces += now + INTERVAL > LIMIT
    assert graces <= LIMIT // INTERVAL


def test_graces_are_counted_within_one_silence() -> None:
    beat, now = started(), 0.0
    for _ in range(3):
        for _ in range(int(LIMIT // INTERVAL)):
            now += 10.0
            assert not beat.is_expired(now)
        beat.record_heard(now + 0.5)
        now += 0.5
    for _ in range(int(LIMIT // INTERVAL)):
        now += 10.0
        assert not beat.is_expired(now)
    assert beat.is_expired(now + 10.0)


@given(st.lists(st.floats(0, 0.49), min_size=1, max_size=40))
def test_a_shell_that_follows_the_deadlines_is_not_taken_for_stalled(lateness: list[float]) -> None:
    """Late by less than half an interval each time, it finds a dead peer at its first look at or after the limit."""
    beat, now = started(), 0.0
    for late in lateness * 20:
        wake = beat.next_deadline(now)
        assert now <= wake <= now + INTERVAL / 2
        now = max(wake + late, math.nextafter(now, math.inf))
        assert beat.is_expired(now) == (now >= LIMIT)
        if now >= LIMIT:
            return
        if beat.is_due(now):
            beat.record_sent(now)
    raise AssertionError("the peer never expired")


@given(
    st.lists(
        st.tuples(st.sampled_from(["is_due", "record_sent", "record_heard", "is_expired", "next_deadline"]), QUARTERS),
        max_size=40,
    )
)
def test_deadlines_are_never_missed_between_two_looks(calls: list[tuple[str, float]]) -> None:
    """Whatever was called before: until the deadline nothing is due and nobody expires."""
    beat, now = HeartbeatClock(INTERVAL, LIMIT), 0.0
    for name, step in calls:
        now += step
        getattr(beat, name)(now)
    deadline = beat.next_deadline(now)
    assert now <= deadline <= now + INTERVAL / 2
    if deadline > now:
        before = math.nextafter(deadline, -math.inf)
        assert not beat.is_due(before)
        assert not beat.is_expired(before)
    else:
        assert beat.is_due(now) or beat.is_expired(now)


@given(st.lists(QUARTERS, min_size=1, max_size=30))
def test_a_peer_that_is_heard_in_every_look_never_expires(gaps: list[float]) -> None:
    beat, now = started(), 0.0
    for gap in gaps:
        now += gap
        beat.record_heard(now)
        assert not beat.is_expired(now)


def test_a_clock_that_goes_back_is_held() -> None:
    beat = started(10.0)
    assert not beat.is_expired(5.0)
    beat.record_heard(2.0)
    assert listening(beat, 10.0, 20.0) == 14.0
    assert beat.next_deadline(0.0) == 14.0


@pytest.mark.parametrize(
    ("interval", "limit"), [(0, 1), (-1, 1), (1, 1), (2, 1), (math.nan, 1), (1, math.nan), (1, math.inf)]
)
def test_senseless_times_are_refused(interval: float, limit: float) -> None:
    with pytest.raises(UsageError, match="expected 0 < interval < limit"):
        HeartbeatClock(interval, limit)
