"""Own the offers of a prefill rank (requests whose cache it computes), and move them to their readers.

| state   | entered by                                  | left when                                             |
|---------|---------------------------------------------|-------------------------------------------------------|
| open    | entering the offer's block                  | as many readers have ended as were announced          |
| stopped | the program, an error in it, or `expired`   | its present readers have ended; no write is in flight |
| over    | either                                      | -                                                     |

A reader is a decode rank that has asked for the request: either this rank writes to it, or it reads. Offer and reader
are matched by the request's name, whichever comes first; each waits for the other for `match_timeout` seconds. A decode
rank whose request still waits for pages renews this wait. Once its block is left, an offer ends within `renewal_limit`
(or `match_timeout`, if longer) whatever its readers do, so no peer can keep pages forever.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote

from ..aio import Condition, run_shielded
from .mapping import CacheMap
from .moving import PagedMoves, Rows, TransferBatch, check_rows
from .protocol import TransferRefused

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Offer", "Offers", "Push"]

REMEMBERED = 4096


class Offer:
    """A request's cache at this rank, `async with producer.offer(...) as offer`. `Producer.offer` makes it.

    `rows` are the pages of each group; the program may replace them by longer rows as it allocates pages. The program
    must not touch the pages until the block is left. Leaving the block waits for the readers; an error or a
    cancellation in the block stops them. Afterwards `outcome` is "moved", "expired", the reason why the offer was
    stopped, or the first of `failures`, the errors of the readers.
    """

    def __init__(
        self, offers: Offers, request: str, tokens: int, rows: Rows, readers: int | None, computed: dict[int, int]
    ) -> None:
        self.request, self.tokens, self.rows = request, tokens, rows
        self.outcome = ""
        self.stopped = ""
        self.failures: list[str] = []
        self.computed_to = computed
        self.streams: dict[int, Any] = {}
        self.changed = Condition()
        self.suspending = False
        self.active: set[object] = set()
        self.pushes: set[Push] = set()
        self.page_tokens = offers.page_tokens
        self._offers = offers
        self._readers = readers or 0
        self._joined = self._ended = 0

    # Called by the program.

    def computed(self, layer: int, tokens: int | None = None, *, stream: Any = None) -> None:
        """Record that a layer is computed up to a token, by default to the last; its writes start soon after.

        Pages that are not full yet wait. If the layer is in GPU memory, it is written after the work of `stream` (as in
        `Engine.write`); for readers that pull (`reads=True`) its kernels must already be over. Raises UsageError for a
        layer that this rank does not have.
        """
        if layer not in self.computed_to:
            raise aiote.UsageError(
                f"layer {layer} is not in this rank's cache, which has layers {sorted(self.computed_to)}"
            )
        self.computed_to[layer] = max(self.computed_to[layer], self.tokens if tokens is None else tokens)
        self.streams[layer] = stream
        for push in self.pushes:
            push.todo.append(layer)
        self.changed.wake_all()

    async def suspend(self, limit: float) -> None:
        """Return when no write of this rank reads the request's pages, so that the program may use them for another
        request.

        Layers count as not computed until the program calls `computed` again, after it has replaced `rows`. Pages that
        have moved are not moved again. The offer is stopped, with its readers, if the writes take longer than `limit`
        seconds, or if a reader pulls pages at this moment: it may read on for a moment, and is told that the bytes are
        not the request's. If this is cancelled, pages may still be read.
        """
        pulled = self.complete and len(self.active) > len(self.pushes)
        for layer in self.computed_to:
            self.computed_to[layer] = 0
        for push in self.pushes:
            push.todo.clear()
        if pulled:
            self.stop("its pages were taken back before they were read")
        self.suspending = True
        try:
            with anyio.move_on_after(limit) as scope:
                await self.changed.until(lambda: not any(push.is_writing for push in self.pushes))
            if scope.cancelled_caught:
                self.stop(f"its pages were taken back, and its writes were not over within {limit} s")
                await self._quiet()
        finally:
            self.suspending = False

    async def follow(self, value: Any, tokens: int | None = None, *, base: int = 0) -> None:
        """Call `computed` for layers as a watched value grows: `base` + n means that the first n layers are complete.

        Return when all layers are computed. The value is as in `Engine.watch`: 1 to 8 bytes that a model increases,
        perhaps from a GPU, by one or more after the last byte of a layer is written. It may grow further (with the next
        chunk) and may wrap around. Raises UsageError.
        """
        changes = self._offers.engine.watch(value)
        layers, done = list(self.computed_to), 0
        try:
            # Read the value after the watch began, so that no increment between the two is missed.
            now = int.from_bytes(_bytes_of(value), sys.byteorder)
            while True:
                for layer in layers[done : (reached := layers_ahead_of(now - base, value, len(layers)))]:
                    self.computed(layer, tokens, stream=-1)
                done = max(done, reached)
                if done == len(layers):
                    return
                _, now = await anext(changes)
        finally:
            await changes.aclose()

    @property
    def complete(self) -> bool:
        """Whether all layers are computed."""
        return min(self.computed_to.values(), default=0) >= self.tokens

    def stop(self, reason: str) -> None:
        """End the offer and tell its readers the reason. Idempotent."""
        self.stopped = self.stopped or reason
        for push in self.pushes:
            push.room.cancel()
        self.changed.wake_all()

    @property
    def awaited(self) -> bool:
        """Whether some readers have not ended yet, or the number of readers is still unknown."""
        return self._ended < self._readers or not self._readers

    async def wait(self) -> None:
        """Wait until all readers have ended or the offer is stopped. Stop it as "expired" when no reader comes, ends or
        renews within `match_timeout`; while this rank writes to a reader, only after `renewal_limit`.
        """
        offers = self._offers
        end = anyio.current_time() + max(offers.match_timeout, offers.renewal_limit)
        while self.awaited and not self.stopped:
            left = end - anyio.current_time()
            # The signal also comes when a push ends.
            with anyio.move_on_after(left if self.pushes else min(offers.match_timeout, left)) as scope:
                await self.changed.wait()
            if scope.cancelled_caught and (not self.pushes or anyio.current_time() >= end):
                self.stop("expired")

    def renew(self) -> None:
        """Restart the wait of `match_timeout`."""
        self.changed.wake_all()

    async def __aenter__(self) -> Offer:
        self._offers.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if not (self.complete or self.stopped):
                    raise aiote.UsageError(
                        f"the program left the offer of {self.request!r} before it had called computed() for all layers"
                    )
                await self.wait()
        finally:
            if self.awaited:
                self.stop("the program has stopped it")
            self._offers.remove(self)
            if self.active:
                await run_shielded(self._quiet)
            self.outcome = self.stopped or next(iter(self.failures), "moved")

    async def _quiet(self) -> None:
        await self.changed.until(lambda: not self.active)

    # Called for readers.

    def join(self, reader: object, ranks: int) -> None:
        """Admit a reader of a decode group of `ranks` ranks. Raises TransferRefused if all announced readers came, the
        session moves the request already, or the offer is stopped.
        """
        if reader in self.active:
            raise TransferRefused(f"this session moves request {self.request!r} already")
        self._readers = self._readers or ranks
        if self._joined >= self._readers or self.stopped:
            raise TransferRefused(
                self.stopped
                or f"request {self.request!r} has all of its {self._readers} readers; raise readers of the "
                "offer for more"
            )
        self._joined += 1
        self.active.add(reader)
        self.changed.wake_all()

    def remove_reader(self, reader: object, failure: str) -> None:
        """Record that a reader has ended, and why if it failed."""
        self.active.discard(reader)
        self._ended += 1
        if failure:
            self.failures.append(failure)
        self.changed.wake_all()


def _bytes_of(value: Any) -> memoryview:
    try:
        return memoryview(value).cast("B")
    except TypeError:
        return np.asarray(value).reshape(-1).view(np.uint8).data


def layers_ahead_of(difference: int, value: Any, most: int) -> int:
    """Return the number of layers that a difference stands for, at most `most`. The difference is taken as a signed
    integer of the value's length; a negative one stands for 0.
    """
    span = 1 << 8 * _bytes_of(value).nbytes
    return 0 if difference % span >= span // 2 else min(difference % span, most)


class Offers:
    """The offers of a prefill rank by name, and the readers that wait for an offer."""

    def __init__(
        self, engine: aiote.Engine, match_timeout: float, renewal_limit: float, page_tokens: dict[int, int]
    ) -> None:
        self.engine = engine
        self.page_tokens = page_tokens
        self.match_timeout, self.renewal_limit = match_timeout, renewal_limit
        self._open: dict[str, Offer] = {}
        self._over: dict[str, str] = {}
        self._queued: dict[str, float] = {}
        self._changed = Condition()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, offer: Offer) -> None:
        """Add an offer. Raises UsageError for a name that another offer has."""
        if offer.request in self._open:
            raise aiote.UsageError(f"request {offer.request!r} is offered already; give each offer a name of its own")
        self._over.pop(offer.request, None)
        self._open[offer.request] = offer
        self._changed.wake_all()

    def remove(self, offer: Offer) -> None:
        """Remove an offer."""
        if self._open.get(offer.request) is offer:
            del self._open[offer.request]
            self.refuse(offer.request, f"request {offer.request!r} is over: {offer.stopped or 'it was moved'}")

    def refuse(self, request: str, reason: str) -> None:
        """Remember for a while why a name is not offered, so that readers need not wait. A new offer overrides this."""
        self._over[request] = reason
        if len(self._over) > REMEMBERED:
            del self._over[next(iter(self._over))]
        self._changed.wake_all()

    def record_queued(self, requests: Iterable[str]) -> None:
        """Record all requests that wait in the program's queue."""
        self._queued = dict.fromkeys(requests, anyio.current_time())
        self._changed.wake_all()

    def renew(self, requests: Iterable[str]) -> None:
        """Restart `match_timeout` for those of the requests that are offered."""
        for request in requests:
            if request in self._open:
                self._open[request].renew()

    async def match(self, request: str) -> Offer:
        """Wait for the offer of a name and return it. Raises TransferRefused on refusal and after `match_timeout`."""
        since = anyio.current_time()
        while request not in self._open:
            if request in self._over:
                raise TransferRefused(self._over[request])
            since = max(since, self._queued.get(request, since))
            with anyio.move_on_after(since + self.match_timeout - anyio.current_time()) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                raise TransferRefused(
                    f"request {request!r} was not offered within {self.match_timeout} s (match_timeout)"
                )
        return self._open[request]

    def is_moving(self, request: str, seen: dict[str, int]) -> bool:
        """Return whether a request waits in a moving queue, or more of it is computed than `seen`; update `seen`."""
        offer = self._open.get(request)
        computed = sum(offer.computed_to.values()) if offer is not None else 0
        before, seen[request] = seen.get(request, 0), computed
        since = self._queued.get(request)
        return computed > before or (since is not None and anyio.current_time() < since + self.match_timeout)

    def stop(self, reason: str) -> None:
        """Stop all offers."""
        for offer in tuple(self._open.values()):
            offer.stop(reason)


