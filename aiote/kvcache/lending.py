"""What a decoder lends to prefillers: its cache and its tails, one pair of leases for each engine that writes to them.

A *loan* begins when an engine is asked for the first time, and is kept while all goes well: then a request costs no
registration. It ends when the connection to that engine is lost. Once nobody can write through it its borrowers are
told; from then on pages that the engine was asked to write to may be anybody's.

It ends also where the engine did not confirm that it has stopped, but revoking it fails all requests that rely on it,
and an engine may merely be busy. So it is *retired*: the next request to that engine gets another loan, and this one is
revoked when nobody but those who wait for that relies on it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

import aiote

from .. import service
from ..service.background import Crew
from .fill import Prefill

__all__ = ["Key", "Lender", "Loan", "key_of"]

Key = tuple[bytes, int]


class Borrower(Protocol):
    """What a loan tells those who rely on it."""

    def loan_lost(self, reason: str) -> None: ...
    def loan_over(self) -> None: ...


class Loan:
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
    """The loans of one decoder. `crew` returns what runs beside it."""

    def __init__(
        self, engine: aiote.Engine, pool: aiote.Region, tails: aiote.Region | None, crew: Callable[[], Crew]
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._tails = tails
        self._crew = crew
        self._loans: dict[Key, Loan] = {}
        self.revoked = 0

    def __len__(self) -> int:
        return len(self._loans)

    def has_lent(self, peer: aiote.Peer) -> bool:
        """Whether an engine has a loan."""
        loan = self._loans.get(key_of(peer))
        return loan is not None and loan.peer is peer

    def lend(self, peer: aiote.Peer) -> Loan:
        """Return the loan of an engine, a new one where it has none. Raises ClosedError, FabricError."""
        loan = self._loans.get(key_of(peer))
        if loan is not None and loan.peer is peer:
            return loan
        if loan is not None:
            self.end(loan, "its connection was replaced by another")
        prefill = service.client(self._engine, peer, Prefill)
        pool = self._pool.lease(slice(0, len(self._pool)), peer)
        try:
            tails = self._tails.lease(slice(0, len(self._tails)), peer) if self._tails is not None else None
        except BaseException:
            self._crew().start(pool.revoke)
            raise
        loan = self._loans[key_of(peer)] = Loan(peer, prefill, pool, tails)
        self._crew().start(self._follow, loan)
        return loan

    def retire(self, loan: Loan, borrower: Borrower, reason: str) -> None:
        """Have a loan end for a borrower, which is told, as soon as that is no loss to the others."""
        loan.retired = loan.retired or reason
        loan.giving_up.add(borrower)
        self._withdraw(loan)
        self._end_unused(loan)

    def take_back(self, loan: Loan, borrower: Borrower) -> None:
        """Take note that one does not rely on a loan any more."""
        loan.borrowers.discard(borrower)
        loan.giving_up.discard(borrower)
        self._end_unused(loan)

    def _end_unused(self, loan: Loan) -> None:
        if loan.retired and loan.borrowers <= loan.giving_up:
            self.end(loan, loan.retired)

    def _withdraw(self, loan: Loan) -> None:
        """Lend it to nobody any more."""
        if self._loans.get(key_of(loan.peer)) is loan:
            del self._loans[key_of(loan.peer)]

    def end(self, loan: Loan, reason: str) -> None:
        """Begin to revoke a loan, and tell those who rely on it. Idempotent."""
        if loan.reason:
            return
        loan.reason = reason
        self.revoked += 1
        self._withdraw(loan)
        loan.scope.cancel()
        self._crew().start(self._revoke, loan)
        for borrower in tuple(loan.borrowers):
            borrower.loan_lost(reason)

    async def _follow(self, loan: Loan) -> None:
        """End a loan when the connection is lost."""
        with loan.scope:
            self.end(loan, await loan.peer.wait_closed())

    async def _revoke(self, loan: Loan) -> None:
        await loan.revoke()
        for borrower in tuple(loan.borrowers):
            borrower.loan_over()
