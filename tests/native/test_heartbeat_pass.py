"""One pass over the heartbeats of many peers: the rule of `HeartbeatClock`, and the counts in the peers' pages.

All in a time of the test's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.heartbeat_clock import HeartbeatClock
from aiote.rails import BeatCounts, Pulse, check_pulses
from support.rails.rail_pair import Kind, Pair, filled, opened

INTERVAL, LIMIT, EARLY = 1.0, 4.0, 0.25
QUARTERS = st.integers(0, 20).map(lambda quarters: quarters / 4)
CALLS = st.sampled_from(["due", "early", "sent", "heard", "expired", "next"])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with opened(Kind("local")) as rails:
        yield Pair.of(rails)


def called(clock: HeartbeatClock | Pulse, call: str, now: float) -> object:
    match call:
        case "due":
            return clock.is_due(now)
        case "early":
            return clock.is_due(now, EARLY)
        case "expired":
            return clock.is_expired(now)
        case "next":
            return clock.next_deadline(now)
        case "sent":
            return clock.record_sent(now)
        case _:
            return clock.record_heard(now)


@given(st.lists(st.tuples(CALLS, QUARTERS), max_size=40), st.sampled_from([None, 0.25, 3.0]))
def test_a_pulse_is_a_heartbeat_clock(calls, told):
    clock, pulse = HeartbeatClock(INTERVAL, LIMIT, told), Pulse(INTERVAL, LIMIT, told)
    now = 0.0
    for call, passed in calls:
        now += passed
        assert called(pulse, call, now) == called(clock, call, now)


@pytest.mark.parametrize(("interval", "limit"), [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_times_that_are_none_are_refused(interval, limit):
    with pytest.raises(ValueError, match="expected 0 < interval < limit"):
        Pulse(interval, limit)


def beat(_now: float) -> float:
    return math.inf


def followed(pair: Pair, now: float = 0.0) -> Pulse:
    """Return a's pulse of b, whose page it has."""
    pulse = Pulse(INTERVAL, LIMIT)
    pulse.record_heard(now)
    pulse.follow_link(pair.ab)
    return pulse


def test_a_peer_whose_count_goes_on_lives_and_costs_no_call(pair):
    pulse = followed(pair)
    assert pulse.shared
    for step in range(1, 100):
        pair.b.core.wakeup_event.beat()
        wanted, due = check_pulses({beat: pulse}, step / 2, EARLY, BeatCounts())
        assert wanted == []
        assert step / 2 < due <= step / 2 + INTERVAL / 2


@pytest.mark.parametrize("beats", [0, 1, 5])
def test_a_peer_whose_count_stands_still_is_found_at_the_limit(pair, beats):
    """Never later than so long after its last count, and an interval before at most."""
    pulse, now = followed(pair), 0.0
    for _ in range(beats):
        now += INTERVAL / 2
        pair.b.core.wakeup_event.beat()
        assert check_pulses({beat: pulse}, now, EARLY, BeatCounts())[0] == []
    last = now
    while not check_pulses({beat: pulse}, now, EARLY, BeatCounts())[0]:
        now += INTERVAL / 4
    assert pulse.is_expired(now)
    assert last + LIMIT - INTERVAL <= now <= last + LIMIT


def test_a_peer_that_does_not_count_is_sent_heartbeats():
    with opened(Kind("socket")) as rails:
        pulse = followed(Pair.of(rails))
        assert not pulse.shared
        assert check_pulses({beat: pulse}, 0.0, EARLY, BeatCounts())[0] == [beat]
        pulse.record_sent(0.0)
        assert check_pulses({beat: pulse}, 0.5, EARLY, BeatCounts()) == ([], 1.0)
        assert check_pulses({beat: pulse}, 0.75, EARLY, BeatCounts())[0] == [beat]


def test_what_is_under_way_is_looked_at_until_it_has_been_seen_to_end(pair):
    pulse, now = followed(pair), 1.0
    source, target = pair.a.register(filled(8 << 20)), pair.b.register(8 << 20)
    pair.rails.rest()
    done = pair.a.write(pair.ab, source, target.remote)
    for _ in range(3):
        pair.b.core.wakeup_event.beat()
        assert check_pulses({beat: pulse}, now, EARLY, BeatCounts())[0] == [beat]
        now += INTERVAL / 2
    pair.rails.finish(done)
    for expected in ([beat], [], []):
        pair.b.core.wakeup_event.beat()
        assert check_pulses({beat: pulse}, now, EARLY, BeatCounts())[0] == expected
        now += INTERVAL / 2


def test_those_without_a_pulse_and_the_attentive_are_called_each_time(pair):
    pulse = followed(pair)
    pulse.every_check = True
    others = [lambda _now: 0.0, lambda _now: 1.0]
    beats = {others[0]: None, beat: pulse, others[1]: None}
    assert check_pulses(beats, 0.25, EARLY, BeatCounts()) == ([others[0], beat, others[1]], math.inf)


def test_a_link_that_was_closed_is_followed_no_further(pair):
    pulse = followed(pair)
    pair.a.close_link(pair.ab)
    now = 0.25
    while not check_pulses({beat: pulse}, now, EARLY, BeatCounts())[0]:
        now += INTERVAL / 4
    assert now == LIMIT
