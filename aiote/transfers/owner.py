"""What transfers need of the peers that they go to; `aiote.links` provides it.

A transfer ends, waits and explains itself through its `TransferOwner`: the connection to one peer, or a group of them.
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
    """Whom a transfer belongs to."""

    @property
    def name(self) -> str:
        """Its address, or what the group is, for errors."""

    @property
    def reason(self) -> str:
        """Why the peer was lost; empty while it is not."""

    @property
    def confirmed(self) -> bool:
        """Whether it is certain that a lost peer carries out nothing more of ours."""

    def require_here(self) -> None:
        """Raise UsageError where another event loop than its engine's runs the caller."""

    def waiter(self) -> Waiter: ...
    def rail_name(self, rail: int, /) -> str: ...
    def error(self, operation: str = "") -> PeerError: ...

    def transfer_refused(self, transfer: Transfer) -> None:
        """Take note that a transfer has ended without the native core."""

    def cancel_transfer(self, transfer: Operation) -> None:
        """Have a transfer end: nothing more is posted, what was posted drains."""

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded, until a cancelled transfer is over."""


class Destination(TransferOwner, Protocol):
    """One peer that transfers go to, connected or being connected."""

    address: Address
    link: PeerLink | None
    connected: bool
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
    async def ready(self) -> Destination: ...
    def lease_flight(self, lease: int) -> Flight | None: ...
    def has_revoked(self, lease: int) -> bool: ...
    def submit(self, transfer: Transfer, *, waits: bool = True) -> None: ...
    async def room(self) -> None: ...
    async def reserve_room(self) -> tuple[Callable[[], None], Callable[[], None]]: ...
    def take_room(self) -> bool: ...
    def release(self, transfer: Operation) -> bool: ...
    def tear_down(self) -> None: ...
    async def agree(self) -> None: ...


class PeerFinder(Protocol):
    """What knows the peers of an engine."""

    def find(self, target: Peer | Address | str, operation: str = "") -> Destination:
        """Return the connection to a peer, begun if there is none. Raises UsageError, and PeerError for a lost Peer."""

    def known(self, target: Address) -> Destination | None:
        """Return the connection to an address, if there is one."""


async def drain(runtime: Runtime, transfer: Operation, owners: Callable[[], list[Destination]]) -> None:
    """Wait, shielded, until a cancelled transfer is over, whose unfinished parts belong to `owners`.

    What does not leave the NIC within `drain_timeout` has its rails taken out, which both sides agree on; where that
    does not do, the connections are torn down. That ends every transfer with these peers.
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
        await owner.agree()
