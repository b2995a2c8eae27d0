"""Producers and consumers for programs that call synchronously, as the workers of inference engines do.

They run on `aiote.bridge`. `submit`, `offer`, `computed` and `cancel` return at once, from any thread; `poll` returns
the requests that have ended since its last call. It names a cancelled request only when the program owns its pages
again.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import anyio

import aiote

from ..bridge import Bridge, Call, Promise, outlast
from .consumer import Consumer, Reception
from .moving import Rows, check_target, token_count
from .offers import Offer
from .producer import Producer
from .producers import Place
from .protocol import TransferRefused
from .tensors import Cache

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BlockingConsumer", "BlockingProducer", "Finished"]

T = TypeVar("T")
MOST_RENEWALS = 1024
"""The most ranks with a renewal in flight; others are told the next time."""


class Finished(NamedTuple):
    """Requests that have ended: the names of those whose caches were moved, and the reasons why others failed.

    `pages` are the pages of the failed requests by group; their contents are undefined.
    """

    moved: list[str]
    failed: dict[str, str]
    pages: dict[int, set[int]]


class Blocking(Generic[T]):
    """A producer or consumer that runs on a bridge, with the requests that threads have open there; a context manager
    that closes it.
    """

    def __init__(self, bridge: Bridge, context: Callable[[aiote.Engine], AbstractAsyncContextManager[T]]) -> None:
        self._bridge = bridge
        self._calls: dict[str, Call[str]] = {}
        self._ended: SimpleQueue[tuple[str, Rows, str]] = SimpleQueue()
        self._held = bridge.hold(lambda: context(bridge.engine))
        self._inner = self._held.value

    def _begin(self, request: str, rows: Rows, work: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Run a coroutine that returns why a request has failed, or "". Raises UsageError for an open request."""
        if request in self._calls:
            raise aiote.UsageError(f"request {request!r} is under way already; give each request a name of its own")
        call = self._calls[request] = self._bridge.submit(work())
        call.add_done_callback(partial(self._end, request, rows))

    def _end(self, request: str, rows: Rows, call: futures.Future[str]) -> None:
        self._calls.pop(request, None)
        if call.cancelled():
            failure = "it was cancelled"
        else:
            error = call.exception()
            failure = call.result() if error is None else str(error) or type(error).__name__
        self._ended.put((request, rows, failure))

    def cancel(self, request: str) -> None:
        """Cancel a request; `poll` names it when it has ended. A request that is not open is ignored."""
        call = self._calls.get(request)
        if call is not None:
            call.cancel()

    def poll(self) -> Finished:
        """Return the requests that have ended since the last call, without waiting."""
        finished = Finished([], {}, {})
        while True:
            try:
                request, rows, failure = self._ended.get_nowait()
            except Empty:
                return finished
            if not failure:
                finished.moved.append(request)
                continue
            finished.failed[request] = failure
            for group, row in rows.items():
                finished.pages.setdefault(group, set()).update(row.pages.tolist())

    def close(self) -> None:
        """Cancel the open requests, wait until they have ended, and close the producer or consumer. Idempotent.

        Raises UsageError on the bridge's own thread.
        """
        self._bridge.require_elsewhere()
        _end(list(self._calls.values()))
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(calls: Sequence[Call[Any]]) -> None:
    """Cancel calls and wait until all have ended; raise an exception that interrupts the wait only after that."""
    for call in calls:
        call.cancel()
    with ExitStack() as all_of_them:
        for call in calls:
            all_of_them.callback(outlast, call)


