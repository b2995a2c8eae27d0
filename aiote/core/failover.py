"""What two engines do when a channel between them dies, and how it comes back.

A *channel* is a pair of endpoints, numbered equally on both sides; each time it is opened again it has a new
*generation*. When it dies, its posts without a completion are *unconfirmed*: whether they arrived is unknown, because
each side knows only its own half. This module owns the agreement of the two sides about one dead channel and about
opening it again. `recovery` decides what becomes of the unconfirmed posts; the argument is in docs/failover.md.

**Counts.** docs/failover.md defines the counts of each side and the conclusions from both; they are native.

**Frames**, over the ordered control connection, each with channel and generation:

    AckCounts(counts)          these were confirmed, take them out             only before RailDown
    RailDown(reason)           my endpoint is shut, and I acknowledge nothing more   once in a generation
    Arrivals(counts, messages) what came, with all your AckCounts applied      once, when own and other RailDown are out
    Reopen(address)            from the initiator: this is my new endpoint; from the acceptor: the answer, this is mine

The arrivals are a frame of their own because they must be taken *after* the other side's RailDown was heard: when a
side sends its own RailDown, an AckCounts of the other side may still be on its way. That AckCounts would be missing
from these arrivals and yet be subtracted from the sender's table, so posts would count as arrived that did not arrive.

**Channels.** From the view of one side:

| from                 | on                              | to         | actions                                |
|----------------------|---------------------------------|------------|----------------------------------------|
| LIVE OPENING JOINING | `record_failed`                 | SHUTTING   | Shut                                   |
| OPENING JOINING      | `advance` (after OPENING_LIMIT) | SHUTTING   | Shut                                   |
| LIVE OPENING JOINING | `on_rail_down`                  | LEAVING    | Shut                                   |
| SHUTTING             | `on_rail_down`                  | LEAVING    |                                        |
| SHUTTING             | `record_shut`                   | SHUT       | SendRailDown                           |
| LEAVING              | `record_shut`                   | EXCHANGING | SendRailDown, SendArrivals             |
| SHUT                 | `on_rail_down`                  | EXCHANGING | SendArrivals                           |
| EXCHANGING           | `on_arrivals`                   | DOWN       | Reconcile                              |
| DOWN (initiator)     | `advance` (after the back-off)  | OPENING    | OpenAgain of the next generation       |
| OPENING (initiator)  | `on_reopen`, the answer         | JOINING    | Join                                   |
| DOWN (acceptor)      | `on_reopen`, next generation    | JOINING    | OpenAgain of that generation           |
| DOWN (acceptor)      | `on_rail_down`, next generation | LEAVING    | Shut: the initiator's attempt failed   |
| JOINING              | `record_joined`                 | LIVE       |                                        |
| any                  | no channel was LIVE for `grace` | all LOST   | LosePeer, instead of the other actions |

Frames for an older generation are ignored. So are `record_failed` for a channel that is on its way down,
`record_joined` for a channel that is not JOINING, and a Reopen that crosses the failure of its generation. Anything
else that is not in the table is the peer's violation (FailoverError: lose the peer) or, for `record_shut`, the caller's
mistake.

This module knows no clock, no random source of its own and no endpoint. The native tables are in `counters/table.pyx`.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass
from typing import Final, TypeAlias

from ..errors import UsageError
from .channel_counts import (
    Account,
    FailoverError,
    Items,
    Received,
)
from .control import Role

__all__ = [
    "BACKOFF_FIRST",
    "BACKOFF_MAX",
    "OPENING_LIMIT",
    "STABLE_S",
    "Account",
    "Action",
    "ChannelState",
    "ChannelStates",
    "FailoverError",
    "Items",
    "Join",
    "LosePeer",
    "OpenAgain",
    "Received",
    "Reconcile",
    "SendArrivals",
    "SendRailDown",
    "Shut",
]

BACKOFF_FIRST: Final = 0.1  # seconds
BACKOFF_MAX: Final = 30.0
STABLE_S: Final = 30.0  # seconds after which a live channel's back-off begins anew
OPENING_LIMIT: Final = 10.0  # seconds from OpenAgain to `record_joined`


@dataclass(frozen=True, slots=True)
class Shut:
    """Stop posting on this channel, stop opening it, shut its endpoint, drain its queue, then call `record_shut`."""

    channel: int


@dataclass(frozen=True, slots=True)
class SendRailDown:
    """Send RailDown."""

    channel: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendArrivals:
    """Take the arrivals now, and send them."""

    channel: int
    generation: int


@dataclass(frozen=True, slots=True)
class Reconcile:
    """Hand the unconfirmed posts of this channel to `recovery.take_over`, then begin new counts for it."""

    channel: int
    arrivals: Account


@dataclass(frozen=True, slots=True)
class OpenAgain:
    """Open an endpoint and send Reopen; if that fails, call `record_failed`.

    The acceptor also joins the peer's address and calls `record_joined` when it may post.
    """

    channel: int
    generation: int


@dataclass(frozen=True, slots=True)
class Join:
    """Join the address from the acceptor's answer, probe, and call `record_joined`, or `record_failed`."""

    channel: int
    generation: int


