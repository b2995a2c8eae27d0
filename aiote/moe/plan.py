"""The plan of a round, derived from the counts of all ranks: each rank's rows, their places, and its writes. Pure.

Every rank computes the same plan from the same counts. A source orders its rows by (expert, token, k), or, with copies
by rank, by (rank, token); `start[s, t]` is the first row of source s for rank t, and `answer[s, t]` the first place of
t's answers to them. A rank places its rows by (expert, source, token, k). The rows of one source for one expert are
therefore adjacent on both sides, so a *run* of rows describes them completely:

    rows of source s for expert e:  first[s, e] ... in the source's order
                                    base[e] + before[s, e] ... in place, `kept[s, e]` of them

Which rows are dropped depends on counts alone: an expert keeps its first rows, in the order of sources.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import Sizes

__all__ = ["Counts", "RoundPlan", "Runs"]

Ints = NDArray[np.int64]
Runs = NDArray[np.int64]
"""Runs of rows to copy (runs, 3): each has the first row at the target, the first row at the source, and a count."""


class Counts(NamedTuple):
    """The counts of all ranks: rows for each expert (ranks, experts), and copies for each rank (ranks, ranks)."""

    experts: Ints
    copies: Ints


class RoundPlan:
    """One round on all ranks, seen from rank `me`, in NumPy: the reference for `native_plan.NativePlan`."""

    def __init__(self, sizes: Sizes, me: int, counts: Counts) -> None:
        self.sizes, self.me = sizes, me
        self.mapping_ranks: frozenset[int] = frozenset()
        """The ranks that write here through shared memory: all rows of one count once, and so do its answers."""
        self._runs: dict[tuple[int, int], Runs] = {}
        self.by_rank: Ints
        """Rows for each (source, target, expert of the target)."""
        self.sent: Ints
        """Rows, or copies, for each (source, target)."""
        self.kept_rows: Ints
        """Rows for each (source, target) that are not dropped."""
        self._lay_out(counts)
        if sizes.has_own_slots:
            self.answer = np.broadcast_to(np.arange(sizes.ranks) * sizes.answers_of_rank, self.sent.shape)

    def _lay_out(self, counts: Counts) -> None:
        sizes, config, ranks = self.sizes, self.sizes.config, self.sizes.ranks
        # Pad the experts to the same number on each rank, so that everything is an array.
        padded = np.zeros((ranks, ranks * sizes.local), np.int64)
        padded[:, : config.experts] = counts.experts
        self.by_rank = padded.reshape(ranks, ranks, sizes.local)
        self.first = (np.cumsum(padded, 1) - padded).reshape(self.by_rank.shape)
        self.before = np.cumsum(self.by_rank, 0) - self.by_rank
        totals = self.by_rank.sum(0)
        self.base, self.taken = self._places(totals)
        self.kept = np.clip(self.taken - self.before, 0, self.by_rank)
        self.kept_rows = self.kept.sum(2)
        self.demand = int(np.max(totals)) if config.layout == "grouped" else self._longest(totals)
        self.overflows = bool((self.taken < totals).any())
        sent = counts.copies if config.copies == "rank" else self.by_rank.sum(2)
        self.sent = sent
        self.start = np.cumsum(sent, 1) - sent
        returned = sent if config.reduce == "expert" else self.by_rank.sum(2)
        self.returned = returned
        self.answer = np.cumsum(returned, 1) - returned

    def _places(self, totals: Ints) -> tuple[Ints, Ints]:
        """Return, for all experts, the first place of each expert's rows at its rank, and how many rows it keeps."""
        sizes = self.sizes
        if sizes.config.layout == "grouped":
            base = np.broadcast_to(np.arange(sizes.local) * sizes.rows, totals.shape)
            return base, np.minimum(totals, sizes.rows)
        if sizes.whole:
            return np.zeros_like(totals), totals
        align = sizes.config.align
        stride = -(-totals // align) * align
        base = np.cumsum(stride, 1) - stride
        # Once an expert's rows do not fit, the rows of later experts do not fit either.
        return np.minimum(base, sizes.rows), np.clip(sizes.rows - base, 0, totals)

    def _longest(self, totals: Ints) -> int:
        align = self.sizes.config.align
        stride = -(-totals // align) * align
        ends = np.cumsum(stride, 1) - stride + totals
        return int(np.where(totals > 0, ends, 0).max())

    # Placing what was received.

    def expert_rows(self) -> Ints:
        """Return how many rows each of this rank's experts keeps (experts of the rank,)."""
        return self.taken[self.me, : self.sizes.experts_of(self.me)]

    def offsets(self) -> Ints:
        """Return the first row of each of this rank's experts, followed by the end of the last (experts + 1,)."""
        held, rows = self.sizes.experts_of(self.me), self.sizes.rows
        if self.sizes.config.layout == "grouped":
            return np.arange(held + 1) * rows
        base, align = self.base[self.me, :held], self.sizes.config.align
        ends = base + -(-self.taken[self.me, :held] // align) * align
        return np.append(base, min(rows, int(np.max(ends, initial=0))))

    def runs(self, source: int, target: int) -> Runs:
        """Return the runs of a source's rows at a target: (row in place, row from the source's first, rows).

        Every step of a round asks for the runs, so the plan caches them as read-only arrays.
        """
        if (source, target) not in self._runs:
            # Compute all runs to or from one rank at once: a step needs them all, and NumPy takes as long for one
            # pair of ranks as for eight.
            ranks = range(self.sizes.ranks)
            if source == self.me:
                self._find_runs(source, None, [(source, other) for other in ranks])
            else:
                self._find_runs(None, target, [(other, target) for other in ranks])
        return self._runs[source, target]

    def _find_runs(self, source: int | None, target: int | None, pairs: list[tuple[int, int]]) -> None:
        """Cache the runs of one source's rows at each rank, or of each rank's rows at one target."""
        sources, targets = (slice(None) if rank is None else rank for rank in (source, target))
        kept, first = self.kept[sources, targets], self.first[sources, targets]
        chosen = kept > 0
        there = (self.base[targets] + self.before[sources, targets])[chosen]
        found = np.stack((there, (first - first[:, :1])[chosen], kept[chosen]), 1)
        found.flags.writeable = False
        begin = 0
        for pair, count in zip(pairs, chosen.sum(1).tolist(), strict=True):
            self._runs[pair] = found[begin : begin + count]
            begin += count

    # Placement "packed": rows of the private part are sent before all counts are known, the others afterwards.

    def private(self, source: int, target: int) -> int:
        """Return how many of a source's rows go to its private part of the target's receive region."""
        return min(int(self.sent[source, target]), self.sizes.private)

    def beyond(self, source: int, target: int) -> Runs:
        """Return the runs that go to the shared part: (row in the source's share of it, row from its first here, rows).

        They omit dropped rows, so the shared part needs room only for rows that can be placed.
        """
        if not self.sizes.shared:
            return np.zeros((0, 3), np.int64)
        _, here, count = self.runs(source, target).T
        end = here + count
        here = np.maximum(here, self.sizes.private)
        count = np.maximum(end - here, 0)
        chosen = count > 0
        here, count = here[chosen], count[chosen]
        return np.stack((np.cumsum(count) - count, here, count), 1)

    def shared_start(self, source: int, target: int) -> int:
        """Return where a source's share of the shared part begins, in rows."""
        return sum(int(self.beyond(other, target)[:, 2].sum()) for other in range(source))

    def received_runs(self, source: int) -> Runs:
        """Return the runs of another rank's rows in this rank's receive region: (row in place, row received, rows)."""
        mine = self.sizes.private
        if not self.sizes.shared:
            placed: Runs = self.runs(source, self.me) + np.array([0, source * mine, 0])
            return placed
        place, here, count = self.runs(source, self.me).T
        early = np.clip(mine - here, 0, count)
        near: Runs = np.stack((place, source * mine + here, early), 1)[early > 0]
        late = count > early
        place, late_count = (place + early)[late], (count - early)[late]
        first = self.sizes.ranks * mine + self.shared_start(source, self.me)
        return np.concatenate((near, np.stack((place, first + np.cumsum(late_count) - late_count, late_count), 1)))

    def arrivals(self, source: int) -> int:
        """Return how many writes of rows a source makes to this rank; the number depends on counts alone."""
        refused = self.overflows and self.sizes.config.on_overflow == "raise"
        if self.sizes.direct:
            kept = 0 if refused else int(self.kept_rows[source, self.me])
            return min(kept, 1) if source in self.mapping_ranks else kept
        beyond = 0 if refused or not self.sizes.shared else len(self.beyond(source, self.me))
        return int(self.private(source, self.me) > 0) + int(beyond > 0)

    # Answers.

    def replies(self, target: int) -> int:
        """Return how many writes a target makes to answer this rank's rows."""
        if self.sizes.config.reduce == "expert":
            return int(self.sent[self.me, target] > 0)
        kept = int(self.kept_rows[self.me, target])
        if target in self.mapping_ranks:
            return min(kept, 1)
        if self.sizes.direct or not self.overflows:
            return kept if self.sizes.direct else int(kept > 0)
        _, here, count = self.runs(self.me, target).T
        # One write for each piece between dropped rows.
        return int((here[1:] != (here + count)[:-1]).sum()) + int(len(here) > 0)

    def answers_at(self, position: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the place of the answer to each of this rank's rows, or copies; -1 where `position` is -1 (no row)."""
        at, me = position.copy(), self.me
        if self.sizes.has_own_slots:
            first = np.cumsum(self.returned[me]) - self.returned[me]
            real = at >= 0
            rank = np.searchsorted(first, at[real], side="right") - 1
            at[real] += (self.answer[me] - first)[rank].astype(np.int32)
        return at

    def dropped_rows(self, position: Ints) -> NDArray[np.bool_]:
        """Return which of this rank's rows are dropped, by their position in its order; False for -1 (no row)."""
        order = self.first[self.me].reshape(-1)
        expert = np.searchsorted(order, position, side="right") - 1
        late: NDArray[np.bool_] = (position >= 0) & (position - order[expert] >= self.kept[self.me].reshape(-1)[expert])
        return late
