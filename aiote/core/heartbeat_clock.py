"""When to send a heartbeat, and when a silent peer counts as dead.

`HeartbeatClock` reads no clock: every method takes the present time, in seconds of any steady clock. It asks for a
heartbeat as often as the peer wants to hear one (`send_every`), and calls the peer expired after `limit` of silence,
whatever was heard counting as life; the peer is asked for a heartbeat every `interval`.

A side that was itself busy or stopped has heard nothing because it did not listen: the peer's heartbeats may lie in a
socket's buffer. Hence the rule. When two calls are more than one interval apart, this side was *stalled*, and at the
end of the stall the peer is given *grace*: it does not count as expired before one further interval has passed, in
which this side listens. A stall gives grace once, when it ends; grace never shortens what the peer had anyway. A side
that keeps on stalling must find a dead peer dead all the same: in one silence the peer is given grace at most as often
as there are whole intervals in the limit, and a stall after that gives none.

So a call must be made more often than once an interval for a side not to look stalled. `next_deadline` therefore never
lies more than half an interval ahead, and a shell that sleeps until then and is late by less than the other half is
never taken for stalled. For a side that listens, a peer is expired `limit` after its last sign of life and not before;
for one that stalls, later by at most `limit // interval` stalls and the intervals of grace behind them.
"""

from __future__ import annotations

import math

from ..errors import UsageError

__all__ = ["HeartbeatClock"]


class HeartbeatClock:
    """Keeps the times of one connection; `interval` and `limit` in seconds, `limit` the larger.

    `send_every` is how often the peer wants a heartbeat, the interval if it is not given. The peer counts as heard at
    the first call, and the first heartbeat is due at once. A time before an earlier one is taken for the earlier one.
    """

    __slots__ = ("_grace_end", "_graces", "_heard", "_interval", "_limit", "_now", "_sent", "send_every")

    def __init__(self, interval: float, limit: float, send_every: float | None = None) -> None:
        if not (math.isfinite(interval) and math.isfinite(limit) and 0 < interval < limit):
            raise UsageError(f"0 < interval < limit expected, in seconds, got interval {interval} and limit {limit}")
        self._interval = interval
        self._limit = limit
        self.send_every = interval if send_every is None else send_every
        self._now = -math.inf
        self._sent = -math.inf
        self._heard = -math.inf
        self._grace_end = -math.inf
        self._graces = 0

    def due(self, now: float, early: float = 0.0) -> bool:
        """Say whether it is time to send a heartbeat, or will be within `early` of the time between two.

        Who looks after many connections sends those that are due soon along with one that is due: then he wakes up a
        few times an interval, however many there are.
        """
        return self._observe(now) >= self._sent + self.send_every * (1 - early)

    def sent(self, now: float) -> None:
        """Take note that a heartbeat was sent."""
        self._sent = self._observe(now)

    def heard(self, now: float) -> None:
        """Take note of any sign of life of the peer."""
        self._heard = self._observe(now)
        self._graces = 0

    def expired(self, now: float) -> bool:
        """Say whether the peer has been silent for too long."""
        return self._observe(now) >= self._expiry()

    def next_deadline(self, now: float) -> float:
        """Return when to call again at the latest: now, where a heartbeat is due or the peer expired."""
        present = self._observe(now)
        return max(present, min(self._sent + self.send_every, self._expiry(), present + self._interval / 2))

    def _expiry(self) -> float:
        return max(self._heard + self._limit, self._grace_end)

    def _observe(self, now: float) -> float:
        """Return the present time; notice the end of a stall and give grace."""
        last = self._now
        self._now = max(last, now)
        if last == -math.inf:
            self._heard = self._now
        elif self._now - last > self._interval:
            grace_end = self._now + self._interval
            if grace_end > self._expiry() and self._graces < self._limit // self._interval:
                self._graces += 1
                self._grace_end = grace_end
        return self._now