@dataclass(frozen=True, slots=True)
class LosePeer:
    """Lose the peer: no channel can reach it any more."""

    reason: str


Action: TypeAlias = Shut | SendRailDown | SendArrivals | Reconcile | OpenAgain | Join | LosePeer


class ChannelState(enum.Enum):
    """The state of a channel on one side: see the table above."""

    LIVE = "in use"
    SHUTTING = "being shut"
    LEAVING = "being shut, as the other side has"
    SHUT = "shut, waiting for the other side to do the same"
    EXCHANGING = "shut on both sides, waiting for the other's arrivals"
    DOWN = "down"
    OPENING = "being opened, waiting for the answer"
    JOINING = "being joined"
    LOST = "lost with its peer"


LIVE, SHUTTING, LEAVING, SHUT, EXCHANGING, DOWN, OPENING, JOINING, LOST = ChannelState
UP: Final = (LIVE, OPENING, JOINING)


class _Channel:
    """One channel: `until` is when `advance` must look at it, `since` when it became LIVE, `failures` in a row."""

    __slots__ = ("failures", "generation", "reason", "since", "state", "until")

    def __init__(self) -> None:
        self.state = LIVE
        self.generation = 0
        self.since = -math.inf
        self.until = math.inf
        self.failures = 0
        self.reason = ""


