"""A dispatch of `deep_ep.Buffer` and its combines, expressed as rounds of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import aiote

from . import fp8
from .batch import Batch
from .blocking import HeldGroup, PendingStep
from .config import MoeConfig, Sizes
from .memory import LaneMap
from .round import Round
from .states import MoeOverflowError

__all__ = ["Dispatched", "Handle", "Shape", "registered_bytes"]


def registered_bytes(config: MoeConfig, ranks: int) -> int:
    """Return how many bytes each rank of a group registers."""
    lane = LaneMap(Sizes(config, ranks))
    return config.lanes * (lane.inbox + lane.outbox)


class Shape:
    """A group for dispatches of one shape, and the dispatch that owns each of its lanes."""

    def __init__(self, held: HeldGroup, number: int, nbytes: int) -> None:
        self.group, self.number, self.nbytes = held, number, nbytes
        self._owners: list[Dispatched | None] = [None] * held.config.lanes
        self._ends: list[PendingStep[Any] | None] = [None] * held.config.lanes
        self._turn = 0

    def take_lane(self, made: Dispatched, lane: int | None = None) -> int:
        """Give a dispatch a lane, and return it: `lane` if given, else a free one, else the oldest dispatch's.

        Ends the round of the lane's previous owner. The choice depends on the order of calls, never on time, because
        every rank must choose the same lane.
        """
        if lane is None:
            free = [one for one in self._order() if self._owners[one] is None]
            lane = (free or self._order())[0]
        old = self._owners[lane]
        if old is not None and old is not made:
            old.give_up()
        self.wait_sums(lane)
        self._owners[lane] = made
        self._turn = lane + 1
        return lane

    def _order(self) -> list[int]:
        lanes = len(self._owners)
        return [(self._turn + one) % lanes for one in range(lanes)]

    def owns(self, made: Dispatched, lane: int) -> bool:
        """Return whether a dispatch still owns the lane, because its round has not been combined."""
        return self._owners[lane] is made

    def free_lane(self, lane: int) -> None:
        """Free a lane whose round has not begun."""
        self._owners[lane] = None

    def end_round(self, lane: int, end: PendingStep[Any]) -> None:
        """Free a lane for the next dispatch, which then waits for `end`: the sums of this lane's round."""
        self._owners[lane], self._ends[lane] = None, end

    def wait_sums(self, lane: int) -> None:
        """Wait for the sums of a lane's last round."""
        end, self._ends[lane] = self._ends[lane], None
        if end is not None:
            end()

    def close(self) -> None:
        """Leave the group."""
        self.group.close()


class Handle(tuple[Any, ...]):
    """The tuple that DeepEP returns as a handle: (source tokens, ranges, tokens of a rank, hidden, experts)."""

    made: Dispatched


