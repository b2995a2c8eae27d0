"""One try of one request with one group of prefillers, seen from the decoder.

It opens immediates, calls every prefill rank that has something to write, and counts. There are two ends:

* *All counts are there.* They are as many as the plan has writes, so no write is left that could still land.
* *It failed*: a rank refused or was lost, nothing came for too long, or the request is not wanted any more. Then every
  call is cancelled. A rank is *over* when its call has ended there, or when its grant is revoked. Where the call does
  not end within `confirm_limit`, the grant is *retired*: it is revoked as soon as that fails no other request. The
  attempt ends when all are over.

Either way nobody can write for it when `run` returns: pages may be anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio
import numpy as np

import aiote

from .. import service
from ..service.background import Bell
from .cache_layout import CacheLayout
from .fill import FillRequest, Numbers, Progress, Ranks, fingerprint
from .immediates import Block, Immediates
from .lending import Lender, WriteGrant
from .transfer_plan import plan_transfer

__all__ = ["Attempt", "DecoderContext"]

MAX_REASON = 1024
LOOKS = 4
"""How often in its time the stall limit is looked at: so much of it a stall may be noticed late."""


@dataclass(slots=True)
class DecoderContext:
    """What the attempts of one decoder share, and which of them wait for what is to come."""

    engine: aiote.Engine
    layout: CacheLayout
    rank: int
    ranks: int
    pool_pages: int
    tail_bytes: int
    stall_limit: float
    confirm_limit: float
    lender: Lender
    immediates: Immediates
    collecting: set[Attempt] = field(default_factory=set)

    async def watch(self) -> None:
        """Have every attempt look whether it has stalled, time and again; one task for all of them."""
        while True:
            await anyio.sleep(self.stall_limit / LOOKS)
            for attempt in tuple(self.collecting):
                attempt.look(anyio.current_time())


class PrefillSource:
    """One prefill rank of an attempt: what it was lent, and whether it may still write."""

    def __init__(self, attempt: Attempt, rank: int, place: aiote.Peer | aiote.Address) -> None:
        self._attempt = attempt
        self._rank = rank
        self._address = place.address if isinstance(place, aiote.Peer) else place
        self._grant: WriteGrant | None = None
        self._call: service.Stream | None = None
        self._over = False
        self._bell = Bell()

    async def ask(self) -> None:
        """Call the rank, and return when the call is on its way; what goes wrong fails the attempt."""
        try:
            grant = self._lend(await self._connect())
            call = cast("service.Stream", grant.prefill.fill(self._attempt.request(self._rank, grant)))
            await call.listen(self._heard, self._ended)
            self._call = call
        except aiote.AioteError as error:
            self._fail(str(error))

    def _heard(self, _: Progress) -> None:
        self._attempt.heard()

    def _ended(self, error: Exception | None) -> None:
        """Take note that its call has ended there, or that it is lost: then the grant ends."""
        if error is not None:
            self._fail(str(error))
        if self._grant is not None and not self._grant.peer.lost:
            self.loan_over()

    async def _connect(self) -> aiote.Peer:
        """Return the engine; who has nothing of ours yet has to answer before it gets something."""
        context = self._attempt.context
        peer = context.engine.find_peer(self._address)
        if peer is None or not context.lender.has_lent(peer):
            peer = peer or await context.engine.connect(self._address)
            await service.client(context.engine, peer, service.Health).check()
            self._attempt.heard()
        return peer

    def _lend(self, peer: aiote.Peer) -> WriteGrant:
        grant = self._grant = self._attempt.context.lender.lend(peer)
        grant.borrowers.add(self)
        return grant

    async def stop(self, limit: float) -> None:
        """Return when it can write nothing more for this attempt. After `limit` its grant is retired."""
        if self._call is None:
            return
        self.call_off()
        with anyio.move_on_after(limit):
            await self._until_over()
        if self._grant is not None and not self._over:
            reason = f"it did not confirm within {limit} s that it had stopped"
            self._attempt.context.lender.retire(self._grant, self, reason)
        await self._until_over()

    def call_off(self) -> None:
        """Cancel its call, if there is one. Idempotent."""
        if self._call is not None:
            self._call.close()

    async def _until_over(self) -> None:
        while not self._over:
            await self._bell.wait()

    def forget(self) -> None:
        """Take note that the attempt is over."""
        if self._grant is not None:
            self._attempt.context.lender.take_back(self._grant, self)

    def loan_lost(self, reason: str) -> None:
        """Take note that its grant is being revoked."""
        self._fail(reason)

    def loan_over(self) -> None:
        """Take note that nobody can write for it any more."""
        self._over = True
        self._bell.ring()

    def _fail(self, reason: str) -> None:
        # The prefiller's words may end up in terminals and logs.
        clean = "".join(character if character.isprintable() else " " for character in reason[:MAX_REASON])
        self._attempt.fail(f"prefill rank {self._rank} ({self._address.host}:{self._address.port}): {clean}")


class Attempt:
    """One try; `run` is its whole life. `group` are the prefillers, by rank; `pages` as many as the prompt needs."""

    def __init__(
        self,
        context: DecoderContext,
        request: bytes,
        round_: int,
        group: Sequence[aiote.Peer | aiote.Address],
        tokens: Numbers,
        pages: Sequence[int],
        place: int,
    ) -> None:
        self.context = context
        self.reason = ""
        self.layers = 0
        self._name = request
        self._round = round_
        self._tokens = tokens
        self._pages = np.asarray(pages, dtype=np.uint32)
        self._place = place
        self._plan = plan_transfer(context.layout, len(group), context.ranks)
        ranks = dict.fromkeys(route.source for route in self._plan.incoming(context.rank))
        self._of_prefill = len(group)
        self._tail_from = min(ranks)
        self._sources = [PrefillSource(self, rank, group[rank]) for rank in ranks]
        self._block: Block | None = None
        self._collecting = anyio.CancelScope()
        self._heard = 0
        self._seen = (0, 0, (0, 0))
        self._since = 0.0

    def request(self, rank: int, grant: WriteGrant) -> FillRequest:
        """Return what is asked of one prefill rank."""
        context, block = self.context, self._block
        assert block is not None
        tail = context.tail_bytes if rank == self._tail_from else 0
        return FillRequest(
            round=self._round,
            ranks=Ranks(rank, self._of_prefill, context.rank, context.ranks),
            imm=block.first,
            pool_pages=context.pool_pages,
            tail_offset=self._place * context.tail_bytes,
            tail_bytes=tail,
            request=self._name,
            print=fingerprint(context.layout),
            pool=grant.pool.descriptor,
            tails=grant.tails.descriptor if tail and grant.tails is not None else b"",
            tokens=self._tokens,
            pages=self._pages,
        )

    def fail(self, reason: str) -> None:
        """End it, for the first reason that there is."""
        self.reason = self.reason or reason
        self._collecting.cancel()
        for source in self._sources:
            source.call_off()

    def heard(self) -> None:
        """Take note of a sign of life that is no count."""
        self._heard += 1

    def _begin(self) -> None:
        """Open immediates."""
        writes = self._plan.writes(self.context.rank, len(self._pages))
        needs = [writes] * self.context.layout.layers + [1] * bool(self.context.tail_bytes)
        try:
            self._block = self.context.immediates.open(needs)
        except aiote.AioteError as error:
            self.reason = str(error)
            return

    async def run(self, progress: Callable[[int], None]) -> str:
        """Return the reason why it failed, "" where all has arrived. `progress` is told how many layers have.

        When it returns nobody can write for it any more. After it failed, a prefiller that does not confirm holds it
        up for `confirm_limit`, for as long as other requests to that engine go on, and for the time of a revocation.
        Cancelled, it leaves that to whoever closes the region: the decoder's end.
        """
        self._begin()
        if self._block is None:
            return self.reason
        arrived = False
        with self._block:
            try:
                arrived = await self._collect(self._block.row, progress)
                if not arrived:
                    async with anyio.create_task_group() as group:
                        for source in self._sources:
                            group.start_soon(source.stop, self.context.confirm_limit)
                return "" if arrived else self.reason
            finally:
                for source in self._sources:
                    source.forget()
                # Which know the attempt: a cycle in each request has the garbage collector come in every few.
                self._sources.clear()

    async def _ask(self) -> None:
        """Call all ranks, of which none waits for another; a task costs as much as a call."""
        if len(self._sources) == 1:
            await self._sources[0].ask()
            return
        async with anyio.create_task_group() as group:
            for source in self._sources:
                group.start_soon(source.ask)

    async def _collect(self, row: aiote.CounterRow, progress: Callable[[int], None]) -> bool:
        """Count layer by layer, then the tail; False where the attempt failed before."""
        arrived, reached = False, 0
        self._since = anyio.current_time()
        self.context.collecting.add(self)
        try:
            with self._collecting:
                await self._ask()
                while reached < len(row):
                    reached = await row.wait(reached + 1)
                    self.layers = min(reached, self.context.layout.layers)
                    progress(self.layers)
                arrived = True
        except aiote.AioteError as error:
            self.fail(str(error))
        finally:
            self.context.collecting.discard(self)
        return arrived

    def look(self, now: float) -> None:
        """Fail where nothing has come for the stall limit."""
        assert self._block is not None
        state = (self.layers, self._heard, self._block.row.progress)
        if state != self._seen:
            self._seen, self._since = state, now
        elif now - self._since >= self.context.stall_limit:
            self.fail(f"nothing has come for {self.context.stall_limit} s, though the connection is alive")
