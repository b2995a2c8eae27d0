"""The handle of another engine that users hold; it owns no state and passes every call to the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.address import Address
from ..errors import UsageError
from .inbox import Messages

if TYPE_CHECKING:
    from .inbox import Message
    from .owner import Destination

__all__ = ["Peer", "one_engine"]


class Peer:
    """Another engine. Returned by `Engine.connect`, and found in `Engine.peers` when that engine connected to this one.

    A lost peer never comes back: the engine that answers at its address later is another Peer.
    """

    __slots__ = ("__weakref__", "_connection")

    def __init__(self, connection: Destination) -> None:
        self._connection = connection

    @property
    def address(self) -> Address:
        """The address that the peer has announced."""
        return self._connection.address

    @property
    def connected(self) -> bool:
        """Whether it is connected now, so that transfers to it can start."""
        return self._connection.connected

    @property
    def lost(self) -> bool:
        """Whether it is gone for good."""
        return self._connection.lost

    @property
    def shares_memory(self) -> bool:
        """Whether it is connected and runs on this host, in the same container, so that the two can share memory."""
        return self._connection.connected and self._connection.shares_memory

    @property
    def reason(self) -> str:
        """Why it was lost; empty while it is not lost."""
        return self._connection.reason

    async def wait_closed(self) -> str:
        """Wait until the peer is lost and return the reason. Cancelling this wait has no other effect."""
        self._connection.require_here()
        return await self._connection.wait_closed()

    def disconnect(self, reason: str = "it was disconnected") -> None:
        """Say goodbye to the peer and close the connection; unfinished transfers end with a TransferError.

        No byte moves to or from it once this returns. The peer receives the reason. The next use of its address
        connects anew. Does nothing for a lost peer, nor in a forked child. Raises UsageError if the reason is not text.
        """
        if not isinstance(reason, str):
            raise UsageError(f"disconnect: the reason must be text, got {type(reason).__name__}")
        self._connection.disconnect(reason)

    def has_revoked(self, lease: int) -> bool:
        """Whether it lent memory to this engine by a lease of that number (`RemoteRegion.lease`) and has revoked it."""
        return self._connection.has_revoked(lease)

    async def recv(self) -> Message:
        """Return the next message of this peer; waiting costs nothing, cancelling loses no message.

        Each message goes to one receiver: to this one, or to `Engine.recv`. Raises PeerError when the peer is lost and
        none of its messages is left, ClosedError.
        """
        return await self._connection.recv()

    async def recv_into(self, buffer: Any) -> int:
        """Copy the next message of this peer into `buffer`, as `Engine.recv_into`; return its length.

        Raises as `recv`, and UsageError for a buffer that is read-only, not contiguous or shorter than the message.
        """
        return await self._connection.recv_into(buffer)

    def messages(self) -> Messages:
        """Iterate over the messages of this peer until it is lost or the engine is closed."""
        return Messages(self.recv)

    def rotate_rails(self, turn: int) -> None:
        """Start the next transfer to it on rail `turn`, modulo their number, if several rails would do equally well.

        If each rank passes the sum of its own number and the peer's, all NICs of every rank carry the same load. Does
        nothing for a peer that is not connected.
        """
        self._connection.require_here()
        if self._connection.link is not None:
            self._connection.link.rotate(turn & 0xFFFFFFFF)

    async def room(self) -> None:
        """Wait, in turn, until there is room for one more transfer to it; the caller has the room until its next await.

        Raises PeerError when the peer is lost.
        """
        self._connection.require_here()
        await self._connection.room()

    @property
    def has_room(self) -> bool:
        """Whether a `submit_` method would start a transfer now instead of raising QueueFull."""
        return self._connection.has_room

    @property
    def unfinished(self) -> int:
        """The number of transfers toward it that are in flight now, at most `max_transfers`."""
        link = self._connection.link
        return 0 if link is None else link.unfinished

    def __repr__(self) -> str:
        return repr(self._connection)


def one_engine(who: Peer | Address | str, verb: str) -> Address:
    """Return the address of an engine that is named by its identity. Raises UsageError for anything else."""
    address = who.address if isinstance(who, Peer) else Address.parse(who) if isinstance(who, str) else who
    if not isinstance(address, Address):
        raise UsageError(f"{verb}: a Peer or an Address is expected, got {type(who).__name__}")
    if address.is_anyone:
        raise UsageError(f"{verb}: the address must name one engine, by its identity; connect first")
    return address