class Push:
    """A reader that this rank writes to: the units of its pages that were submitted, and those that are left."""

    def __init__(
        self, offer: Offer, moves: PagedMoves, batch: TransferBatch, rows: Rows, tokens: int, immediates: dict[int, int]
    ) -> None:
        self._offer, self._moves, self._batch = offer, moves, batch
        self._map: CacheMap = moves.map
        self._spans = self._map.spans(rows, tokens)
        in_page = offer.page_tokens
        self._unit_tokens = {group: unit or in_page.get(group, 0) for group, (unit, _, _) in self._map.units.items()}
        # A page of states holds the state after all tokens of the offer, even if its reader asks for fewer.
        states = any(span and not self._unit_tokens[group] for group, span in self._spans.items())
        self._tokens, self._immediates = offer.tokens if states else tokens, immediates
        self._sent = {layer: {group: span.start for group, span in self._spans.items()} for layer in self._map.layers}
        self._layers_left = set(self._map.layers)
        self._checked: tuple[Rows, dict[int, range]] = {}, {}
        self.todo: deque[int] = deque(offer.computed_to)
        self.room = anyio.CancelScope()
        self._submitting = False

    @property
    def is_writing(self) -> bool:
        """Whether a write of this reader is in flight or is being submitted."""
        return self._submitting or self._batch.in_flight

    async def run(self, engine: aiote.Engine) -> None:
        """Write each layer as it is computed; return when all are written. Raises TransferRefused, and the error of a
        failed write. However this ends, no write is in flight afterwards.
        """
        self._offer.pushes.add(self)
        try:
            while True:
                if self._offer.stopped:
                    raise TransferRefused(self._offer.stopped)
                await self._write_computed(engine)
                if not self._batch.is_busy and not self._layers_left:
                    return
                if not self.todo:
                    await self._batch.changed.wait()
        finally:
            try:
                if not self._batch.end_if_idle():
                    await run_shielded(self._batch.drain)
            finally:
                self._offer.pushes.discard(self)

    async def _write_computed(self, engine: aiote.Engine) -> None:
        """Start to write the layers in `todo`."""
        self._submitting = True
        try:
            while self.todo:
                await self._write(engine, self.todo.popleft())
        finally:
            self._submitting = False
            if self._offer.suspending:
                self._offer.changed.wake_all()

    async def _write(self, engine: aiote.Engine, layer: int) -> None:
        """Start to write the units of a layer that became full since the last call."""
        if layer not in self._layers_left:
            return
        spans, sent = {}, self._sent[layer]
        computed = self._offer.computed_to[layer]
        for group, _ in self._map.pieces[layer]:
            if group in spans:
                continue
            whole, unit = self._spans[group], self._unit_tokens[group]
            full = computed // unit if unit else whole.start
            stop = whole.stop if computed >= self._tokens else min(max(full, sent[group]), whole.stop)
            spans[group], sent[group] = range(sent[group], stop), stop
        replaced = self._offer.rows != self._checked[0]
        if replaced or spans != self._checked[1]:
            # Copy the rows: the program may replace them at any time, even while this waits for room.
            rows = self._offer.rows.copy()
            check_rows(self._map.source, rows)
            self._map.check_source(rows, spans)
            if replaced:
                self._moves.replace_sources(rows)
            self._checked = rows, spans
        if computed >= self._tokens:
            self._layers_left.discard(layer)
        stream = self._offer.streams.get(layer)
        order = {} if stream is None else {"stream": stream}
        for source, target in self._moves.layer(layer, spans):
            if not self._batch.has_room:
                # `Offer.stop` cancels this wait, so that a peer that takes no writes cannot delay the offer's end.
                with anyio.CancelScope() as self.room:
                    await self._batch.room()
                if self._offer.stopped:
                    raise TransferRefused(self._offer.stopped)
            self._batch.submit(engine.submit_write_pages, source, target, self._immediates[layer], **order)
