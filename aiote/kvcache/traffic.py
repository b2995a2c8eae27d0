"""What a prefiller has written, and for how long something of it was on its way.

Transfers of several jobs overlap, so their times are not added up: the time counts in which at least one is not over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import aiote

__all__ = ["PrefillStatistics", "PrefillTraffic"]


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


class PrefillTraffic:
    """Counts the transfers of one prefiller, by the flights that they are of. `now` tells the time, outside of tasks
    as well.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._flights: dict[aiote.Flight, None] = {}
        self._transfers = 0
        self._bytes = 0
        self._busy = 0
        self._busy_s = 0.0
        self._since = 0.0

    def enter(self, flight: aiote.Flight) -> None:
        """Count what is of a flight."""
        self._flights[flight] = None

    def leave(self, flight: aiote.Flight) -> None:
        """Keep what a flight has come to, in which nothing is under way any more."""
        del self._flights[flight]
        self._transfers += flight.landed
        self._bytes += flight.landed_bytes

    def begun(self) -> None:
        """Take note that something is under way in a flight in which nothing was."""
        if not self._busy:
            self._since = self._now()
        self._busy += 1

    def ended(self) -> None:
        """Take note that nothing is under way any more in a flight in which something was."""
        self._busy -= 1
        if not self._busy:
            self._busy_s += self._now() - self._since

    def read(self) -> PrefillStatistics:
        """Return what was counted so far."""
        current = self._now() - self._since if self._busy else 0.0
        return PrefillStatistics(
            self._transfers + sum(flight.landed for flight in self._flights),
            self._bytes + sum(flight.landed_bytes for flight in self._flights),
            sum(len(flight) for flight in self._flights),
            self._busy_s + current,
        )
