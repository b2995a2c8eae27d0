"""The connection to another engine, from the first attempt until it is lost.

This module owns the state of one peer. It knows the session that serves the peer only as a `ServingSession`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..aio import Condition, poll_until
from ..core.address import Address
from ..core.control_frames import Bye
from ..errors import PeerError, PeerLostError, QueueFull
from ..transfers import Message, Peer, Transfer, drain, writable
from ..transfers.admission import AdmissionQueue
from .held_leases import HeldLeases

if TYPE_CHECKING:
    from ..aio import ControlConnection
    from ..rails import Flight, Operation, PeerLink
    from ..runtime import Runtime
    from ..transfers import Counter, Inbox

__all__ = ["Attempts", "Connection", "ServingSession"]

QUIET_S = 0.05
"""How long `confirm_teardown` polls the gate of a peer that is in a call into its library, before it asks the peer."""
PEER_LOST = 104  # ECONNRESET: the native core ends the transfers of a lost peer with it


class ConnectionHost(Protocol):
    """Keeps the messages of peers, and is told of lost peers."""

    inbox: Inbox

    def peer_lost(self, connection: Connection) -> None: ...


class ServingSession(Protocol):
    """The part of a serving session that the connection and the table use."""

    committed: bool

    def supersede(self) -> None:
        """Give way to another connection between the two engines."""

    def release(self, transfer: Operation) -> bool:
        """Fail the rails that hold a cancelled transfer; return False if no rail was failed."""

    async def revoke(self, lease: int, low: int, high: int) -> None:
        """Wait until the peer starts no more requests through a lease and has none in flight."""


class Attempts:
    """The attempts to establish one connection: how many run, and until when they may.

    `initiator` is the identity of the engine that began the authenticated attempt, if there is one; `reached` are the
    places where the other engine was reached.
    """

    __slots__ = ("deadline", "initiator", "reached", "running")

    def __init__(self, deadline: float) -> None:
        self.running = 0
        self.deadline = deadline
        self.initiator = b""
        self.reached: set[tuple[str, int]] = set()


class Connection:
    """One connection of this engine with another, through its whole life: being made, in use, lost.

    `address` is the address that the other engine announces; `peer` is the handle for users.
    """

    def __init__(self, runtime: Runtime, host: ConnectionHost, address: Address) -> None:
        self.peer = Peer(self)
        self.address = address
        self.reason = ""
        self._kind: type[PeerError] = PeerLostError
        self.confirmed = True
        self.connected = self.shares_memory = False
        self.attempts = Attempts(runtime.loop.time() + runtime.config.connect_timeout)
        self.session: ServingSession | None = None
        self.successor: Connection | None = None
        self.link: PeerLink | None = None
        self.leases = HeldLeases()
        self.loss_waiters: set[Counter] = set()
        self.control: ControlConnection | None = None
        self._runtime = runtime
        self._host = host
        self.waiter = runtime.loop.waiter
        self.rail_name = runtime.rail_name
        self.require_here = runtime.loop.require_here
        # Transfers that wait for the connection or for room; the link counts the transfers in the native core.
        self._queue = AdmissionQueue(runtime.loop, runtime.config.max_transfers, self.start)
        self._changed = Condition(runtime.loop)
        self._ended = Condition(runtime.loop)

    @property
    def key(self) -> tuple[bytes, int]:
        """The identity and incarnation, which tell engines apart."""
        return self.address.identity, self.address.incarnation

    @property
    def name(self) -> str:
        """The address as text, for error messages."""
        return str(self.address)

    @property
    def lost(self) -> bool:
        """Whether the peer is gone; a lost peer never comes back, a new one takes its place."""
        return bool(self.reason)

    def error(self, operation: str = "") -> PeerError:
        """Return the error of a request to a lost peer."""
        return self._kind(self.name, self.reason, operation=operation)

    def belongs_to(self, runtime: Runtime) -> bool:
        """Whether it is a connection of the engine with this runtime."""
        return self._runtime is runtime

    async def wait_closed(self) -> str:
        """Wait until the peer is lost and return the reason. Cancelling this wait has no other effect."""
        await self._ended.until(lambda: self.reason)
        return self.reason

    async def wait_ready(self) -> Connection:
        """Wait until the peer is connected and return it, or its successor if it gave way. Raises PeerError."""
        await self._changed.until(lambda: self.connected or self.reason or self.successor)
        if self.successor is not None:
            return await self.successor.wait_ready()
        if self.reason:
            raise self.error()
        return self

    async def recv(self) -> Message:
        """Return the next message of this peer. Raises PeerError when it is lost without messages left, ClosedError."""
        return Message(*await self._recv(None))

    async def recv_into(self, buffer: object) -> int:
        """Copy the next message of this peer into a buffer; return its length. Raises as `recv`, and UsageError."""
        with writable(buffer) as view:
            length: int = (await self._recv(view))[1]
        return length

    async def _recv(self, buffer: memoryview | None) -> tuple[Peer, Any]:
        inbox = self._host.inbox
        while True:
            self._runtime.require_open()
            found = inbox.take_from(self, buffer)
            self._runtime.kick()
            if found is not None:
                return found
            if self.reason:
                raise self.error("recv")
            await inbox.wait_for(self)

    def submit(self, transfer: Transfer, *, waits: bool = True) -> None:
        """Start a transfer now, or as soon as the peer is connected and has room; without `waits` raise QueueFull."""
        if self.successor is not None:
            transfer.peer = self.successor
            self.successor.submit(transfer, waits=waits)
        elif self.reason:
            transfer.fail(self.error(transfer.description))
        elif not waits and self._queue.use_turn():
            assert self.link is not None
            self._begin(transfer, self.link)
        elif not waits and not self._queue.has_room:
            limit = self._runtime.config.max_transfers
            raise QueueFull(
                f"{transfer.description}: {limit} transfers toward peer {self.address} are unfinished; "
                "await engine.room(peer), or raise config.max_transfers"
            )
        else:
            self._begin(transfer, None)

    def _begin(self, transfer: Transfer, link: PeerLink | None) -> None:
        """Start a transfer over a link that has room for it, or queue it. If its lease is void, the transfer ends."""
        if transfer.lease:
            flight = self.leases.flight(transfer.lease)
            if flight is None:
                transfer.revoke()
                return
            transfer.hold(flight)
        if link is not None:
            self.start(transfer, link)
        else:
            self._queue.add(transfer)

    async def room(self) -> None:
        """Wait, in turn, until there is room for one more transfer. Raises PeerError when the peer is lost.

        The caller has the room until its next await.
        """
        peer = self
        while peer.successor is not None or peer.reason or not peer._queue.has_room:
            if peer.successor is not None:
                peer = peer.successor
            elif peer.reason:
                raise peer.error()
            else:
                await peer._queue.wait()
                if not (peer.successor or peer.reason):
                    return

    async def reserve_room(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Wait for room and keep it; return two functions: one lets the running task use it, one gives it up.

        Raises PeerError.
        """
        queue = self._queue
        turn = None if self.reason else await queue.reserve()
        if self.reason or turn is None:
            raise self.error()
        return lambda: queue.hand_over(turn), lambda: queue.give_up(turn)

    @property
    def has_room(self) -> bool:
        """Whether a transfer of the running task would be within the limit, also by a turn that it has waited for."""
        return self._queue.has_room or self._queue.has_turn

    def take_room(self) -> bool:
        """Take room for one transfer that starts at once; False when there is none."""
        return self._queue.use_turn() or self._queue.has_room

    def start(self, transfer: Transfer, link: PeerLink) -> None:
        """Hand a transfer to the native core over a link, ahead of the queue."""
        transfer.belong(link)
        transfer.start(link)
        self._runtime.kick()

    def probe(self, link: PeerLink, channel: int) -> Transfer:
        """Start an empty write over one channel, to test the data path."""

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_probe(link, transfer, channel)

        transfer = Transfer(self, "probe", launch)
        self.start(transfer, link)
        return transfer

    def lease_flight(self, lease: int) -> Flight | None:
        """Return the flight of one of the peer's leases, with its requests in flight; None if the lease is void."""
        return self.leases.flight(lease)

    def has_revoked(self, lease: int) -> bool:
        """Return whether a lease of the peer's is void."""
        return self.leases.is_void(lease)

    def transfer_refused(self, transfer: Transfer) -> None:
        """Record that a transfer has ended without the native core."""
        self._queue.remove(transfer)

    def cancel_transfer(self, transfer: Operation) -> None:
        """Make a transfer end: the engine posts no more of it, and the posted requests drain."""
        self._runtime.core.cancel(transfer)
        self._runtime.kick()

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded from cancellation, until a cancelled transfer is over; see `drain`."""
        await drain(self._runtime, transfer, lambda: [self])

    def release(self, transfer: Operation) -> bool:
        """Fail the rails that hold a cancelled transfer; return False if no rail was failed."""
        return self.session is not None and self.session.release(transfer)

    def tear_down(self) -> None:
        """Lose the peer because a cancelled transfer did not leave the NIC in time."""
        if self.control is not None:
            self.control.linger = self._runtime.config.heartbeat_timeout
        self.confirmed = False
        self.lose(
            f"a cancelled transfer did not leave the NIC within {self._runtime.config.drain_timeout} s, "
            "so the connection was torn down"
        )

    async def confirm_teardown(self) -> None:
        """Find out whether the torn-down peer is known to carry out no more of our requests."""
        connection, link = self.control, self.link
        if link is not None and await poll_until(self._runtime.loop, lambda: link.quiet, QUIET_S):
            self.confirmed = True
        elif connection is not None:
            self.confirmed = await connection.wait_for_bye()

    def give_way_to(self, other: Connection) -> None:
        """Give way to the peer that this one turned out to be, and pass it all waiting transfers."""
        self.successor = other
        for transfer in self._queue.dissolve():
            transfer.peer = other
            other.submit(transfer)
        self._changed.wake_all()

    def mark_established(self) -> None:
        """Record that transfers may flow, and start those that waited for the connection."""
        assert self.link is not None
        self.connected = True
        self.link.peer = self
        self._queue.open(self.link)
        self._changed.wake_all()

    def disconnect(self, reason: str) -> None:
        """Lose the peer because the program asked for it. A forked child leaves the peer alone: it is the parent's."""
        if not self._runtime.inherited:
            self.require_here()
            self.lose(reason)

    def lose(self, reason: str, kind: type[PeerError] = PeerError) -> None:
        """Lose the peer: no byte moves to or from it when this returns, and everything that depends on it ends.

        `kind` is the error to raise if the peer was never connected.
        """
        if self.reason or self.successor is not None:
            return
        self.reason = reason or "lost"
        self._kind = PeerLostError if self.connected else kind
        self.connected = False
        waiting = list(self._queue.dissolve())
        if self.link is not None:
            self.link.close(PEER_LOST)
            if self.link.unsettled and not (self.control is not None and self.control.has_peer_left):
                self.confirmed = False
        if self.control is not None:
            # The peer takes a Bye as the confirmation that our endpoints are closed.
            self.control.send(Bye(self.reason))
            self.control.end(self.reason)
        for transfer in waiting:
            transfer.fail(self.error(transfer.description))
        self._host.peer_lost(self)
        self._changed.wake_all()
        self._ended.wake_all()
        for counter in tuple(self.loss_waiters):
            counter.wake_waits()
        self._runtime.kick()

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.reason else "connected" if self.connected else "connecting"
        return f"<Peer {self.address}, {state}>"
