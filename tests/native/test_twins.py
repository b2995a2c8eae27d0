"""The native code and its plain Python references say the same: cuts of writes, counts of immediates, page indices.

Property tests draw the same input for both; what a twin adds of its own (a table with a limit, copies of indices) is
tested for itself.
"""

from __future__ import annotations

import array
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from aiote.core import striping
from aiote.core.paging import PageList
from aiote.core.striping import IMM_LIMIT, MAX_COUNTED, encode_immediate
from aiote.errors import UsageError
from aiote_native.counters.table import ImmCounters, Ticket
from aiote_native.engine.posting import plan
from aiote_native.requests.operations import PageIndex
from reference import imm_counters as plain_counters

U64 = 2**64 - 1
I64 = 2**63 - 1
GIB = 1 << 30

# -- cuts


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(length, lanes, largest, smallest), about a hundred stripes at most, edges of the multiples included."""
    largest = draw(st.integers(1, 70_000) | st.integers(2**31, 2**33) | st.integers(2**59, U64))
    pieces, beside = draw(st.integers(0, 48)), draw(st.integers(-2, 2) | st.integers(-largest, largest))
    length = min(max(0, pieces * largest + beside), U64)
    smallest = draw(st.integers(1, 70_000) | st.integers(1, U64) | st.just(max(1, length // 7)))
    return length, draw(st.integers(1, 64)), largest, smallest


def plain_plan(write: tuple[int, int, int, int], counted: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """What the reference says, as (offset, length) of the head and of the tail."""
    cut = striping.plan(*write, counted)
    return [stripe[:2] for stripe in cut.head], [stripe[:2] for stripe in cut.tail]


@given(writes())
@example((0, 1, 1, 1))
@example((0, 64, U64, U64))
@example((1, 64, 1, 1))
@example((16, 1, 1, 1))
@example((17, 64, 1, 1))
@example((64, 64, 100, 1))
@example((16 * GIB, 2, GIB, 1))
@example((16 * GIB + 1, 2, GIB, 1))
@example((33 * GIB - 1, 17, GIB, 1))
@example((U64, 64, U64, 1))
@example((U64, 1, 2**59, 1))
@example((U64, 3, 2**60 - 1, U64))
def test_counted_writes_are_split_alike(write: tuple[int, int, int, int]) -> None:
    head, tail = plan(*write, True)
    event("in two parts" if head else "in one part")
    assert (head, tail) == plain_plan(write, True)
    assert 1 <= len(tail) <= MAX_COUNTED


@given(writes())
@example((0, 1, 1, 1))
@example((64, 64, 100, 1))
@example((U64, 64, U64, 1))
@example((U64, 1, 2**59, 1))
def test_uncounted_writes_are_split_alike(write: tuple[int, int, int, int]) -> None:
    """In which of the two parts the stripes stand does not matter: none of them waits for another."""
    head, tail = plan(*write, False)
    assert not (head and tail)
    plain_head, plain_tail = plain_plan(write, False)
    assert head + tail == plain_head + plain_tail


# -- counts

IMMS = [0, 5, 77, IMM_LIMIT - 1]
LIMIT = 3  # fewer than the immediates, so that the table is full at times


class Counts(RuleBasedStateMachine):
    """The same story told to both; where the native table is full it must refuse, and both stay as they were."""

    waits = Bundle("waits")
    imms = st.sampled_from(IMMS)

    def __init__(self) -> None:
        super().__init__()
        self.native = ImmCounters(LIMIT)
        self.plain = plain_counters.ImmCounters()
        self.pairs: list[tuple[Ticket, plain_counters.Ticket]] = []

    def agree(self, native: list[Ticket], plain: list[plain_counters.Ticket]) -> None:
        """Both name the same tickets, in the same order."""
        numbers = [{id(pair[which]): number for number, pair in enumerate(self.pairs)} for which in (0, 1)]
        assert [numbers[0][id(ticket)] for ticket in native] == [numbers[1][id(ticket)] for ticket in plain]

    def is_full_for(self, imm: int) -> bool:
        return imm not in self.plain._entries and len(self.plain) == LIMIT

    @rule(imm=imms, stripes=st.integers(1, 16), times=st.integers(1, 16))
    def arrive(self, imm: int, stripes: int, times: int = 1) -> None:
        imm_data = encode_immediate(imm, stripes)
        for _ in range(times):
            if self.is_full_for(imm):
                event("an arrival refused")
                with pytest.raises(MemoryError, match="full"):
                    self.native.arrive(imm_data)
            else:
                self.agree(self.native.arrive(imm_data), self.plain.arrive(imm_data))

    @rule(imm=imms, cuts=st.lists(st.integers(1, 16), min_size=1, max_size=3), data=st.data())
    def whole_writes_arrive(self, imm: int, cuts: list[int], data: st.DataObject) -> None:
        arrivals = [stripes for stripes in cuts for _ in range(stripes)]
        for part in data.draw(st.permutations(arrivals)):
            self.arrive(imm, part)

    @rule(target=waits, imm=imms, n=st.integers(0, 4) | st.just(plain_counters.MAX_WAIT))
    def wait(self, imm: int, n: int) -> Any:
        if self.is_full_for(imm):
            event("a wait refused")
            with pytest.raises(MemoryError, match="full"):
                self.native.wait(imm, n)
            return multiple()
        native, satisfied = self.native.wait(imm, n)
        plain = self.plain.wait(imm, n)
        self.pairs.append((native, plain))
        self.agree(satisfied, [plain] if plain.satisfied else [])
        return native, plain

    @rule(pair=waits)
    def cancel(self, pair: tuple[Ticket, plain_counters.Ticket]) -> None:
        """Pending, satisfied, delivered and cancelled ones alike."""
        event(f"cancelled where it was {pair[1].state.name.lower()}")
        self.agree(self.native.cancel(pair[0]), self.plain.cancel(pair[1]))

    @rule(pair=waits)
    def deliver(self, pair: tuple[Ticket, plain_counters.Ticket]) -> None:
        if pair[1].satisfied:
            event("delivered")
            self.native.deliver(pair[0])
            self.plain.deliver(pair[1])

    @invariant()
    def both_say_the_same(self) -> None:
        assert len(self.native) == len(self.plain) <= LIMIT
        assert [self.native.value(imm) for imm in IMMS] == [self.plain.value(imm) for imm in IMMS]
        assert [pair[0].satisfied for pair in self.pairs] == [pair[1].satisfied for pair in self.pairs]

    def teardown(self) -> None:
        """End what is open, in order, then consume what is left."""
        for pair in self.pairs:
            self.cancel(pair)
            self.both_say_the_same()
        for imm in IMMS:
            if self.plain.value(imm):
                self.wait(imm, self.plain.value(imm))
                self.deliver(self.pairs[-1])
        self.both_say_the_same()


Counts.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCounts = Counts.TestCase


@given(st.lists(st.tuples(st.sampled_from(IMMS), st.integers(1, 16)), max_size=40), st.data())
def test_every_write_counts_one_in_any_order(writes: list[tuple[int, int]], data: st.DataObject) -> None:
    immediates = [encode_immediate(imm, stripes) for imm, stripes in writes for _ in range(stripes)]
    native = ImmCounters()
    for imm_data in data.draw(st.randoms(use_true_random=False)).sample(immediates, len(immediates)):
        assert native.arrive(imm_data) == []
    assert [native.value(imm) for imm in IMMS] == [sum(at == imm for at, _ in writes) for imm in IMMS]


def test_a_full_table_refuses_and_loses_nothing() -> None:
    counters = ImmCounters(3)
    ticket, satisfied = counters.wait(1, 2)
    assert satisfied == counters.arrive(encode_immediate(2, 1)) == counters.arrive(encode_immediate(3, 2)) == []
    for _ in range(3):
        with pytest.raises(MemoryError, match="full"):
            counters.arrive(encode_immediate(4, 1))
        with pytest.raises(MemoryError, match="full"):
            counters.wait(4, 0)
    assert (len(counters), [counters.value(imm) for imm in (1, 2, 3, 4)]) == (3, [0, 1, 0, 0])
    # What it knows goes on counting,
    assert counters.arrive(encode_immediate(3, 2)) == counters.arrive(encode_immediate(1, 1)) == []
    assert counters.arrive(encode_immediate(1, 1)) == [ticket]
    assert (counters.value(2), counters.value(3)) == (1, 1)
    # and what is consumed makes room.
    counters.deliver(ticket)
    assert len(counters) == 2
    assert counters.arrive(encode_immediate(4, 1)) == []
    assert [counters.value(imm) for imm in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_a_table_that_grows_keeps_every_count() -> None:
    """More immediates than the 1024 buckets that it starts with, next to one another and far apart."""
    imms = [*range(1500), *range(IMM_LIMIT - 1500, IMM_LIMIT), *(number << 16 for number in range(1, 1000))]
    counters = ImmCounters()
    tickets = [counters.wait(imm, 2)[0] for imm in imms]
    for imm in imms:
        assert counters.arrive(encode_immediate(imm, 1)) == []
    assert len(counters) == len(imms)
    assert all(counters.value(imm) == 1 for imm in imms)
    for imm, ticket in zip(imms, tickets, strict=True):
        assert counters.arrive(encode_immediate(imm, 1)) == [ticket]
        counters.deliver(ticket)
    assert len(counters) == 0


def test_a_wait_that_nobody_keeps_stays_in_line() -> None:
    counters = ImmCounters()
    counters.wait(5, 1)
    gc.collect()
    (ticket,) = counters.arrive(encode_immediate(5, 1))
    assert ticket.satisfied
    assert counters.cancel(ticket) == []
    assert (ticket.satisfied, counters.value(5)) == (False, 1)


# -- page indices


def first_refused(indices: list[int], page_bytes: int, stride: int, offset: int, length: int) -> int:
    """The position of the first page that the reference refuses, or -1."""
    for position, index in enumerate(indices):
        try:
            PageList([index], page_bytes, stride, offset).check(length)
        except UsageError:
            return position
    return -1


@st.composite
def paged(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    """(indices, page_bytes, stride, offset, length), the last page that fits and the next one among the indices."""
    small = draw(st.booleans())
    anything = st.integers(0, 100 if small else U64)
    length = draw(anything if small else anything | st.integers(2**63 - 3, 2**63 + 3) | st.integers(U64 - 3, U64))
    page_bytes = draw(st.integers(0, length) | st.integers(max(0, length - 2), length) | anything)
    room = max(0, length - page_bytes)
    offset = draw(st.integers(0, room) | st.integers(max(0, room - 2), min(U64, room + 1)) | anything)
    stride = draw(st.integers(0, 9) | st.integers(0, max(1, room - offset)) | anything)
    last = min(I64, max(0, room - offset) // max(1, stride))
    inside = st.integers(0, last) | st.integers(max(0, last - 1), last)
    beyond = st.just(min(I64, last + 1)) | st.integers(last, I64) | st.sampled_from([-1, -(2**63), I64])
    indices = (
        draw(st.lists(inside, max_size=6)) + draw(st.lists(beyond, max_size=1)) + draw(st.lists(inside, max_size=2))
    )
    return indices, max(1, page_bytes), stride, offset, length


@given(paged())
@example(([], 1, 0, U64, 0))
@example(([0], U64, U64, U64, U64))
@example(([0, 1], U64, 1, 0, U64))
@example(([0, 0], 1, 0, U64, U64))
@example(([I64, I64], 1, 0, U64 - 1, U64))
@example(([2, 3], 2**62, 2**62, 0, U64))  # 3 * 2**62 + 2**62 is 0 in 64 bits
@example(([0, 4], 1, 2**62, 0, U64))  # so is 4 * 2**62
@example(([2**32, 2**33], 1, 2**32, 0, 2**63))
@example(([I64 - 1, I64], 1, 2, 0, U64 - 1))
@example(([0, -1], 1, 0, 0, 1))
@example(([0, -(2**63)], 1, 2, 0, U64))
@example(([1, -1], 1, 2**63, 2**63, U64))  # -1 * 2**63 + 2**63 is 0 in 64 bits
def test_pages_outside_are_found_alike(case: tuple[list[int], int, int, int, int]) -> None:
    indices, page_bytes, stride, offset, length = case
    found = PageIndex(indices).first_outside(page_bytes, stride, offset, length)
    event("none" if found < 0 else "the first" if found == 0 else "a later one")
    assert found == first_refused(*case)
    if found < 0:
        PageList(indices, page_bytes, stride, offset).check(length)
    elif min(indices) >= 0:
        with pytest.raises(UsageError, match=rf"page {found} \(index {indices[found]}\)"):
            PageList(indices, page_bytes, stride, offset).check(length)
    else:
        with pytest.raises(UsageError, match="the index of page"):
            PageList(indices, page_bytes, stride, offset)


@pytest.mark.parametrize("number", [-1, 2**64])
@pytest.mark.parametrize("position", range(4))
def test_what_does_not_fit_in_64_bits_is_refused(number: int, position: int) -> None:
    arguments = [1, 1, 0, 8]
    assert PageIndex([0]).first_outside(*arguments) == -1
    arguments[position] = number
    with pytest.raises(OverflowError):
        PageIndex([0]).first_outside(*arguments)


def spread(kind: str, step: int) -> Callable[[list[int]], Any]:
    """Make arrays that hold the values every `step` elements (negative: backwards), other values in between."""

    def make(values: list[int]) -> Any:
        whole = np.full(max(1, len(values)) * abs(step), 99, dtype=kind)
        part = whole[::step][: len(values)]
        part[:] = values
        return part

    return make


def read_only(values: list[int]) -> Any:
    made = np.array(values, dtype=np.int64)
    made.setflags(write=False)
    return made


def array_of(code: str) -> Callable[[list[int]], Any]:
    return lambda values: array.array(code, values)


KINDS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "longlong", ">i8", ">u2")
# How to make a source of each kind, and the least and the largest index that it can hold and that is taken.
MAKERS: dict[str, tuple[Callable[[list[int]], Any], int, int]] = {
    "list": (list, -(2**63), I64),
    "tuple": (tuple, -(2**63), I64),
    "generator": (lambda values: (value for value in values), -(2**63), I64),
    "iterator": (iter, -(2**63), I64),
    "bytes": (bytes, 0, 255),
    "list of NumPy's integers": (lambda values: [np.int64(value) for value in values], -(2**63), I64),
    "read-only": (read_only, -(2**63), I64),
    "memoryview": (lambda values: memoryview(array.array("q", values)), -(2**63), I64),
    "memoryview in steps": (lambda values: memoryview(spread("q", 2)(values)), -(2**63), I64),
    **{
        f"array {code}": (array_of(code), int(np.iinfo(code).min), min(int(np.iinfo(code).max), I64))
        for code in "bBhHiIlLqQ"
    },
    **{
        f"NumPy {kind}{name}": (spread(kind, step), int(np.iinfo(kind).min), min(int(np.iinfo(kind).max), I64))
        for kind in KINDS
        for name, step in (("", 1), (" in steps", 3), (" backwards", -1))
    },
}
UNCHANGEABLE = {"tuple", "generator", "iterator", "bytes", "read-only"}


def contents(index: PageIndex) -> list[int]:
    return [index[position] for position in range(len(index))]


@pytest.mark.parametrize("name", MAKERS)
def test_indices_of_any_kind_are_taken(name: str) -> None:
    make, least, most = MAKERS[name]

    @settings(max_examples=20)
    @given(st.lists(st.integers(least, most) | st.sampled_from([least, most]), max_size=12))
    @example([])
    @example([least, most, 7])
    def take(values: list[int]) -> None:
        source = make(values)
        index = PageIndex(source)
        assert contents(index) == values
        assert index.count == len(index) == len(values)
        with pytest.raises(IndexError):
            index[len(values)]

    take()


@given(st.integers(-10, 10), st.integers(-10, 30), st.sampled_from([-3, -1, 1, 2]))
def test_ranges_are_taken_as_indices(start: int, stop: int, step: int) -> None:
    assert contents(PageIndex(range(start, stop, step))) == list(range(start, stop, step))


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in UNCHANGEABLE])
def test_what_happens_to_the_source_later_changes_nothing(name: str) -> None:
    source = MAKERS[name][0]([3, 1, 2])
    index = PageIndex(source)
    for position in range(3):
        source[position] = 8
    assert list(source) == [8, 8, 8]
    assert contents(index) == [3, 1, 2]
    assert index.first_outside(1, 1, 0, 4) == -1


@pytest.mark.parametrize("code", ["q", "i"])
def test_the_source_of_an_index_is_let_go(code: str) -> None:
    """An array.array whose memory is lent cannot grow."""
    source = array.array(code, [3, 1, 2])
    index = PageIndex(source)
    source.extend(range(10_000))
    del source
    gc.collect()
    assert contents(index) == [3, 1, 2]


NOT_INTEGERS: list[Any] = [
    [1.0],
    [1, 2, 2.5],
    ["1"],
    [None],
    [1, [2]],
    [b"1"],
    "12",
    np.array([1.0, 2.0]),
    np.array([1.0, 2.0])[::-1],
    np.array([[1, 2], [3, 4]]),
    np.array(3),
    array.array("d", [1.0]),
    None,
    7,
    1.5,
]


@pytest.mark.parametrize("source", NOT_INTEGERS, ids=repr)
def test_what_is_no_row_of_integers_is_refused(source: Any) -> None:
    # AttributeError is what a missing __index__ makes of it; callers turn both into their own error.
    with pytest.raises((TypeError, AttributeError)):
        PageIndex(source)
    if not isinstance(source, np.ndarray):
        with pytest.raises((TypeError, UsageError)):
            PageList(source, 1, 1, 0)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**30])
def test_an_index_of_more_than_64_bits_is_refused(number: int) -> None:
    for source in ([number], [1, number], (page for page in (number, 1))):
        with pytest.raises(OverflowError):
            PageIndex(source)
    if 2**63 <= number < 2**64:
        with pytest.raises(OverflowError):
            PageIndex(np.array([number], dtype=np.uint64))


def test_an_index_is_filled_once() -> None:
    index = PageIndex([1, 2])
    for source in ([3], np.arange(3)):
        with pytest.raises(RuntimeError, match="already filled"):
            index.__init__(source)  # type: ignore[misc]
    assert contents(index) == [1, 2]
