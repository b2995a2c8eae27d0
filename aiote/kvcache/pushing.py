"""Write a request's pages to one reader as its layers are computed.

A push is a call without a task: it goes on in callbacks. It has a task while it has to wait for something else than
layers and the ends of its writes:

| it waits for                                        | in                |
|-----------------------------------------------------|-------------------|
| its offer, layers that are computed, writes that end| callbacks         |
| the check of a long row                             | `_check_long`     |
| room at the peer; layers that are written one by one| `_write_in_turns` |
| the ends of its writes, after it has failed         | `_drain`          |
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import aiote

from .. import service
from ..aio import Condition, LoopTask, run_shielded
from ..observe.wrapping import is_wrapped
from ..rails import PushedLayers, RequestPages
from ..service.endpoint import CallEndpoint
from .mapping import CacheMap
from .moving import PagedMoves, Rows, SessionMoves, TransferBatch, TransferStatistics, check_rows, check_target
from .protocol import PushRequest, TransferRefused, rows_of

if TYPE_CHECKING:
    from .offers import Offer, Offers

__all__ = ["DecodeSession", "Push"]

FEW_PAGES = 1 << 14
"""Requests with more pages are checked in a thread; sorting this many takes 2.5 ms."""


@dataclass(eq=False)
class DecodeSession:
    """The map onto a decode rank's part, the own memories (`sources`), and the decode rank's if this rank writes
    (`targets`).

    `asked` counts the open calls for each request; `has_moving_stream` is whether a `moving` stream is open.
    """

    engine: aiote.Engine
    traffic: TransferStatistics
    peer: aiote.Peer
    map: CacheMap
    sources: Sequence[aiote.Region]
    targets: Sequence[aiote.RemoteRegion | None]
    immediates: dict[int, int]
    moves: SessionMoves
    asked: Counter[str] = field(default_factory=Counter)
    has_moving_stream: bool = False

    @contextmanager
    def asks(self, request: str) -> Iterator[None]:
        """Count a call for a request while the call is open."""
        self.asked[request] += 1
        try:
            yield
        finally:
            self.forget_asked(request)

    def forget_asked(self, request: str) -> None:
        """Record the end of a call for a request."""
        self.asked[request] -= 1
        if not self.asked[request]:
            del self.asked[request]


class Push(service.DirectCall):
    """A reader that this rank writes to: the units of its pages that were submitted, and those that are left."""

    def __init__(self, offers: Offers, session: DecodeSession, fetch: PushRequest) -> None:
        self._offers, self._session, self._fetch = offers, session, fetch
        self.end_may_wait = fetch.counts_suffice
        self._end: Callable[[Exception | None], None] | None = None
        self._offer: Offer | None = None
        self._layers: PushedLayers | None = None
        self._batch: TransferBatch | None = None
        self._pages: RequestPages
        self._moves: PagedMoves | None = None  # for layers that are written one by one
        self._target: Rows = {}
        self._due: deque[tuple[list[range], list[int], Any]] = deque()
        self._checked: tuple[Rows, Sequence[range]] = {}, ()
        self._task: LoopTask | None = None
        self._next: Callable[[], Awaitable[None]] | None = None
        self._error: Exception | None = None
        self._failed = self._cancelled = self._writing = False
        self.expires = math.inf
        # Of the call, if wrappers of the engine's verbs look at it; they do not see layers that are written together.
        self._context: Context | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a write of this reader is in flight or is being submitted."""
        return self._batch is not None and (bool(self._due) or self._batch.in_flight)

    # Its beginning and its end.

    def begin(self, end: Callable[[Exception | None], None]) -> None:
        """Match the request with its offer, and write what is computed."""
        self._end = end
        if is_wrapped(self._session.engine, "submit_write_pages"):
            self._context = copy_context()
        self._session.asked[self._fetch.request] += 1
        self._guard(self._find)

    def _guard(self, step: Callable[[], None]) -> None:
        """Do a step, and end the push with the error of it."""
        try:
            step()
        except Exception as error:
            self._fail(error)

    def _find(self) -> None:
        offer = self._offers.find(self._fetch.request)
        if offer is None:
            self._offers.seek(self._fetch.request, self)
        else:
            self._join(offer)

    def match(self, offer: Offer) -> None:
        """Take the offer that was sought."""
        self._guard(partial(self._join, offer))

    def refuse(self, reason: str) -> None:
        """End the push, because the program does not offer its request."""
        self._fail(TransferRefused(reason))

    def expire(self) -> None:
        """End the push, because its request was not offered in time."""
        self._offers.unseek(self._fetch.request, self)
        limit = self._offers.match_timeout
        self.refuse(f"request {self._fetch.request!r} was not offered within {limit} s (match_timeout)")

    def _join(self, offer: Offer) -> None:
        offer.join(self._session, self._session.map.part.ranks)
        self._offer = offer
        rows = rows_of(self._fetch.rows)
        if sum([len(row.pages) for row in rows.values()]) > FEW_PAGES:
            self._continue_in(partial(self._check_long, rows))
        else:
            check_target(self._session.map.part, rows, self._fetch.tokens)
            self._start(offer, rows)

    async def _check_long(self, rows: Rows) -> None:
        assert self._offer is not None
        part, tokens = self._session.map.part, self._fetch.tokens
        await CallEndpoint.of(self._session.engine).in_thread(check_target, part, rows, tokens)
        self._start(self._offer, rows)

    def _start(self, offer: Offer, rows: Rows) -> None:
        """Find out what the reader wants, and write what of it is computed. Raises UsageError or TransferRefused."""
        session, fetch, cache_map = self._session, self._fetch, self._session.map
        spans, tokens = cache_map.spans(rows, fetch.tokens), fetch.tokens
        cache_map.counts(spans)
        if tokens > offer.tokens:
            raise TransferRefused(
                f"{cache_map.part.name} wants {tokens} tokens of {fetch.request!r}, but "
                f"{cache_map.source.name} offers {offer.tokens}"
            )
        units = [unit or offer.page_tokens.get(group, 0) for group, (unit, _, _) in cache_map.units.items()]
        for span, unit in zip(spans, units, strict=True):
            # A page of states holds the state after all tokens of the offer, even if its reader asks for fewer.
            tokens = offer.tokens if span and not unit else tokens
        self._layers = PushedLayers(offer, cache_map.layers, session.moves.groups, spans, units, tokens)
        self._pages = session.moves.pages(offer.rows, rows)
        self._target = rows
        self._batch = TransferBatch(session.engine, session.peer, Condition(), session.traffic)
        offer.pushes.add(self)
        if offer.stopped:
            raise TransferRefused(offer.stopped)
        self._advance()

    def _fail(self, error: Exception | None) -> None:
        """End the push with an error, when none of its writes is in flight. None: it is cancelled."""
        if not self._failed:
            self._failed, self._error = True, error
            self._due.clear()
        if self._writing:
            return  # `_write_now` is under way; its caller ends the push
        if self._offer is None:
            self._offers.unseek(self._fetch.request, self)
        if self._task is not None:
            self._task.cancel()
        elif self._batch is None or self._batch.end_if_idle():
            self._over()
        else:
            self._continue_in(self._drain)

    async def _drain(self) -> None:
        assert self._batch is not None
        await run_shielded(self._batch.drain)

    def _over(self) -> None:
        """Tell the offer and the reader that the push is over."""
        end, self._end = self._end, None
        if end is None:
            return
        error, session = self._error, self._session
        if isinstance(error, aiote.AioteError):
            error = TransferRefused(str(error)) if self._offer is not None else error
        session.forget_asked(self._fetch.request)
        if self._offer is not None:
            self._offer.pushes.discard(self)
            failure = str(error) if isinstance(error, aiote.AioteError) else "it was cancelled"
            self._offer.remove_reader(session, failure if self._failed else "")
        end(error)

    def cancel(self) -> None:
        """Stop writing for the reader; the push ends when none of its writes is in flight."""
        if not self._cancelled and self._end is not None:
            self._cancelled = True
            self._fail(None)

    def stop(self) -> None:
        """End the push, because its offer was stopped."""
        assert self._offer is not None
        if not self._failed:
            self._fail(TransferRefused(self._offer.stopped))

    # Tasks.

    def _continue_in(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work in the task, which begins if there is none."""
        self._next = work
        if self._task is None:
            spawn = partial(
                CallEndpoint.of(self._session.engine).loop.spawn,
                self._work,
                name="aiote kvcache: push",
                after=self._work_ended,
            )
            self._task = spawn() if self._context is None else self._context.run(spawn)

    async def _work(self) -> None:
        try:
            while self._next is not None:
                work, self._next = self._next, None
                await work()
        except Exception as error:
            if not self._failed:
                self._failed, self._error = True, error
                self._due.clear()

    def _work_ended(self) -> None:
        self._task = None
        if self._failed:
            self._fail(None)
        else:
            self._guard(self._advance)

    # Writing.

    def step(self) -> None:
        """Write what became full since the last call; called in a callback of the loop."""
        if self._task is None and not self._failed:
            self._guard(self._advance)
        elif self._batch is not None:
            self._batch.changed.wake_all()

    def _landed(self, transfer: aiote.Transfer) -> None:
        """Go on when a request is over, in a callback of the engine."""
        if self._task is None and not self._failed:
            self._guard(self._advance)
        if self._offer is not None and self._offer.suspending:
            self._offer.changed.wake_all()

    def _advance(self) -> None:
        """Write what became full, and end when all is written."""
        batch = self._batch
        if batch is None or self._layers is None or self._failed or self._writing:
            return
        batch.begin_turn()
        written = self._write_now()
        if self._failed:
            self._fail(None)
        elif not written:
            self._continue_in(self._write_in_turns)
        elif not batch.is_busy and not self._layers.left and batch.end_if_idle():
            self._over()

    def _write_now(self) -> bool:
        """Start to write what became full, many layers with one request; return False if that has to wait, or if
        layers have to be written one by one.

        A submission may run a round of the engine, and with it callbacks of this push. They must neither write the same
        again, nor end the push before the batch has the transfer.
        """
        self._writing = True
        try:
            return self._write_due()
        finally:
            self._writing = False

    def _write_due(self) -> bool:
        assert self._batch is not None
        assert self._layers is not None
        moves, batch = self._session.moves, self._batch
        while True:
            if not self._due:
                self._due.extend(self._layers.take())
                if not self._due:
                    return True
            spans, layers, stream = self._due[0]
            self._check_rows(spans)
            while layers:
                together = batch.has_room and self._context is None
                made = moves.run(self._pages, spans, layers, self._fetch.imm) if together else None
                if made is None:
                    return False
                run, start = made
                del layers[: run.layers]
                batch.submit(run.pieces, start, run, stream).add_done_callback(self._landed)
                if self._failed:
                    return True
            self._due.popleft()

    def _check_rows(self, spans: list[range]) -> None:
        """Check the offer's rows, unless they and the units are those of the last check. Raises UsageError."""
        assert self._offer is not None
        cache_map = self._session.map
        replaced = self._offer.rows != self._checked[0]
        if replaced or spans != self._checked[1]:
            # Copy the rows: the program may replace them at any time, even while this waits for room.
            rows = self._offer.rows.copy()
            check_rows(cache_map.source, rows)
            cache_map.check_source(rows, spans)
            if replaced:
                self._pages.replace(rows)
                self._moves = None
            self._checked = rows, spans

    async def _write_in_turns(self) -> None:
        """Write what is due, waiting for room."""
        assert self._batch is not None
        assert self._offer is not None
        while not self._write_now():
            if not self._batch.has_room:
                await self._batch.room()
                continue
            spans, layers, stream = self._due[0]
            await self._write_layer(self._session.map.layers[layers[0]], spans, stream)
            del layers[0]
        if self._offer.suspending:
            self._offer.changed.wake_all()

    async def _write_layer(self, layer: int, spans: list[range], stream: Any) -> None:
        """Start to write one layer, with a request for each of its moves, or several for a long one."""
        assert self._batch is not None
        session = self._session
        moves = self._moves = self._moves or PagedMoves(
            session.map, session.sources, session.targets, self._checked[0], self._target
        )
        imm = self._fetch.imm + session.immediates[layer]
        write, order = session.engine.submit_write_pages, {} if stream is None else {"stream": stream}
        for source, target in moves.layer(layer, spans):
            while not self._batch.has_room:
                await self._batch.room()
            transfer = self._batch.submit(len(source), write, source, target, imm, **order)
            transfer.add_done_callback(self._landed)
