"""What a decoder lends to prefillers: its cache and its tails, one pair of leases for each engine that writes to them.

A *grant* begins when an engine is asked for the first time, and is kept while all goes well: then a request costs no
registration. It ends when the connection to that engine is lost. Once nobody can write through it its borrowers are
told; from then on pages that the engine was asked to write to may be anybody's.

It ends also where the engine did not confirm that it has stopped, but revoking it fails all requests that rely on it,
and an engine may merely be busy. So it is *retired*: the next request to that engine gets another grant, and this one
is revoked when nobody but those who wait for that relies on it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

import aiote

from .. import service
from ..service.background import TaskScope
from .fill import Prefill

__all__ = ["Key", "Lender", "WriteGrant", "key_of"]

Key = tuple[bytes, int]


class Borrower(Protocol):
    """What a grant tells those who rely on it."""

    def loan_lost(self, reason: str) -> None: ...
    def loan_over(self) -> None: ...


class WriteGrant:
    """The leases of one engine, and its service. Made by `Lender.lend`."""

    def __init__(self, peer: aiote.Peer, prefill: Prefill, pool: aiote.Lease, tails: aiote.Lease | None) -> None:
        self.peer = peer
        self.prefill = prefill
        self.pool = pool
        self.tails = tails
        self.reason = ""
        self.borrowers: set[Borrower] = set()
        self.retired = ""
        self.giving_up: set[Borrower] = set()
        self.scope = anyio.CancelScope()

    async def revoke(self) -> None:
        """Return once nobody can write through it; within `drain_timeout` of the engine's config, or a little more."""
        for lease in (self.pool, self.tails):
            if lease is not None:
                await lease.revoke()


def key_of(peer: aiote.Peer) -> Key:
    """Return what tells engines, and runs of one engine, apart."""
    return peer.address.identity, peer.address.incarnation


class Lender:
    """The grants of one decoder. `scope` returns what runs beside it."""

    def __init__(
        self, engine: aiote.Engine, pool: aiote.Region, tails: aiote.Region | None, scope: Callable[[], TaskScope]
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._tails = tails
        self._scope = scope
        self._grants: dict[Key, WriteGrant] = {}
        self.revoked = 0

    def __len__(self) -> int:
        return len(self._grants)

    def has_lent(self, peer: aiote.Peer) -> bool:
        """Whether an engine has a grant."""
        grant = self._grants.get(key_of(peer))
        return grant is not None and grant.peer is peer

    def lend(self, peer: aiote.Peer) -> WriteGrant:
        """Return the grant of an engine, a new one where it has none. Raises ClosedError, FabricError."""
        grant = self._grants.get(key_of(peer))
        if grant is not None and grant.peer is peer:
            return grant
        if grant is not None:
            self.end(grant, "its connection was replaced by another")
        prefill = service.client(self._engine, peer, Prefill)
        pool = self._pool.lease(slice(0, len(self._pool)), peer)
        try:
            tails = self._tails.lease(slice(0, len(self._tails)), peer) if self._tails is not None else None
        except BaseException:
            self._scope().start(pool.revoke)
            raise
        grant = self._grants[key_of(peer)] = WriteGrant(peer, prefill, pool, tails)
        self._scope().start(self._follow, grant)
        return grant

    def retire(self, grant: WriteGrant, borrower: Borrower, reason: str) -> None:
        """Have a grant end for a borrower, which is told, as soon as that is no loss to the others."""
        grant.retired = grant.retired or reason
        grant.giving_up.add(borrower)
        self._withdraw(grant)
        self._end_unused(grant)

    def take_back(self, grant: WriteGrant, borrower: Borrower) -> None:
        """Take note that one does not rely on a grant any more."""
        grant.borrowers.discard(borrower)
        grant.giving_up.discard(borrower)
        self._end_unused(grant)

    def _end_unused(self, grant: WriteGrant) -> None:
        if grant.retired and grant.borrowers <= grant.giving_up:
            self.end(grant, grant.retired)

    def _withdraw(self, grant: WriteGrant) -> None:
        """Lend it to nobody any more."""
        if self._grants.get(key_of(grant.peer)) is grant:
            del self._grants[key_of(grant.peer)]

    def end(self, grant: WriteGrant, reason: str) -> None:
        """Begin to revoke a grant, and tell those who rely on it. Idempotent."""
        if grant.reason:
            return
        grant.reason = reason
        self.revoked += 1
        self._withdraw(grant)
        grant.scope.cancel()
        self._scope().start(self._revoke, grant)
        for borrower in tuple(grant.borrowers):
            borrower.loan_lost(reason)

    async def _follow(self, grant: WriteGrant) -> None:
        """End a grant when the connection is lost."""
        with grant.scope:
            self.end(grant, await grant.peer.wait_closed())

    async def _revoke(self, grant: WriteGrant) -> None:
        await grant.revoke()
        for borrower in tuple(grant.borrowers):
            borrower.loan_over()
