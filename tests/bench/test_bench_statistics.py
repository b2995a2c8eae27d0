"""The statistics of a measurement, against plain definitions."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.bench.order_statistics import LatencySummary, Spread, paired_ratio, percentile

VALUES = st.lists(st.floats(0.001, 1e9), min_size=1, max_size=200)


@given(VALUES, st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values)
    smaller = [value for value in values if value < found]
    assert sum(value <= max(smaller, default=-1) for value in values) * 100 < percent * len(values)


def test_percentiles_of_a_hundred_values_are_their_ranks():
    values = list(range(100, 0, -1))
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 1) == 7.0


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_a_percentage_out_of_range_is_refused(percent):
    with pytest.raises(ValueError, match=str(percent)):
        percentile([1.0], percent)


@given(VALUES)
def test_a_spread_and_a_summary_give_least_median_and_most(values):
    spread = Spread.of(values)
    assert (spread.least, spread.median, spread.most) == (min(values), statistics.median(values), max(values))
    summary = LatencySummary.of(values)
    assert summary.p50_us <= summary.p99_us <= summary.max_us == max(values)
    assert summary.fields() == {"p50_us": summary.p50_us, "p99_us": summary.p99_us, "max_us": summary.max_us}


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=50))
def test_a_ratio_is_of_neighbours(pairs):
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    ratio = paired_ratio(ours, theirs)
    assert ratio == Spread.of([one / other for one, other in pairs])
    # What slows both of a pair down changes nothing: doubling is exact.
    assert paired_ratio([2 * one for one in ours], [2 * other for other in theirs]) == ratio


def test_what_drifts_cancels_in_a_paired_ratio_and_not_in_a_ratio_of_medians():
    theirs = [1.0, 2.0, 4.0, 8.0, 16.0]
    ours = [value * 0.5 for value in theirs]
    assert paired_ratio(ours, theirs) == Spread(0.5, 0.5, 0.5)


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0]), ([1.0], [-1.0])])
def test_runs_that_cannot_be_paired_are_refused(ours, theirs):
    with pytest.raises(ValueError):
        paired_ratio(ours, theirs)


@pytest.mark.parametrize("function", [Spread.of, LatencySummary.of, lambda values: percentile(values, 50)])
def test_statistics_of_no_values_are_refused(function):
    with pytest.raises(ValueError):
        function([])
