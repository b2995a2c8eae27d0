"""The numbers of leases, against plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiote.core.lease_numbers import MAX_RANGES, Grants, Revocations
from aiote.errors import UsageError

HOLDERS = "abc"
RANGES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=40)


@given(RANGES)
def test_what_is_void_is_what_was_told(ranges: list[tuple[int, int]]) -> None:
    void, plain = Revocations(), set[int]()
    for low, high in ranges:
        void.add(low, high)
        plain |= set(range(low, high + 1))
    assert [number for number in range(-1, 70) if number in void] == sorted(plain)
    runs = sum(number - 1 not in plain for number in plain)
    assert len(void) == runs


class Leasing(RuleBasedStateMachine):
    """One engine that grants and revokes, holders that are told at once or all together when they connect."""

    def __init__(self) -> None:
        super().__init__()
        self.grants = Grants()
        self.live: dict[str, set[int]] = {holder: set() for holder in HOLDERS}
        self.connected = {holder: Revocations() for holder in HOLDERS}
        self.drawn = 0

    @rule(holder=st.sampled_from(HOLDERS))
    def grant(self, holder: str) -> None:
        number = self.grants.grant(holder)
        assert number == self.drawn + 1
        self.drawn = number
        self.live[holder].add(number)

    @precondition(lambda self: any(self.live.values()))
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        holder, number = data.draw(st.sampled_from([(h, n) for h in HOLDERS for n in sorted(self.live[h])]))
        self.live[holder].discard(number)
        low, high = self.grants.revoke(holder, number)
        assert low <= number <= high
        self.connected[holder].add(low, high)

    @rule(holder=st.sampled_from(HOLDERS))
    def reconnect(self, holder: str) -> None:
        """A new connection knows nothing but what it is told."""
        self.connected[holder] = Revocations()
        for low, high in self.grants.void_ranges(holder):
            self.connected[holder].add(low, high)

    @invariant()
    def no_live_lease_is_void(self) -> None:
        for holder in HOLDERS:
            assert not [number for number in self.live[holder] if number in self.connected[holder]]

    @invariant()
    def what_is_remembered_is_bounded_by_what_is_live(self) -> None:
        for holder in HOLDERS:
            assert len(self.connected[holder]) <= len(self.live[holder]) + 1


TestLeasing = Leasing.TestCase


@given(st.lists(st.sampled_from(HOLDERS), max_size=20), st.data())
def test_a_new_connection_is_told_all_that_is_void_and_nothing_else(holders: list[str], data: st.DataObject) -> None:
    grants, live = Grants(), {holder: set[int]() for holder in HOLDERS}
    for holder in holders:
        live[holder].add(grants.grant(holder))
    for holder in HOLDERS:
        for number in data.draw(st.sets(st.sampled_from(sorted(live[holder])))) if live[holder] else ():
            grants.revoke(holder, number)
            live[holder].discard(number)
    for holder in HOLDERS:
        void = Revocations()
        for low, high in grants.void_ranges(holder):
            void.add(low, high)
        assert {number for number in range(1, len(holders) + 1) if number not in void} == live[holder]


def test_a_lease_is_revoked_once() -> None:
    grants = Grants()
    number = grants.grant("a")
    with pytest.raises(KeyError, match="holder 'b' has no lease 1"):
        grants.revoke("b", number)
    assert grants.revoke("a", number) == (1, 1)
    with pytest.raises(KeyError):
        grants.revoke("a", number)
    assert list(grants.void_ranges("nobody")) == [(1, 1)]


def test_a_granter_that_fragments_for_ever_is_stopped() -> None:
    void = Revocations()
    for number in range(MAX_RANGES):
        void.add(2 * number + 1, 2 * number + 1)
    assert len(void) == MAX_RANGES
    with pytest.raises(UsageError, match="ranges of leases"):
        void.add(2 * MAX_RANGES + 9, 2 * MAX_RANGES + 9)
    # What joins two ranges makes fewer of them.
    void.add(2, 2)
    assert len(void) == MAX_RANGES - 1
