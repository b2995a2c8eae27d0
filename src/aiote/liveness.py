"""Whether one peer is alive: heard of late, and moving what is under way toward it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .core.frames import Heartbeat
from .core.heartbeat import Heartbeat as HeartbeatClock
from .core.standstill import Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engine import Engine
    from .failover import Failover
    from .peer import Peer
    from .rails import PeerLink

__all__ = ["Liveness"]

EARLY = 0.25  # heartbeats that will be due within a quarter of their time go along with one that is


class Liveness:
    """The heartbeats of one session, both ways, and the looks at its channels."""

    def __init__(self, engine: Engine, send: Callable[[Heartbeat], object]) -> None:
        self._engine = engine
        self._send = send
        interval, self._limit = engine.config.heartbeat_interval, engine.config.heartbeat_limit
        self.clock = HeartbeatClock(interval, self._limit)
        self._standstill = Standstill(interval, self._limit)

    def look(self, now: float, peer: Peer, link: PeerLink | None, failover: Failover | None) -> float:
        """Tell the peer that we live where that is due, lose it where it has been silent; return when to look again."""
        if self.clock.expired(now):
            peer.confirmed = False
            peer.lose(f"it has been silent for {self._limit} s")
            return math.inf
        if failover is not None:
            failover.tick(now)
        stuck = self._stands_still(now, link, failover)
        if stuck:
            # What lies in the sockets' buffers may arrive yet, if the connection comes back first.
            peer.confirmed = False
            peer.lose(stuck)
            return math.inf
        if self.clock.due(now, EARLY):
            self._send(Heartbeat())
            self.clock.sent(now)
        soon = failover.deadline if failover is not None else None
        return min(self.clock.next_deadline(now), math.inf if soon is None else soon)

    def _stands_still(self, now: float, link: PeerLink | None, failover: Failover | None) -> str:
        """Say so where what is under way does not move: the data connection may be cut and this one not."""
        if link is None or not self._standstill.due(now):
            return ""
        stuck = self._standstill.look(now, link.under_way(), link.moved)
        if stuck is None:
            return ""
        if failover is not None:
            failover.fail(stuck, "the data connection has stood still, though the peer is alive")
            return ""
        rail = self._engine.rail_name(link.rail_of(stuck))
        return f"the data connection on rail {rail} has stood still, though the peer is alive"
