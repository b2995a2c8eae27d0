"""Cutting writes: every byte once, sizes within their limits, and a count that does not depend on the cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiote.core.striping import (
    IMM_LIMIT,
    MAX_COUNTED,
    Stripe,
    StripePlan,
    check_immediate,
    decode_immediate,
    encode_immediate,
    plan,
)
from aiote.errors import UsageError

lanes = st.integers(1, 24)
GIB = 1 << 30


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(length, lanes, largest, smallest), at most a few hundred stripes each."""
    largest = draw(st.integers(1, 70_000) | st.integers(2**31, 2**64 - 1))
    length = draw(st.integers(0, 50).flatmap(lambda pieces: st.integers(0, min(largest * pieces, 2**63 - 1))))
    smallest = draw(st.integers(1, 70_000) | st.integers(1, 2**40))
    return length, draw(lanes), largest, smallest


def covers(cut: StripePlan, length: int) -> bool:
    """Tell whether the stripes, in their order, are exactly the bytes [0, length)."""
    at = 0
    for stripe in cut.stripes:
        if stripe.offset != at or stripe.length < 0:
            return False
        at += stripe.length
    return at == length


@given(cuts(), st.booleans())
def test_every_byte_exactly_once(cut: tuple[int, int, int, int], counted: bool) -> None:
    assert covers(plan(*cut, counted), cut[0])


@given(cuts(), st.booleans())
def test_no_stripe_is_too_large_and_none_is_empty_but_that_of_an_empty_write(
    cut: tuple[int, int, int, int], counted: bool
) -> None:
    length, _, largest, _ = cut
    stripes = plan(*cut, counted).stripes
    assert all(stripe.length <= largest for stripe in stripes)
    if length:
        assert all(stripe.length > 0 for stripe in stripes)
    else:
        assert stripes == (Stripe(0, 0, 0, counted),)


