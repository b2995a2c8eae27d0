"""The states of a round and of a group's members. Pure: they decide which step is allowed; the runtime performs it.

A round goes through its phases in order, on every rank alike:

| phase        | left by          | then the rank has                                    |
|--------------|------------------|------------------------------------------------------|
| `idle`       | `dispatch_send`  | sent its route, and perhaps rows                     |
| `sent`       | `dispatch_recv`  | all ranks' routes, and its rows in place             |
| `dispatched` | `combine_send`   | sent its answers, and given up its batch             |
| `answered`   | `combine_recv`   | all answers; the lane is `idle`, in the next round   |

No barrier is needed. A rank sends the route of round r + 1 only after it has ended round r. Therefore a rank that has
all routes of r + 1 knows that every rank has ended r, and may write anywhere. A rank that sent rows to a peer in r has
the peer's answer at the end of r, which shows that the peer has read them. A peer that owes a rank no answer may be one
round ahead of it, never two. Therefore the slots of routes are double, by the parity of the round. Counters are
threefold: a rank waits on those of its round, a peer that is ahead counts on those of the next, and a count on those of
the last round is one too many (`Lane.wait`).

A failure in the middle of a round breaks the group on every rank, because the counts of a broken round can no longer be
interpreted. A reset begins a new epoch with new immediates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from ..errors import AioteError, UsageError

__all__ = ["GroupBrokenError", "Membership", "MoeOverflowError", "NotBegunError", "Phase", "RoundState"]

Phase = Literal["idle", "sent", "dispatched", "answered"]
MOST_FOLLOWED = 256
"""How many later epochs a rank follows others into before it gives up a reset. Honest ranks agree after a few; a rank
that always claims to be ahead would keep the others from entering any.
"""
STEPS: dict[str, tuple[Phase, Phase]] = {
    "dispatch_send": ("idle", "sent"),
    "dispatch_recv": ("sent", "dispatched"),
    "combine_send": ("dispatched", "answered"),
    "combine_recv": ("answered", "idle"),
}


class GroupBrokenError(AioteError):
    """A round was cancelled or failed on some rank; the group is unusable until every rank calls `reset`."""


class MoeOverflowError(AioteError):
    """A round has more rows than there is room for. Every rank raises this; the round is over and the next may begin.

    `demand` is the value of `rows` that would have been enough.
    """

    def __init__(self, demand: int, rows: int) -> None:
        super().__init__(f"{demand} rows are needed and there is room for rows={rows}; raise it, or drop rows")
        self.demand = demand
        self.rows = rows


class NotBegunError(UsageError):
    """The tokens of a round were refused before any of it was sent; the lane is unchanged."""


class RoundState:
    """The state of a lane: the number of its round, the phase, and whether a step is running."""

    def __init__(self) -> None:
        self.number = 0
        self.phase: Phase = "idle"
        self.busy = False

    @property
    def parity(self) -> int:
        """Which of the two slots and counters the round uses: 0 or 1."""
        return self.number & 1

    def enter(self, step: str) -> None:
        """Begin a step. Raises UsageError if the phase is not the step's, or if another step is running."""
        before, _ = STEPS[step]
        if self.busy or self.phase != before:
            under_way = (
                "another step is under way" if self.busy else f"the round is {self.phase!r}, expected {before!r}"
            )
            raise UsageError(f"{step}: {under_way}; a lane has one round at a time, in the order {' -> '.join(STEPS)}")
        self.busy = True

    def leave(self, step: str) -> None:
        """End a step that succeeded."""
        self.busy = False
        self.phase = STEPS[step][1]
        if self.phase == "idle":
            self.number += 1

    def undo(self) -> None:
        """End a step that did nothing, or that found that this rank has sent nothing: the round has not begun."""
        self.busy = False
        self.phase = "idle"

    def give_up(self) -> None:
        """End the round without answers, because rows overflow; every rank does the same."""
        self.busy = False
        self.phase = "idle"
        self.number += 1


