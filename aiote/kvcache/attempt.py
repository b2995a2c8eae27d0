"""One try of one request with one group of prefillers, seen from the decoder.

It opens immediates, sends every prefill rank that has something to write its `Fill`, and counts. There are two ends:

* *All counts are there.* They are as many as the plan has writes, so no write is left that could still land.
* *It failed*: a rank refused or was lost, nothing came for too long, or the request is not wanted any more. Then every
  rank that was lent memory is asked to stop. A rank is *over* when it has said that it has, or when its loan is
  revoked. Where it does not say so within `confirm_limit`, its loan is *retired*: it is revoked as soon as that fails
  no other request. The attempt ends when all are over.

Either way nobody can write for it when `run` returns: pages may be anybody's.

A `Cancel` is sent only after the rank's `Accepted` has come: messages overtake each other, and one that comes before
its `Fill` would stop nothing.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import numpy as np

import aiote

from ..aio import current_loop
from ..service.background import Bell, Crew
from .layout import CacheLayout
from .lending import Lender, Loan, key_of
from .plan import plan_transfer
from .post import Post
from .transferwire import Accepted, Cancel, Ended, Fill, Numbers, Queued, Ranks, encode, fingerprint, fits_frame, frames

__all__ = ["Attempt", "Desk", "Immediates"]

FRAMES_AHEAD = 8
LOOKS = 4
"""How often in its time the stall limit is looked at: so much of it a stall may be noticed late."""


class Immediates:
    """Blocks of `size` immediates in a row, from `base` on, used in rotation.

    Whoever fails leaves counts behind, and a NIC's queue may hold one more that nobody has looked at yet. So a block
    comes up again after all the others, and begins with empty counters.
    """

    def __init__(self, engine: aiote.Engine, base: int, size: int, blocks: int) -> None:
        self._engine = engine
        self._base = base
        self._size = size
        self._blocks = blocks
        self._next = 0
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, needs: Sequence[int]) -> Block:
        """Take a block, and wait for so many counts of each. Raises UsageError at the engine's limit of counters,
        ClosedError.
        """
        while self._next in self._used:
            self._next = (self._next + 1) % self._blocks
        number, self._next = self._next, (self._next + 1) % self._blocks
        first = self._base + number * self._size
        row = self._engine.counters(first, needs)
        self._used.add(number)
        return Block(first, row, lambda: self._used.discard(number))


@dataclass(slots=True)
class Block:
    """The immediates of one attempt: of every layer, then of the tail."""

    first: int
    row: aiote.CounterRow
    give_back: Callable[[], None]

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.row.close()
        self.give_back()


@dataclass(slots=True)
class Desk:
    """What the attempts of one decoder share: `sources` that may be heard of, by their serials, and who collects."""

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
    crew: Callable[[], Crew]
    post: Post
    sources: dict[int, Source] = field(default_factory=dict)
    collecting: set[Attempt] = field(default_factory=set)
    _serials: itertools.count[int] = field(default_factory=lambda: itertools.count(secrets.randbits(62)))

    def serial(self) -> int:
        """Return a number that no attempt of this decoder had."""
        return next(self._serials)

    async def watch(self) -> None:
        """Have every attempt look whether it has stalled, time and again; one task for all of them."""
        while True:
            await anyio.sleep(self.stall_limit / LOOKS)
            for attempt in tuple(self.collecting):
                attempt.look(anyio.current_time())

    def hear(self, peer: aiote.Peer, message: Accepted | Ended | Queued) -> bool:
        """Pass on what a prefiller says; False where it is of nothing that still goes on."""
        source = self.sources.get(message.serial)
        if source is None or source.loan is None or key_of(source.loan.peer) != key_of(peer):
            if not isinstance(message, Accepted):
                # All may have arrived before one heard that it was to wait.
                return isinstance(message, Queued)
            if self.lender.answered(peer, message.serial):
                return True
            # It came too late: the leases are revoked. What is not wanted any more need not be computed either.
            self.post.say(peer, Cancel(message.serial))
            return False
        source.hear(message)
        return True


class Source:
    """One prefill rank of an attempt: what it was lent, and whether it may still write."""

    def __init__(self, attempt: Attempt, rank: int, place: aiote.Peer | aiote.Address) -> None:
        self.serial = attempt.desk.serial()
        self.loan: Loan | None = None
        self.over = False
        self._attempt = attempt
        self._rank = rank
        self._address = place.address if isinstance(place, aiote.Peer) else place
        self._accepted = False
        self._abandoned = False
        self._dismissed = False
        self._asking = anyio.CancelScope()
        self._bell = Bell()

    def ask(self) -> None:
        """Lend the rank the memory and send it its `Fill`; what goes wrong fails the attempt.

        At once where its engine is connected and has room, for a task costs as much as all of it; else beside.
        """
        desk = self._attempt.desk
        try:
            peer = desk.engine.find_peer(self._address)
            if peer is None:
                desk.crew().start(self._aside, self._connect)
                return
            fill = self._lend(peer)
            if fits_frame(fill) and peer.has_room:
                (frame,) = frames(fill, self.serial)
                desk.engine.submit_send(peer, frame).join(aiote.Flight(self._sent))
            else:
                desk.crew().start(self._aside, partial(self._send, peer, fill))
        except aiote.AioteError as error:
            self._fail(str(error))

    def _lend(self, peer: aiote.Peer) -> bytes:
        """Lend its engine the memory, and return its `Fill`, encoded."""
        self.loan = self._attempt.desk.lender.lend(peer)
        self.loan.borrowers.add(self)
        return encode(self._attempt.fill(self._rank, self.serial, self.loan))

    def _sent(self, failed: aiote.Transfer | None) -> None:
        """Take note that the `Fill` is sent. Why it is not is known after this round only."""
        if failed is not None:
            current_loop().call_soon(lambda: self._fail(str(failed.exception())))

    async def _aside(self, work: Callable[[], Awaitable[None]]) -> None:
        with self._asking:
            try:
                await work()
            except aiote.AioteError as error:
                self._fail(str(error))

    async def _connect(self) -> None:
        peer = await self._attempt.desk.engine.connect(self._address)
        if not self._abandoned:
            await self._send(peer, self._lend(peer))

    async def _send(self, peer: aiote.Peer, fill: bytes) -> None:
        engine = self._attempt.desk.engine
        sending: deque[aiote.Transfer] = deque()
        for frame in frames(fill, self.serial):
            # Frames may overtake each other: no need to wait for one to be there before the next one leaves.
            while len(sending) >= FRAMES_AHEAD:
                await sending.popleft()
            await engine.room(peer)
            sending.append(engine.submit_send(peer, frame))
        for transfer in sending:
            await transfer

    async def stop(self, limit: float) -> None:
        """Return when it can write nothing more for this attempt. After `limit` its loan is retired."""
        self._abandoned = True
        if self.loan is None:
            self._asking.cancel()
            return
        with anyio.move_on_after(limit):
            await self._until_over()
        if not self.over:
            reason = f"it did not confirm within {limit} s that it had stopped"
            self._attempt.desk.lender.retire(self.loan, self, reason)
        await self._until_over()
        self._asking.cancel()
        self.dismiss()

    async def _until_over(self) -> None:
        while not self.over:
            self.dismiss()
            await self._bell.wait()

    def dismiss(self) -> None:
        """Tell the rank that nothing is wanted of it any more, if it knows of it; once."""
        if self.loan is not None and self._accepted and not self._dismissed:
            self._dismissed = True
            self._attempt.desk.post.say(self.loan.peer, Cancel(self.serial))

    def forget(self, delivered: bool) -> None:
        """Take note that the attempt is over, and whether all has arrived."""
        if self.loan is not None:
            if delivered and not self._accepted:
                self.loan.delivered(self.serial)
            self._attempt.desk.lender.take_back(self.loan, self)

    def hear(self, message: Accepted | Ended | Queued) -> None:
        """Take what the rank says."""
        self._accepted = True  # also what follows that shows it
        if isinstance(message, Ended):
            self.over = self._dismissed = True
            self._fail(message.reason or "it has stopped")
        elif self.over:
            self.dismiss()
        else:
            self._attempt.heard()
        self._bell.ring()

    def loan_lost(self, reason: str) -> None:
        """Take note that its loan is being revoked."""
        self._fail(reason)

    def loan_over(self) -> None:
        """Take note that nobody can write through its loan any more."""
        self.over = True
        self._bell.ring()

    def _fail(self, reason: str) -> None:
        self._attempt.fail(f"prefill rank {self._rank} ({self._address.host}:{self._address.port}): {reason}")


class Attempt:
    """One try; `run` is its whole life. `group` are the prefillers, by rank; `pages` as many as the prompt needs."""

    def __init__(
        self,
        desk: Desk,
        request: bytes,
        round_: int,
        group: Sequence[aiote.Peer | aiote.Address],
        tokens: Numbers,
        pages: Sequence[int],
        place: int,
    ) -> None:
        self.desk = desk
        self.reason = ""
        self.layers = 0
        self._request = request
        self._round = round_
        self._tokens = tokens
        self._pages = np.asarray(pages, dtype=np.uint32)
        self._place = place
        self._plan = plan_transfer(desk.layout, len(group), desk.ranks)
        ranks = dict.fromkeys(route.source for route in self._plan.incoming(desk.rank))
        self._of_prefill = len(group)
        self._tail_from = min(ranks)
        self._sources = [Source(self, rank, group[rank]) for rank in ranks]
        self._block: Block | None = None
        self._collecting = anyio.CancelScope()
        self._heard = 0
        self._seen = (0, 0, (0, 0))
        self._since = 0.0

    def fill(self, rank: int, serial: int, loan: Loan) -> Fill:
        """Return what is asked of one prefill rank."""
        desk, block = self.desk, self._block
        assert block is not None
        tail = desk.tail_bytes if rank == self._tail_from else 0
        return Fill(
            serial=serial,
            round=self._round,
            ranks=Ranks(rank, self._of_prefill, desk.rank, desk.ranks),
            imm=block.first,
            pool_pages=desk.pool_pages,
            tail_offset=self._place * desk.tail_bytes,
            tail_bytes=tail,
            request=self._request,
            print=fingerprint(desk.layout),
            pool=loan.pool.descriptor,
            tails=loan.tails.descriptor if tail and loan.tails is not None else b"",
            tokens=self._tokens,
            pages=self._pages,
        )

    def fail(self, reason: str) -> None:
        """End it, for the first reason that there is."""
        self.reason = self.reason or reason
        self._collecting.cancel()

    def heard(self) -> None:
        """Take note of a sign of life that is no count."""
        self._heard += 1

    def _begin(self) -> None:
        """Open immediates and ask the ranks."""
        writes = self._plan.writes(self.desk.rank, len(self._pages))
        needs = [writes] * self.desk.layout.layers + [1] * bool(self.desk.tail_bytes)
        try:
            self._block = self.desk.immediates.open(needs)
        except aiote.AioteError as error:
            self.reason = str(error)
            return
        for source in self._sources:
            self.desk.sources[source.serial] = source
            source.ask()

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
                            group.start_soon(source.stop, self.desk.confirm_limit)
                return "" if arrived else self.reason
            finally:
                for source in self._sources:
                    del self.desk.sources[source.serial]
                    source.forget(arrived)
                # Which know the attempt: a cycle in each request has the garbage collector come in every few.
                self._sources.clear()

    async def _collect(self, row: aiote.CounterRow, progress: Callable[[int], None]) -> bool:
        """Count layer by layer, then the tail; False where the attempt failed before."""
        arrived, reached = False, 0
        self._since = anyio.current_time()
        self.desk.collecting.add(self)
        try:
            with self._collecting:
                while reached < len(row):
                    reached = await row.wait(reached + 1)
                    self.layers = min(reached, self.desk.layout.layers)
                    progress(self.layers)
                arrived = True
        except aiote.AioteError as error:
            self.fail(str(error))
        finally:
            self.desk.collecting.discard(self)
        return arrived

    def look(self, now: float) -> None:
        """Fail where nothing has come for the stall limit."""
        assert self._block is not None
        state = (self.layers, self._heard, self._block.row.progress)
        if state != self._seen:
            self._seen, self._since = state, now
        elif now - self._since >= self.desk.stall_limit:
            self.fail(f"nothing has come for {self.desk.stall_limit} s, though the connection is alive")
