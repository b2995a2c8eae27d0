"""The agreement about a dead channel: counts, the difference of two sides', and every state with every event."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.control import ControlError, Role
from aiote.core.failover import (
    BACKOFF_FIRST,
    BACKOFF_MAX,
    OPENING_LIMIT,
    STABLE_S,
    Account,
    Action,
    ChannelState,
    ChannelStates,
    FailoverError,
    Join,
    LosePeer,
    OpenAgain,
    Received,
    Reconcile,
    SendArrivals,
    SendRailDown,
    Shut,
)
from aiote.errors import UsageError
from reference import channel_counts
from reference.channel_counts import CONFIRMED_LIMIT, ChannelCounts, Verdict, reconcile

LIVE, SHUTTING, LEAVING, SHUT, EXCHANGING, DOWN, OPENING, JOINING, LOST = ChannelState
INITIATOR, ACCEPTOR = Role.INITIATOR, Role.ACCEPTOR
CAME = Account(((5, 2),), Received(3, ((5, 6),)))


def test_a_channel_counts_confirmed_and_arrived_immediates_apart() -> None:
    counts = ChannelCounts()
    for imm_data in (7, 5, 7):
        counts.confirm(imm_data)
        counts.arrive(imm_data + 1)
    assert dict(counts.confirmed) == {5: 1, 7: 2}
    assert counts.arrivals() == ((6, 1), (8, 2))
    assert len(counts) == 2


def test_a_sender_acknowledges_what_is_over_the_limit() -> None:
    counts = ChannelCounts()
    for imm_data in range(CONFIRMED_LIMIT):
        counts.confirm(imm_data)
        counts.confirm(imm_data)
        assert counts.counts_to_ack() is None
    counts.confirm(CONFIRMED_LIMIT)
    assert counts.counts_to_ack() == (*((imm_data, 2) for imm_data in range(CONFIRMED_LIMIT)), (CONFIRMED_LIMIT, 1))
    assert not counts.confirmed
    assert counts.counts_to_ack() is None


def test_an_acknowledgement_may_come_before_what_it_acknowledges() -> None:
    counts = ChannelCounts()
    counts.arrive(5)
    counts.ack_counts([(5, 3)])
    with pytest.raises(FailoverError, match="acknowledged 2 posts of the immediate 0x5 more than arrived"):
        counts.arrivals()
    counts.arrive(5)
    counts.arrive(5)
    assert (counts.arrivals(), len(counts)) == ((), 0)


@pytest.mark.parametrize("n", [0, -1])
def test_an_acknowledgement_of_nothing_is_refused(n: int) -> None:
    with pytest.raises(FailoverError, match="at least 1"):
        ChannelCounts().ack_counts([(5, n)])


def test_a_peer_that_never_acknowledges_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_counts, "ARRIVED_LIMIT", 3)
    counts = ChannelCounts()
    for imm_data in range(3):
        counts.arrive(imm_data)
    with pytest.raises(FailoverError, match="did not acknowledge"):
        counts.arrive(3)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=60),
    st.randoms(use_true_random=False),
    st.integers(0, 4),
)
def test_acknowledging_never_changes_the_difference(
    posts: list[tuple[int, bool, bool]], source: random.Random, limit: int
) -> None:
    """Whenever arrivals, completions and AckCounts are read, what is left says how many of the unconfirmed came."""
    sender, receiver = ChannelCounts(limit), ChannelCounts(limit)
    unread: list[tuple[str, object]] = []
    unconfirmed: Counter[int] = Counter()
    came: Counter[int] = Counter()
    for imm_data, arrived, confirmed in posts:
        if arrived:
            unread.append(("arrival", imm_data))
        if arrived and confirmed:
            sender.confirm(imm_data)
            items = sender.counts_to_ack()
            if items is not None:
                unread.append(("ack", items))
            assert len(sender.confirmed) <= limit
        else:
            unconfirmed[imm_data] += 1
            came[imm_data] += arrived
    source.shuffle(unread)
    for kind, what in unread:
        if kind == "ack":
            receiver.ack_counts(what)
        else:
            receiver.arrive(what)
    verdicts = reconcile(
        {imm_data: (n, 0) for imm_data, n in unconfirmed.items()}, sender.confirmed, dict(receiver.arrivals())
    )
    assert {imm_data: verdict.came for imm_data, verdict in verdicts.items()} == dict(came)
    assert {imm_data: verdict.missing for imm_data, verdict in verdicts.items()} == dict(unconfirmed - came) | {
        imm_data: 0 for imm_data in unconfirmed if unconfirmed[imm_data] == came[imm_data]
    }


@pytest.mark.parametrize(
    ("unconfirmed", "confirmed", "arrived", "verdict"),
    [
        ((2, 0), 3, 5, Verdict(False, 0, 2)),
        ((2, 0), 3, 4, Verdict(True, 1, 1)),
        ((2, 0), 0, 0, Verdict(True, 2, 0)),
        ((2, 1), 0, 3, Verdict(False, 0, 3)),
        ((2, 1), 0, 2, Verdict(True, 0, 2)),
        ((2, 1), 0, 1, Verdict(True, 1, 1)),
        ((0, 2), 0, 0, Verdict(False, 0, 0)),
        ((0, 2), 0, 1, Verdict(False, 0, 1)),
    ],
)
def test_a_verdict_says_what_came_and_what_is_missing(
    unconfirmed: tuple[int, int], confirmed: int, arrived: int, verdict: Verdict
) -> None:
    assert reconcile({9: unconfirmed}, {9: confirmed}, {9: arrived}) == {9: verdict}


@given(*[st.dictionaries(st.integers(0, 3), st.integers(0, 4)) for _ in range(4)])
def test_impossible_numbers_are_refused(
    live: dict[int, int], cancelled: dict[int, int], confirmed: dict[int, int], arrived: dict[int, int]
) -> None:
    unconfirmed = {imm_data: (live.get(imm_data, 0), cancelled.get(imm_data, 0)) for imm_data in {*live, *cancelled}}
    came = {imm_data: arrived.get(imm_data, 0) - confirmed.get(imm_data, 0) for imm_data in range(4)}
    if all(0 <= came[imm_data] <= sum(unconfirmed.get(imm_data, (0, 0))) for imm_data in range(4)):
        verdicts = reconcile(unconfirmed, confirmed, arrived)
        assert set(verdicts) == set(unconfirmed)
        for imm_data, verdict in verdicts.items():
            assert live.get(imm_data, 0) <= verdict.came + verdict.missing <= sum(unconfirmed[imm_data])
    else:
        with pytest.raises(FailoverError, match="the peer says"):
            reconcile(unconfirmed, confirmed, arrived)


def test_a_failure_of_the_protocol_is_one_of_the_control_connection() -> None:
    assert issubclass(FailoverError, ControlError)


# Channels.


def states(role: Role, count: int = 2) -> ChannelStates:
    return ChannelStates(count, role, random.Random(1))


ROADS: dict[tuple[Role, ChannelState], list[Callable[[ChannelStates], list[Action]]]] = {
    (INITIATOR, LIVE): [],
    (INITIATOR, SHUTTING): [lambda one: one.record_failed(1, "why", 0.0)],
    (INITIATOR, LEAVING): [lambda one: one.on_rail_down(1, 0, "why", 0.0)],
}
ROADS[INITIATOR, SHUT] = [*ROADS[INITIATOR, SHUTTING], lambda one: one.record_shut(1)]
ROADS[INITIATOR, EXCHANGING] = [*ROADS[INITIATOR, LEAVING], lambda one: one.record_shut(1)]
ROADS[INITIATOR, DOWN] = [*ROADS[INITIATOR, EXCHANGING], lambda one: one.on_arrivals(1, 0, CAME, 0.0)]
ROADS |= {(ACCEPTOR, state): road for (_, state), road in ROADS.items()}
ROADS[INITIATOR, OPENING] = [*ROADS[INITIATOR, DOWN], lambda one: one.advance(1.0)]
ROADS[INITIATOR, JOINING] = [*ROADS[INITIATOR, OPENING], lambda one: one.on_reopen(1, 1, 1.0)]
ROADS[ACCEPTOR, JOINING] = [*ROADS[ACCEPTOR, DOWN], lambda one: one.on_reopen(1, 1, 1.0)]
LAST = [lambda one: one.record_failed(0, "the last", 2.0)]
ROADS |= {(role, LOST): [*ROADS[role, JOINING], *LAST] for role in Role}


def at(role: Role, state: ChannelState) -> tuple[ChannelStates, int]:
    """Return channels of which number 1 is in this state, and its generation."""
    one = states(role)
    for step in ROADS[role, state]:
        step(one)
    assert one.state(1) is state
    return one, one.generation(1)


# What a (state, event) leads to; everything else is ignored, refused or a mistake, as below.
LEADS: dict[tuple[ChannelState, str], tuple[ChannelState, list[type]]] = {
    **{(state, "failed"): (SHUTTING, [Shut]) for state in (LIVE, OPENING, JOINING)},
    **{(state, "down"): (LEAVING, [Shut]) for state in (LIVE, OPENING, JOINING)},
    **{(state, "due"): (SHUTTING, [Shut]) for state in (OPENING, JOINING)},
    (SHUTTING, "shut"): (SHUT, [SendRailDown]),
    (SHUTTING, "down"): (LEAVING, []),
    (LEAVING, "shut"): (EXCHANGING, [SendRailDown, SendArrivals]),
    (SHUT, "down"): (EXCHANGING, [SendArrivals]),
    (EXCHANGING, "arrivals"): (DOWN, [Reconcile]),
    (JOINING, "joined"): (LIVE, []),
}
OF_ONE_ROLE: dict[tuple[Role, ChannelState, str], tuple[ChannelState, list[type]]] = {
    (INITIATOR, DOWN, "due"): (OPENING, [OpenAgain]),
    (INITIATOR, OPENING, "reopen"): (JOINING, [Join]),
    (INITIATOR, SHUTTING, "reopen"): (SHUTTING, []),
    (INITIATOR, SHUT, "reopen"): (SHUT, []),
    (ACCEPTOR, DOWN, "next reopen"): (JOINING, [OpenAgain]),
    (ACCEPTOR, DOWN, "next down"): (LEAVING, [Shut]),
}
EVENTS: dict[str, Callable[[ChannelStates, int], list[Action]]] = {
    "failed": lambda one, _: one.record_failed(1, "again", 2.0),
    "shut": lambda one, _: one.record_shut(1),
    "joined": lambda one, _: one.record_joined(1, 2.0),
    "due": lambda one, _: one.advance(100.0),
    "down": lambda one, now: one.on_rail_down(1, now, "theirs", 2.0),
    "arrivals": lambda one, now: one.on_arrivals(1, now, CAME, 2.0),
    "reopen": lambda one, now: one.on_reopen(1, now, 2.0),
    "next down": lambda one, now: one.on_rail_down(1, now + 1, "theirs", 2.0),
    "next arrivals": lambda one, now: one.on_arrivals(1, now + 1, CAME, 2.0),
    "next reopen": lambda one, now: one.on_reopen(1, now + 1, 2.0),
}
IGNORED = {"failed", "joined", "due"}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("role", "state"), ROADS, ids=str)
def test_every_event_in_every_state_leads_where_the_table_says(role: Role, state: ChannelState, event: str) -> None:
    one, generation = at(role, state)
    expected = OF_ONE_ROLE.get((role, state, event)) or LEADS.get((state, event))
    if state is LOST or (expected is None and event in IGNORED):
        expected = state, []
    if expected is None:
        with pytest.raises(UsageError if event == "shut" else FailoverError):
            EVENTS[event](one, generation)
        assert one.state(1) is state
    else:
        actions = EVENTS[event](one, generation)
        assert (one.state(1), [type(action) for action in actions]) == expected
    assert one.state(0) is (LOST if state is LOST else LIVE)


@pytest.mark.parametrize("event", ["down", "arrivals", "reopen"])
@pytest.mark.parametrize(("role", "state"), ROADS, ids=str)
def test_events_of_a_past_generation_are_ignored(role: Role, state: ChannelState, event: str) -> None:
    one, generation = at(role, state)
    assert EVENTS[event](one, generation - 1) == []
    assert one.state(1) is state
    assert not one.on_ack_counts(1, generation - 1)


@pytest.mark.parametrize(("role", "state"), ROADS, ids=str)
def test_acknowledgements_are_taken_until_the_peer_is_down(role: Role, state: ChannelState) -> None:
    one, generation = at(role, state)
    if state is LOST:
        assert not one.on_ack_counts(1, generation)
        return
    if state in (LIVE, JOINING, SHUTTING, SHUT):
        assert one.on_ack_counts(1, generation)
    else:
        with pytest.raises(FailoverError, match="AckCounts of channel 1"):
            one.on_ack_counts(1, generation)
    with pytest.raises(FailoverError):
        one.on_ack_counts(1, generation + 1)


def test_actions_name_the_channel_and_the_generation_they_are_for() -> None:
    one = states(INITIATOR, 3)
    assert one.record_failed(2, "no light", 5.0) == [Shut(2)]
    assert one.live == (0, 1)
    assert one.record_shut(2) == [SendRailDown(2, 0, "no light")]
    assert one.on_rail_down(2, 0, "theirs", 5.0) == [SendArrivals(2, 0)]
    assert one.deadline is None
    assert one.on_arrivals(2, 0, CAME, 5.0) == [Reconcile(2, CAME)]
    assert one.deadline is not None
    assert one.advance(one.deadline) == [OpenAgain(2, 1)]
    assert one.on_reopen(2, 1, 6.0) == [Join(2, 1)]
    assert one.record_joined(2, 6.5) == []
    assert (one.live, one.deadline, one.generation(2)) == ((0, 1, 2), None, 1)


def test_a_side_that_leaves_because_it_was_told_says_why() -> None:
    one = states(ACCEPTOR)
    one.on_rail_down(0, 0, "theirs", 0.0)
    assert one.record_shut(0) == [SendRailDown(0, 0, "theirs"), SendArrivals(0, 0)]


@pytest.mark.parametrize("role", Role)
def test_without_a_channel_the_peer_is_lost(role: Role) -> None:
    one = states(role)
    one.record_failed(0, "first", 0.0)
    actions = one.on_rail_down(1, 0, "second", 0.0)
    assert actions == [LosePeer("no channel is left, and the last, channel 1, failed: second")]
    assert (one.live, one.deadline) == ((), None)
    assert one.record_shut(0) == one.record_failed(1, "again", 1.0) == one.advance(1e9) == []


def test_failure_of_the_only_channel_loses_the_peer() -> None:
    assert [type(action) for action in states(INITIATOR, 1).record_failed(0, "why", 0.0)] == [LosePeer]


@pytest.mark.parametrize("k", [-1, 2])
def test_a_channel_that_does_not_exist_is_refused(k: int) -> None:
    one = states(ACCEPTOR)
    for mistake in (
        lambda: one.record_failed(k, "", 0.0),
        lambda: one.record_shut(k),
        lambda: one.record_joined(k, 0.0),
    ):
        with pytest.raises(UsageError):
            mistake()
    for violation in (
        lambda: one.on_rail_down(k, 0, "", 0.0),
        lambda: one.on_arrivals(k, 0, CAME, 0.0),
        lambda: one.on_reopen(k, 1, 0.0),
        lambda: one.on_ack_counts(k, 0),
    ):
        with pytest.raises(FailoverError, match="names channel"):
            violation()


def test_zero_channels_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        states(INITIATOR, 0)


def fail_and_come_down(one: ChannelStates, now: float) -> float:
    """Let channel 1 fail; return how long it is going to stay down."""
    generation = one.generation(1)
    one.record_failed(1, "why", now)
    one.record_shut(1)
    one.on_rail_down(1, generation, "why", now)
    one.on_arrivals(1, generation, CAME, now)
    assert one.deadline is not None
    return one.deadline - now


@given(st.integers(0, 2**32))
def test_the_back_off_doubles_up_to_its_limit_with_full_jitter(seed: int) -> None:
    one = ChannelStates(2, INITIATOR, random.Random(seed))
    now = 0.0
    for failure in range(80):
        wait = fail_and_come_down(one, now)
        assert 0 <= wait <= min(BACKOFF_MAX, BACKOFF_FIRST * 2**failure)
        now += wait
        assert one.advance(now) == [OpenAgain(1, failure + 1)]


def test_a_thousand_peers_do_not_come_back_at_once() -> None:
    waits = []
    for seed in range(1000):
        one = ChannelStates(2, INITIATOR, random.Random(seed))
        for _ in range(6):
            wait = fail_and_come_down(one, 0.0)
            one.advance(wait)
        waits.append(wait)
    longest = BACKOFF_FIRST * 2**5
    spread = Counter(int(wait / longest * 10) for wait in waits)
    assert all(60 < spread[tenth] < 140 for tenth in range(10))


@pytest.mark.parametrize(("lived", "anew"), [(STABLE_S + 1, True), (STABLE_S - 1, False)])
def test_the_back_off_begins_anew_after_a_while_without_failure(lived: float, anew: bool) -> None:
    longest = []
    for seed in range(200):
        one = ChannelStates(2, INITIATOR, random.Random(seed))
        now = 0.0
        for _ in range(7):
            now += fail_and_come_down(one, now)
            one.advance(now)
        one.on_reopen(1, 7, now)
        one.record_joined(1, now)
        longest.append(fail_and_come_down(one, now + lived))
    assert (max(longest) <= BACKOFF_FIRST) is anew


@pytest.mark.parametrize("role", Role)
def test_a_channel_that_is_not_joined_in_time_has_failed(role: Role) -> None:
    one, generation = at(role, JOINING)
    assert one.deadline == 1.0 + OPENING_LIMIT
    assert one.advance(one.deadline - 0.001) == []
    assert one.advance(one.deadline) == [Shut(1)]
    assert one.record_shut(1) == [SendRailDown(1, generation, f"not joined within {OPENING_LIMIT:g} seconds")]


def test_an_acceptor_never_opens_a_channel_by_itself() -> None:
    one, _ = at(ACCEPTOR, DOWN)
    assert one.deadline is None
    assert one.advance(1e9) == []
