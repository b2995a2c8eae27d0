"""When work under way counts as stuck: neither ends nor bytes for the limit, less an interval."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiote.core.stall import StallDetector

INTERVAL, LIMIT = 1.0, 4.0
QUARTERS = st.integers(1, 12).map(lambda quarters: quarters / 4)


def stuck_at(clock: StallDetector, ended: dict[int, int], moved: int, start: float = 0.0):
    """Look every quarter of a second at what never changes; return the time and the channel that was found stuck."""
    now = start
    while now < start + 60:
        if clock.is_due(now) and (found := clock.find_stalled(now, ended, lambda _channel: moved)) is not None:
            return now, found
        now += INTERVAL / 4
    return None


def test_what_stands_still_is_stuck_within_the_limit_and_an_interval():
    found = stuck_at(StallDetector(INTERVAL, LIMIT), {3: 7}, 1000, start=100.0)
    assert found is not None
    assert found[1] == 3
    assert LIMIT - INTERVAL <= found[0] - 100.0 <= LIMIT + INTERVAL


def test_nothing_under_way_is_never_stuck():
    assert stuck_at(StallDetector(INTERVAL, LIMIT), {}, 1000) is None


def test_nothing_is_stuck_where_the_bytes_are_unknown():
    assert stuck_at(StallDetector(INTERVAL, LIMIT), {0: 5}, -1) is None


@given(st.lists(QUARTERS, min_size=1, max_size=80))
def test_bytes_that_go_on_are_no_standstill(gaps):
    """However slowly: one more byte at each look, and no request ends."""
    clock, now, moved = StallDetector(INTERVAL, LIMIT), 0.0, 0
    for gap in gaps:
        now, moved = now + gap, moved + 1
        assert clock.find_stalled(now, {0: 9}, lambda _channel, moved=moved: moved) is None


def test_a_channel_on_which_requests_end_is_not_asked_for_its_bytes():
    clock, asked = StallDetector(INTERVAL, LIMIT), []
    for ended in range(40):
        assert clock.find_stalled(ended * 0.5, {0: ended}, lambda channel: asked.append(channel) or 0) is None
    assert asked == []


def test_the_stuck_one_is_found_among_those_that_go_on():
    clock = StallDetector(INTERVAL, LIMIT)
    found = [clock.find_stalled(step * 0.5, {0: step, 1: 8}, lambda _channel: 50) for step in range(20)]
    assert set(found) == {None, 1}


def test_work_that_ended_meanwhile_starts_anew():
    clock = StallDetector(INTERVAL, LIMIT)
    for step in range(40):
        busy = {0: 3} if step % 6 else {}
        assert clock.find_stalled(step * 0.5, busy, lambda _channel: 50) is None


@given(st.floats(2.0, 1000.0))
def test_a_shell_that_was_held_up_counts_an_interval_at_most(stall):
    clock = StallDetector(INTERVAL, LIMIT)
    for now in (0.0, 0.5, 1.0, 1.0 + stall):
        assert clock.find_stalled(now, {0: 3}, lambda _channel: 50) is None


def test_looks_are_half_an_interval_apart():
    clock = StallDetector(INTERVAL, LIMIT)
    assert clock.is_due(10.0)
    clock.find_stalled(10.0, {}, lambda _channel: 0)
    assert not clock.is_due(10.25)
    assert clock.is_due(10.5)
