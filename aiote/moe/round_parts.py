"""The parts of a round that its steps share: its group, its arguments, offsets in memory, and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import aiote

from . import kernels
from .config import MoeConfig, Sizes
from .device import Launcher
from .memory import RankMemory
from .plan import RoundPlan
from .posting import OutboxWrite, Posting
from .sharing import MappedInboxes
from .states import Membership
from .statistics import MoeStatistics
from .wire import slot_of

if TYPE_CHECKING:
    from .lane import Lane

__all__ = ["DispatchArguments", "RoundHost", "RoundParts"]


class RoundHost(Protocol):
    """The part of a group that its lanes and rounds use."""

    engine: aiote.Engine
    config: MoeConfig
    sizes: Sizes
    rank: int
    members: list[aiote.Address]
    debug: bool
    launcher: Launcher | None
    membership: Membership
    memory: RankMemory
    mapped_inboxes: MappedInboxes
    posting: Posting | None
    counted: MoeStatistics

    @property
    def active(self) -> NDArray[np.bool_]:
        """Which ranks take part (ranks,), including this one."""

    def lose(self, rank: int, reason: str) -> None:
        """Record that a rank is lost: mask and disconnect it, or break the group."""

    def fail(self, error: BaseException, step: str) -> None:
        """Break the group because of an error on this rank, and tell the others."""

    def start_task(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Run a task beside the rounds, until the group is left."""


class DispatchArguments:
    """The arguments of a dispatch, with rows as lines of bytes. `like` is an array of the kind that the caller uses."""

    __slots__ = ("ids", "like", "scales", "tokens", "weights", "x")

    def __init__(self, tokens: int, x: Any, ids: Any, weights: Any, scales: Any, like: Any):
        self.tokens, self.x, self.ids, self.weights, self.scales, self.like = tokens, x, ids, weights, scales, like


class RoundParts:
    """What all steps of a round use: its group, lane, memory and plan, where its rows lie, and how they are written."""

    def __init__(self, lane: Lane, given: DispatchArguments) -> None:
        self._lane, self._given = lane, given
        self._group, self._sizes, self._memory = lane.group, lane.sizes, lane.memory
        self._me, self._membership = lane.group.rank, lane.group.membership
        self._map, self._counted = lane.group.memory.map, lane.group.counted
        self._config = lane.sizes.config
        self._state = lane.state
        self.number, self._parity = lane.state.number, lane.state.parity
        self._tokens = given.tokens
        self._kernels: Any = kernels
        self._plan: RoundPlan | None = None
        self._arrived_ranks: list[int] = []
        self._own: NDArray[np.int32] | None = None
        # With copies by rank: whether this rank's own copies are in the receive region, like the others'.
        self._own_received = lane.sizes.whole
        # The inboxes of ranks of this host, which rows and answers are written to without a transfer.
        self._mapped_inboxes = lane.group.mapped_inboxes.lanes[lane.number]
        self._y_like: Any = given.like
        self.answered: NDArray[np.bool_] | None = None

    def _slot(self, kind: int) -> int:
        return slot_of(self._lane.number, kind, self.number)

    def _write(self, writes: list[OutboxWrite], kind: int) -> None:
        posting = self._group.posting
        assert posting is not None
        if writes:
            try:
                self._lane.keep_transfers(posting.post_writes(writes, self._slot(kind)))
            except aiote.PeerError as error:
                raise self._lane.name_rank(error) from error
            self._counted.sent_bytes += sum(one.nbytes for one in writes)

    async def _wait(self, what: str, kind: int, needs: dict[int, int]) -> list[int]:
        return await self._lane.wait(what, kind, needs)

    def _base(self) -> int:
        return self._lane.number * self._map.inbox

    def _outbox(self) -> int:
        return self._lane.number * self._map.outbox

    def _pages(self, rank: int, to: tuple[int, Any], at: tuple[int, Any], nbytes: int, kind: int) -> None:
        posting = self._group.posting
        assert posting is not None
        self._lane.keep_transfers(posting.post_pages(rank, to, at, nbytes, self._slot(kind)))
        self._counted.sent_bytes += nbytes * len(to[1])

    def _rows_to(self, rank: int, line: int, first: int, count: int) -> OutboxWrite:
        where, row = self._map, self._sizes.row
        to, at = self._base() + where.rows_at, self._outbox() + where.sent_at
        return OutboxWrite(rank, to + line * row, at + first * row, count * row)

    def _refuse(self, rank: int, why: str) -> None:
        """Lose a rank that sent impossible data. With on_loss="raise" raises PeerError, which breaks the group."""
        if self._config.on_loss == "raise":
            raise aiote.PeerError(str(self._group.members[rank]), f"rank {rank}: {why}")
        self._group.lose(rank, why)

    def _count_of(self, rank: int, nbytes: int) -> OutboxWrite:
        """Return the write without bytes that counts what was put into a mapped inbox."""
        self._counted.sent_bytes += nbytes
        return OutboxWrite(rank, 0, 0, 0)

    def _known_plan(self) -> RoundPlan:
        assert self._plan is not None
        return self._plan
