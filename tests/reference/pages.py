"""The arithmetic of requests' pages as NumPy does it, for `aiote_native.requests.pages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = tuple[list[int], int]
"""Page numbers, and which page of the request the first one is."""
Grid: TypeAlias = tuple[int, int, int]
"""The units of a page, and the strides of pages and units in bytes."""
Axes: TypeAlias = Sequence[tuple[int, int, int]]


def fault(rows: dict[int, list[int]], groups: dict[int, int], distinct: bool) -> tuple[int, bool] | None:
    """Return the first group with a page that it does not have, or the first with a page twice."""
    for group, row in rows.items():
        if not all(0 <= page < groups.get(group, 0) for page in row):
            return group, False
    twice = [group for group, row in rows.items() if distinct and len(set(row)) < len(row)]
    return (twice[0], True) if twice else None


def span(unit: int, in_page: int, row: Row | None, tokens: int) -> range:
    """Return the units that lie in a row's pages and have tokens of the request."""
    pages, start = row or ([], 0)
    first, stop = start * in_page, (start + len(pages)) * in_page
    return range(first, stop if unit == 0 else min(stop, max(first, -(-tokens // unit))))


def holds(in_page: int, row: Row | None, wanted: range) -> bool:
    """Return whether a row's pages hold these units."""
    pages, start = row or ([], 0)
    return not wanted or (start * in_page <= wanted.start and wanted.stop <= (start + len(pages)) * in_page)


def offsets(grid: Grid, axes: Axes, side: int, row: Row, wanted: range) -> NDArray[np.int64]:
    """Return the offsets of the pieces of these units on one side."""
    pages, start = row
    places, within = np.divmod(np.arange(wanted.start, wanted.stop, dtype=np.int64), grid[0])
    found = np.array(pages, np.int64)[places - start] * grid[1] + within * grid[2]
    for axis in axes:
        steps = np.arange(axis[0], dtype=np.int64) * axis[1 + side]
        found = (found[:, np.newaxis] + steps).reshape(-1)
    return found