class ChannelStates:
    """The channels toward one peer; all are LIVE at first. Times are seconds of any steady clock.

    `grace` is how long the peer may be without any channel before it is lost; posts wait meanwhile. Every method
    returns the actions to take, in that order; the caller takes them before it calls another method. LosePeer is the
    last action. Methods that take the peer's frames may raise FailoverError.
    """

    def __init__(self, count: int, role: Role, source: random.Random, grace: float = 0.0) -> None:
        if count < 1:
            raise UsageError(f"{count} channels, expected at least 1")
        self.role = role
        self._source = source
        self._grace = grace
        self._grace_end = math.inf
        self._grace_reason = ""
        self._channels = [_Channel() for _ in range(count)]

    @property
    def live(self) -> tuple[int, ...]:
        """The channels that may be posted on."""
        return tuple(k for k, channel in enumerate(self._channels) if channel.state is LIVE)

    @property
    def deadline(self) -> float | None:
        """The latest time for the next call of `advance`, or None."""
        first = min(self._grace_end, *(channel.until for channel in self._channels))
        return None if first == math.inf else first

    def state(self, k: int) -> ChannelState:
        """Return the state of channel k."""
        return self._own_channel(k).state

    def generation(self, k: int) -> int:
        """Return the generation of channel k."""
        return self._own_channel(k).generation

    def record_failed(self, k: int, reason: str, now: float) -> list[Action]:
        """Record that this side found channel k not working or could not open it; may be repeated."""
        return self._take_out_of_use(k, SHUTTING, reason, now) if self._own_channel(k).state in UP else []

    def record_shut(self, k: int) -> list[Action]:
        """Record that this side's endpoint is shut and its completion queue read and counted to the end.

        Raises UsageError if no Shut was requested.
        """
        channel = self._own_channel(k)
        if channel.state is LOST:
            return []
        if channel.state not in (SHUTTING, LEAVING):
            raise UsageError(f"channel {k} is {channel.state.value}: it was not to be shut")
        actions: list[Action] = [SendRailDown(k, channel.generation, channel.reason)]
        if channel.state is SHUTTING:
            channel.state = SHUT
            return actions
        channel.state = EXCHANGING
        return [*actions, SendArrivals(k, channel.generation)]

    def on_rail_down(self, k: int, generation: int, reason: str, now: float) -> list[Action]:
        """Take the peer's RailDown."""
        channel = self._peer_channel(k)
        if self._stale(channel, generation):
            return []
        if generation == channel.generation + 1 and channel.state is DOWN and self.role is Role.ACCEPTOR:
            channel.generation = generation
            return self._take_out_of_use(k, LEAVING, reason, now)
        self._current(k, generation, "RailDown", (*UP, SHUTTING, SHUT))
        if channel.state is SHUTTING:
            channel.state = LEAVING
            return []
        if channel.state is SHUT:
            channel.state = EXCHANGING
            return [SendArrivals(k, generation)]
        return self._take_out_of_use(k, LEAVING, reason, now)

    def on_arrivals(self, k: int, generation: int, arrivals: Account, now: float) -> list[Action]:
        """Take the peer's Arrivals."""
        channel = self._peer_channel(k)
        if self._stale(channel, generation):
            return []
        self._current(k, generation, "Arrivals", (EXCHANGING,))
        channel.state = DOWN
        if self.role is Role.INITIATOR:
            longest = min(BACKOFF_MAX, math.ldexp(BACKOFF_FIRST, min(channel.failures, 64)))
            channel.until = now + self._source.uniform(0.0, longest)
        channel.failures += 1
        return [Reconcile(k, arrivals)]

    def on_ack_counts(self, k: int, generation: int) -> bool:
        """Return whether the caller must apply the peer's AckCounts to the counts of channel k."""
        channel = self._peer_channel(k)
        if self._stale(channel, generation):
            return False
        self._current(k, generation, "AckCounts", (LIVE, JOINING, SHUTTING, SHUT))
        return True

    def on_reopen(self, k: int, generation: int, now: float) -> list[Action]:
        """Take the peer's Reopen: a request if the peer is the initiator, an answer if it is the acceptor."""
        channel = self._peer_channel(k)
        if self._stale(channel, generation):
            return []
        if self.role is Role.ACCEPTOR:
            self._current(k, generation - 1, "Reopen", (DOWN,))
            channel.generation = generation
            channel.state, channel.until = JOINING, now + OPENING_LIMIT
            return [OpenAgain(k, generation)]
        self._current(k, generation, "Reopen", (OPENING, SHUTTING, SHUT))
        if channel.state is not OPENING:
            return []
        channel.state = JOINING
        return [Join(k, generation)]

    def record_joined(self, k: int, now: float) -> list[Action]:
        """Record that channel k can be posted on."""
        channel = self._own_channel(k)
        if channel.state is JOINING:
            channel.state, channel.since, channel.until = LIVE, now, math.inf
            self._grace_end = math.inf
        return []

    def advance(self, now: float) -> list[Action]:
        """Open the channels whose back-off is over; treat a channel that was not joined in time as failed."""
        actions: list[Action] = []
        if now >= self._grace_end:
            return self._lose()
        for k, channel in enumerate(self._channels):
            if now < channel.until:
                continue
            if channel.state is DOWN:
                channel.generation += 1
                channel.state, channel.until = OPENING, now + OPENING_LIMIT
                actions.append(OpenAgain(k, channel.generation))
            else:
                actions += self.record_failed(k, f"not joined within {OPENING_LIMIT:g} seconds", now)
        return actions

    def _take_out_of_use(self, k: int, state: ChannelState, reason: str, now: float) -> list[Action]:
        """Take a channel out of use; if it was the last, lose the peer once `grace` is over."""
        channel = self._channels[k]
        if channel.state is LIVE and now - channel.since >= STABLE_S:
            channel.failures = 0
        channel.state, channel.reason, channel.until = state, reason, math.inf
        if not self.live and self._grace_end == math.inf:
            self._grace_end = now + self._grace
            self._grace_reason = f"no channel is left, and the last, channel {k}, failed: {reason}"
        return self._lose() if self._grace_end <= now else [Shut(k)]

    def _lose(self) -> list[Action]:
        for each in self._channels:
            each.state, each.until = LOST, math.inf
        self._grace_end = math.inf
        return [LosePeer(self._grace_reason)]

    def _own_channel(self, k: int) -> _Channel:
        if not 0 <= k < len(self._channels):
            raise UsageError(f"channel {k} of {len(self._channels)}")
        return self._channels[k]

    def _peer_channel(self, k: int) -> _Channel:
        if not 0 <= k < len(self._channels):
            raise FailoverError(f"the peer names channel {k} of {len(self._channels)}")
        return self._channels[k]

    def _stale(self, channel: _Channel, generation: int) -> bool:
        """Return whether a frame can be ignored because its generation, or the peer, is over."""
        return channel.state is LOST or generation < channel.generation

    def _current(self, k: int, generation: int, frame: str, states: tuple[ChannelState, ...]) -> None:
        """Raise FailoverError unless the frame is about this generation and may come in this state."""
        channel = self._channels[k]
        if generation != channel.generation or channel.state not in states:
            raise FailoverError(
                f"{frame} of channel {k}, generation {generation}, "
                f"where generation {channel.generation} is {channel.state.value}"
            )
