"""The counts that two engines keep for the immediates of one channel, and their meaning once both have shut it.

Per channel and generation each side counts, for each immediate (all 32 bits, see striping.py), the successful
completions of its own counted posts (*confirmed*) and the immediates that arrived from the other side (*arrived*). A
completion means that bytes and immediate are there. So when both sides have shut their endpoints and read their
completion queues to the end, of the unconfirmed posts of an immediate exactly

    came = arrived at the receiver - confirmed at the sender        0 <= came <= unconfirmed

have arrived. Which of them arrived is unknown, and need not be known.

Some providers *forget*: closing an endpoint drops the rest of its completion queue, so immediates that arrived may not
have been counted. `came` may then be below zero for an immediate, down to minus all that were ever confirmed. The bytes
of those writes are in place, because they were confirmed. Only counts are missing, and they are sent again as
immediates alone. So arrivals have a sign, and a peer whose provider does not forget is treated as lying if it reports
less than zero.

To keep its table bounded, a sender that has confirmed more than CONFIRMED_LIMIT immediates removes them from its table
and sends them in an `AckCounts`; the receiver subtracts them from its own. That keeps the difference. An AckCounts may
overtake the arrivals that it acknowledges, because completion queue and control connection are read in any order, so an
entry may be below zero for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from aiote.core.failover import FailoverError, Items

__all__ = [
    "ARRIVED_LIMIT",
    "CONFIRMED_LIMIT",
    "ChannelCounts",
    "Verdict",
    "reconcile",
]

CONFIRMED_LIMIT: Final = 1024  # immediates: an AckCounts of them takes 12 KiB of a frame's 64
ARRIVED_LIMIT: Final = 1 << 20  # immediates; beyond it the peer sends no AckCounts, or this side reads none


class ChannelCounts:
    """One side's counts for one generation of one channel: its own confirmed posts, and the arrivals from the other."""

    __slots__ = ("_arrived", "_confirmed", "_forgets", "_limit", "_total")

    def __init__(self, limit: int = CONFIRMED_LIMIT, *, forgets: bool = False) -> None:
        self._limit = limit
        self._forgets = forgets
        self._total = 0
        self._confirmed: dict[int, int] = {}
        self._arrived: dict[int, int] = {}

    @property
    def confirmed(self) -> Mapping[int, int]:
        """The number of posts of each immediate that were confirmed and not yet acknowledged."""
        return MappingProxyType(self._confirmed)

    @property
    def forgettable(self) -> int:
        """The number of counts that the peer may have dropped with its completion queue: all that were ever confirmed,
        or 0 if the provider does not forget.
        """
        return self._total if self._forgets else 0

    def confirm(self, imm_data: int) -> None:
        """Record that a counted post with this immediate succeeded; call `counts_to_ack` next."""
        self._confirmed[imm_data] = self._confirmed.get(imm_data, 0) + 1
        self._total += 1

    def counts_to_ack(self) -> Items | None:
        """Return the counts for an AckCounts and remove them, or None while the table is small enough.

        It must not be called once the RailDown of this generation has been sent.
        """
        if len(self._confirmed) <= self._limit:
            return None
        items = tuple(sorted(self._confirmed.items()))
        self._confirmed.clear()
        return items

    def arrive(self, imm_data: int) -> None:
        """Record that an immediate arrived. Raises FailoverError if the peer makes the table grow without end."""
        self._add(imm_data, 1)

    def ack_counts(self, items: Iterable[tuple[int, int]]) -> None:
        """Subtract the counts that the peer has acknowledged; an entry may go below zero until its arrival is read.

        Raises FailoverError for a number below one, and as `arrive`.
        """
        for imm_data, n in items:
            if n < 1:
                raise FailoverError(
                    f"the peer acknowledges {n} posts of the immediate {imm_data:#x}, expected at least 1"
                )
            self._add(imm_data, -n)

    def arrivals(self) -> Items:
        """Return the immediates that arrived and are not acknowledged.

        They are final once this side's endpoint is shut and the other side's RailDown was heard. Raises FailoverError
        if more was acknowledged than arrived and the provider does not forget.
        """
        for imm_data, n in self._arrived.items():
            if n < 0 and not self._forgets:
                raise FailoverError(
                    f"the peer acknowledged {-n} posts of the immediate {imm_data:#x} more than arrived"
                )
        return tuple(sorted(self._arrived.items()))

    def __len__(self) -> int:
        """Return the number of entries in the larger of the two tables."""
        return max(len(self._confirmed), len(self._arrived))

    def _add(self, imm_data: int, n: int) -> None:
        left = self._arrived.get(imm_data, 0) + n
        if left:
            self._arrived[imm_data] = left
        else:
            del self._arrived[imm_data]
        if len(self._arrived) > ARRIVED_LIMIT:
            raise FailoverError(f"the peer has over {ARRIVED_LIMIT} immediates that it did not acknowledge")


class Verdict(NamedTuple):
    """The verdict on the unconfirmed posts of one immediate: whether to rewrite bytes, and how many counts are missing.

    `came` of the posts arrived, with their bytes. `missing` is valid for the posts that are live now; see recovery.py.
    """

    rewrite: bool
    missing: int
    came: int


def reconcile(
    unconfirmed: Mapping[int, tuple[int, int]],
    confirmed: Mapping[int, int],
    arrived: Mapping[int, int],
    forgettable: int = 0,
) -> dict[int, Verdict]:
    """Return the verdict on each immediate of `unconfirmed`, and on each immediate with forgotten counts.

    `unconfirmed` has the numbers of live and of cancelled posts of each immediate. Raises FailoverError if more arrived
    than was posted, or less than was confirmed by more than `forgettable` counts of all immediates together.
    """
    verdicts = {}
    for imm_data in sorted({*unconfirmed, *confirmed, *arrived}):
        live, cancelled = unconfirmed.get(imm_data, (0, 0))
        came = arrived.get(imm_data, 0) - confirmed.get(imm_data, 0)
        forgettable += min(0, came)
        if forgettable < 0 or came > live + cancelled:
            raise FailoverError(
                f"the peer says that {arrived.get(imm_data, 0)} posts of the immediate {imm_data:#x} came, "
                f"where {confirmed.get(imm_data, 0)} were confirmed and {live + cancelled} were not"
            )
        if imm_data in unconfirmed or came < 0:
            some_lost = came < live + cancelled
            verdicts[imm_data] = Verdict(some_lost and live > 0, max(0, live - came) if some_lost else 0, came)
    return verdicts
