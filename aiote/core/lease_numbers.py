"""Numbers of leases: which are granted to whom, and which a holder has been told are void.

Each lease has a number, which the granting engine draws in ascending order. For one holder, every number drawn so far
is void except those of its own live leases. Void numbers can therefore be told as ranges: at most one more than the
holder has live leases, however many leases there were. `Grants` is the granting side; `Revocations` is what a holder
remembers of one such engine. Neither knows time or connections.
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
        """End a lease; return the range around its number that is void for the holder, both ends included.

        Raises KeyError if the holder has no such lease.
        """
        live = self._live.get(holder, [])
        at = bisect_left(live, lease)
        if at == len(live) or live[at] != lease:
            raise KeyError(f"holder {holder!r} has no lease {lease}")
        del live[at]
        if not live:
            del self._live[holder]
        return self._between(live, at)

    def void_ranges(self, holder: Hashable) -> Iterator[tuple[int, int]]:
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
    """The numbers that another engine has told this one are void."""

    __slots__ = ("_highs", "_lows")

    def __init__(self) -> None:
        # Disjoint ranges that do not touch, in ascending order.
        self._lows: list[int] = []
        self._highs: list[int] = []

    def add(self, low: int, high: int) -> None:
        """Record that the numbers from `low` to `high` are void; an empty range changes nothing.

        Raises UsageError beyond MAX_RANGES: two ranges have a live lease between them, and an honest engine has fewer
        leases.
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
        """Return the number of remembered ranges."""
        return len(self._lows)
