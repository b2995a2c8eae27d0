"""Counts of immediates: exact in any order, consumed first come first served, and gone when nobody needs them."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aiote.core.striping import MAX_COUNTED, encode_immediate, plan
from aiote.errors import UsageError
from reference.imm_counters import MAX_WAIT, UNITS, ImmCounters, Ticket, TicketState

WHOLE = encode_immediate(5, 1)


def stripe_immediates(imm: int, stripes: int) -> list[int]:
    """The immediates by which one write of so many stripes arrives."""
    return [encode_immediate(imm, stripes)] * stripes


def test_the_units_of_a_write_divide_by_any_number_of_stripes() -> None:
    assert UNITS == 720720
    assert all(UNITS % stripes == 0 for stripes in range(1, 17))


@pytest.mark.parametrize("stripes", range(1, MAX_COUNTED + 1))
def test_a_write_counts_one_however_it_was_split(stripes: int) -> None:
    counters = ImmCounters()
    for imm_data in stripe_immediates(5, stripes)[1:]:
        counters.arrive(imm_data)
    assert counters.value(5) == 0
    counters.arrive(stripe_immediates(5, stripes)[0])
    assert counters.value(5) == 1
    assert counters.wait(5, 1).satisfied


@given(st.lists(st.tuples(st.sampled_from([3, 5]), st.integers(1, 16)), max_size=30), st.randoms(use_true_random=False))
def test_the_order_of_arrival_is_irrelevant(writes: list[tuple[int, int]], shuffled: random.Random) -> None:
    arrivals = [imm_data for imm, stripes in writes for imm_data in stripe_immediates(imm, stripes)]
    shuffled.shuffle(arrivals)
    counters = ImmCounters()
    for imm_data in arrivals:
        counters.arrive(imm_data)
    for imm in (3, 5):
        expected = sum(value == imm for value, _ in writes)
        assert counters.value(imm) == expected
        assert counters.wait(imm, expected).satisfied
        assert not counters.wait(imm, 1).satisfied


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 300_000), st.integers(1, 10**5)), max_size=8
    )
)
def test_lengths_lanes_and_limits_are_irrelevant_to_the_count(writes: list[tuple[int, int, int, int]]) -> None:
    counters = ImmCounters()
    for write in writes:
        length, lanes, largest, smallest = write
        cut = plan(length, lanes, max(largest, length // 100 + 1), smallest, True)
        for _ in cut.tail:
            counters.arrive(encode_immediate(5, cut.counted))
    assert counters.value(5) == len(writes)


def test_arrivals_before_the_first_waiter_are_kept() -> None:
    counters = ImmCounters()
    assert counters.arrive(WHOLE) == counters.arrive(WHOLE) == []
    ticket = counters.wait(5, 2)
    assert (ticket.satisfied, counters.value(5)) == (True, 0)


def test_the_last_arrival_names_its_waiters() -> None:
    counters = ImmCounters()
    first, second, third = (counters.wait(5, n) for n in (2, 0, 1))
    assert counters.arrive(WHOLE) == []
    assert counters.arrive(WHOLE) == [first, second]
    assert counters.arrive(encode_immediate(6, 1)) == []
    assert counters.arrive(WHOLE) == [third]


def test_a_wait_for_zero_is_satisfied_unless_others_wait_ahead() -> None:
    counters = ImmCounters()
    assert counters.wait(5, 0).satisfied
    ahead, behind = counters.wait(5, 1), counters.wait(5, 0)
    assert not behind.satisfied
    assert counters.arrive(WHOLE) == [ahead, behind]


def test_who_waits_for_less_does_not_overtake() -> None:
    counters = ImmCounters()
    large, small = counters.wait(5, 3), counters.wait(5, 1)
    for _ in range(2):
        assert counters.arrive(WHOLE) == []
    assert counters.arrive(WHOLE) == [large]
    assert not small.satisfied


def test_cancelling_the_head_lets_the_next_ones_pass() -> None:
    counters = ImmCounters()
    head, second, third = counters.wait(5, 3), counters.wait(5, 1), counters.wait(5, 1)
    counters.arrive(WHOLE)
    counters.arrive(WHOLE)
    assert counters.cancel(head) == [second, third]
    assert (head.state, counters.value(5)) == (TicketState.CANCELLED, 0)
    assert counters.cancel(head) == []


def test_cancelling_behind_the_head_changes_nothing_for_it() -> None:
    counters = ImmCounters()
    head, second, third = counters.wait(5, 2), counters.wait(5, 1), counters.wait(5, 1)
    assert counters.cancel(second) == []
    counters.arrive(WHOLE)
    assert counters.arrive(WHOLE) == [head]
    assert counters.arrive(WHOLE) == [third]


def test_a_satisfied_wait_that_nobody_was_told_of_gives_its_counts_back() -> None:
    counters = ImmCounters()
    ticket, behind = counters.wait(5, 1), counters.wait(5, 1)
    assert counters.arrive(WHOLE) == [ticket]
    assert counters.cancel(ticket) == [behind]
    assert counters.cancel(behind) == []
    assert counters.value(5) == 1


def test_a_delivered_wait_gives_nothing_back() -> None:
    counters = ImmCounters()
    ticket = counters.wait(5, 1)
    counters.arrive(WHOLE)
    counters.deliver(ticket)
    assert counters.cancel(ticket) == []
    assert (ticket.state, counters.value(5), len(counters)) == (TicketState.DELIVERED, 0, 0)


def test_only_a_satisfied_ticket_is_delivered_and_once() -> None:
    counters = ImmCounters()
    ticket = counters.wait(5, 1)
    with pytest.raises(UsageError, match="pending> cannot be delivered"):
        counters.deliver(ticket)
    counters.arrive(WHOLE)
    counters.deliver(ticket)
    with pytest.raises(UsageError, match="delivered> cannot be delivered"):
        counters.deliver(ticket)


def test_an_entry_exists_only_while_it_says_something() -> None:
    counters = ImmCounters()
    assert (counters.value(5), len(counters)) == (0, 0)
    counters.arrive(encode_immediate(5, 2))
    assert (counters.value(5), len(counters)) == (0, 1)
    counters.arrive(encode_immediate(5, 2))
    ticket = counters.wait(5, 1)
    assert len(counters) == 1
    counters.deliver(ticket)
    assert len(counters) == 0
    counters.cancel(counters.wait(5, 1))
    assert len(counters) == 0


def test_a_held_immediate_keeps_its_count_until_it_is_freed() -> None:
    counters = ImmCounters()
    counters.hold(5)
    counters.hold(5)
    counters.arrive(WHOLE)
    counters.free(5)
    assert (counters.value(5), len(counters)) == (1, 1)
    counters.free(5)
    assert (counters.value(5), len(counters)) == (0, 0)
    counters.free(5)
    counters.arrive(WHOLE)
    assert counters.value(5) == 1


@pytest.mark.parametrize("arrived", [0, 1])
def test_freeing_drops_nothing_that_an_open_ticket_may_need(arrived: int) -> None:
    counters = ImmCounters()
    counters.hold(5)
    ticket = counters.wait(5, 1)
    for _ in range(arrived):
        assert counters.arrive(WHOLE) == [ticket]
    counters.free(5)
    assert len(counters) == 1
    counters.cancel(ticket)
    assert (counters.value(5), len(counters)) == (arrived, arrived)


def test_immediates_and_waits_out_of_range_are_refused() -> None:
    counters = ImmCounters()
    assert MAX_WAIT * UNITS < 2**60
    assert not counters.wait(2**28 - 1, MAX_WAIT).satisfied
    for imm, n in ((5, -1), (5, MAX_WAIT + 1), (2**28, 1), (-1, 1)):
        with pytest.raises(UsageError):
            counters.wait(imm, n)
    for touch in (counters.value, counters.hold, counters.free):
        with pytest.raises(UsageError):
            touch(2**28)
    assert len(counters) == 1


class Model(RuleBasedStateMachine):
    """The counters beside a naive account in fractions: nothing is lost, invented, overtaken or kept too long."""

    tickets = Bundle("tickets")
    imms = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.counters = ImmCounters()
        self.free = [Fraction(0)] * 3
        self.holders = [0] * 3
        self.lines: list[deque[Ticket]] = [deque() for _ in range(3)]
        self.told: list[set[Ticket]] = [set() for _ in range(3)]

    def expect(self, imm: int) -> list[Ticket]:
        """Satisfy by the rule, one at a time, from the head of the line."""
        passed = []
        while self.lines[imm] and self.free[imm] >= self.lines[imm][0].n:
            ticket = self.lines[imm].popleft()
            self.free[imm] -= ticket.n
            self.told[imm].add(ticket)
            passed.append(ticket)
        return passed

    @rule(imm=imms, stripes=st.integers(1, 16), times=st.integers(1, 4))
    def arrive(self, imm: int, stripes: int, times: int) -> None:
        for _ in range(times):
            self.free[imm] += Fraction(1, stripes)
            assert self.counters.arrive(encode_immediate(imm, stripes)) == self.expect(imm)

    @rule(target=tickets, imm=imms, n=st.integers(0, 3))
    def wait(self, imm: int, n: int) -> Ticket:
        ticket = self.counters.wait(imm, n)
        self.lines[imm].append(ticket)
        assert self.expect(imm) == ([ticket] if ticket.satisfied else [])
        return ticket

    @rule(ticket=tickets)
    def cancel(self, ticket: Ticket) -> None:
        imm = ticket.imm
        if ticket in self.lines[imm]:
            self.lines[imm].remove(ticket)
        elif ticket in self.told[imm]:
            self.told[imm].remove(ticket)
            self.free[imm] += ticket.n
        assert self.counters.cancel(ticket) == self.expect(imm)

    @rule(ticket=consumes(tickets))
    def deliver(self, ticket: Ticket) -> None:
        if ticket.satisfied:
            self.counters.deliver(ticket)
            self.told[ticket.imm].remove(ticket)

    @rule(imm=imms)
    def hold(self, imm: int) -> None:
        self.counters.hold(imm)
        self.holders[imm] += 1

    @rule(imm=imms)
    def let_go(self, imm: int) -> None:
        self.counters.free(imm)
        self.holders[imm] = max(0, self.holders[imm] - 1)
        if not (self.holders[imm] or self.lines[imm] or self.told[imm]):
            self.free[imm] = Fraction(0)

    @invariant()
    def agrees(self) -> None:
        entries = 0
        for imm in range(3):
            assert self.counters.value(imm) == self.free[imm] // 1
            assert all(ticket.state is TicketState.PENDING for ticket in self.lines[imm])
            assert all(ticket.satisfied for ticket in self.told[imm])
            entries += bool(self.free[imm] or self.holders[imm] or self.lines[imm] or self.told[imm])
        assert len(self.counters) == entries


TestModel = Model.TestCase
