"""The interface to peers that transfers need; `aiote.links` implements it.

A transfer ends, waits and explains itself through its `TransferOwner`: the connection to one peer, or a group of peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ..aio import finish
from .peer import Peer

if TYPE_CHECKING:
    from ..aio import Waiter
    from ..core.address import Address
    from ..errors import PeerError
    from ..rails import Flight, Operation, PeerLink
    from ..runtime import Runtime
    from .counter import Counter
    from .inbox import Message
    from .transfer import Transfer

__all__ = ["Destination", "PeerFinder", "TransferOwner", "drain"]


class TransferOwner(Protocol):
    """The connection or group that a transfer belongs to."""

    @property
    def name(self) -> str:
        """The peer's address, or a description of the group, for error messages."""

    @property
    def reason(self) -> str:
        """Why the peer was lost; empty while it is not lost."""

    @property
    def confirmed(self) -> bool:
        """Whether it is certain that, after the loss of the peer, none of our requests still takes effect there."""

    def require_here(self) -> None:
        """Raise UsageError if the caller runs in another event loop than the engine's."""

    def waiter(self) -> Waiter: ...
    def rail_name(self, rail: int, /) -> str: ...
    def error(self, operation: str = "") -> PeerError: ...

    def transfer_refused(self, transfer: Transfer) -> None:
        """Record that a transfer has ended without the native core."""

    def cancel_transfer(self, transfer: Operation) -> None:
        """Make a transfer end: the engine posts no more of it, and the posted requests drain."""

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded from cancellation, until a cancelled transfer is over."""


class Destination(TransferOwner, Protocol):
    """One peer that transfers go to, connected or being connected."""

    address: Address
    link: PeerLink | None
    connected: bool
    shares_memory: bool
    peer: Peer
    loss_waiters: set[Counter]

    @property
    def key(self) -> tuple[bytes, int]: ...
    @property
    def lost(self) -> bool: ...
    @property
    def has_room(self) -> bool: ...
    async def wait_closed(self) -> str: ...
    async def recv(self) -> Message: ...
    async def recv_into(self, buffer: object) -> int: ...
    def disconnect(self, reason: str) -> None: ...
    async def wait_ready(self) -> Destination: ...
    def lease_flight(self, lease: int) -> Flight | None: ...
    def has_revoked(self, lease: int) -> bool: ...
    def submit(self, transfer: Transfer, *, waits: bool = True) -> None: ...
    async def room(self) -> None: ...
    async def reserve_room(self) -> tuple[Callable[[], None], Callable[[], None]]: ...
    def take_room(self) -> bool: ...
    def release(self, transfer: Operation) -> bool: ...
    def tear_down(self) -> None: ...
    async def confirm_teardown(self) -> None: ...


class PeerFinder(Protocol):
    """Finds the peers of an engine."""

    def find_or_connect(self, target: Peer | Address | str, operation: str = "") -> Destination:
        """Return the connection to a peer; begin one if needed. Raises UsageError, and PeerError for a lost Peer."""

    def look_up(self, target: Address) -> Destination | None:
        """Return the connection to an address, or None."""


async def drain(runtime: Runtime, transfer: Operation, owners: Callable[[], list[Destination]]) -> None:
    """Wait, shielded from cancellation, until a cancelled transfer is over; its unfinished parts belong to `owners`.

    If requests do not leave the NIC within `drain_timeout`, the engine takes their rails out of use, which both sides
    agree on. If the transfer is not over within `heartbeat_timeout` after that, the engine tears the connections down,
    which ends every transfer with these peers.
    """
    loop, config = runtime.loop, runtime.config
    if await finish(loop, transfer, config.drain_timeout):
        return
    released = [owner.release(transfer) for owner in owners()]
    if any(released) and await finish(loop, transfer, config.heartbeat_timeout):
        return
    stuck = owners()
    for owner in stuck:
        owner.tear_down()
    await finish(loop, transfer, config.heartbeat_timeout)
    for owner in stuck:
        await owner.confirm_teardown()
