"""The prefill side: own a rank's registered cache, the offers of its program, and the sessions of decode ranks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel

import aiote

from .. import service
from ..aio import current_loop, run_background_tasks, run_shielded
from ..service.endpoint import CallEndpoint
from .mapping import CacheMap
from .moving import Rows, SessionMoves, TransferStatistics, Written, check_rows, token_count
from .offers import Offer, Offers
from .protocol import (
    MOST_NAMED,
    NoSessionError,
    Opened,
    Pinned,
    PushRequest,
    TransferRefused,
    Transfers,
    rows_to,
)
from .pushing import DecodeSession, Push
from .tensors import FEW_TENSORS, Cache, CacheSpec

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Producer"]

T = TypeVar("T")
ATTACHED = 128
"""After it has attached this many memories, 50 us each, `open` lets other tasks run."""
MOST_SESSIONS = 16
"""The most sessions of one peer. A decode rank opens one for each cache, group and way of moving (push or pull);
beyond that, the producer drops the session that was unused for the longest time."""


@dataclass(eq=False)
class Pull:
    """A reader that pulls; it sets `finished` when it has read the pages."""

    session: DecodeSession
    offer: Offer
    finished: bool = False


class Producer:
    """One prefill rank's cache on one engine; `async with Producer(engine, cache) as producer:`.

    Offers and readers wait for each other for `match_timeout` seconds. A reader may renew this wait, but an offer waits
    for at most `renewal_limit` seconds. page_tokens: the number of tokens in an opaque page of a group, if such a page
    is complete once its tokens are computed; it then moves before the rest of the prompt. Transfers only read
    the cache's memories, which stay registered until the block is left. An engine has at most one producer, in addition
    to other services.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        cache: Cache,
        *,
        match_timeout: float = 30.0,
        renewal_limit: float = 600.0,
        page_tokens: Mapping[int, int] | None = None,
    ) -> None:
        self.engine = engine
        self.spec = cache.spec
        self._arrays = cache.memories
        self._regions: list[aiote.Region] = []
        self._offers = Offers(engine, match_timeout, renewal_limit, dict(page_tokens or {}))
        self._sessions: dict[int, DecodeSession] = {}
        self._numbers = itertools.count(1)
        self._pulls: set[Pull] = set()
        self._stack = AsyncExitStack()

    # Called by the program.

    def offer(self, request: str, *, tokens: int, rows: Rows, readers: int | None = 1, computed: bool = False) -> Offer:
        """Offer a request's cache: `async with producer.offer(...) as offer`, and `offer.computed(layer)` in it.

        rows: the request's pages of each group, from its first page on, or from a later one if no reader wants the
        pages before; more pages may follow later. tokens: the number of tokens. readers: the number of ranks in the
        decode group; with None the first reader announces it. computed: whether all layers are computed already.
        Entering raises UsageError for a name that is already offered.
        """
        tokens = token_count(tokens)
        check_rows(self.spec, rows)
        return Offer(self._offers, request, tokens, rows, readers, self.spec.layers, computed=computed)

    def refuse(self, request: str, reason: str) -> None:
        """Refuse a request, with the reason, to decode ranks that ask for it now or later."""
        self._offers.refuse(request, reason)

    def queued(self, requests: Iterable[str]) -> None:
        """Record which requests wait in the program's queue; the program passes all of them whenever the queue moves.

        Neither `match_timeout` nor a decode rank's `stall_timeout` runs while a request waits in the queue, until
        `match_timeout` has passed since the program last named the request.
        """
        self._offers.record_queued(requests)

    @property
    def written(self) -> Written:
        """The writes since the producer was entered; those of a request count once none of them is in flight."""
        return self._traffic.written

    @property
    def offers(self) -> int:
        """The number of requests that are offered and not over."""
        return len(self._offers)

    # Opening and closing.

    async def __aenter__(self) -> Producer:
        self._traffic = TransferStatistics(current_loop().time)
        async with AsyncExitStack() as stack:
            for array in self._arrays:
                self._regions.append(await self.engine.register_async(array, "read"))
                stack.push_async_callback(run_shielded, self._regions[-1].aclose)
            await stack.enter_async_context(run_background_tasks(self._offers.keep_time))
            await stack.enter_async_context(service.serve(self.engine, Transfers(self)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Stop all offers; return when no transfer reads the memories any more."""
        self._offers.stop("the producer was closed")
        try:
            return await self._stack.__aexit__(kind, error, trace)
        finally:
            self._sessions.clear()

    # Called by decode ranks.

    def describe(self) -> CacheSpec:
        """Return the spec of the cache."""
        return self.spec

    async def open(self, peer: aiote.Peer, part: CacheSpec, immediates: list[int], memories: list[bytes]) -> Opened:
        """Open a session: map the cache onto a part of a decode rank's cache. Raises MappingError, TransferRefused."""
        cache_map = await self._map(part)
        if len(immediates) != len(part.layers) or len(memories) not in (0, len(part.memories)):
            raise TransferRefused(
                "the decode rank's call does not fit: expected an immediate for each layer and a "
                "descriptor for each memory"
            )
        targets = await self._attach(peer, part, memories)
        counted = dict(zip(part.layers, immediates, strict=True))
        moves = await self._run(part, partial(SessionMoves, cache_map, peer, self._regions, targets, counted))
        self._forget(peer)
        number = next(self._numbers)
        self._sessions[number] = DecodeSession(
            self.engine, self._traffic, peer, cache_map, self._regions, targets, counted, moves
        )
        return Opened(number, [] if memories else [region.descriptor for region in self._regions])

    async def _map(self, part: CacheSpec) -> CacheMap:
        """Map the cache onto a part. Raises MappingError, and UsageError for an impossible part."""

        def check_and_map() -> CacheMap:
            part.check()
            return CacheMap(self.spec, part)

        return await self._run(part, check_and_map)

    async def _run(self, part: CacheSpec, work: Callable[[], T]) -> T:
        """Do some work on all tensors of a part: in a thread if there are many."""
        if len(part.tensors) <= FEW_TENSORS:
            return work()
        done: T = await CallEndpoint.of(self.engine).in_thread(work)
        return done

    async def _attach(
        self, peer: aiote.Peer, part: CacheSpec, memories: list[bytes]
    ) -> list[aiote.RemoteRegion | None]:
        """Attach the memories that a decode rank lends; the others are None. Raises TransferRefused."""
        targets: list[aiote.RemoteRegion | None] = []
        try:
            for descriptor, nbytes in zip(memories, part.memories, strict=False):
                if len(targets) % ATTACHED == ATTACHED - 1:
                    await anyio.lowlevel.checkpoint()
                # `owner`: the peer must not direct the writes to another engine's memory.
                lent = self.engine.attach(descriptor, owner=peer, access="write", nbytes=nbytes) if descriptor else None
                targets.append(lent)
        except aiote.UsageError as error:
            raise TransferRefused(f"{part.name} lends no memory of its cache to write to: {error}") from None
        return targets

    def _forget(self, peer: aiote.Peer) -> None:
        """Drop the sessions of lost peers, and the longest unused session of a peer that opens too many."""
        own = [number for number, session in self._sessions.items() if session.peer is peer]
        gone = [number for number, session in self._sessions.items() if session.peer.lost]
        for number in gone + own[: max(0, len(own) + 1 - MOST_SESSIONS)]:
            del self._sessions[number]

    def _session(self, peer: aiote.Peer, number: int) -> DecodeSession:
        session = self._sessions.get(number)
        if session is None or session.peer is not peer:
            raise NoSessionError(
                f"session {number} of this peer does not exist, or was dropped because it was unused; connect again"
            )
        # Move it to the end: `_forget` drops the sessions that were unused for the longest time.
        self._sessions[number] = self._sessions.pop(number)
        return session

    def push(self, peer: aiote.Peer, fetch: PushRequest) -> Push:
        """Write a request's pages as they are computed. Raises NoSessionError."""
        return Push(self._offers, self._session(peer, fetch.session), fetch)

    async def pull(self, peer: aiote.Peer, session: int, request: str) -> AsyncGenerator[Pinned]:
        """Keep a request's pages from the time they are computed until the decode rank has read them."""
        own = self._session(peer, session)
        with own.asks(request):
            offer = await self._offers.match(request)
            async with aclosing(self._pull(own, offer)) as items:
                async for item in items:
                    yield item

    async def _pull(self, session: DecodeSession, offer: Offer) -> AsyncGenerator[Pinned]:
        reader = Pull(session, offer)
        offer.join(session, session.map.part.ranks)
        self._pulls.add(reader)
        try:
            await offer.changed.until(lambda: offer.complete or offer.stopped)
            if not offer.stopped:
                yield Pinned(offer.tokens, rows_to(offer.rows))
            await offer.changed.until(lambda: reader.finished or offer.stopped)
            if not reader.finished:
                raise TransferRefused(offer.stopped)
        finally:
            self._pulls.discard(reader)
            offer.remove_reader(session, "" if reader.finished else offer.stopped or "it was cancelled")

    async def moving(self, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]:
        """Yield every `interval` seconds the requests of a session that move on.

        These wait in a queue that moves, or more of them was computed since the last time.
        """
        own, seen = self._session(peer, session), dict[str, int]()
        if own.has_moving_stream:
            raise TransferRefused(f"session {session} has a reader of its progress already")
        own.has_moving_stream = True
        try:
            while self._sessions.get(session) is own:
                await anyio.sleep(interval)
                if found := [request for request in own.asked if self._offers.is_moving(request, seen)]:
                    for start in range(0, len(found), MOST_NAMED):
                        yield found[start : start + MOST_NAMED]
                seen = {request: tokens for request, tokens in seen.items() if request in own.asked}
        finally:
            own.has_moving_stream = False

    def renew(self, requests: list[str]) -> None:
        """Keep the offers of requests that decode ranks still want; `match_timeout` begins anew for them."""
        self._offers.renew(requests)

    def finish(self, peer: aiote.Peer, session: int, request: str) -> bool:
        """Record that a decode rank has read a request, if its pages are still kept; return whether they are."""
        own = self._sessions.get(session)
        for reader in self._pulls:
            if reader.session is own and own.peer is peer and reader.offer.request == request:
                # Even a stopped offer keeps its pages until its readers have left.
                reader.finished = True
                reader.offer.changed.wake_all()
                return True
        return False
