"""The plan of a round by native code, which rounds use. `plan.RoundPlan` is the reference; both give equal results."""

from __future__ import annotations

import numpy as np

from . import kernels
from .plan import Counts, RoundPlan

__all__ = ["NativePlan"]


class NativePlan(RoundPlan):
    """A `RoundPlan` whose tables and runs are computed by native code."""

    def _lay_out(self, counts: Counts) -> None:
        sizes, config, ranks = self.sizes, self.sizes.config, self.sizes.ranks
        # One array holds several tables, and is one buffer to hand over: each further array or buffer costs as much
        # as computing its content.
        self._tables = np.empty((4, ranks, ranks, sizes.local), np.int64)
        self._at_rank = np.empty((2, ranks, sizes.local), np.int64)
        pairs = np.empty((4, ranks, ranks), np.int64)
        copies = counts.copies if config.copies == "rank" else None
        self.demand, self.overflows = kernels.lay_out(
            counts.experts,
            copies,
            rows=sizes.rows,
            align=config.align,
            grouped=config.layout == "grouped",
            whole=sizes.whole,
            tables=self._tables,
            places=self._at_rank,
            pairs=pairs,
        )
        self.by_rank, self.first, self.before, self.kept = self._tables
        self.base, self.taken = self._at_rank
        rows, self.start, answer, self.kept_rows = pairs
        self.sent = rows if copies is None else copies
        self.returned, self.answer = (self.sent, self.start) if config.reduce == "expert" else (rows, answer)

    def _find_runs(self, source: int | None, target: int | None, pairs: list[tuple[int, int]]) -> None:
        found = np.empty((self.by_rank[0].size, 3), np.int64)
        ends = np.empty(len(pairs), np.int64)
        one, other = (-1 if rank is None else rank for rank in (source, target))
        kernels.find_runs(self._tables, self._at_rank, one, other, found, ends)
        found.flags.writeable = False
        begin = 0
        for pair, end in zip(pairs, ends.tolist(), strict=True):
            self._runs[pair] = found[begin:end]
            begin = end
