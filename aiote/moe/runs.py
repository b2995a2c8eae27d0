"""Helpers of a round: expand or merge runs of rows, and find the places of copies by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .arrays import Bytes
from .plan import RoundPlan

if TYPE_CHECKING:
    from .memory import LaneMemory

__all__ = ["expand_runs", "merge_runs", "unfold"]


def unfold(memory: LaneMemory, plan: RoundPlan, source: int, rows: Bytes, nbytes: int) -> bool:
    """Find the places of a source's copies, and, unless the layout is "rank", copy `nbytes` of each to its places.

    Returns whether the copies are for the experts that the source's route names. If all rows of a source are dropped,
    none of its copies is read. Such a source waits for no answer, so it may already be overwriting them in its next
    round.
    """
    sizes, me = plan.sizes, plan.me
    held, first, found = sizes.experts_of(me), sizes.first_expert_of(me), memory.copies[source, : len(rows)]
    if not plan.kept_rows[source, me]:
        found[...] = -1
        return True
    ids = rows[:, sizes.ids_at : sizes.weights_at].copy().view(np.int32)
    base = plan.base[me, :held] + plan.before[source, me, :held]
    room = np.zeros(held, np.int64) if sizes.whole else plan.kept[source, me, :held]
    seen = np.zeros(held, np.int64)
    kernels.unfold(
        memory.placed if nbytes else rows, rows, nbytes, ids, first, base, room=room, places=found, seen=seen
    )
    if sizes.whole:
        found[...] = np.where((ids >= first) & (ids < first + held), ids - first, -1)
    return bool((seen == plan.by_rank[source, me, :held]).all())


def expand_runs(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row numbers of all runs, one after another: `count` numbers from each `first` on."""
    ends = np.cumsum(count)
    numbers: NDArray[np.int64] = np.repeat(first - (ends - count), count) + np.arange(ends[-1] if len(ends) else 0)
    return numbers


def merge_runs(runs: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return runs in the source's order as (first row, rows), with adjacent runs merged."""
    found: list[tuple[int, int]] = []
    for _, first, count in runs.tolist():
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((first, count))
    return found
