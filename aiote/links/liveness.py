"""Whether one peer is alive: whether it was heard recently, and whether the data in flight toward it moves.

This module owns the decision to lose a silent or stuck peer; `heartbeat_timer` decides when it looks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..core.control_frames import Heartbeat
from ..core.stall import StallDetector
from ..rails import Pulse
from .heartbeat_timer import EARLY

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..rails import PeerLink
    from ..runtime import Runtime
    from .channels import Channels
    from .connection import Connection

__all__ = ["Liveness"]


class Liveness:
    """The heartbeats of one session, in both directions, and the checks of its channels."""

    def __init__(self, runtime: Runtime, send: Callable[[Heartbeat], object]) -> None:
        self._runtime = runtime
        self._send = send
        interval, self._limit = runtime.config.heartbeat_interval, runtime.config.heartbeat_timeout
        self.clock = Pulse(interval, self._limit)
        self._stalls = StallDetector(interval, self._limit)

    def check(self, now: float, connection: Connection, link: PeerLink | None, channels: Channels | None) -> float:
        """Send a heartbeat if one is due, lose the peer if it has been silent; return when to look again."""
        if self.clock.is_expired(now):
            connection.confirmed = False
            connection.lose(f"it has been silent for {self._limit} s")
            return math.inf
        if channels is not None:
            channels.tick(now)
        stuck = self._stands_still(now, link, channels)
        if stuck:
            # Bytes in the sockets' buffers may still arrive, if the data connection recovers first.
            connection.confirmed = False
            connection.lose(stuck)
            return math.inf
        if self.clock.is_due(now, EARLY):
            self._send(Heartbeat())
            self._runtime.heartbeats.sent += 1
            self.clock.record_sent(now)
        soon = channels.deadline if channels is not None else None
        return min(self.clock.next_deadline(now), math.inf if soon is None else soon)

    def _stands_still(self, now: float, link: PeerLink | None, channels: Channels | None) -> str:
        """Return a reason if data in flight does not move: the data connection may be lost though this one is not.

        With several channels, fail the stuck one instead and return "".
        """
        if link is None or not self._stalls.is_due(now):
            return ""
        stuck = self._stalls.find_stalled(now, link.under_way(), link.moved)
        if stuck is None:
            return ""
        if channels is not None:
            channels.fail(stuck, "the data connection makes no progress, although the peer is alive")
            return ""
        rail = self._runtime.rail_name(link.rail_of(stuck))
        return f"the data connection on rail {rail} makes no progress, although the peer is alive"