@given(cuts(), st.booleans())
def test_spreading_makes_no_stripe_smaller_than_asked(cut: tuple[int, int, int, int], counted: bool) -> None:
    length, _, largest, smallest = cut
    stripes = plan(*cut, counted).stripes
    if len(stripes) > max(1, -(-length // largest)):
        assert min(stripe.length for stripe in stripes) >= smallest


@given(cuts())
@example((1 << 20, 24, GIB, 4096))  # more lanes than stripes that can be counted
def test_counted_stripes_come_last_and_are_at_most_sixteen(cut: tuple[int, int, int, int]) -> None:
    length, _, largest, _ = cut
    done = plan(*cut, True)
    assert all(not stripe.counted for stripe in done.head)
    assert all(stripe.counted for stripe in done.tail)
    assert 1 <= done.counted == len(done.tail) <= MAX_COUNTED
    if done.head:
        assert length > MAX_COUNTED * largest
        assert [stripe.length for stripe in done.tail] == [largest] * MAX_COUNTED
    else:
        assert length <= MAX_COUNTED * largest


@given(cuts())
def test_an_uncounted_write_carries_no_immediate(cut: tuple[int, int, int, int]) -> None:
    done = plan(*cut, False)
    assert (done.tail, done.counted) == ((), 0)
    assert not any(stripe.counted for stripe in done.stripes)


@given(cuts(), st.booleans())
def test_sizes_differ_by_one_byte_at_most_the_longer_first(cut: tuple[int, int, int, int], counted: bool) -> None:
    for part in plan(*cut, counted):
        sizes = [stripe.length for stripe in part]
        assert sizes == sorted(sizes, reverse=True)
        assert not sizes or sizes[0] - sizes[-1] <= 1


@given(cuts(), st.booleans())
def test_lanes_take_turns(cut: tuple[int, int, int, int], counted: bool) -> None:
    stripes = plan(*cut, counted).stripes
    assert [stripe.lane for stripe in stripes] == [number % cut[1] for number in range(len(stripes))]


@given(cuts(), st.booleans())
@example((45873, 18, 2700, 1), True)  # seventeen stripes are needed, and there are lanes for one more
def test_the_number_of_stripes_is_the_documents(cut: tuple[int, int, int, int], counted: bool) -> None:
    length, usable, largest, smallest = cut
    needed = -(-length // largest)
    number = max(needed, min(usable, max(1, length // smallest)))
    if counted:
        # Where the head is cut off, the tail has sixteen whatever the lanes, so spreading adds none.
        number = needed if needed > MAX_COUNTED else min(number, MAX_COUNTED)
    assert len(plan(*cut, counted).stripes) == number


# Lengths at which the striping of others loses bytes: nothing sent, 1 lost, 3 lost, lengths cut to 32 bits.


def test_regression_one_byte_over_two_lanes_is_one_stripe() -> None:
    assert plan(1, 2, GIB, 1, True) == StripePlan((), (Stripe(0, 1, 0, True),))


def test_regression_16385_bytes_over_two_lanes_are_all_covered() -> None:
    assert plan(16385, 2, GIB, 8192, True).tail == (Stripe(0, 8193, 0, True), Stripe(8193, 8192, 1, True))


def test_regression_196611_bytes_over_four_lanes_are_all_covered() -> None:
    done = plan(196611, 4, GIB, 16384, True)
    assert [stripe.length for stripe in done.tail] == [49153, 49153, 49153, 49152]
    assert covers(done, 196611)


@pytest.mark.parametrize("length", [4 * GIB - 1, 4 * GIB, 4 * GIB + 1, 5 * GIB + 3])
@pytest.mark.parametrize("usable", [1, 2, 3, 4])
def test_regression_lengths_over_4_gib_are_all_covered(length: int, usable: int) -> None:
    done = plan(length, usable, GIB, 65536, True)
    assert covers(done, length)
    assert (done.head, done.counted) == ((), -(-length // GIB))


def test_a_write_of_more_than_sixteen_messages_counts_the_last_sixteen() -> None:
    done = plan(100 * GIB + 1, 3, GIB, 65536, True)
    assert (len(done.head), done.counted) == (85, 16)
    assert done.tail[0] == Stripe(84 * GIB + 1, GIB, 85 % 3, True)
    assert covers(done, 100 * GIB + 1)


def test_a_seventeenth_message_goes_ahead_uncounted() -> None:
    assert plan(160, 1, 10, 1, True).head == ()
    assert plan(161, 1, 10, 1, True).head == (Stripe(0, 1, 0, False),)


def test_a_largest_message_of_64_bits_is_no_overflow() -> None:
    assert plan(2**63, 2, 2**64 - 1, 1, True).tail == (Stripe(0, 2**62, 0, True), Stripe(2**62, 2**62, 1, True))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1, 1, 1, 1), "length"), ((1, 0, 1, 1), "lanes"), ((1, 1, 0, 1), "largest"), ((1, 1, 1, 0), "smal")],
)
def test_bad_arguments_of_a_plan_are_refused(arguments: tuple[int, int, int, int], name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}.* is (-1|0), expected at least"):
        plan(*arguments, True)


# The immediate on the wire.


@given(st.integers(0, IMM_LIMIT - 1), st.integers(1, MAX_COUNTED))
def test_an_immediate_and_its_stripes_survive_encoding(imm: int, stripes: int) -> None:
    imm_data = encode_immediate(imm, stripes)
    assert 0 <= imm_data < 2**32
    assert imm_data >> 28 == stripes - 1
    assert decode_immediate(imm_data) == (imm, stripes)


@given(st.integers(0, 2**32 - 1))
def test_any_32_bits_decode_and_encode_to_themselves(imm_data: int) -> None:
    assert encode_immediate(*decode_immediate(imm_data)) == imm_data


def test_one_stripe_leaves_the_immediate_as_it_is() -> None:
    assert encode_immediate(0xABCDEF0, 1) == 0xABCDEF0
    assert encode_immediate(0xABCDEF0, 16) == 0xFABCDEF0


@pytest.mark.parametrize("imm", [-1, 2**28, 2**32, 1.0, "1", None])
def test_an_immediate_has_28_bits(imm: Any) -> None:
    for refuse in (check_immediate, lambda value: encode_immediate(value, 1)):
        with pytest.raises(
            UsageError, match=r"the immediate is .*expected.* 0 to 268435455|integer from 0 to 268435455"
        ):
            refuse(imm)


@pytest.mark.parametrize("stripes", [0, 17, -1])
def test_stripes_out_of_range_are_refused(stripes: int) -> None:
    with pytest.raises(UsageError, match=f"^{stripes} stripes"):
        encode_immediate(0, stripes)


@pytest.mark.parametrize("imm_data", [-1, 2**32])
def test_immediates_out_of_range_are_refused(imm_data: int) -> None:
    with pytest.raises(UsageError, match="not 32 bits"):
        decode_immediate(imm_data)
