"""What decode ranks ask a prefiller for, looked at before anything is done about it.

A decoder may be wrong, or lie: what its request says is compared with what this prefiller has and with what the decoder
has lent, and what does not fit is refused with a sentence. What has passed can be written without another look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import aiote

from ..service.background import Bell
from .cache_layout import CacheLayout
from .fill import LAST_IMMEDIATE, FillRequest, fingerprint
from .lending import key_of
from .transfer_plan import PageTable, Route, plan_transfer

__all__ = ["Order", "OrderBuilder"]

ATTACHED = 256
"""How many descriptors are kept: a decoder's is the same in all its requests, for as long as its lease lasts."""
MOST_TOKENS = 1 << 23


@dataclass(slots=True, eq=False)
class Order:
    """What one decode rank asks for, and the writes to it that are not over. `news` is rung when its job is over, and
    when it is `queued`: when a job before its own has moved on.
    """

    fill: FillRequest
    peer: aiote.Peer
    routes: tuple[Route, ...]
    table: PageTable
    pool: aiote.RemoteRegion
    tail: aiote.RemoteRegion | None
    flight: aiote.Flight = field(default_factory=aiote.Flight)
    news: Bell = field(default_factory=Bell)
    queued: bool = False


class OrderBuilder:
    """Makes orders of requests, for a prefill rank. `attach` is the engine's."""

    def __init__(
        self, layout: CacheLayout, rank: int, ranks: int, attach: Callable[[bytes], aiote.RemoteRegion]
    ) -> None:
        self._layout = layout
        self._rank, self._ranks = rank, ranks
        self._print = fingerprint(layout)
        self._attach = attach
        self._attached: dict[bytes, aiote.RemoteRegion] = {}

    def wanted_by(self, decode: int) -> set[int]:
        """Return the ranks that this one writes to, of a decode group of so many. Raises UsageError."""
        return {route.target for route in plan_transfer(self._layout, self._ranks, decode).outgoing(self._rank)}

    def order(self, peer: aiote.Peer, fill: FillRequest) -> Order:
        """Return what a request asks for, attached. Raises UsageError that says what does not fit."""
        layout, ranks = self._layout, fill.ranks
        routes = self._routes(fill)
        if fill.tokens.ndim != 1 or fill.pages.ndim != 1 or len(fill.tokens) > MOST_TOKENS:
            raise aiote.UsageError(f"tokens and pages are rows of numbers, of {MOST_TOKENS} tokens at most")
        if not len(fill.tokens) or len(fill.pages) != layout.pages_for(len(fill.tokens)):
            raise aiote.UsageError(f"{len(fill.pages)} pages for {len(fill.tokens)} tokens")
        if fill.imm + layout.layers > LAST_IMMEDIATE:
            raise aiote.UsageError(f"immediate {fill.imm + layout.layers:#x} has more than 28 bits")
        table = PageTable(fill.pages, fill.pool_pages)
        if not table.distinct:
            raise aiote.UsageError("a page comes twice")
        pool = self._lent(peer, fill.pool)
        if pool.nbytes != layout.pool_bytes(ranks.of_decode, fill.pool_pages):
            raise aiote.UsageError(f"a cache of {fill.pool_pages} pages a layer has not {pool.nbytes} bytes")
        tail = None
        if fill.tail_bytes:
            tail = self._lent(peer, fill.tails)[fill.tail_offset : fill.tail_offset + fill.tail_bytes]
        return Order(fill, peer, routes, table, pool, tail)

    def _routes(self, fill: FillRequest) -> tuple[Route, ...]:
        if fill.print != self._print:
            raise aiote.UsageError("the decoder's cache has another layout than this prefiller's")
        ranks = fill.ranks
        if (ranks.prefill, ranks.of_prefill) != (self._rank, self._ranks):
            raise aiote.UsageError(
                f"this is prefill rank {self._rank} of {self._ranks}, not {ranks.prefill} of {ranks.of_prefill}"
            )
        plan = plan_transfer(self._layout, self._ranks, ranks.of_decode)
        routes = tuple(route for route in plan.outgoing(self._rank) if route.target == ranks.decode)
        if not routes:
            raise aiote.UsageError(f"prefill rank {self._rank} writes nothing to decode rank {ranks.decode}")
        return routes

    def _lent(self, peer: aiote.Peer, descriptor: bytes) -> aiote.RemoteRegion:
        """Return memory that the peer itself has lent to be written: nobody may send us to another's."""
        remote = self._attached.get(descriptor)
        if remote is None:
            if len(self._attached) >= ATTACHED:
                self._attached.clear()
            remote = self._attached[descriptor] = self._attach(descriptor)
        its_own = (remote.owner.identity, remote.owner.incarnation) == key_of(peer)
        if not (its_own and remote.lease and remote.writable):
            raise aiote.UsageError("a request gives memory that was not lent by its own decoder, to be written")
        return remote
