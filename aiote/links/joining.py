"""The channels of one session while they are opened, told to the peer, and joined to the peer's."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import aiote.aio as aio

from ..core.address import name_of
from ..core.control import Role
from ..core.control_frames import Channel, EngineOffer
from ..core.pairing import pair_rails
from ..errors import PeerError, PeerRefusedError

if TYPE_CHECKING:
    from ..rails import NativeEndpoint, PeerLink, PendingChannel
    from ..runtime import Runtime
    from .connection import Connection

__all__ = ["FULL", "Joining", "pair"]

FULL = "full"
"""The wire format of a rail whose NIC has no endpoint left; no rail uses this format."""
SLOT = struct.Struct("<iI")  # a slot in a wake-up page: its number and its generation


def pair(
    runtime: Runtime, connection: Connection, offer: EngineOffer, role: Role, full: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Return the pairs of (our rail, its rail) to join; both sides compute the same pairs. Raises PeerError.

    `full`: our rails that have no endpoint left. The peer's full rails have the wire format `FULL`, which matches none.
    """
    ours = {rail.index: rail.wire for rail in runtime.rail_set.rails if rail.index not in full}
    theirs = {number: rail.wire for number, rail in enumerate(offer.rails)}
    near = {rail.wire for rail in runtime.rail_set.rails if rail.traits.host_only} & set(theirs.values())
    if len(set(ours.values()) - near) > 0 and len(set(theirs.values()) - near) > 0:
        # If both sides also have other rails: use shared memory alone on one host, and never between two hosts.
        here = offer.host_id == runtime.host_id
        ours, theirs = (
            {number: wire for number, wire in rails.items() if not near or (wire in near) is here}
            for rails in (ours, theirs)
        )
    spares = runtime.rail_set.spares
    if (set(ours.values()) & set(theirs.values())) - spares:
        ours = {number: wire for number, wire in ours.items() if wire not in spares}
    mine, remote = list(ours), list(theirs)
    if role is Role.INITIATOR:
        found = pair_rails(list(ours.values()), list(theirs.values()))
    else:
        found = [each[::-1] for each in pair_rails(list(theirs.values()), list(ours.values()))]
    if not found:
        raise PeerRefusedError(
            connection.name,
            f"no rail in common: this engine has {', '.join(ours.values())}, the peer has "
            f"{', '.join(theirs.values())} (tcp of libfabric 1.17 and of 1.18 and later cannot talk to each other, "
            "shm only of one version)",
        )
    return [(mine[i], remote[j]) for i, j in found]


class Joining:
    """Channels that no link has taken over yet, in the order in which the peer was told of them."""

    def __init__(self, runtime: Runtime, control: aio.ControlConnection, arrived: aio.Condition) -> None:
        self._runtime = runtime
        self._control = control
        self._arrived = arrived
        self._pending: list[PendingChannel] = []
        self._handovers: dict[PendingChannel, aio.Handover] = {}
        self._reserved: dict[int, NativeEndpoint] = {}
        self.full: set[int] = set()

    def reserve(self) -> None:
        """Reserve an endpoint of each scarce rail before the peer is told of the rail. Raises FabricError."""
        for rail in self._runtime.rail_set.rails:
            if rail.traits.scarce:
                endpoint = self._runtime.rail_set.reserve(rail.index)
                if endpoint is None:
                    self.full.add(rail.index)
                else:
                    self._reserved[rail.index] = endpoint

    def __iter__(self) -> Iterator[PendingChannel]:
        return iter(tuple(self._pending))

    def close(self) -> None:
        """Close the channels that no link has taken over. Idempotent."""
        for handover in self._handovers.values():
            handover.close()
        for pending in self._pending:
            pending.close()
            self._runtime.rail_set.free_slot(pending.slot)
        self._pending.clear()
        self.release_reserved()

    def release_reserved(self) -> None:
        """Give back the endpoints that no channel has taken. Idempotent."""
        while self._reserved:
            self._reserved.popitem()[1].close()

    def tell_full(self, connection: Connection, offer: EngineOffer) -> None:
        """Emit an event for each NIC, ours or the peer's, that has no endpoint left: a slower rail serves the peer."""
        for number in self.full:
            rail = self._runtime.rail_name(number)
            reason = "the NIC has no endpoint left for it (aiote doctor names the limit)"
            self._runtime.events.emit("rail.full", peer=connection.name, rail=rail, reason=reason)
        for theirs in offer.rails:
            if theirs.wire == FULL:
                reason = "the peer's NIC has no endpoint left for this engine"
                self._runtime.events.emit("rail.full", peer=connection.name, rail=theirs.name, reason=reason)

    def offer(self, mine: int, remote: int) -> None:
        """Open a channel of two rails and tell the peer."""
        pending = self._runtime.rail_set.open_channel(mine, remote, self._reserved.pop(mine, None))
        self._pending.append(pending)
        wakeup = b""
        if not pending.rail.traits.waits:

            def on_arrival(descriptors: Sequence[int], address: bytes, error: OSError | None) -> None:
                pending.map_memory(descriptors, address, error)
                self._arrived.wake_all()

            handover = self._handovers[pending] = aio.Handover(self._runtime.loop, on_arrival)
            wakeup = SLOT.pack(pending.slot, pending.generation) + handover.address
        key, base = self._runtime.rail_set.scratch.keys[mine]
        self._control.send(Channel(mine, remote, 0, pending.address, key, base, wakeup))

    async def join(self, connection: Connection, link: PeerLink, pending: PendingChannel, channel: Channel) -> None:
        """Connect a channel to the peer's, and hand it to the link. Raises PeerError, FabricError."""
        if (channel.rail_local, channel.rail_remote) != (pending.remote_rail, pending.rail.index):
            raise PeerError(
                connection.name,
                f"it described the channel of rails {channel.rail_local} and {channel.rail_remote} out of order",
            )
        peer_slot = -1, 0
        if not pending.rail.traits.waits:
            if len(channel.wakeup) < SLOT.size:
                raise PeerError(connection.name, "it sent no wake-up address for a rail that needs one")
            peer_slot = SLOT.unpack_from(channel.wakeup)
            await self._hand_over(connection, pending, channel.wakeup[SLOT.size :])
        name = name_of(connection.key)
        self._runtime.rail_set.join(
            link, pending, channel.address, channel.imm_key, channel.imm_base, peer_slot=peer_slot, name=name
        )
        self._pending.remove(pending)

    async def _hand_over(self, connection: Connection, pending: PendingChannel, address: bytes) -> None:
        """Pass our wake-up page and ring to the peer, and wait for the peer's own. Raises PeerError."""
        own = self._runtime.core.wakeup_event
        assert own is not None
        try:
            aio.hand_over(address, pending.shared(own), own.address)
        except ValueError as error:
            raise PeerError(connection.name, f"it sent no wake-up address: {error}") from None
        while pending.wakeup is None or pending.refused:
            if pending.refused:
                raise PeerError(connection.name, pending.refused)
            if self._control.has_ended:
                raise PeerError(connection.name, self._control.reason)
            await self._arrived.wait()
