"""Members are checked, and a watcher is told differences, never a backlog."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiote
from aiote.discovery.membership import Member, Roster, check_lease
from support.service.registries import member

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "parts",
    [
        {"name": ""},
        {"name": "x" * 129},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"name": 5},
        {"role": ""},
        {"role": "x" * 33},
        {"role": "a\x00"},
        {"role": 0},
        {"address": "text"},
        {"address": bytes(513)},
        {"incarnation": -1},
        {"incarnation": 1 << 64},
        {"incarnation": True},
        {"attributes": {"load": float("nan")}},
        {"attributes": {"load": 1 << 63}},
        {"attributes": {"load": None}},
        {"attributes": {"load": "x" * 129}},
        {"attributes": {"k" * 33: 1}},
        {"attributes": {str(n): n for n in range(17)}},
        {"attributes": 5},
    ],
    ids=str,
)
def test_a_malformed_member_is_refused(parts):
    with pytest.raises(aiote.UsageError):
        Member(**{"name": "a", "role": "decode", "address": b"", "incarnation": 1} | parts)


def test_members_are_compared_by_value_and_cannot_be_changed():
    given_attributes = {"b": 1, "a": True}
    one = Member("n", "decode", b"", 1, given_attributes)
    given_attributes["b"] = 2
    assert dict(one.attributes) == {"a": True, "b": 1}
    assert one == Member("n", "decode", b"", 1, {"a": True, "b": 1}, stale=True)
    assert len({one, Member("n", "decode", b"", 1, {"a": True, "b": 1})}) == 1
    with pytest.raises(TypeError):
        one.attributes["b"] = 2  # type: ignore[index]


@pytest.mark.parametrize("lease_s", [0, 0.01, 601, float("nan"), "1"])
def test_lease_times_out_of_bounds_are_refused(lease_s):
    with pytest.raises(aiote.UsageError):
        check_lease(lease_s)


def test_a_reader_is_told_of_each_change():
    roster = Roster()
    roster.put(member("a"))
    watch = roster.watch()
    roster.put(member("b"))
    told = [(event.kind, event.member.name) for event in iter(watch.take, None)]
    assert told == [("joined", "a"), ("joined", "b")]
    roster.put(member("a", load=1))
    roster.put(member("a", load=1))
    roster.remove("b")
    roster.remove("b")
    assert [(event.kind, event.member.name) for event in iter(watch.take, None)] == [("changed", "a"), ("left", "b")]
    roster.put(member("a", 2))
    told = [(event.kind, event.member.incarnation) for event in iter(watch.take, None)]
    assert told == [("left", 1), ("joined", 2)]


def test_a_slow_reader_is_told_the_latest_and_costs_no_backlog():
    roster = Roster()
    watch = roster.watch()
    for number in range(1000):
        roster.put(member(f"passing{number}"))
        roster.put(member("stays", load=number))
        roster.remove(f"passing{number}")
    assert len(watch._pending) == 1
    assert [event.member.attributes["load"] for event in iter(watch.take, None)] == [999]


async def test_a_watch_that_is_left_is_forgotten():
    roster = Roster()
    roster.put(member("a"))
    for _ in range(10):
        async for _event in roster.watch():
            break
    gc.collect()
    assert roster.watchers == 0


STEPS = st.lists(st.tuples(st.sampled_from("prt"), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 2)))


@given(STEPS)
def test_applying_the_events_of_a_watch_gives_the_members(steps):
    roster = Roster()
    watch = roster.watch()
    known: dict[str, Member] = {}

    def read(most: int) -> None:
        for _ in range(most):
            if (event := watch.take()) is None:
                return
            name = event.member.name
            assert (event.kind == "joined") == (name not in known)
            if event.kind == "left":
                assert known.pop(name) == event.member
            else:
                assert known.get(name) != event.member
                assert event.kind == "joined" or known[name].incarnation == event.member.incarnation
                known[name] = event.member

    for step, name, incarnation, load in steps:
        if step == "p":
            roster.put(member(name, incarnation, load=load))
        elif step == "r":
            roster.remove(name)
        else:
            read(load)
        assert len(watch._pending) <= 3
    read(100)
    assert known == roster.known
