"""When work in flight toward a live peer counts as stuck.

Heartbeats go over the control connection. A data connection can be lost on its own (a firewall, one NIC of several):
then the provider reports nothing, and the peer is still heard. So the caller looks at each channel that has work: how
many of its requests have ended, and how many bytes its connection has moved. A channel on which neither changes for
`patience` is stuck; a channel that is merely slow is not, because its bytes go on.

`StallDetector` knows no clock, like `HeartbeatClock`. A caller that was itself held up did not look, and its peer's
answer may lie in a socket's buffer, so the time between two looks counts as at most one `interval`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["StallDetector"]

UNSEEN = -1


@dataclass(slots=True)
class LastLook:
    """The state of a channel at the last look, and the time since it last changed."""

    ended: int
    moved: int = UNSEEN
    still: float = 0.0


class StallDetector:
    """The channels of one peer; times in seconds.

    `limit` is the longest time that a waiting task is to wait. The patience is shorter than that by one interval, which
    the looks may take, but at least half of the limit.
    """

    __slots__ = ("_interval", "_last", "_marks", "_patience")

    def __init__(self, interval: float, limit: float) -> None:
        self._interval = interval
        self._patience = max(limit - interval, limit / 2)
        self._last = 0.0
        self._marks: dict[int, LastLook] = {}

    def is_due(self, now: float) -> bool:
        """Return whether it is time to look: half an interval after the last time."""
        return now >= self._last + self._interval / 2

    def find_stalled(self, now: float, ended: Mapping[int, int], moved: Callable[[int], int]) -> int | None:
        """Return a channel that is stuck, or None.

        `ended` has, for each channel with work, the number of requests that have ended so far. `moved` is called for a
        channel on which no request has ended since the last look; it returns the bytes so far, or a negative number if
        that is unknown.
        """
        passed = min(now - self._last, self._interval)
        self._last = now
        self._marks = {channel: self._mark(channel, count, moved, passed) for channel, count in ended.items()}
        return next((channel for channel, mark in self._marks.items() if mark.still >= self._patience), None)

    def _mark(self, channel: int, ended: int, moved: Callable[[int], int], passed: float) -> LastLook:
        mark = self._marks.get(channel)
        if mark is None or mark.ended != ended:
            return LastLook(ended)
        now_moved = moved(channel)
        if now_moved < 0 or now_moved != mark.moved:
            return LastLook(ended, now_moved)
        mark.still += passed
        return mark
