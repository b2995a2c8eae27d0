"""Summaries of several measurements by order statistics only, because the machines that run them are shared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LatencySummary", "Spread", "paired_ratio", "percentile"]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed (the nearest rank).

    Raises ValueError for no values and for a percentage outside of (0, 100].
    """
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 < percent <= 100:
        raise ValueError(f"percentile {percent}: expected more than 0 and at most 100")
    # Multiplied first: 0.99 * 100 is 99.00000000000001 in floating point, 99 * 100 / 100 is exact.
    return sorted(values)[math.ceil(percent * len(values) / 100) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """The least, the median and the largest of some measurements."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise; raises ValueError for no values."""
        if not values:
            raise ValueError("a spread of no values")
        return cls(min(values), statistics.median(values), max(values))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of the ratios of measurements that were taken one after the other.

    Each is divided by its own neighbour, so that slow changes on a shared machine cancel. Raises ValueError for
    sequences of different lengths and for a neighbour that is not positive.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} measurements cannot be paired with {len(theirs)}")
    if any(value <= 0 for value in theirs):
        raise ValueError("a ratio to something that is not positive")
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Round trips in microseconds: the median, the 99th percentile and the longest."""

    p50_us: float
    p99_us: float
    max_us: float

    @classmethod
    def of(cls, times: Sequence[float]) -> LatencySummary:
        """Summarise times in microseconds."""
        return cls(percentile(times, 50), percentile(times, 99), max(times))

    def fields(self) -> dict[str, float]:
        """Return the fields of a worker's result."""
        return {"p50_us": self.p50_us, "p99_us": self.p99_us, "max_us": self.max_us}
