"""Page arithmetic: which bytes, in which order, and which list is refused for which reason."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.paging import PageList, pair_pages
from aiote.errors import UsageError

indices = st.lists(st.integers(0, 40), max_size=12)
small = st.integers(0, 50)


@given(indices, st.integers(1, 20), small, small)
def test_ranges_are_what_slicing_gives(numbers: list[int], page_bytes: int, stride: int, offset: int) -> None:
    region = range(offset + 40 * stride + page_bytes)
    ranges = PageList(numbers, page_bytes, stride, offset).ranges()
    assert [region[start : start + length] for start, length in ranges] == [
        region[offset:][number * stride :][:page_bytes] for number in numbers
    ]


@given(indices, st.integers(1, 20), small, small, st.integers(0, 2200))
def test_check_agrees_with_the_bytes_themselves(
    numbers: list[int], page_bytes: int, stride: int, offset: int, length: int
) -> None:
    pages = PageList(numbers, page_bytes, stride, offset)
    outside = [
        position
        for position, (start, size) in enumerate(pages.ranges())
        if not all(0 <= byte < length for byte in range(start, start + size))
    ]
    if not outside:
        pages.check(length)
        return
    with pytest.raises(UsageError, match=rf"^page {outside[0]} \(index {numbers[outside[0]]}\) "):
        pages.check(length)


@given(
    st.integers(0, 2**63 - 1),
    st.integers(1, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.data(),
)
def test_a_check_without_overflow_agrees_with_exact_arithmetic(
    index: int, size: int, stride: int, offset: int, data: Any
) -> None:
    edge = offset + index * stride + size
    length = data.draw(st.integers(max(0, edge - 2), edge + 2) | st.integers(0, 2**64 - 1))
    inside = size <= length and offset <= length - size and (stride == 0 or index <= (length - size - offset) // stride)
    pages = PageList([index], size, stride, offset)
    if inside:
        pages.check(length)
    else:
        with pytest.raises(UsageError):
            pages.check(length)


def test_check_says_what_is_wrong_with_the_first_bad_page() -> None:
    pages = PageList([0, 3, 9, 7], page_bytes=100, stride=128, offset=16)
    pages.check(16 + 9 * 128 + 100)
    with pytest.raises(UsageError) as failure:
        pages.check(16 + 9 * 128 + 99)
    assert str(failure.value).startswith("page 2 (index 9) covers bytes 1168 to 1268, but the region has 1267")


def test_pages_beyond_4_gib_are_ranges_of_64_bits() -> None:
    pages = PageList([2**20], page_bytes=32768, stride=32768, offset=5)
    assert pages.ranges() == [(2**35 + 5, 32768)]
    with pytest.raises(UsageError, match=f"covers bytes {2**35 + 5} to {2**35 + 32773}"):
        pages.check(2**32)


def test_overlap_repetition_and_stride_zero_are_legal() -> None:
    assert PageList([0, 1, 1], page_bytes=8, stride=4, offset=0).ranges() == [(0, 8), (4, 8), (4, 8)]
    assert PageList([0, 99], page_bytes=8, stride=0, offset=3).ranges() == [(3, 8), (3, 8)]


def test_an_empty_list_is_legal() -> None:
    pages = PageList([], page_bytes=8, stride=8, offset=1000)
    pages.check(0)
    assert (len(pages), pages.ranges(), pair_pages(pages, pages)) == (0, [], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1, -1], 8, 8, 0), "the index of page 2 is -1, expected at least 0"),
        (([0], 0, 8, 0), "page_bytes is 0, expected at least 1"),
        (([0], -8, 8, 0), "page_bytes is -8"),
        (([0], 8, -1, 0), "stride is -1, expected at least 0"),
        (([0], 8, 8, -1), "offset is -1, expected at least 0"),
        (([0, 1.5], 8, 8, 0), "the index of page 1 is 1.5, expected an integer"),
        ((["0"], 8, 8, 0), "the index of page 0 is '0', expected an integer"),
        (([0], 8.0, 8, 0), "page_bytes is 8.0, expected an integer"),
    ],
)
def test_bad_arguments_of_a_page_list_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError) as failure:
        PageList(*arguments)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    "numbers", [[3, 1], (3, 1), array.array("q", [3, 1]), np.array([3, 1], np.uint32), iter([3, 1])]
)
def test_any_iterable_of_integers_is_taken_as_indices(numbers: Any) -> None:
    pages = PageList(numbers, 10, 10, 0)
    assert pages.indices == (3, 1)
    assert all(type(index) is int for index in pages.indices)


def test_the_callers_list_may_change_afterwards() -> None:
    numbers = [1, 2]
    pages = PageList(numbers, 10, 10, 0)
    numbers.append(3)
    assert pages.indices == (1, 2)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=20), st.integers(1, 99), small, small)
def test_pairs_keep_the_order_of_both_lists(
    numbers: list[tuple[int, int]], page_bytes: int, stride: int, offset: int
) -> None:
    src = PageList([source for source, _ in numbers], page_bytes, stride, offset)
    dst = PageList([target for _, target in numbers], page_bytes, stride + 7, 2 * offset)
    assert pair_pages(src, dst) == [
        (offset + source * stride, 2 * offset + target * (stride + 7), page_bytes) for source, target in numbers
    ]


def test_pairs_of_different_numbers_or_sizes_are_refused() -> None:
    pages = PageList([1, 2], 8, 8, 0)
    with pytest.raises(UsageError, match="2 source pages for 1 target pages"):
        pair_pages(pages, PageList([1], 8, 8, 0))
    with pytest.raises(UsageError, match="source pages of 8 bytes for target pages of 16"):
        pair_pages(pages, PageList([1, 2], 16, 16, 0))
