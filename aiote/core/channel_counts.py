"""The report that two engines exchange about a channel which both have shut.

`docs/failover.md` explains the counts, and the conclusions from both sides' reports. The counting is native
(counters/table.pyx, channels/failover.pyx).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from .control_frames import ControlError

__all__ = ["Account", "FailoverError", "Items", "Received"]

Items: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of an immediate and its number of occurrences, sorted by imm_data."""


class FailoverError(ControlError):
    """The peer sent something impossible: its counts cannot be trusted any more, and this engine must lose the peer."""


class Received(NamedTuple):
    """The messages that arrived: all up to `high`, and the ranges `beyond`, both ends included."""

    high: int
    beyond: tuple[tuple[int, int], ...]

    def __contains__(self, number: object) -> bool:
        """Return whether the message of that number arrived."""
        return isinstance(number, int) and (
            0 < number <= self.high or any(low <= number <= high for low, high in self.beyond)
        )


class Account(NamedTuple):
    """One side's report of the other's posts: the counts of its immediates on a channel, and its messages on all."""

    counts: Items = ()
    messages: Received = Received(0, ())
