"""When to send a heartbeat, and when a silent peer counts as dead.

`HeartbeatClock` reads no clock: every method takes the present time, in seconds of any steady clock. It asks for a
heartbeat as often as the peer wants to hear one (`send_every`), and calls the peer expired after `limit` of silence;
anything heard from the peer counts as life. The peer is asked for a heartbeat every `interval`.

A side that was itself busy or stopped has heard nothing because it did not listen: the peer's heartbeats may lie in a
socket's buffer. Hence this rule: when two calls are more than one interval apart, this side was *stalled*, and at the
end of the stall the peer is given *grace*: it does not count as expired before one further interval has passed, in
which this side listens. A stall gives grace once, when it ends; grace never shortens the time that the peer had anyway.
A side that keeps on stalling must still find a dead peer dead, so in one silence the peer is given grace at most as
often as there are whole intervals in the limit, and a later stall gives none.

Calls must therefore be less than an interval apart, or this side looks stalled. `next_deadline` never lies more than
half an interval ahead, so a caller that sleeps until then and is late by less than the other half is never taken for
stalled. A side that listens finds the peer expired `limit` after its last sign of life and not before. A side that
stalls finds it later, by at most `limit // interval` stalls and the intervals of grace after them.
"""

from __future__ import annotations

import math

from ..errors import UsageError

__all__ = ["HeartbeatClock"]


class HeartbeatClock:
    """Keeps the times of one connection; `interval` and `limit` in seconds, `limit` the larger.

    `send_every` is the time between the heartbeats that the peer wants, by default the interval. The peer counts as
    heard at the first call, and the first heartbeat is due at once. A time before an earlier one is treated as the
    earlier one.
    """

    __slots__ = ("_grace_end", "_graces", "_heard", "_interval", "_limit", "_now", "_sent", "send_every")

    def __init__(self, interval: float, limit: float, send_every: float | None = None) -> None:
        if not (math.isfinite(interval) and math.isfinite(limit) and 0 < interval < limit):
            raise UsageError(f"expected 0 < interval < limit, in seconds, got interval {interval} and limit {limit}")
        self._interval = interval
        self._limit = limit
        self.send_every = interval if send_every is None else send_every
        self._now = -math.inf
        self._sent = -math.inf
        self._heard = -math.inf
        self._grace_end = -math.inf
        self._graces = 0

    def is_due(self, now: float, early: float = 0.0) -> bool:
        """Return whether a heartbeat is due, or will be within `early`, a fraction of the time between two.

        A caller with many connections sends the heartbeats that are due soon together with one that is due: it then
        wakes up a few times an interval, however many connections there are.
        """
        return self._observe(now) >= self._sent + self.send_every * (1 - early)

    def record_sent(self, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent = self._observe(now)

    def record_heard(self, now: float) -> None:
        """Record any sign of life of the peer."""
        self._heard = self._observe(now)
        self._graces = 0

    def is_expired(self, now: float) -> bool:
        """Return whether the peer has been silent for too long."""
        return self._observe(now) >= self._expiry()

    def next_deadline(self, now: float) -> float:
        """Return the latest time for the next call: now, if a heartbeat is due or the peer has expired."""
        present = self._observe(now)
        return max(present, min(self._sent + self.send_every, self._expiry(), present + self._interval / 2))

    def _expiry(self) -> float:
        return max(self._heard + self._limit, self._grace_end)

    def _observe(self, now: float) -> float:
        """Return the present time; detect the end of a stall and give grace."""
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
