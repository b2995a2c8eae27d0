"""Which of several connections of two engines is kept, and which incarnation of an engine may connect.

Of two connections that are made at once, both sides keep the one from the engine with the lower identity. A new
incarnation waits until the earlier one is lost, because the key does not prove which of its holders connects: the
kernel closes the connections of an engine that has died, or its silence ends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import PeerRefusedError
from .session import ALIVE, BUSY, SessionOver

if TYPE_CHECKING:
    from ..core.address import Address
    from .connection import Connection

__all__ = ["Admission"]


class Admission:
    """Admits authenticated peers to the connections of an engine, which the owner keeps by identity and incarnation."""

    def __init__(self, own_identity: bytes, connections: Mapping[tuple[bytes, int], Connection]) -> None:
        self._own_identity = own_identity
        self._connections = connections

    def choose(self, connection: Connection | None, address: Address, initiator: bytes) -> Connection | None:
        """Return the connection that the peer at an address joins; None if the table has none.

        `connection` is the one that this engine dials for, if it does; `initiator` is the identity of the dialling
        engine. Raises a busy SessionOver if another connection is kept, or while an earlier incarnation is connected,
        and PeerRefusedError for an incarnation that is older than the connected one.
        """
        identity, incarnation = address.identity, address.incarnation
        for other in self._connections.values():
            if other.connected and other.address.identity == identity:
                if other.address.incarnation > incarnation:
                    raise PeerRefusedError(str(address), "it was restarted: a newer incarnation of it is connected")
                if other.address.incarnation < incarnation:
                    raise SessionOver(ALIVE, busy=True)
        existing = self._connections.get((identity, incarnation))
        if existing is not None and (existing is not connection or existing.session is not None):
            if existing.connected or not self._replaces(existing, initiator):
                raise SessionOver(BUSY, busy=True)
            if existing.session is not None:
                existing.session.supersede()
        return existing

    def _replaces(self, existing: Connection, initiator: bytes) -> bool:
        """Whether a new connection from `initiator` replaces the connection attempt of `existing`.

        Never once we have sent Ready there, because the other side may use that connection then.
        """
        if existing.session is not None and existing.session.committed:
            return False
        rival = existing.attempts.initiator or self._own_identity
        return (existing.session is None and rival == initiator) or initiator < rival

    def end_earlier_incarnations(self, address: Address) -> None:
        """Lose the connections that are being made to an earlier incarnation of the engine at an address."""
        for (identity, incarnation), other in tuple(self._connections.items()):
            if identity == address.identity and incarnation < address.incarnation:
                other.lose("it was restarted: a new incarnation of it has connected")
