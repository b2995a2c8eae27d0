"""What two engines know of the immediates of one channel, and what follows once both have shut it.

Per channel and generation each side counts, for each immediate (all 32 bits, see striping.py), the successful
completions of its own counted posts (*confirmed*) and what came (*arrived*). A completion means that bytes and
immediate are there, so when both sides have shut their endpoints and read their completion queues to the end, of the
unconfirmed posts of an immediate exactly

    came = arrived at the receiver - confirmed at the sender        0 <= came <= unconfirmed

have arrived. Which ones is unknown, and need not be known.

Some providers *forget*: closing an endpoint drops what its completion queue still holds, so what came may not have been
counted. Of an immediate `came` may then be below zero, down to minus all that were ever confirmed. The bytes of those
are in place, for they were confirmed; what is missing are counts, which are sent again as immediates alone. So arrivals
have a sign, and a peer whose provider does not forget is taken for a liar where it says fewer than none.

To stay bounded, a sender that has confirmed more than CONFIRMED_LIMIT immediates takes them out of its table and sends
them in an `AckCounts`; the receiver takes them out of its own. That keeps the difference. An AckCounts may overtake
what it acknowledges, since completion queue and control connection are read in any order, so an entry may be below zero
for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from .control_frames import ControlError

__all__ = [
    "ARRIVED_LIMIT",
    "CONFIRMED_LIMIT",
    "Account",
    "ChannelCounts",
    "FailoverError",
    "Items",
    "Received",
    "Verdict",
    "reconcile",
]

CONFIRMED_LIMIT: Final = 1024  # immediates: an AckCounts of them takes 12 KiB of a frame's 64
ARRIVED_LIMIT: Final = 1 << 20  # immediates of a peer that acknowledges none, or of AckCounts that nobody reads

Items: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of an immediate and how often, sorted by imm_data."""


class FailoverError(ControlError):
    """The peer said what cannot be: its counts cannot be trusted any more, and it has to be given up."""


class ChannelCounts:
    """What one side knows of one generation of one channel: its own confirmed posts, and what came from the other."""

    __slots__ = ("_arrived", "_confirmed", "_forgets", "_limit", "_total")

    def __init__(self, limit: int = CONFIRMED_LIMIT, *, forgets: bool = False) -> None:
        self._limit = limit
        self._forgets = forgets
        self._total = 0
        self._confirmed: dict[int, int] = {}
        self._arrived: dict[int, int] = {}

    @property
    def confirmed(self) -> Mapping[int, int]:
        """How often each immediate was confirmed and not yet acknowledged."""
        return MappingProxyType(self._confirmed)

    @property
    def forgettable(self) -> int:
        """How many counts the peer may have dropped with its completion queue: all that were ever confirmed, or none
        where the provider does not forget.
        """
        return self._total if self._forgets else 0

    def confirm(self, imm_data: int) -> None:
        """Take note that a counted post with this immediate completed successfully; then ask for a `counts_to_ack`."""
        self._confirmed[imm_data] = self._confirmed.get(imm_data, 0) + 1
        self._total += 1

    def counts_to_ack(self) -> Items | None:
        """Return what is to be told in an AckCounts and forget it, or None while the table is small enough.

        Not to be called once the RailDown of this generation is told.
        """
        if len(self._confirmed) <= self._limit:
            return None
        items = tuple(sorted(self._confirmed.items()))
        self._confirmed.clear()
        return items

    def arrive(self, imm_data: int) -> None:
        """Take note that an immediate came. Raises FailoverError where the peer makes the table grow without end."""
        self._add(imm_data, 1)

    def ack_counts(self, items: Iterable[tuple[int, int]]) -> None:
        """Take out what the peer has acknowledged; an entry may go below zero until its arrival is read.

        Raises FailoverError for a number below one, and as `arrive`.
        """
        for imm_data, n in items:
            if n < 1:
                raise FailoverError(f"the peer acknowledges {n} of the immediate {imm_data:#x}, expected at least 1")
            self._add(imm_data, -n)

    def arrivals(self) -> Items:
        """Return what came and is not acknowledged: final once the own endpoint is shut and the other's RailDown heard.

        Raises FailoverError where more was acknowledged than came, and the provider does not forget.
        """
        for imm_data, n in self._arrived.items():
            if n < 0 and not self._forgets:
                raise FailoverError(f"the peer acknowledged {-n} posts of the immediate {imm_data:#x} more than came")
        return tuple(sorted(self._arrived.items()))

    def __len__(self) -> int:
        """Return how many entries there are in the larger of the two tables."""
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
    """About the unconfirmed posts of one immediate: whether to rewrite their bytes, and how many counts are missing.

    `came` of the posts arrived, with their bytes. `missing` holds for what is live now; see recovery.py.
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
    """Return the verdict on each immediate of `unconfirmed`, which has the numbers of live and of cancelled posts, and
    on each of which counts were forgotten.

    Raises FailoverError where more arrived than was posted, or less than was confirmed by more than `forgettable`
    counts of all immediates together.
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


class Received(NamedTuple):
    """Which messages arrived: all up to `high`, and the ranges `beyond`, both ends included."""

    high: int
    beyond: tuple[tuple[int, int], ...]

    def __contains__(self, number: object) -> bool:
        """Tell whether the message of that number arrived."""
        return isinstance(number, int) and (
            0 < number <= self.high or any(low <= number <= high for low, high in self.beyond)
        )


class Account(NamedTuple):
    """What one side says of the other's posts: the counts of its immediates on a channel, and its messages on all."""

    counts: Items = ()
    messages: Received = Received(0, ())
