"""The native arithmetic of requests' pages, against NumPy's and Python's."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.requests.pages import PageNumbers, RequestPages, RequestPlan, page_fault, piece_offsets
from reference import pages as plain

NUMBERS = st.lists(st.integers(-2, 12), max_size=8)
ROW = st.tuples(NUMBERS, st.integers(0, 5))
UNITS = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


def native(row: plain.Row) -> PageNumbers:
    return PageNumbers(np.array(row[0], np.int64), row[1])


def rows_of(rows: dict[int, plain.Row]) -> dict[int, PageNumbers]:
    return {group: native(row) for group, row in rows.items()}


@given(
    st.dictionaries(st.integers(0, 3), NUMBERS), st.dictionaries(st.integers(0, 3), st.integers(0, 12)), st.booleans()
)
def test_a_row_is_checked_as_python_does(rows, groups, distinct):
    found = page_fault(rows_of({group: (row, 0) for group, row in rows.items()}), groups, distinct)
    assert found == plain.fault(rows, groups, distinct)


def test_a_row_of_something_else_is_refused():
    for numbers in (np.array([1.0]), np.array([1], np.int32), np.array([[1]]), [1], "1"):
        with pytest.raises(TypeError):
            PageNumbers(numbers)
    with pytest.raises(TypeError):
        page_fault({0: np.array([1])}, {0: 3}, False)  # type: ignore[dict-item]
    with pytest.raises(OverflowError):
        PageNumbers(np.array([1]), 1 << 63)


@given(st.lists(UNITS, max_size=4), st.dictionaries(st.integers(0, 4), ROW), st.integers(0, 1 << 70), st.data())
def test_units_pieces_and_what_lacks_are_those_of_the_definition(units, rows, tokens, data):
    layout = st.lists(st.tuples(st.integers(0, max(0, len(units) - 1)), st.integers(1, 9)), max_size=4).map(tuple)
    layers = data.draw(st.lists(layout, max_size=5)) if units else []
    plan = RequestPlan(dict(enumerate(units)), layers)
    spans = plan.spans(rows_of(rows), tokens)
    assert spans == [plain.span(unit, there, rows.get(i), tokens) for i, (unit, _, there) in enumerate(units)]
    assert plan.counts(spans) == [sum(len(spans[place]) * times for place, times in layer) for layer in layers]
    source = data.draw(st.dictionaries(st.integers(0, 4), ROW))
    held = [plain.holds(here, source.get(i), spans[i]) for i, (_, here, _) in enumerate(units)]
    assert plan.lacks(rows_of(source), spans) == (held.index(False) if False in held else -1)


def test_numbers_without_measure_do_not_wrap_around():
    plan = RequestPlan({0: (1 << 40, 1 << 45, 1 << 46)}, [((0, 1 << 30),)])
    spans = plan.spans({0: PageNumbers(np.arange(9), (1 << 40) - 1)}, 1 << 80)
    assert spans == [range(1 << 62, 1 << 62)]
    spans = plan.spans({0: PageNumbers(np.arange(9), 1)}, 1 << 80)
    assert spans == [range(1 << 46, 1 << 46)]  # no request has so many tokens
    assert plan.counts([range(1 << 61)]) == [1 << 62]


@given(st.data())
def test_offsets_are_those_of_numpy(data):
    sides = []
    for _ in range(2):
        pages = data.draw(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5))
        strides = data.draw(st.tuples(st.integers(1, 4), st.integers(0, 1 << 40), st.integers(0, 1 << 40)))
        sides.append(((pages, data.draw(st.integers(0, 3))), strides))
    axes = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 99), st.integers(0, 99)), max_size=3))
    first = max(row[1] * grid[0] for row, grid in sides)
    last = min((row[1] + len(row[0])) * grid[0] for row, grid in sides)
    (here, near), (there, far) = sides
    if first >= last:
        with pytest.raises(ValueError, match="do not lie in"):
            piece_offsets(near, far, axes, native(here), native(there), range(first, first + 1))
        return
    start, stop = sorted(data.draw(st.tuples(st.integers(first, last), st.integers(first, last))))
    found = piece_offsets(near, far, axes, native(here), native(there), range(start, stop))
    for side, (row, grid) in enumerate(sides):
        assert list(found[side]) == plain.offsets(grid, axes, side, row, range(start, stop)).tolist()
    for outside in ((start, last + 1), (min(row[1] * grid[0] for row, grid in sides) - 1, stop)):
        if outside[0] < outside[1]:
            with pytest.raises(ValueError, match="do not lie in"):
                piece_offsets(near, far, axes, native(here), native(there), range(*outside))


def test_a_pattern_is_bounded():
    row = PageNumbers(np.arange(4))
    with pytest.raises(ValueError, match="9 axes"):
        piece_offsets((1, 1, 1), (1, 1, 1), [(1, 1, 1)] * 9, row, row, range(1))
    with pytest.raises(ValueError, match="0 units"):
        piece_offsets((0, 1, 1), (1, 1, 1), [], row, row, range(1))
    with pytest.raises(MemoryError):
        piece_offsets((1, 1, 1), (1, 1, 1), [(1 << 40, 1, 1)] * 3, row, row, range(1))


def test_offsets_are_found_anew_for_other_units_and_other_pages():
    plan = RequestPlan({7: (1, 2, 2), 8: (1, 1, 1)}, [((0, 1), (1, 1))])
    grid, target = (2, 16, 8), {7: PageNumbers(np.array([5, 6])), 8: PageNumbers(np.array([3]))}
    pages = RequestPages(
        plan, [(0, 1, grid, grid, ()), (1, 1, grid, grid, ())], {7: PageNumbers(np.array([1, 2]))}, target
    )
    found = pages.offsets([range(3), range(0)], 3)
    assert found is not None
    assert [pair and [list(side) for side in pair] for pair in found] == [[[16, 24, 32], [80, 88, 96]], None]
    assert pages.offsets([range(3), range(0)], 3) is found
    assert pages.offsets([range(4), range(0)], 3) is None
    (later, _) = pages.offsets([range(3, 4), range(0)], 3) or [None, None]
    assert later is not None
    assert [list(side) for side in later] == [[40], [104]]
    pages.replace({7: PageNumbers(np.array([0, 9]))})
    (other, _) = pages.offsets([range(3, 4), range(0)], 3) or [None, None]
    assert other is not None
    assert [list(side) for side in other] == [[152], [104]]
    with pytest.raises(TypeError):
        pages.offsets([range(1), range(1)], 3)  # group 8 has no pages at the source


def test_a_row_travels_between_processes():
    from aiote.kvcache import PageRow

    row = pickle.loads(pickle.dumps(PageRow([3, 1], 2)))
    assert (row.pages.tolist(), row.start) == ([3, 1], 2)
