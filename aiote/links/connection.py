"""The connection to another engine, from the first attempt until it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..aio import Signal, poll_until
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

__all__ = ["Connection", "ServingSession"]

QUIET_S = 0.05
"""How long a peer in a call into its library is looked at through its gate; one that takes longer is asked."""
PEER_LOST = 104  # ECONNRESET: what the transfers of a lost peer end with in the native core


class ConnectionHost(Protocol):
    """Who keeps the messages of peers, and hears of lost ones."""

    inbox: Inbox

    def peer_lost(self, connection: Connection) -> None: ...


class ServingSession(Protocol):
    """What a connection and the table need of the session that serves it."""

    committed: bool

    def supersede(self) -> None:
        """Give way to another connection between the two engines."""

    def release(self, transfer: Operation) -> bool:
        """Take out the rails that do not let go of a cancelled transfer; False where there are no several."""

    async def revoke(self, lease: int, low: int, high: int) -> None:
        """Return when the peer starts nothing more through a lease and has nothing under way."""


class Connection:
    """One life of the pair of this engine and another: being made, in use, lost.

    `address` is where the other engine says that it is reached, `reached` are the places where it was; `peer` is what
    users hold.
    """

    def __init__(self, runtime: Runtime, host: ConnectionHost, address: Address) -> None:
        self.peer = Peer(self)
        self.address = address
        self.reason = ""
        self._kind: type[PeerError] = PeerLostError
        self.confirmed = True
        self.connected = False
        self.attempts = 0
        self.deadline = runtime.loop.time() + runtime.config.connect_timeout
        self.initiator = b""
        self.reached: set[tuple[str, int]] = set()
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
        # Transfers that wait for the connection or for room; the link counts what the native core has.
        self._queue = AdmissionQueue(runtime.loop, runtime.config.max_transfers, self.start)
        self._changed = Signal(runtime.loop)
        self._ended = Signal(runtime.loop)

    @property
    def key(self) -> tuple[bytes, int]:
        """What tells engines apart: identity and incarnation."""
        return self.address.identity, self.address.incarnation

    def newer_than(self, identity: bytes, incarnation: int) -> bool:
        """Whether this is a later life of that engine."""
        return self.address.identity == identity and self.address.incarnation > incarnation

    def older_than(self, identity: bytes, incarnation: int) -> bool:
        """Whether this is an earlier life of that engine."""
        return self.address.identity == identity and self.address.incarnation < incarnation

    @property
    def name(self) -> str:
        """Its address as text, for errors."""
        return str(self.address)

    @property
    def lost(self) -> bool:
        """Whether the peer is gone; a lost peer never comes back, a new one takes its place."""
        return bool(self.reason)

    def error(self, operation: str = "") -> PeerError:
        """The error of what was asked of a lost peer."""
        return self._kind(self.name, self.reason, operation=operation)

    def belongs_to(self, runtime: Runtime) -> bool:
        """Whether it is a connection of that engine."""
        return self._runtime is runtime

    async def wait_closed(self) -> str:
        """Wait until the peer is lost and return the reason. Cancelling this wait does nothing else."""
        while not self.reason:
            await self._ended.wait()
        return self.reason

    async def ready(self) -> Connection:
        """Wait until the peer is connected and return it, or the one that it gave way to. Raises PeerError."""
        while not (self.connected or self.reason or self.successor):
            await self._changed.wait()
        if self.successor is not None:
            return await self.successor.ready()
        if self.reason:
            raise self.error()
        return self

    async def recv(self) -> Message:
        """Return the next message of this peer. Raises PeerError when it is lost and none is left, ClosedError."""
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
        """Start a transfer over a link that has room for it, or queue it; its lease may be void."""
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
        """Wait until there is room for one more transfer, in turn. Raises PeerError when the peer is lost.

        The room is the caller's until its next await.
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
        """Wait for room and keep it; return what lets the running task use it, and what gives it up.

        Raises PeerError.
        """
        queue = self._queue
        turn = None if self.reason else await queue.reserve()
        if self.reason or turn is None:
            raise self.error()
        return lambda: queue.hand_over(turn), lambda: queue.give_up(turn)

    @property
    def has_room(self) -> bool:
        """Whether a transfer of the running task would be within the limit, by a turn that it has waited for, too."""
        return self._queue.has_room or self._queue.has_turn

    def take_room(self) -> bool:
        """Take room for one transfer that is started at once; False when there is none."""
        return self._queue.use_turn() or self._queue.has_room

    def start(self, transfer: Transfer, link: PeerLink) -> None:
        """Hand a transfer over a link to the native core, whatever waits."""
        transfer.belong(link)
        transfer.start(link)
        self._runtime.kick()

    def probe(self, link: PeerLink, channel: int) -> Transfer:
        """Start to write nothing over one channel, to see that the data path is there."""

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self._runtime.core.submit_probe(link, transfer, channel)

        transfer = Transfer(self, "probe", launch)
        self.start(transfer, link)
        return transfer

    def lease_flight(self, lease: int) -> Flight | None:
        """Return what is under way through a lease of the peer's; None where it is void."""
        return self.leases.flight(lease)

    def has_revoked(self, lease: int) -> bool:
        """Tell whether a lease of the peer's is void."""
        return self.leases.is_void(lease)

    def transfer_refused(self, transfer: Transfer) -> None:
        """Take note that a transfer has ended without the native core."""
        self._queue.remove(transfer)

    def cancel_transfer(self, transfer: Operation) -> None:
        """Have a transfer end: nothing more is posted, what was posted drains."""
        self._runtime.core.cancel(transfer)
        self._runtime.kick()

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded, until a cancelled transfer is over; see `drain`."""
        await drain(self._runtime, transfer, lambda: [self])

    def release(self, transfer: Operation) -> bool:
        """Take out the rails that do not let go of a cancelled transfer; False where there are no several."""
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

    async def agree(self) -> None:
        """Find out whether the peer, torn down, is known to carry out nothing more of ours."""
        connection, link = self.control, self.link
        if link is not None and await poll_until(self._runtime.loop, lambda: link.quiet, QUIET_S):
            self.confirmed = True
        elif connection is not None:
            self.confirmed = await connection.agreed()

    def follow(self, other: Connection) -> None:
        """Give way to the peer that this one turned out to be, with all that waits."""
        self.successor = other
        for transfer in self._queue.dissolve():
            transfer.peer = other
            other.submit(transfer)
        self._changed.set()

    def established(self) -> None:
        """Take note that transfers may flow, and start those that waited for it."""
        assert self.link is not None
        self.connected = True
        self.link.peer = self
        self._queue.open(self.link)
        self._changed.set()

    def disconnect(self, reason: str) -> None:
        """Lose the peer because the program wants so; in a child of a fork it is the parent's, and left alone."""
        if not self._runtime.inherited:
            self.require_here()
            self.lose(reason)

    def lose(self, reason: str, kind: type[PeerError] = PeerError) -> None:
        """Give the peer up: no byte moves to or from it when this returns, and everything that depends on it ends.

        `kind` is the error that says so where it was never connected.
        """
        if self.reason or self.successor is not None:
            return
        self.reason = reason or "lost"
        self._kind = PeerLostError if self.connected else kind
        self.connected = False
        waiting = list(self._queue.dissolve())
        if self.link is not None:
            self.link.close(PEER_LOST)
            if self.link.unsettled and not (self.control is not None and self.control.left):
                self.confirmed = False
        if self.control is not None:
            # The peer takes a Bye as the confirmation that our endpoints are closed.
            self.control.send(Bye(self.reason))
            self.control.end(self.reason)
        for transfer in waiting:
            transfer.fail(self.error(transfer.description))
        self._host.peer_lost(self)
        self._changed.set()
        self._ended.set()
        for counter in tuple(self.loss_waiters):
            counter.wake_waits()
        self._runtime.kick()

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.reason else "connected" if self.connected else "connecting"
        return f"<Peer {self.address}, {state}>"