class Dispatched:
    """One dispatch: the tensors that it returns, its current round, and its combines."""

    def __init__(
        self, shape: Shape, ids: torch.Tensor, sizes: tuple[int, int, int], ue8m0: bool, stats: torch.Tensor | None
    ) -> None:
        self._shape, self._ue8m0, self._stats = shape, ue8m0, stats
        self._held, config = shape.group, shape.group.config
        self._ids, self.tokens = ids.clone(), len(ids)
        most, hidden, experts = sizes
        ranks = self._held.moe.sizes.ranks
        local, rows = experts // ranks, ranks * most
        self._x = torch.empty(local, rows, hidden, dtype=getattr(torch, config.dtype))
        self._scales: torch.Tensor | None = None
        if config.scales:
            columns = (hidden // 512, torch.int32) if ue8m0 else (config.scales, torch.float32)
            # Column-major, which matrix products on a GPU need.
            self._scales = torch.empty(local, columns[0], rows, dtype=columns[1]).transpose(1, 2)
        self.received: Any = self._x if self._scales is None else (self._x, self._scales)
        self.count = torch.empty(local, dtype=torch.int32)
        source = torch.empty(local, rows, dtype=torch.int32)
        ranges = torch.empty(local, ranks, dtype=torch.int64)
        self.handle = Handle((source, ranges, most, hidden, experts))
        self.handle.made = self
        self._round: Round
        self._batch: Batch

    def send(self, x: torch.Tensor, round_scale: bool) -> PendingStep[Batch]:
        """Send the tokens. The returned `PendingStep` waits for the other ranks' tokens, and fills the tensors."""
        scales = None
        if self._scales is not None:
            x, scales = fp8.cast(x, round_scale)
        self._lane = self._shape.take_lane(self)
        try:
            self._begin(x, scales)
        except aiote.UsageError:
            # The round has not begun, so the next dispatch may have the lane.
            self._shape.free_lane(self._lane)
            raise
        self.finish = PendingStep(self._held.start(self._round.dispatch_recv()), self._fill_tensors)
        return self.finish

    def _begin(self, x: torch.Tensor, scales: torch.Tensor | None) -> None:
        weights = torch.zeros(self._ids.shape)

        def send() -> Round:
            return self._held.moe.dispatch_send(x, self._ids, weights, scales, lane=self._lane)

        self._round = self._held.run(send)

    def _fill_tensors(self, batch: Batch) -> None:
        """Copy the received rows into the tensors, because the next round of the lane overwrites its memory."""
        self._batch = batch
        x, scales, token = batch.x, batch.scales, torch.from_numpy(batch.token)
        counts = batch.expert_num_tokens
        source, ranges = self.handle[:2]
        for expert, count in enumerate(counts.tolist()):
            if count:
                self._x[expert, :count] = x[expert, :count]
                source[expert, :count] = token[expert, :count]
                if self._scales is not None:
                    rows = scales[expert, :count]
                    self._scales[expert, :count] = fp8.exponents(rows) if self._ue8m0 else rows
        self.count.copy_(torch.from_numpy(counts))
        of_rank = batch.expert_source_tokens.astype(np.int64)
        ranges.copy_(torch.from_numpy(np.cumsum(of_rank, 1) - of_rank << 32 | of_rank))
        if self._stats is not None:
            self._stats += self.count

    def find_skipped(self, ids: torch.Tensor) -> NDArray[np.bool_]:
        """Return which ids are -1 in a combine. Raises UsageError if other ids differ from the dispatched ones."""
        here = self._ids
        if ids.shape != here.shape or not torch.equal(torch.where(ids < 0, here, ids.to(here.dtype)), here):
            raise aiote.UsageError(
                "topk_idx: it differs from the dispatched ids; only a change of ids to -1 is allowed"
            )
        none: NDArray[np.bool_] = (ids < 0).numpy()
        return none

    def answers(self) -> torch.Tensor:
        """Return memory for the experts' results; a combine sends them from there without a copy."""
        if not self._shape.owns(self, self._lane):
            self._shape.wait_sums(self._lane)
        y: torch.Tensor = self._batch.y
        return y

    def combine(
        self, y: torch.Tensor | None, weights: torch.Tensor, skipped: NDArray[np.bool_], out: torch.Tensor
    ) -> PendingStep[Any]:
        """Send the experts' results back. The returned `PendingStep` waits for the sums."""
        if not self._shape.owns(self, self._lane):
            self._dispatch_zeros()
        round = self._round

        def send() -> None:
            round.reweigh(weights, skipped)
            round.combine_send(y)

        self._held.run(send)
        return self._begin_combine(out)

    def _begin_combine(self, out: torch.Tensor | None) -> PendingStep[Any]:
        end = PendingStep(self._held.start(self._round.combine_recv(out)))
        self._shape.end_round(self._lane, end)
        return end

    def _dispatch_zeros(self) -> None:
        """Dispatch tokens of zeros once more, to begin the round that a second or later combine needs."""
        self._shape.take_lane(self, self._lane)
        config = self._held.config
        x = torch.zeros(self.tokens, config.hidden, dtype=self._x.dtype)
        self._begin(x, torch.zeros(self.tokens, config.scales) if config.scales else None)
        self._batch = self._held.start(self._round.dispatch_recv()).wait()

    def give_up(self) -> None:
        """End a round that the caller has not combined; the received tensors stay."""
        try:
            self.finish()
        except MoeOverflowError:
            # Every rank has raised this error, and the round is over.
            return
        round = self._round
        self._held.run(round.combine_send)
        self._begin_combine(None)
