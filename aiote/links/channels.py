"""The channels to one peer: when one fails, its lost work continues over the others, and the channel is opened again.

The protocol is `core.failover`, which decides on the actions; this module takes them with the native link, the rails
and the control connection of one session.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

from ..core.address import name_of
from ..core.control_frames import (
    MAX_COUNTS,
    AckCounts,
    Arrivals,
    Arrived,
    Channel,
    ChannelMessage,
    ImmCount,
    Joined,
    MailboxMoved,
    MemoryKey,
    RailDown,
    Range,
)
from ..core.failover import (
    Account,
    Action,
    ChannelStates,
    FailoverError,
    Join,
    LosePeer,
    OpenAgain,
    Received,
    Reconcile,
    SendArrivals,
    SendRailDown,
    Shut,
)
from ..errors import AioteError, TransferError
from ..rails import error_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..core.control import Role
    from ..rails import Operation, PeerLink, PendingChannel
    from ..runtime import Runtime
    from ..transfers import Transfer
    from .connection import Connection

__all__ = ["Channels"]


class Channels:
    """The channels of a connected peer that survives the loss of a channel.

    `pairs` are (our rail, its rail) of each channel, `send` sends to the peer, and `check` is called when `deadline`
    may have become earlier.
    """

    def __init__(
        self,
        runtime: Runtime,
        connection: Connection,
        link: PeerLink,
        role: Role,
        pairs: list[tuple[int, int]],
        send: Callable[[ChannelMessage], object],
        *,
        check: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._connection = connection
        self._link = link
        self._pairs = pairs
        self._send = send
        self._check = check
        self._initiates = role.value == 0
        self._states = ChannelStates(len(pairs), role, random.Random(), grace=runtime.config.heartbeat_timeout)
        self._pending: dict[int, PendingChannel] = {}
        self._peer_endpoints: dict[int, Channel] = {}
        self._probes: dict[int, Transfer] = {}
        # The keys that the peer's RailDown asked about, and its answer about our keys in Arrivals, until they are used.
        self._asked_keys: dict[int, tuple[MemoryKey, ...]] = {}
        self._unknown: dict[int, list[int]] = {}
        self._partial_arrivals: dict[int, list[tuple[int, int]]] = {}

    @property
    def deadline(self) -> float | None:
        """The time when `tick` is due, or None."""
        return self._states.deadline

    # Events on this side.

    def notice(self, number: int, errnum: int) -> None:
        """Handle a notice of the native core: send the counts to acknowledge or, on an error, fail the channel."""
        if number not in self._states.live and not self._probes.get(number):
            return
        if errnum == 0:
            counts = [ImmCount(imm_data, times) for imm_data, times in self._link.counts_to_ack(number)]
            for start in range(0, len(counts), MAX_COUNTS):
                self._send(
                    AckCounts(number, self._states.generation(number), tuple(counts[start : start + MAX_COUNTS]))
                )
        else:
            self.fail(number, f"the data connection failed: {error_text(errnum)}")

    def fail(self, number: int, reason: str) -> None:
        """Take a channel out of use."""
        rail = self._runtime.rail_name(self._pairs[number][0])
        if number in self._states.live:
            self._runtime.events.emit("rail.failed", peer=self._connection.name, rail=rail, reason=reason)
        self._do(self._states.record_failed(number, f"rail {rail}: {reason}"[:500], self._runtime.loop.time()))

    def release(self, transfer: Operation) -> bool:
        """Fail the channels that hold a cancelled transfer; return False if no channel holds it."""
        holding = self._link.holding(transfer)
        for number in holding:
            self.fail(number, "a cancelled transfer did not leave the NIC")
        return bool(holding)

    def tick(self, now: float) -> None:
        """Take the actions that are due at this time."""
        self._link.decay_costs()
        self._do(self._states.advance(now))

    def close(self) -> None:
        """Stop opening channels."""
        for number in tuple(self._pending):
            self._stop_attempt(number)

    # Messages of the peer.

    def receive(self, message: ChannelMessage) -> None:
        """Take a message about a channel. Raises FailoverError for an impossible message."""
        now = self._runtime.loop.time()
        match message:
            case AckCounts(number, generation, counts):
                if self._states.on_ack_counts(number, generation) and not self._link.ack_counts(
                    number, [(item.imm_data, item.times) for item in counts]
                ):
                    raise FailoverError("the peer does not acknowledge its counts")
            case RailDown(number, generation, reason, keys):
                self._asked_keys[number] = keys
                if number in self._states.live:
                    rail = self._runtime.rail_name(self._pairs[number][0])
                    self._runtime.events.emit("rail.failed", peer=self._connection.name, rail=rail, reason=reason)
                self._do(self._states.on_rail_down(number, generation, reason, now))
            case Arrivals():
                self._on_arrivals(message, now)
            case Channel():
                self._on_channel(message, now)
            case Joined(number, generation):
                self._on_joined(number, generation, now)
            case MailboxMoved(number, generation):
                self._on_mailbox_moved(number, generation)

    def _on_arrivals(self, message: Arrivals, now: float) -> None:
        number = message.channel
        if self._partial_arrivals.keys() - {number}:
            raise FailoverError(
                "the peer began to report arrivals on a channel before it had ended its report on another"
            )
        counts = self._partial_arrivals.setdefault(number, [])
        counts += [(item.imm_data, item.times) for item in message.counts]
        if len(counts) > MAX_ARRIVALS:
            raise FailoverError(f"the peer reports arrivals on over {MAX_ARRIVALS} immediates")
        if message.more:
            return
        del self._partial_arrivals[number]
        self._unknown[number] = [item.key for item in message.unknown]
        mark = Received(message.high, tuple((item.first, item.last) for item in message.beyond))
        self._do(self._states.on_arrivals(number, message.generation, Account(tuple(counts), mark), now))

    def _on_channel(self, message: Channel, now: float) -> None:
        number = self._number_of(message)
        self._peer_endpoints[number] = message
        self._do(self._states.on_reopen(number, message.generation, now))

    def _number_of(self, message: Channel) -> int:
        """Return the number of the channel that a Channel is about. Raises FailoverError if there is none."""
        pair = message.rail_remote, message.rail_local
        if pair not in self._pairs:
            raise FailoverError(f"the peer opens a channel of rails {pair[0]} and {pair[1]}, which do not form one")
        return self._pairs.index(pair)

    def _on_joined(self, number: int, generation: int, now: float) -> None:
        # A peer that was lost in the meantime has no channels any more.
        if number >= len(self._pairs) or not self._current(number, generation):
            return
        self._do(self._states.record_joined(number, now))
        self._resume(number)

    def _on_mailbox_moved(self, number: int, generation: int) -> None:
        if number not in self._states.live or generation != self._states.generation(number):
            # The channel has failed in the meantime; the initiator hears of that, and chooses again.
            return
        if not self._initiates:
            self._link.move_mailbox(number)
            self._send(MailboxMoved(number, generation))
        if self._link.mailbox_channel == number:
            self._link.release_mailbox()

    # Actions.

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if self._connection.lost:
                # Everything ended with the peer.
                return
            match action:
                case Shut(number):
                    self._shut_endpoint(number)
                case SendRailDown(number, generation, reason):
                    keys = tuple(MemoryKey(key) for key in self._link.lost_keys(number))
                    self._send(RailDown(number, generation, reason[:500], keys))
                case SendArrivals(number, generation):
                    self._send_arrivals(number, generation)
                case Reconcile(number, arrivals):
                    self._reconcile(number, arrivals)
                case OpenAgain(number, generation):
                    self._open_endpoint(number, generation)
                case Join(number):
                    self._join(number)
                    self._runtime.spawn(self._probe, number, self._states.generation(number), name="aiote rail")
                case LosePeer(reason):
                    self._connection.lose(reason)
        if not actions:
            return
        if self.deadline is not None:
            self._check()
        self._runtime.kick()

    def _shut_endpoint(self, number: int) -> None:
        self._stop_attempt(number)
        self._link.shut(number)
        self._do(self._states.record_shut(number))

    def _stop_attempt(self, number: int) -> None:
        """Stop the attempt to bring a channel up."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.close()
        probe = self._probes.pop(number, None)
        if probe is not None:
            probe.cancel()

    def _send_arrivals(self, number: int, generation: int) -> None:
        arrived, top, holes = self._link.arrivals(number)
        if any(times < 0 for _, times in arrived) and not self._link.forgets(number):
            raise FailoverError("the peer acknowledged more writes than arrived here")
        mark = to_received(top, holes)
        counts = [Arrived(imm_data, times) for imm_data, times in arrived]
        while len(counts) > MAX_COUNTS:
            self._send(Arrivals(number, generation, tuple(counts[:MAX_COUNTS]), 0, (), (), more=True))
            del counts[:MAX_COUNTS]
        beyond = tuple(Range(*item) for item in mark.beyond)
        self._send(Arrivals(number, generation, tuple(counts), mark.high, beyond, self._unknown_of(number)))

    def _unknown_of(self, number: int) -> tuple[MemoryKey, ...]:
        """Return the keys that the peer asked about and that belong to no memory on the channel's rail."""
        known = self._runtime.rail_set.keys_of(self._pairs[number][0])
        return tuple(item for item in self._asked_keys.pop(number, ()) if item.key not in known)

    def _reconcile(self, number: int, arrivals: Account) -> None:
        top, holes = from_received(arrivals.messages)
        if not self._link.reconcile(number, list(arrivals.counts), top, holes, self._unknown.pop(number, [])):
            raise FailoverError("the peer reports arrivals that this engine did not send")
        self._move_mailbox()

    def _move_mailbox(self) -> None:
        """Move the mailbox to a channel in use if its channel has failed; the initiator of the connection chooses."""
        if self._initiates and self._link.mailbox_waits and self._states.live:
            chosen = self._states.live[0]
            self._link.move_mailbox(chosen)
            self._send(MailboxMoved(chosen, self._states.generation(chosen)))

    def _open_endpoint(self, number: int, generation: int) -> None:
        """Open our endpoint and tell the peer; the acceptor joins the initiator's endpoint at once."""
        mine, remote = self._pairs[number]
        try:
            pending = self._pending[number] = self._runtime.rail_set.open_channel(mine, remote)
        except AioteError as error:
            self.fail(number, f"the channel cannot be opened again: {error}")
            return
        key, base = self._runtime.rail_set.scratch.keys[mine]
        self._send(Channel(mine, remote, generation, pending.address, key, base, b""))
        if not self._initiates:
            self._join(number)

    def _join(self, number: int) -> None:
        theirs = self._peer_endpoints.pop(number)
        pending = self._pending.pop(number)
        try:
            self._runtime.rail_set.join(
                self._link,
                pending,
                theirs.address,
                theirs.imm_key,
                theirs.imm_base,
                number=number,
                name=name_of(self._connection.key),
            )
        except AioteError as error:
            pending.close()
            self.fail(number, f"the channel cannot be joined again: {error}")

    async def _probe(self, number: int, generation: int) -> None:
        """Send an empty write over a channel that was opened again; once it has arrived, the channel is in use."""
        if not self._current(number, generation):
            return
        try:
            probe = self._probes[number] = self._connection.probe(self._link, number)
            await probe
        except (TransferError, AioteError) as error:
            if self._current(number, generation):
                self.fail(number, f"the channel was opened again, but a test write failed: {error}")
            return
        if self._current(number, generation):
            self._probes.pop(number, None)
            self._do(self._states.record_joined(number, self._runtime.loop.time()))
            self._send(Joined(number, generation))
            self._resume(number)

    def _current(self, number: int, generation: int) -> bool:
        return not self._connection.lost and self._states.generation(number) == generation

    def _resume(self, number: int) -> None:
        if number in self._states.live and not self._link.carries(number):
            self._link.admit(number)
            rail = self._runtime.rail_name(self._pairs[number][0])
            self._runtime.events.emit("rail.back", peer=self._connection.name, rail=rail)
            self._move_mailbox()


def to_received(top: int, holes: list[int]) -> Received:
    """Return the messages that arrived as a Received, from the highest number and the missing numbers below it."""
    if not holes:
        return Received(top, ())
    bounds = [*holes, top + 1]
    ranges = [(low + 1, high - 1) for low, high in pairwise(bounds) if low + 1 <= high - 1]
    return Received(holes[0] - 1, tuple(ranges))


def from_received(mark: Received) -> tuple[int, list[int]]:
    """Return the highest number that arrived and the missing ones below. Raises FailoverError for an absurd mark."""
    holes: list[int] = []
    top = mark.high
    for low, high in mark.beyond:
        if not top < low <= high or low - top > MAX_HOLES:
            raise FailoverError("the peer's report of its received messages is invalid")
        holes.extend(range(top + 1, low))
        top = high
    return top, holes


MAX_HOLES = 4096  # the messages of one pool
MAX_ARRIVALS = 1 << 15  # more than a tally of the native core can hold
