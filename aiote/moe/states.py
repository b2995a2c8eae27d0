"""The states of a round and of a group's members. Pure: they say what may be done, and the runtime does it.

A round goes through its phases in order, on every rank alike:

| phase        | left by          | then the rank has                                    |
|--------------|------------------|------------------------------------------------------|
| `idle`       | `dispatch_send`  | sent its route, and perhaps rows                     |
| `sent`       | `dispatch_recv`  | everybody's routes, and its rows in place            |
| `dispatched` | `combine_send`   | answered, and its batch is gone                      |
| `answered`   | `combine_recv`   | all answers; the lane is `idle`, in the next round   |

A rank sends the route of round r + 1 only after it has ended round r. So whoever has all routes of r + 1 knows that
everybody has ended r, and writes where he likes; whoever has sent somebody rows in r has his answer, so they were read.
A peer that owes one nothing may be a round ahead, never two: so routes, and the counts of routes and rows, are double,
by the parity of the round, and no barrier is needed.

What goes wrong in the middle of a round breaks the group, for every rank: the counts of a broken round are nobody's any
more. A reset begins a new epoch, whose immediates are others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ..errors import AioteError, UsageError

__all__ = ["GroupBrokenError", "Membership", "MoeOverflowError", "NotBegunError", "Phase", "RoundState"]

Phase = Literal["idle", "sent", "dispatched", "answered"]
STEPS: dict[str, tuple[Phase, Phase]] = {
    "dispatch_send": ("idle", "sent"),
    "dispatch_recv": ("sent", "dispatched"),
    "combine_send": ("dispatched", "answered"),
    "combine_recv": ("answered", "idle"),
}


class GroupBrokenError(AioteError):
    """A round was cancelled or failed on some rank: the group is of no use until every rank calls `reset`."""


class MoeOverflowError(AioteError):
    """More rows than there is room for, seen by every rank alike; the round is over and the next may begin.

    `demand` is how many `rows` would have been enough.
    """

    def __init__(self, demand: int, rows: int) -> None:
        super().__init__(f"{demand} rows are needed and there is room for rows={rows}; raise it, or drop rows")
        self.demand = demand
        self.rows = rows


class NotBegunError(UsageError):
    """The tokens of a round were refused before anything of it was sent: the lane is as it was."""


class RoundState:
    """Where a lane is: the number of its round, and the phase."""

    def __init__(self) -> None:
        self.number = 0
        self.phase: Phase = "idle"
        self.busy = False

    @property
    def parity(self) -> int:
        """Which of the two slots and counters the round has."""
        return self.number & 1

    def enter(self, step: str) -> None:
        """Begin a step. Raises UsageError where it is not its turn."""
        before, _ = STEPS[step]
        if self.busy or self.phase != before:
            under_way = (
                "another step is under way" if self.busy else f"the round is {self.phase!r}, expected {before!r}"
            )
            raise UsageError(f"{step}: {under_way}; a lane has one round at a time, in the order {' -> '.join(STEPS)}")
        self.busy = True

    def leave(self, step: str) -> None:
        """End a step that went well."""
        self.busy = False
        self.phase = STEPS[step][1]
        if self.phase == "idle":
            self.number += 1

    def undo(self) -> None:
        """End a step that did nothing, or found that nothing was sent: the round has not begun."""
        self.busy = False
        self.phase = "idle"

    def give_up(self) -> None:
        """End the round without an answer, as one that overflows: every rank does the same."""
        self.busy = False
        self.phase = "idle"
        self.number += 1


class Membership:
    """Who takes part: the epoch, which ranks are masked, and why the group is broken, if it is."""

    def __init__(self, ranks: int, me: int, *, masks: bool) -> None:
        self.ranks, self.me = ranks, me
        self.epoch = 0
        self.failure: AioteError | None = None
        self.heard = False
        """Whether it was another rank that said so."""
        self.departed: dict[int, list[int]] = {}
        """The first rounds, one for each lane, in which a rank that has left takes no part."""
        self.gone: dict[int, str] = {}
        """Of these the ones whose connection has ended, and why: whatever they wrote has been counted."""
        self._masks = masks
        self._masked: dict[int, str] = {}

    @property
    def active(self) -> list[int]:
        """The other ranks that take part."""
        return [rank for rank in range(self.ranks) if rank != self.me and rank not in self._masked]

    @property
    def masked(self) -> dict[int, str]:
        """Which ranks take no part, and why."""
        return dict(self._masked)

    def takes_part(self, rank: int) -> bool:
        """Whether a rank is not masked."""
        return rank not in self._masked

    def mask(self, rank: int, reason: str) -> bool:
        """Go on without a rank; return whether it took part. Raises UsageError for this one, and for none."""
        if not 0 <= rank < self.ranks or rank == self.me:
            raise UsageError(f"mask({rank!r}): expected another rank, from 0 to {self.ranks - 1} without {self.me}")
        if rank in self._masked:
            return False
        self._masked[rank] = reason
        return True

    def lost(self, rank: int, error: AioteError) -> None:
        """Take note that a rank is lost: it is masked, or the group is broken."""
        if self._masks:
            self.mask(rank, str(error))
        else:
            self.break_by(error)

    def break_by(self, error: AioteError) -> bool:
        """Break the group; return whether it was whole. What came first is the reason."""
        if self.failure is not None:
            return False
        self.failure = error
        return True

    def told(self, rank: int, epoch: int, reason: str) -> bool:
        """Take note that another rank broke an epoch; return whether that is this one."""
        if epoch != self.epoch:
            return False
        self.heard |= self.failure is None
        return self.break_by(GroupBrokenError(f"rank {rank} broke the round: {reason}"))

    def reset(self, epoch: int, back: Iterable[int] = ()) -> None:
        """Begin an epoch, with the ranks in `back` again. Raises UsageError for one that is not later."""
        if epoch <= self.epoch:
            raise UsageError(f"epoch {epoch} is not later than {self.epoch}")
        self.epoch, self.failure, self.heard = epoch, None, False
        self.departed.clear()
        self.gone.clear()
        for rank in back:
            self._masked.pop(rank, None)

    def require_whole(self) -> None:
        """Raise why the group is broken, if it is."""
        if self.failure is not None:
            raise self.failure