class BlockingConsumer(Blocking[Consumer]):
    """One decode rank's cache on a bridge's engine; settings: those of `Consumer`. Raises what entering it raises."""

    def __init__(self, bridge: Bridge, cache: Cache, **settings: Any) -> None:
        self._renewals: dict[str, Call[None]] = {}
        self._begun: SimpleQueue[str] = SimpleQueue()
        self._receptions: dict[str, tuple[Reception, Promise[None]]] = {}
        super().__init__(bridge, lambda engine: Consumer(engine, cache, **settings))

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the cache's layers, in their order."""
        return tuple(self._inner.layers)

    def submit(
        self,
        producers: Sequence[Place],
        request: str,
        *,
        tokens: int,
        rows: Rows,
        reads: bool = False,
        name: str | None = None,
        begins: bool = False,
    ) -> None:
        """Move a request's cache into pages as `Consumer.receive` does. The bridge owns the pages until `poll` names
        the request. name: the request's name here, if several producers choose request names independently. begins:
        `take_begun` names the request when its first layer has arrived. Raises UsageError for a request that is open,
        and for pages that cannot hold the tokens.
        """
        tokens = token_count(tokens)
        check_target(self._inner.spec, rows, tokens)
        name = request if name is None else name
        receiving = partial(self._receive, name if begins else "", producers, request, tokens, rows, reads)
        self._begin(name, rows, receiving)

    async def _receive(
        self, begins: str, producers: Sequence[Place], request: str, tokens: int, rows: Rows, reads: bool
    ) -> str:
        async with self._inner.receive(producers, request, tokens=tokens, rows=rows, reads=reads) as reception:
            if begins and reception.counts_suffice:
                await reception.arrived(1)
                self._receptions[begins] = reception, Promise()
                self._begun.put(begins)
            await reception.arrived()
        return ""

    def _end(self, request: str, rows: Rows, call: futures.Future[str]) -> None:
        super()._end(request, rows, call)
        # Only after `poll` can name the request, because `await_layers` promises that.
        _, over = self._receptions.pop(request, (None, None))
        if over is not None:
            over.settle(None)

    def take_begun(self) -> list[str]:
        """Return the requests, submitted with `begins`, whose first layer has arrived since the last call.

        A returned request may have ended. Requests that several ranks write, and requests that are read, are left out.
        """
        return [self._begun.get_nowait() for _ in range(self._begun.qsize())]

    def await_layers(self, requests: Iterable[str], layers: int, limit: float) -> None:
        """Wait until the first `layers` layers of requests that `take_begun` has named have arrived. A request fails if
        they do not come within `limit` seconds. For a request that has failed, this waits until `poll` names it: the
        program owns its pages again. Requests that have ended are ignored. An interruption is raised after the wait.
        """
        named = [self._receptions.get(name) for name in requests]
        pending = [found for found in named if found is not None and found[0].layers < layers]
        if pending:
            outlast(self._bridge.submit(_await_layers([reception for reception, _ in pending], layers, limit)))
        for reception, over in pending:
            if reception.failed:
                outlast(over)

    def renew(self, waiting: Mapping[str, Sequence[str]]) -> None:
        """Make prefill ranks (by address) keep requests that wait for pages, as `Consumer.renew` does.

        Skip a rank that has not answered the last call yet, and ignore a rank that cannot be reached.
        """
        for place, requests in waiting.items():
            if place not in self._renewals and len(self._renewals) < MOST_RENEWALS:
                call = self._renewals[place] = self._bridge.submit(self._inner.renew(place, requests))
                call.add_done_callback(partial(self._renewed, place))

    def _renewed(self, place: str, call: futures.Future[None]) -> None:
        self._renewals.pop(place, None)

    def close(self) -> None:
        """Close as `Blocking.close` does, and cancel the renewals: prefill ranks keep waiting requests no longer."""
        self._bridge.require_elsewhere()
        _end(list(self._renewals.values()))
        super().close()


