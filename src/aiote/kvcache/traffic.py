"""What a prefiller has written, and for how long something of it was on its way.

Transfers of several jobs overlap, so their times are not added up: the time counts in which at least one is not over.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

import aiote

__all__ = ["PrefillStatistics", "Traffic"]


@dataclass(frozen=True, slots=True)
class PrefillStatistics:
    """What the jobs of a prefiller have written since it was entered.

    `transfers` (one for each layer of a chunk, and each tail, toward each decode rank) and their `bytes`, what failed
    not included; `in_flight` are not over. For `busy_s` seconds at least one was not, on this engine's clock.
    """

    transfers: int
    bytes: int
    in_flight: int
    busy_s: float


class Traffic:
    """Counts the transfers of one prefiller."""

    def __init__(self) -> None:
        self._transfers = 0
        self._bytes = 0
        self._flying = 0
        self._busy_s = 0.0
        self._since = 0.0

    def begun(self) -> None:
        """Take note of one that was submitted."""
        if not self._flying:
            self._since = anyio.current_time()
        self._flying += 1

    def over(self, transfer: aiote.Transfer) -> None:
        """Take note of one that is over, well or not."""
        self._flying -= 1
        if not self._flying:
            self._busy_s += anyio.current_time() - self._since
        if transfer.exception() is None:
            self._transfers += 1
            self._bytes += transfer.total_bytes

    def read(self) -> PrefillStatistics:
        """Return what was counted so far."""
        current = anyio.current_time() - self._since if self._flying else 0.0
        return PrefillStatistics(self._transfers, self._bytes, self._flying, self._busy_s + current)
