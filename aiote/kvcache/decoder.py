"""The decode side: a cache whose pages others write to, and the requests that they are lent for.

What it answers for is one rule: *a page is given to a new request only when nobody can write to it for the old one*.
A request's pages come back when its `async with` has been left and

| what was going on             | they come back                                                       |
|-------------------------------|----------------------------------------------------------------------|
| everything had arrived        | at once: it was counted, so no write is left                         |
| a prefiller that answers      | when it has confirmed that its writes are over                       |
| one that does not             | after `confirm_limit`, the end of the other requests to its engine,  |
|                               | and the time of a revocation (`drain_timeout`)                       |
| one that is dead or cut off   | when its connection is lost: `heartbeat_timeout` after its last word   |

Each request has a task of its own in the decoder, which does all that. So it does not matter how often the program's
task is cancelled, nor where.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

import aiote

from ..core.paging import integer
from ..service.background import TaskScope, beside, to_the_end
from ..service.endpoint import Endpoint
from .attempt import DecoderContext
from .cache_layout import CacheLayout
from .fill import LAST_IMMEDIATE, REQUEST_BYTES, Numbers
from .immediates import Immediates
from .lending import Lender
from .pool import Holding, PagePool
from .slot import Group, Slot
from .transfer_plan import plan_transfer

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Decoder"]

IMMEDIATE_BASE = 1 << 26
IMMEDIATES = 1 << 24
MOST_SLOTS = 1 << 14


class Decoder:
    """One decode rank's cache on one engine; `async with Decoder(engine, layout, memory) as decoder:`.

    `memory` is what `Engine.register` takes: [layers, pages, *layout.page_shape(ranks)] elements, in whole; it is the
    decoder's until the `async with` ends. `rank` of `ranks` is its place in the decode group. `tail_bytes` is the
    length of what follows the last layer, such as hidden state or logits (0: nothing). At most `slots` requests have
    pages at a time, `line` more wait for some. Immediates are taken from `imm_base` on, 2**24 of them at most.

    A try fails when nothing has come for `stall_limit` seconds (noticed within a quarter of that), though no earlier
    request to its prefiller, of whichever decoder, has moved on either. A prefiller that does not confirm within
    `confirm_limit` that it has stopped loses its leases, once no other request relies on them.
    An engine may have several decoders, whose immediates differ. Raises UsageError for memory of another size, and for
    an engine that cannot call (docs/services.md).
    """

    def __init__(
        self,
        engine: aiote.Engine,
        layout: CacheLayout,
        memory: Any,
        *,
        rank: int = 0,
        ranks: int = 1,
        tail_bytes: int = 0,
        slots: int = 64,
        line: int = 1024,
        stall_limit: float = 30.0,
        confirm_limit: float = 2.0,
        imm_base: int = IMMEDIATE_BASE,
    ) -> None:
        self.engine = engine
        self.layout = layout
        layout.heads(rank, ranks)
        self._memory = memory
        self._rank, self._ranks = rank, ranks
        self._slots_limit = integer("slots", slots, 1)
        self._line = integer("line", line, 0)
        self._tail_bytes = integer("tail_bytes", tail_bytes, 0)
        self._limits = (_seconds("stall_limit", stall_limit), _seconds("confirm_limit", confirm_limit))
        self._imm_base, self._blocks = self._checked_immediates(imm_base)
        self._slots: dict[Slot, None] = {}
        self._open = False
        self._entered = False
        self._running: AbstractAsyncContextManager[TaskScope] | None = None

    def _checked_immediates(self, base: int) -> tuple[int, int]:
        if self._slots_limit > MOST_SLOTS:
            raise aiote.UsageError(f"slots is {self._slots_limit}, expected at most {MOST_SLOTS}")
        size = self.layout.layers + 1
        blocks = min(IMMEDIATES, LAST_IMMEDIATE + 1 - integer("imm_base", base, 0)) // size
        if blocks <= self._slots_limit:
            raise aiote.UsageError(
                f"imm_base={base} leaves {blocks} blocks of {size} immediates, more than slots={self._slots_limit} "
                "are needed"
            )
        return base, blocks

    # What it is.

    @property
    def pages(self) -> int:
        """How many pages a layer has."""
        return self._pool.pages

    @property
    def free_pages(self) -> int:
        """How many pages are nobody's."""
        return self._pool.free

    @property
    def requests(self) -> int:
        """How many requests have pages, those included that are ending."""
        return self._pool.held

    @property
    def waiting(self) -> int:
        """How many requests wait for pages."""
        return self._pool.waiting

    @property
    def grants(self) -> int:
        """How many prefill engines are lent the cache; a grant that is ending is left out."""
        return len(self._context.lender)

    @property
    def revoked(self) -> int:
        """How many grants were ended, for whatever reason."""
        return self._context.lender.revoked

    # Requests.

    @asynccontextmanager
    async def request(
        self,
        tokens: Sequence[int] | Numbers,
        prefillers: Group,
        *,
        alternatives: Sequence[Group] = (),
        request_id: bytes | None = None,
    ) -> AsyncIterator[Slot]:
        """Have a prompt's cache filled: `async with decoder.request(tokens, prefillers) as slot:`.

        `prefillers` are a group's addresses or peers, by rank; where it fails, each of `alternatives` is tried in turn,
        in the same pages, once nobody can write to them. In a decode group of several ranks every one makes the same
        request, with one `request_id` (up to 64 bytes, used by no other request meanwhile) and groups in one order;
        they move on to the next group together where they can, else each by itself (docs/kvcache.md). Whoever drives
        them ends it on all of them where it failed on one.

        It waits, first come, first served, until there is a slot and pages for the prompt. The pages are the
        program's until the block is left, which waits until nobody can write to them: see the table of this module.
        Raises UsageError, QueueFull when `line` requests wait already, ClosedError; what a prefiller fails at is raised
        by the slot's waits.
        """
        prompt = _token_array(tokens)
        groups = [tuple(prefillers), *(tuple(group) for group in alternatives)]
        for group in groups:
            self._check_group(group)
        identity = self._checked_id(request_id)
        self._require_open()
        holding = await self._pool.take(self.layout.pages_for(len(prompt)))
        if not self._open:  # closed in the moment in which its turn came
            self._pool.give(holding)
            self._require_open()
        slot = Slot(self._context, self._pool, holding, self._tails, identity, prompt)
        self._slots[slot] = None
        # Nothing is asked for before the block's first await, so that a program may prepare its pages there.
        self._scope.start(self._live, slot, groups, holding)
        try:
            yield slot
        finally:
            slot.leave()
            if slot.ran:
                self._end(slot, holding)
            else:
                await to_the_end(slot.over.wait)

    async def _live(self, slot: Slot, groups: Sequence[Group], holding: Holding) -> None:
        """Run a request, and take its pages back."""
        try:
            await slot.run(groups)
            await slot.left.wait()
        finally:
            # Where it was cancelled the decoder ends: its pool gives out nothing more.
            self._end(slot, holding)

    def _end(self, slot: Slot, holding: Holding) -> None:
        """Take a request's pages back: by whoever is first, the request's task or the program that leaves the block."""
        if slot in self._slots:
            del self._slots[slot]
            self._pool.give(holding)
            slot.over.set()

    def _check_group(self, group: Group) -> None:
        for member in group:
            if not isinstance(member, (aiote.Peer, aiote.Address)):
                raise aiote.UsageError(f"request: a prefiller is an Address or a Peer, got {type(member).__name__}")
        if len(set(group)) != len(group):
            raise aiote.UsageError("request: a prefiller comes twice in its group: every rank has an engine of its own")
        plan_transfer(self.layout, len(group), self._ranks)

    def _checked_id(self, request_id: bytes | None) -> bytes:
        if request_id is None and self._ranks > 1:
            raise aiote.UsageError("request: a decode group of several ranks needs the same request_id on all of them")
        identity = secrets.token_bytes(16) if request_id is None else request_id
        if not isinstance(identity, bytes) or not 1 <= len(identity) <= REQUEST_BYTES:
            raise aiote.UsageError(f"request: request_id={request_id!r}: expected 1 to {REQUEST_BYTES} bytes")
        return identity

    # Its life.

    def _require_open(self) -> None:
        if not self._open:
            raise aiote.ClosedError("the decoder is closed")

    async def __aenter__(self) -> Decoder:
        if self._entered:
            raise aiote.UsageError("a decoder is entered once")
        self._entered = True
        Endpoint.of(self.engine)
        self._region = await self.engine.register_async(self._memory)
        try:
            self._tails = np.zeros((self._slots_limit, self._tail_bytes), np.uint8)
            self._tail_region = self.engine.register(self._tails) if self._tail_bytes else None
            self._pool = PagePool(pages_in(self._region, self.layout, self._ranks), self._slots_limit, self._line)
            self._context = self._make_context()
        except BaseException:
            await self._let_go()
            raise
        self._running = beside()
        self._scope = await self._running.__aenter__()
        self._scope.start(self._context.watch)
        self._open = True
        return self

    def _make_context(self) -> DecoderContext:
        return DecoderContext(
            engine=self.engine,
            layout=self.layout,
            rank=self._rank,
            ranks=self._ranks,
            pool_pages=self._pool.pages,
            tail_bytes=self._tail_bytes,
            stall_limit=self._limits[0],
            confirm_limit=self._limits[1],
            lender=Lender(self.engine, self._region, self._tail_region, lambda: self._scope),
            immediates=Immediates(self.engine, self._imm_base, self.layout.layers + 1, self._blocks),
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """End every request with ClosedError, and return once nobody can write to the memory any more."""
        assert self._running is not None
        self._open = False
        self._pool.close("the decoder is closed")
        for slot in tuple(self._slots):
            slot.fail(aiote.ClosedError("the decoder was closed"))
        try:
            return await self._running.__aexit__(kind, error, traceback)
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        """End the registrations, and the leases with them."""
        for region in (self._region, getattr(self, "_tail_region", None)):
            if region is not None:
                await to_the_end(region.aclose)


def pages_in(region: aiote.Region, layout: CacheLayout, ranks: int) -> int:
    """Return how many pages a layer has in a rank's cache. Raises UsageError where the memory is no such cache."""
    page = layout.layers * layout.page_bytes(ranks)
    pages, rest = divmod(len(region), page)
    if rest or not pages:
        raise aiote.UsageError(
            f"the memory has {len(region)} bytes, expected a multiple of {page}: {layout.layers} layers of pages of "
            f"{layout.page_bytes(ranks)} bytes"
        )
    if not region.writable:
        raise aiote.UsageError("the memory is read-only, which no cache can be")
    return pages


def _token_array(tokens: Sequence[int] | Numbers) -> Numbers:
    try:
        given = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise aiote.UsageError(f"request: tokens must be a row of integers: {error}") from None
    if given.ndim != 1 or not given.size or given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= 1 << 32:
        raise aiote.UsageError("request: tokens must be a row of one or more integers of 32 bits")
    array = np.array(given, np.uint32)
    array.setflags(write=False)
    return array


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise aiote.UsageError(f"{name}={value!r}: expected a number of seconds above 0")
    return float(value)