class BlockingProducer(Blocking[Producer]):
    """One prefill rank's cache on a bridge's engine; settings: those of `Producer`. Raises what entering it raises."""

    def __init__(self, bridge: Bridge, cache: Cache, **settings: Any) -> None:
        super().__init__(bridge, lambda engine: Producer(engine, cache, **settings))
        self._offers: dict[str, Offer] = {}

    def offer(self, request: str, *, tokens: int, rows: Rows, readers: int | None = 1, computed: bool = False) -> None:
        """Offer a request's cache as `Producer.offer` does; the bridge owns its pages until `poll` names it."""
        offer = self._inner.offer(request, tokens=tokens, rows=rows, readers=readers, computed=computed)
        self._begin(request, rows, partial(self._keep, offer))

    def _keep(self, offer: Offer) -> Coroutine[Any, Any, str]:
        self._offers[offer.request] = offer
        return self._offered(offer)

    async def _offered(self, offer: Offer) -> str:
        async with offer:
            await offer.changed.until(lambda: offer.complete or offer.stopped)
        return "" if offer.outcome == "moved" else offer.outcome

    def _end(self, request: str, rows: Rows, call: futures.Future[str]) -> None:
        # Removed here and not by the coroutine, which does not run if it is cancelled before its first step.
        self._offers.pop(request, None)
        super()._end(request, rows, call)

    def cancel(self, request: str) -> None:
        """Cancel a request and refuse it to readers that ask for it; `poll` names the request if it was open."""
        super().cancel(request)
        self._bridge.submit(_refuse(self._inner, request))

    def queued(self, requests: Sequence[str]) -> None:
        """Record which requests wait in the program's queue, as `Producer.queued` does."""
        self._bridge.submit(_queued(self._inner, requests))

    def computed(
        self, request: str, layer: int, tokens: int | None = None, *, rows: Rows | None = None, stream: Any = None
    ) -> None:
        """Record that a layer is computed up to a token, by default to the last. rows: the request's pages, if it has
        more by now; stream: as in `Offer.computed`. A request that has ended is ignored. Raises UsageError for a layer
        that this rank does not have.
        """
        if layer not in self._inner.spec.layers:
            raise aiote.UsageError(
                f"layer {layer} is not in this rank's cache, which has layers {self._inner.spec.layers}"
            )
        offer = self._offers.get(request)
        if offer is not None:
            self._bridge.submit(_computed(offer, layer, tokens, rows, stream))

    def extend(self, request: str, rows: Rows) -> None:
        """Replace rows of a request by longer ones, before `computed_layer`. A request that has ended is ignored."""
        offer = self._offers.get(request)
        if offer is not None:
            self._bridge.submit(_extend(offer, rows))

    def computed_layer(self, layer: int, requests: Mapping[str, int]) -> None:
        """Record that a layer of several requests is computed, each up to its number of tokens, as `computed` does for
        one. Requests that have ended are ignored.
        """
        offers = [(self._offers[name], tokens) for name, tokens in requests.items() if name in self._offers]
        if offers:
            self._bridge.submit(_computed_layer(offers, layer))

    def suspend(self, requests: Sequence[str], limit: float) -> None:
        """Wait until no transfer reads the pages of these requests, as `Offer.suspend` does, for at most about `limit`
        seconds. The program then owns the pages, and the requests stay open. An interruption is raised after the wait.
        """
        offers = [self._offers[name] for name in requests if name in self._offers]
        if offers:
            outlast(self._bridge.submit(_suspend(offers, limit)))


async def _await_layers(receptions: Sequence[Reception], layers: int, limit: float) -> None:
    with anyio.move_on_after(limit) as scope:
        for reception in receptions:
            with suppress(TransferRefused):
                await reception.arrived(layers)
    if scope.cancelled_caught:
        for reception in receptions:
            if reception.layers < layers:
                reception.fail(f"its first {layers} layers did not arrive within {limit} s of the computation")


async def _extend(offer: Offer, rows: Rows) -> None:
    offer.rows.update(rows)


async def _computed_layer(offers: Sequence[tuple[Offer, int]], layer: int) -> None:
    for offer, tokens in offers:
        offer.computed(layer, tokens)


async def _suspend(offers: Sequence[Offer], limit: float) -> None:
    async with anyio.create_task_group() as group:
        for offer in offers:
            group.start_soon(offer.suspend, limit)


async def _refuse(producer: Producer, request: str) -> None:
    producer.refuse(request, f"request {request!r} was cancelled")


async def _queued(producer: Producer, requests: Sequence[str]) -> None:
    producer.queued(requests)


async def _computed(offer: Offer, layer: int, tokens: int | None, rows: Rows | None, stream: Any) -> None:
    offer.rows.update(rows or {})
    offer.computed(layer, tokens, stream=stream)
