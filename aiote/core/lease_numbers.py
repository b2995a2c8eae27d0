"""Numbers of leases: which are granted to whom, and which a holder has been told are void.

A lease has a number, drawn in order by the engine that grants it. Of the numbers that it has drawn so far all are void
for a holder but those of its own live leases; so what is void can be told in ranges, as many as it has live leases and
one more, however many leases there were. `Grants` is the granting side, `Revocations` what a holder remembers of one
such engine. Neither knows time or connections.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

from ..errors import UsageError

__all__ = ["MAX_RANGES", "Grants", "Revocations"]

MAX_RANGES = 1 << 16


class Grants:
    """The live leases of one engine, by holder."""

    __slots__ = ("_last", "_live")

    def __init__(self) -> None:
        self._last = 0
        self._live: dict[Hashable, list[int]] = {}

    def grant(self, holder: Hashable) -> int:
        """Draw the number of a new lease."""
        self._last += 1
        insort(self._live.setdefault(holder, []), self._last)
        return self._last

    def revoke(self, holder: Hashable, lease: int) -> tuple[int, int]:
        """End a lease; return the range around its number that is void for the holder, both ends included."""
        live = self._live.get(holder, [])
        at = bisect_left(live, lease)
        if at == len(live) or live[at] != lease:
            raise KeyError(f"holder {holder!r} has no lease {lease}")
        del live[at]
        if not live:
            del self._live[holder]
        return self._between(live, at)

    def void(self, holder: Hashable) -> Iterator[tuple[int, int]]:
        """Return all ranges that are void for a holder, in order."""
        live = self._live.get(holder, [])
        for at in range(len(live) + 1):
            low, high = self._between(live, at)
            if low <= high:
                yield low, high

    def _between(self, live: list[int], at: int) -> tuple[int, int]:
        low = live[at - 1] + 1 if at else 1
        high = live[at] - 1 if at < len(live) else self._last
        return low, high


class Revocations:
    """The numbers that are void for this engine, as another one has told."""

    __slots__ = ("_highs", "_lows")

    def __init__(self) -> None:
        # Disjoint ranges that do not touch, in order.
        self._lows: list[int] = []
        self._highs: list[int] = []

    def add(self, low: int, high: int) -> None:
        """Take note that the numbers from `low` to `high` are void; nothing where there are none.

        Raises UsageError for more ranges than an engine has that grants in good faith: it has a live lease between two.
        """
        if low > high:
            return
        first = bisect_left(self._highs, low - 1)
        last = bisect_left(self._lows, high + 2)
        if first < last:
            low = min(low, self._lows[first])
            high = max(high, self._highs[last - 1])
        if first == last and len(self._lows) >= MAX_RANGES:
            raise UsageError(f"over {MAX_RANGES} ranges of leases are void")
        self._lows[first:last] = [low]
        self._highs[first:last] = [high]

    def __contains__(self, lease: int) -> bool:
        at = bisect_left(self._highs, lease)
        return at < len(self._lows) and self._lows[at] <= lease

    def __len__(self) -> int:
        """Return how many ranges are remembered."""
        return len(self._lows)