class Membership:
    """The members of a group: the epoch, which ranks are masked or have left, and why the group is broken, if it is."""

    def __init__(self, ranks: int, me: int, *, masks: bool) -> None:
        self.ranks, self.me = ranks, me
        self.epoch = 0
        self.failure: AioteError | None = None
        self.heard = False
        """Whether another rank reported the failure."""
        self.departed: dict[int, list[int]] = {}
        """The ranks that have left, each with the first round of each lane in which it takes no part."""
        self.gone: dict[int, str] = {}
        """The ranks among these whose connection has ended, and why: all that they wrote has been counted."""
        self._masks = masks
        self._masked: dict[int, str] = {}
        self._followed = 0
        self._ahead = Counter[int]()

    @property
    def active(self) -> list[int]:
        """The ranks that take part, without this one."""
        return [rank for rank in range(self.ranks) if rank != self.me and rank not in self._masked]

    @property
    def masked(self) -> dict[int, str]:
        """The ranks that are masked, and why."""
        return dict(self._masked)

    def takes_part(self, rank: int) -> bool:
        """Return whether a rank takes part, which it does unless it is masked."""
        return rank not in self._masked

    def mask(self, rank: int, reason: str) -> bool:
        """Go on without a rank; return whether it took part. Raises UsageError for this rank and for unknown ones."""
        if not 0 <= rank < self.ranks or rank == self.me:
            raise UsageError(f"mask({rank!r}): expected another rank, from 0 to {self.ranks - 1} without {self.me}")
        if rank in self._masked:
            return False
        self._masked[rank] = reason
        return True

    def record_loss(self, rank: int, error: AioteError) -> None:
        """Record that a rank is lost: mask it, or break the group."""
        if self._masks:
            self.mask(rank, str(error))
        else:
            self.break_by(error)

    def break_by(self, error: AioteError) -> bool:
        """Break the group; return whether it was whole. The first error stays the reason."""
        if self.failure is not None:
            return False
        self.failure = error
        return True

    def record_break(self, rank: int, epoch: int, reason: str) -> bool:
        """Record that another rank broke an epoch; return whether that broke this rank's group.

        It does not for another epoch, nor for a group that is broken already.
        """
        if epoch != self.epoch:
            return False
        self.heard |= self.failure is None
        return self.break_by(GroupBrokenError(f"rank {rank} broke the round: {reason}"))

    def reset(self, epoch: int, back: Iterable[int] = ()) -> None:
        """Begin an epoch, in which the ranks in `back` take part again. Raises UsageError if the epoch is not later."""
        if epoch <= self.epoch:
            raise UsageError(f"epoch {epoch} is not later than {self.epoch}")
        self.epoch, self.failure, self.heard = epoch, None, False
        self._followed, self._ahead = 0, Counter()
        self.departed.clear()
        self.gone.clear()
        for rank in back:
            self._masked.pop(rank, None)

    def follow(self, epoch: int, ranks: Iterable[int]) -> None:
        """Go on to a later epoch, which these ranks are in, or which comes after one that a rank broke.

        Raises GroupBrokenError, which names the ranks, after MOST_FOLLOWED epochs since the last `reset`.
        """
        followed, ahead = self._followed + 1, self._ahead
        ahead.update(ranks)
        if followed > MOST_FOLLOWED:
            often = ", ".join(f"rank {rank} {count} times" for rank, count in ahead.most_common(8))
            raise GroupBrokenError(
                f"{MOST_FOLLOWED} epochs were broken, or some rank was in a later one ({often or 'none'}); leave out a "
                "rank that is always ahead"
            )
        self.reset(epoch)
        self._followed, self._ahead = followed, ahead

    def require_whole(self) -> None:
        """Raise the reason why the group is broken, if it is."""
        if self.failure is not None:
            raise self.failure
