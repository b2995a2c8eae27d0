"""Another engine, as this one sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from .aio import EventLoop, Signal, finish, settle
from .core.address import Address
from .core.frames import Bye
from .errors import PeerError, QueueFull
from .heldleases import HeldLeases
from .line import Line

if TYPE_CHECKING:
    from .aio import ControlConnection
    from .counter import Counter
    from .rails import Core, Operation, PeerLink
    from .session import Session
    from .transfer import Transfer

__all__ = ["Host", "Peer", "drain"]

QUIET_S = 0.05
"""How long a peer in a call into its library is looked at through its gate; one that takes longer is asked."""
PEER_LOST = 104  # ECONNRESET: what the transfers of a lost peer end with in the native core


class Host(Protocol):
    """What a peer needs of its engine."""

    loop: EventLoop
    core: Core
    connect_timeout: float
    drain_timeout: float
    patience: float
    max_transfers: int

    def kick(self) -> None: ...
    def rail_name(self, rail: int) -> str: ...
    def peer_lost(self, peer: Peer) -> None: ...


class Peer:
    """Another engine. Made by `Engine.connect`, by the first use of its address, or when it connects to us.

    `address` is where it says that it is reached, `reached` are the places where it was; `await closed()` returns the
    reason when it is lost.
    """

    def __init__(self, host: Host, address: Address) -> None:
        self.address = address
        self.reason = ""
        self.confirmed = True
        self.connected = False
        self.attempts = 0
        self.deadline = host.loop.time() + host.connect_timeout
        self.initiator = b""
        self.reached: set[tuple[str, int]] = set()
        self.session: Session | None = None
        self.successor: Peer | None = None
        self.link: PeerLink | None = None
        self.leases = HeldLeases()
        self.mourners: set[Counter] = set()
        self.connection: ControlConnection | None = None
        self._host = host
        self.waiter = host.loop.waiter
        # Transfers that wait for the connection or for room; the link counts what the native core has.
        self._line = Line(host.loop, host.max_transfers, self.start)
        self._changed = Signal(host.loop)
        self._ended = Signal(host.loop)

    @property
    def key(self) -> tuple[bytes, int]:
        """What tells engines apart: identity and incarnation."""
        return self.address.identity, self.address.incarnation

    def newer_than(self, identity: bytes, incarnation: int) -> bool:
        """Whether this is a later life of that engine."""
        return self.address.identity == identity and self.address.incarnation > incarnation

    @property
    def lost(self) -> bool:
        """Whether the peer is gone; a lost peer never comes back, a new one takes its place."""
        return bool(self.reason)

    def error(self, operation: str = "") -> PeerError:
        """The error of what was asked of a lost peer."""
        return PeerError(str(self.address), self.reason, operation=operation)

    def of(self, host: object) -> bool:
        """Whether it is the peer of that engine: its connection is no other's."""
        return self._host is host

    def rail_name(self, rail: int) -> str:
        """Name one of our rails."""
        return self._host.rail_name(rail)

    async def closed(self) -> str:
        """Wait until the peer is lost and return the reason. Cancelling this wait does nothing else."""
        while not self.reason:
            await self._ended.wait()
        return self.reason

    async def ready(self) -> Peer:
        """Wait until the peer is connected and return it, or the one that it gave way to. Raises PeerError."""
        while not (self.connected or self.reason or self.successor):
            await self._changed.wait()
        if self.successor is not None:
            return await self.successor.ready()
        if self.reason:
            raise self.error()
        return self

    def submit(self, transfer: Transfer, *, waits: bool = True) -> None:
        """Start a transfer now, or as soon as the peer is connected and has room; without `waits` raise QueueFull."""
        if self.successor is not None:
            transfer.peer = self.successor
            self.successor.submit(transfer, waits=waits)
        elif self.reason:
            transfer.fail(self.error(transfer.description))
        elif not waits and self._line.use_place():
            assert self.link is not None
            self._begin(transfer, self.link)
        elif not waits and not self._line.has_room:
            raise QueueFull(
                f"{transfer.description}: {self._host.max_transfers} transfers toward peer {self.address} are "
                "unfinished; await engine.room(peer), or raise config.max_transfers"
            )
        else:
            self._begin(transfer, None)

    def _begin(self, transfer: Transfer, link: PeerLink | None) -> None:
        """Start a transfer over a link that has room for it, or put it in line; its lease may be void."""
        if transfer.lease:
            flight = self.leases.flight(transfer.lease)
            if flight is None:
                transfer.revoke()
                return
            transfer.hold(flight)
        if link is not None:
            self.start(transfer, link)
        else:
            self._line.add(transfer)

    async def room(self) -> None:
        """Wait until there is room for one more transfer, in line. Raises PeerError when the peer is lost.

        The room is the caller's until its next await.
        """
        peer = self
        while peer.successor is not None or peer.reason or not peer._line.has_room:
            if peer.successor is not None:
                peer = peer.successor
            elif peer.reason:
                raise peer.error()
            else:
                await peer._line.place()
                if not (peer.successor or peer.reason):
                    return

    async def reserve_room(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Wait for room and keep it; return what lets the running task use it, and what gives it up.

        Raises PeerError.
        """
        line = self._line
        place = None if self.reason else await line.reserve()
        if self.reason or place is None:
            raise self.error()
        return lambda: line.hand_over(place), lambda: line.give_up(place)

    @property
    def has_room(self) -> bool:
        """Whether a transfer of the running task would be within the limit, by a place that it has waited for, too."""
        return self._line.has_room or self._line.has_place

    def take_room(self) -> bool:
        """Take room for one transfer that is started at once; False when there is none."""
        return self._line.use_place() or self._line.has_room

    def start(self, transfer: Transfer, link: PeerLink) -> None:
        """Hand a transfer over a link to the native core, whatever waits."""
        transfer.belong(link)
        transfer.start(link)
        self._host.kick()

    def transfer_refused(self, transfer: Transfer) -> None:
        """Take note that a transfer has ended without the native core."""
        self._line.remove(transfer)

    def cancel_transfer(self, transfer: Operation) -> None:
        """Have a transfer end: nothing more is posted, what was posted drains."""
        self._host.core.cancel(transfer)
        self._host.kick()

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded, until a cancelled transfer is over; see `drain`."""
        await drain(self._host, transfer, lambda: [self])

    def let_go(self, transfer: Operation) -> bool:
        """Take out the rails that do not let go of a cancelled transfer; False where there are no several."""
        return (
            self.session is not None and self.session.failover is not None and self.session.failover.release(transfer)
        )

    def tear_down(self) -> None:
        """Lose the peer because a cancelled transfer did not leave the NIC in time."""
        if self.connection is not None:
            self.connection.linger = self._host.patience
        self.confirmed = False
        self.lose(
            f"a cancelled transfer did not leave the NIC within {self._host.drain_timeout} s, "
            "so the connection was torn down"
        )

    async def agree(self) -> None:
        """Find out whether the peer, torn down, is known to carry out nothing more of ours."""
        connection, link = self.connection, self.link
        if link is not None and await settle(self._host.loop, lambda: link.quiet, QUIET_S):
            self.confirmed = True
        elif connection is not None:
            self.confirmed = await connection.agreed()

    def follow(self, other: Peer) -> None:
        """Give way to the peer that this one turned out to be, with all that waits."""
        self.successor = other
        for transfer in self._line.dissolve():
            transfer.peer = other
            other.submit(transfer)
        self._changed.set()

    def established(self) -> None:
        """Take note that transfers may flow, and start those that waited for it."""
        assert self.link is not None
        self.connected = True
        self.link.peer = self
        self._line.open(self.link)
        self._changed.set()

    def lose(self, reason: str) -> None:
        """Give the peer up: no byte moves to or from it when this returns, and everything that depends on it ends."""
        if self.reason or self.successor is not None:
            return
        self.reason = reason or "lost"
        self.connected = False
        waiting = list(self._line.dissolve())
        if self.link is not None:
            self.link.close(PEER_LOST)
        if self.connection is not None:
            # The peer takes a Bye for the word that our endpoints are closed.
            self.connection.send(Bye(self.reason))
            self.connection.end(self.reason)
        for transfer in waiting:
            transfer.fail(self.error(transfer.description))
        self._host.peer_lost(self)
        self._changed.set()
        self._ended.set()
        for counter in tuple(self.mourners):
            counter.wake_waits()
        self._host.kick()

    def __repr__(self) -> str:
        state = f"lost: {self.reason}" if self.reason else "connected" if self.connected else "connecting"
        return f"<Peer {self.address}, {state}>"


async def drain(host: Host, transfer: Operation, peers: Callable[[], list[Peer]]) -> None:
    """Wait, shielded, until a cancelled transfer is over, whose unfinished parts are toward `peers`.

    What does not leave the NIC within `drain_timeout` has its rails taken out, which both sides agree on; where that
    does not do, the connections are torn down. That ends every transfer with these peers.
    """
    if await finish(host.loop, transfer, host.drain_timeout):
        return
    asked = [peer.let_go(transfer) for peer in peers()]
    if any(asked) and await finish(host.loop, transfer, host.patience):
        return
    stuck = peers()
    for peer in stuck:
        peer.tear_down()
    await finish(host.loop, transfer, host.patience)
    for peer in stuck:
        await peer.agree()
