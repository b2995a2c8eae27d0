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

import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote

from ..aio import Condition, current_loop, run_shielded
from ..rails import OfferedLayers
from .moving import Rows
from .protocol import TransferRefused

if TYPE_CHECKING:
    from types import TracebackType

    from ..aio import EventLoop
    from .pushing import Push

__all__ = ["Offer", "Offers"]

REMEMBERED = 4096


class Offer(OfferedLayers):
    """A request's cache at this rank, `async with producer.offer(...) as offer`. `Producer.offer` makes it.

    `rows` are the pages of each group; the program may replace them by longer rows as it allocates pages. The program
    must not touch the pages until the block is left. Leaving the block waits for the readers; an error or a
    cancellation in the block stops them. Afterwards `outcome` is "moved", "expired", the reason why the offer was
    stopped, or the first of `failures`, the errors of the readers.
    """

    def __init__(
        self,
        offers: Offers,
        request: str,
        tokens: int,
        rows: Rows,
        readers: int | None,
        layers: list[int],
        *,
        computed: bool,
    ) -> None:
        self.open_layers(layers, tokens, computed)
        self.request, self.rows = request, rows
        self.outcome = ""
        self.stopped = ""
        self.failures: list[str] = []
        self.changed = Condition()
        self._ended_some = Condition()
        self.suspending = False
        self.active: set[object] = set()
        self.pushes: set[Push] = set()
        self.page_tokens = offers.page_tokens
        self._offers = offers
        self._loop: EventLoop | None = None
        self._readers = readers or 0
        self._joined = self._ended = 0
        self._latest = self.expires = math.inf

    # Called by the program.

    def on_computed(self) -> None:
        """Let the readers look at the layers in the loop's next turn, with those that are computed until then."""
        if self._loop is not None:
            self._loop.call_soon(self._announce)
        else:
            self.hear()

    def _announce(self) -> None:
        if not self.told:
            return
        self.hear()
        for push in tuple(self.pushes):
            push.step()
        self.signal()

    def refuse_layer(self, layer: int) -> None:
        """Raise UsageError for a layer that this rank does not have."""
        raise aiote.UsageError(f"layer {layer} is not in this rank's cache, which has layers {sorted(self.layers)}")

    async def suspend(self, limit: float) -> None:
        """Return when no write of this rank reads the request's pages, so that the program may use them for another
        request.

        Layers count as not computed until the program calls `computed` again, after it has replaced `rows`. Pages that
        have moved are not moved again. The offer is stopped, with its readers, if the writes take longer than `limit`
        seconds, or if a reader pulls pages at this moment: it may read on for a moment, and is told that the bytes are
        not the request's. If this is cancelled, pages may still be read.
        """
        pulled = self.complete and len(self.active) > len(self.pushes)
        self.take_back()
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
        layers, done = self.layers, 0
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

    def stop(self, reason: str) -> None:
        """End the offer and tell its readers the reason. Idempotent."""
        self.stopped = self.stopped or reason
        for push in tuple(self.pushes):
            push.stop()
        self.changed.wake_all()
        self._ended_some.wake_all()

    @property
    def awaited(self) -> bool:
        """Whether some readers have not ended yet, or the number of readers is still unknown."""
        return self._ended < self._readers or not self._readers

    async def wait(self) -> None:
        """Wait until all readers have ended or the offer is stopped. Stop it as "expired" when no reader comes, ends or
        renews within `match_timeout`; while this rank writes to a reader, only after `renewal_limit`.
        """
        if self.awaited and not self.stopped:
            self._latest = self._offers.latest()
            self.signal()
            try:
                self._offers.watch(self)
                await self._ended_some.until(lambda: not self.awaited or self.stopped)
            finally:
                self._offers.unwatch(self)

    def signal(self) -> None:
        """Wake the waits of this offer, because something has changed; its wait of `match_timeout` begins anew."""
        if self._latest < math.inf:
            self.expires = self._latest if self.pushes else min(self._offers.latest_match(), self._latest)
        self.changed.wake_all()

    def expire(self) -> None:
        """Stop the offer, because its time has come; while this rank writes to a reader, it has until the last."""
        if self.pushes and self.expires < self._latest:
            self.expires = self._latest
            self._offers.watch(self)
        else:
            self.stop("expired")

    async def __aenter__(self) -> Offer:
        self._loop = current_loop()
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
                self._announce()
                await self.wait()
        finally:
            if self.awaited:
                self.stop("the program has stopped it")
            self._offers.remove(self)
            if self.active:
                await run_shielded(self._quiet)
            self.outcome = self.stopped or next(iter(self.failures), "moved")

    async def _quiet(self) -> None:
        await self._ended_some.until(lambda: not self.active)

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
        self.signal()

    def remove_reader(self, reader: object, failure: str) -> None:
        """Record that a reader has ended, and why if it failed."""
        self.active.discard(reader)
        self._ended += 1
        if failure:
            self.failures.append(failure)
        self.signal()
        self._ended_some.wake_all()


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
        self._seekers: dict[str, list[Push]] = {}
        self._watched: set[Offer | Push] = set()
        self._wakes_at = math.inf
        self._nudged = Condition()
        self._now: Callable[[], float] = anyio.current_time

    def __len__(self) -> int:
        return len(self._open)

    # The time that offers have.

    def latest_match(self) -> float:
        """Return until when a reader must come that is waited for from now on."""
        return self._now() + self.match_timeout

    def latest(self) -> float:
        """Return when an offer ends whose block is left now, whatever its readers do."""
        return self._now() + max(self.match_timeout, self.renewal_limit)

    def watch(self, waiting: Offer | Push) -> None:
        """Call `expire` of an offer or a reader when its time has come (`expires`), which may change meanwhile."""
        self._watched.add(waiting)
        if waiting.expires < self._wakes_at:
            self._nudged.wake_all()

    def unwatch(self, waiting: Offer | Push) -> None:
        """Let an offer or a reader have any time."""
        self._watched.discard(waiting)

    async def keep_time(self) -> None:
        """Let watched offers and readers expire when their time has come, for ever. There is one timer for all of them,
        set again when it has rung: most waits end long before, and a timer each would cost more than the rest of them.
        """
        self._now = current_loop().time
        while True:
            now = self._now()
            for waiting in [waiting for waiting in self._watched if waiting.expires <= now]:
                self._watched.discard(waiting)
                waiting.expire()
            self._wakes_at = min((waiting.expires for waiting in self._watched), default=math.inf)
            with anyio.move_on_after(self._wakes_at - now):
                await self._nudged.wait()

    # Offers and readers.

    def find(self, request: str) -> Offer | None:
        """Return the offer of a name, or None if there is none yet. Raises TransferRefused if it was refused."""
        offer = self._open.get(request)
        if offer is None and request in self._over:
            raise TransferRefused(self._over[request])
        return offer

    def seek(self, request: str, reader: Push) -> None:
        """Hand the offer of a name to a reader when there is one, or refuse it, at the latest after `match_timeout`."""
        self._seekers.setdefault(request, []).append(reader)
        reader.expires = self.latest_match()
        self.watch(reader)

    def unseek(self, request: str, reader: Push) -> None:
        """End what `seek` began. Idempotent."""
        self.unwatch(reader)
        readers = self._seekers.get(request, [])
        if reader in readers:
            readers.remove(reader)
            if not readers:
                del self._seekers[request]

    def enter(self, offer: Offer) -> None:
        """Add an offer. Raises UsageError for a name that another offer has."""
        if offer.request in self._open:
            raise aiote.UsageError(f"request {offer.request!r} is offered already; give each offer a name of its own")
        self._over.pop(offer.request, None)
        self._open[offer.request] = offer
        for reader in self._found(offer.request):
            reader.match(offer)
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
        if request not in self._open:
            for reader in self._found(request):
                reader.refuse(reason)
        self._changed.wake_all()

    def _found(self, request: str) -> list[Push]:
        readers = self._seekers.pop(request, [])
        self._watched.difference_update(readers)
        return readers

    def record_queued(self, requests: Iterable[str]) -> None:
        """Record all requests that wait in the program's queue."""
        self._queued = dict.fromkeys(requests, anyio.current_time())
        for request in self._queued:
            for reader in self._seekers.get(request, ()):
                reader.expires = self.latest_match()
        self._changed.wake_all()

    def renew(self, requests: Iterable[str]) -> None:
        """Restart `match_timeout` for those of the requests that are offered."""
        for request in requests:
            if request in self._open:
                self._open[request].signal()

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
