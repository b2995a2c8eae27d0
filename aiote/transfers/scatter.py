"""Requests to many peers at once: groups of peers, and one transfer with a target at each.

This module must not know how peers are connected or how the native core posts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.address import Address
from ..core.striping import native_immediate
from ..errors import AioteError, FabricError, LeaseRevokedError, PeerError, QueueFull, TransferError, UsageError
from ..rails import ScatterTargets, error_text, scatter
from .owner import Destination, drain
from .peer import Peer
from .regions import Region, RemoteRegion
from .streams import order_behind, pools_of
from .transfer import Transfer

if TYPE_CHECKING:
    from ..aio import Waiter
    from ..rails import Flight, Operation, PeerLink
    from ..runtime import Runtime
    from .owner import PeerFinder

__all__ = [
    "GroupTransfer",
    "PeerGroup",
    "ScatterTarget",
    "check_group",
    "group_room",
    "link_of",
    "make_group",
    "member_of",
    "memories_of",
    "submit_scatter",
    "take_rooms",
    "void_lease",
]


async def group_room(group: PeerGroup) -> None:
    """Wait until there is room toward every member at once; room at one member is kept while others are waited for.

    The caller has the room until its next await. Raises PeerError for a member that is lost.
    """
    group.require_here()
    peers = group.connections
    if all(peer.has_room and not peer.lost for peer in peers):
        return
    kept = []
    try:
        # All tasks use one order, because two tasks that each keep the room the other waits for would deadlock.
        for peer in sorted(peers, key=lambda peer: peer.key):
            kept.append(await peer.reserve_room())
        lost = next((peer for peer in peers if peer.lost), None)
        if lost is not None:
            raise lost.error()
    except BaseException:
        for _, give_up in kept:
            give_up()
        raise
    for hand_over, _ in kept:
        hand_over()


class ScatterTarget(NamedTuple):
    """One target of a scatter: all of `src` goes to all of `dst` (same length).

    If `src` is None, the target gets an immediate alone; `dst` is then a RemoteRegion, or a Peer or Address of the
    group.
    """

    src: Region | None
    dst: RemoteRegion | Peer | Address | str


class PeerGroup:
    """Peers that were resolved once, for `scatter` and `barrier`. Made by `Engine.peer_group`.

    A sequence of its peers, in the order given. It does not replace a lost peer: requests to a lost peer fail, and the
    error names that peer.
    """

    reason = ""
    """Always empty: a group itself is never lost, only its members are."""

    def __init__(self, runtime: Runtime, connections: Sequence[Destination]) -> None:
        self.connections = tuple(connections)
        self.runtime = runtime
        self.rounds: dict[int, int] = {}
        self._members = {connection.key: connection for connection in connections}
        # A transfer of the group ends, waits and explains itself through these, as others do through their peer.
        self.waiter: Callable[[], Waiter] = runtime.loop.waiter
        self.rail_name = runtime.rail_name
        self.require_here = runtime.loop.require_here

    def __len__(self) -> int:
        return len(self.connections)

    def __iter__(self) -> Iterator[Peer]:
        return (connection.peer for connection in self.connections)

    def __getitem__(self, item: int) -> Peer:
        return self.connections[item].peer

    def __contains__(self, peer: object) -> bool:
        return any(connection.peer is peer for connection in self.connections)

    @property
    def name(self) -> str:
        """The name of the group, for error messages."""
        return f"a group of {len(self.connections)} peers"

    @property
    def confirmed(self) -> bool:
        """Whether every lost member agreed that its connection is gone."""
        return all(connection.confirmed for connection in self.connections)

    def error(self, operation: str = "") -> PeerError:
        """Return the error of a request to a lost peer."""
        return PeerError(self.name, self.reason, operation=operation)

    def member(self, target: Peer | Address | str) -> Destination | None:
        """Return the member for a peer or an address; None if it is not in the group."""
        address = target.address if isinstance(target, Peer) else target
        if isinstance(address, str):
            address = Address.parse(address)
        return self._members.get((address.identity, address.incarnation))

    def transfer_refused(self, transfer: Transfer) -> None:
        """Do nothing about a transfer that has ended without the native core: a group has no queue."""

    def cancel_transfer(self, transfer: Operation) -> None:
        """Make a transfer end: the engine posts no more of it, and the posted requests drain."""
        self.runtime.core.cancel(transfer)
        self.runtime.kick()

    async def drain(self, transfer: Operation) -> None:
        """Wait, shielded, until a cancelled transfer is over; tear down the connections that do not release it."""
        assert isinstance(transfer, GroupTransfer)
        await drain(self.runtime, transfer, transfer.unfinished_peers)

    def __repr__(self) -> str:
        return f"<PeerGroup of {len(self)}>"


async def make_group(runtime: Runtime, finder: PeerFinder, members: Iterable[Peer | Address | str]) -> PeerGroup:
    """Connect to all members at once and return the group. Raises UsageError, PeerError."""
    asked = [finder.find_or_connect(one, "peer_group") for one in members]
    # All connections are being made by now, so waiting for them in turn takes as long as the slowest.
    peers = [await peer.wait_ready() for peer in asked]
    if len({peer.key for peer in peers}) < len(peers):
        raise UsageError(
            "peer_group: a member is named twice; name it once, because a scatter may have several "
            "targets at one member"
        )
    return PeerGroup(runtime, peers)


class GroupTransfer(Transfer):
    """A transfer to every target of a scatter; over when all are. The first failure is the cause of its error."""

    _peers: Sequence[Destination] = ()

    def __init__(self, group: PeerGroup, peers: Sequence[Destination], description: str) -> None:
        self.peer = group
        self._peers = peers
        self._text = description

    def members(self) -> Sequence[Destination]:
        """Return the peer of each target."""
        return self._peers

    def unfinished_peers(self) -> list[Destination]:
        """Return the peers whose part is not over."""
        assert self.targets is not None
        peers = self.members()
        return list(dict.fromkeys(peers[i] for i in self.targets.unfinished()))

    def explain(self) -> TransferError:
        """Return the error that it ended with: which targets failed, and why the first of them did."""
        done = f"{self.confirmed_bytes} of {self.total_bytes} bytes confirmed"
        assert self.targets is not None
        if self._revoked:
            cause: AioteError = LeaseRevokedError(
                self.peer.name, "it has revoked the lease of a target; ask it for a new descriptor"
            )
            return self._error(cause, f"{self.description} failed, {done}: {cause}")
        if self.was_cancelled:
            return self._error(None, f"{self.description}: cancelled, {done}")
        failures = self.targets.failures()
        position, errnum, rail = failures[0]
        peer = self.members()[position]
        failure = "" if self.order is None else self.order.failure
        if peer.reason:
            cause = peer.error(self.description)
        elif failure:
            cause = FabricError(errnum, failure, operation=f"{self.description} behind a stream")
        else:
            name = peer.rail_name(rail)
            cause = FabricError(errnum, error_text(errnum), operation=self.description, rail=name)
        where = f"target {position} with peer {peer.name}"
        others = f" and {len(failures) - 1} others" if len(failures) > 1 else ""
        return self._error(cause, f"{self.description}: {where}{others} failed, {done}: {cause}")


def check_group(runtime: Runtime, group: object) -> None:
    """Raise UsageError unless this is a group of this engine, ClosedError if the engine is closed."""
    runtime.require_open()
    if not isinstance(group, PeerGroup) or group.runtime is not runtime:
        raise UsageError("scatter: expected a PeerGroup of this engine; make one with await engine.peer_group([...])")


def submit_scatter(
    runtime: Runtime, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None, stream: Any = None
) -> GroupTransfer:
    """Start a write to each target, one request for all. Raises UsageError, PeerError, QueueFull before any starts."""
    check_group(runtime, group)
    value = native_immediate(imm)
    items = list(targets)
    parts = ScatterTargets(len(items))
    peers: list[Destination] = []
    leases: dict[tuple[Destination, int], None] = {}
    for position, item in enumerate(items):
        try:
            src, dst = item
        except (TypeError, ValueError):
            raise UsageError(f"scatter: target {position} is {item!r}, expected ScatterTarget(src, dst)") from None
        peers.append(_add(runtime, group, parts, position, src, dst))
        if isinstance(dst, RemoteRegion) and dst.lease:
            leases[peers[-1], dst.lease] = None
    transfer = GroupTransfer(group, peers, f"scatter to {len(items)} targets")
    sources = [src.memory for src, _dst in items if isinstance(src, Region)]
    transfer.order = order_behind(pools_of(sources), stream, "scatter")
    take_rooms(runtime, transfer.description, peers)
    held = _take_leases(transfer, leases)
    try:
        scatter(runtime.core, transfer, parts, value)
    except (ValueError, RuntimeError) as error:
        _drop_from_flights(held, transfer)
        raise UsageError(f"{transfer.description}: {error}") from error
    return transfer


def take_rooms(runtime: Runtime, description: str, peers: Iterable[Destination]) -> None:
    """Take room for a request at each of its peers. Raises QueueFull."""
    for peer in dict.fromkeys(peers):
        if not peer.take_room():
            raise QueueFull(
                f"{description}: {runtime.config.max_transfers} transfers toward peer {peer.name} are unfinished; "
                "await engine.room(peer), or raise config.max_transfers"
            )


def _add(
    runtime: Runtime,
    group: PeerGroup,
    parts: ScatterTargets,
    position: int,
    src: object,
    dst: RemoteRegion | Peer | Address | str,
) -> Destination:
    """Check one target and add it; return its peer."""
    peer, link = member_of(group, position, dst)
    if src is None:
        parts.add(link, None, 0, None, 0, 0)
        return peer
    src, dst = memories_of(runtime, position, src, dst)
    if src.nbytes != dst.nbytes:
        raise UsageError(
            f"scatter: target {position} has a source of {src.nbytes} bytes and a destination of "
            f"{dst.nbytes}: expected one length"
        )
    try:
        parts.add(link, src.memory, src.start, dst.memory, dst.start, src.nbytes)
    except ValueError as error:
        raise UsageError(f"scatter: target {position}: {error}") from None
    return peer


def member_of(
    group: PeerGroup, position: int, dst: RemoteRegion | Peer | Address | str
) -> tuple[Destination, PeerLink]:
    """Return the peer of a target, and its link. Raises UsageError, PeerError."""
    peer = group.member(dst.owner if isinstance(dst, RemoteRegion) else dst)
    if peer is None:
        raise UsageError(
            f"scatter: target {position} is memory of an engine outside the group; add that engine to peer_group"
        )
    return peer, link_of(peer)


def memories_of(runtime: Runtime, position: int, src: object, dst: object) -> tuple[Region, RemoteRegion]:
    """Check the memories of a target. Raises UsageError, ClosedError."""
    if not isinstance(src, Region) or not isinstance(dst, RemoteRegion):
        raise UsageError(
            f"scatter: target {position} needs a Region as source and a RemoteRegion as destination, "
            f"got {type(src).__name__} and {type(dst).__name__}"
        )
    src.require_open()
    if src.memory.owner is not runtime.core:
        raise UsageError(
            f"scatter: the source of target {position} belongs to another engine; register that "
            "memory with this one too"
        )
    return src, dst


def link_of(peer: Destination) -> PeerLink:
    """Return the link of a peer. Raises PeerError if the peer is lost."""
    if peer.link is None or not peer.connected:
        raise peer.error("scatter")
    return peer.link


def _take_leases(transfer: GroupTransfer, leases: Iterable[tuple[Destination, int]]) -> list[Flight]:
    """Enter the transfer in the flight of every lease that it uses. Raises TransferError if one of them is void."""
    held: list[Flight] = []
    for peer, lease in leases:
        flight = peer.lease_flight(lease)
        if flight is None:
            _drop_from_flights(held, transfer)
            raise void_lease(transfer, peer, lease)
        flight.enter(transfer)
        held.append(flight)
    if held:
        transfer.on_over = partial(_drop_from_flights, held)
    return held


def void_lease(transfer: GroupTransfer, peer: Destination, lease: int) -> TransferError:
    """End the transfer because its lease was revoked, and return the error."""
    cause = LeaseRevokedError(peer.name, f"it has revoked lease {lease} of a target; ask it for a new descriptor")
    error = TransferError(transfer, cause, f"{transfer.description} failed, nothing was posted: {cause}")
    transfer.fail(error)
    return error


def _drop_from_flights(held: Iterable[Flight], transfer: GroupTransfer) -> None:
    for flight in held:
        flight.drop(transfer)
