"""The table of registrations: who holds what is counted, what nobody holds is kept within limits, nothing is lost."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiote.transfers import Registrations, SharedRegistration

LIMIT = 100
MOST = 3
KEYS = [
    (address, nbytes, True, "local") for address, nbytes in ((1, 10), (2, 30), (3, 50), (4, 100), (5, 101), (1, 20))
]


class FakeRegion:
    """What the table knows of a region."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.closed = False


def made(table: Registrations, key: Any) -> SharedRegistration:
    return table.add(key, FakeRegion(key[1]))


def test_registrations_without_holders_are_kept_and_the_least_recently_used_goes_first():
    table = Registrations(LIMIT, MOST)
    first, second, third = (made(table, key) for key in KEYS[:3])
    for held in (first, second, third):
        assert table.let_go(held) == []
    assert table.hold(first.key) is first
    assert table.let_go(first) == []
    fourth = made(table, (9, 40, True, "local"))
    assert table.let_go(fourth) == [second.region]
    assert table.hold(second.key) is None
    assert (table.idle_bytes, len(table)) == (100, 3)


def test_registrations_beyond_the_greatest_number_are_not_kept():
    table = Registrations(LIMIT, MOST)
    every = [made(table, (address, 1, True, "local")) for address in range(MOST + 1)]
    assert [table.let_go(held) for held in every] == [[], [], [], [every[0].region]]


def test_a_registration_larger_than_the_limit_is_closed_and_displaces_none():
    table = Registrations(LIMIT, MOST)
    small, large = made(table, KEYS[0]), made(table, KEYS[4])
    assert table.let_go(small) == []
    assert table.let_go(large) == [large.region]
    assert table.hold(small.key) is small


def test_a_registration_that_is_not_kept_is_closed_with_its_last_holder():
    table = Registrations(LIMIT, MOST)
    held = made(table, KEYS[0])
    assert table.hold(held.key) is held
    assert table.let_go(held, keep=False) == []
    assert table.let_go(held, keep=False) == [held.region]
    assert table.hold(held.key) is None


def test_a_forgotten_registration_stays_its_holders_and_another_takes_its_place():
    table = Registrations(LIMIT, MOST)
    old = made(table, KEYS[0])
    assert table.forget(old) == []
    new = made(table, KEYS[0])
    assert table.let_go(old) == [old.region]
    assert table.hold(KEYS[0]) is new
    assert new.holders == 2


class Holding(RuleBasedStateMachine):
    """Holders come and go in any order; the model is how many each registration has."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.table = Registrations(LIMIT, MOST)
        self.holders: dict[SharedRegistration, int] = {}
        self.forgotten: set[SharedRegistration] = set()

    def close(self, regions: list[Any]) -> None:
        for region in regions:
            assert not region.closed, "it is closed once"
            region.closed = True

    @rule(target=handles, key=st.sampled_from(KEYS))
    def hold(self, key: Any) -> SharedRegistration:
        held = self.table.hold(key)
        if held is None:
            assert all(one.key != key or one in self.forgotten for one in self.holders), "it is there already"
            held = made(self.table, key)
        assert not held.region.closed
        self.holders[held] = self.holders.get(held, 0) + 1
        return held

    @rule(held=consumes(handles), keep=st.booleans())
    def let_go(self, held: SharedRegistration, keep: bool) -> None:
        self.holders[held] -= 1
        self.close(self.table.let_go(held, keep=keep))
        if not self.holders[held]:
            del self.holders[held]
            kept = keep and held.region.nbytes <= LIMIT and held not in self.forgotten
            assert held.region.closed is not kept, "the one that came last is kept, if any is"

    @rule(held=handles)
    def forget(self, held: SharedRegistration) -> None:
        self.close(self.table.forget(held))
        if held in self.holders:
            self.forgotten.add(held)

    @rule(nbytes=st.integers(0, LIMIT))
    def trim(self, nbytes: int) -> None:
        self.close(self.table.trim(nbytes))
        assert self.table.idle_bytes <= nbytes

    @invariant()
    def is_counted(self) -> None:
        assert {held: held.holders for held in self.holders} == self.holders
        assert not any(held.region.closed for held in self.holders)
        assert self.table.in_use == len(self.holders.keys() - self.forgotten)
        assert self.table.idle_bytes <= LIMIT
        assert len(self.table) - self.table.in_use <= MOST


TestHolding = Holding.TestCase
