"""One request at a prefill rank: what is to be computed, where each layer of it goes, and how it ends.

| state     | from                                           | left by                                              |
|-----------|------------------------------------------------|------------------------------------------------------|
| gathering | a decode rank's request                        | those of all decode ranks that this rank writes to   |
| waiting   | they are complete; it is in `Prefiller.jobs`   | `async with job`                                     |
| running   | that                                           | its end, with all writes over                        |
| over      | `stop` in any state, once no write is under way | -                                                   |

`stop` is for all that can go wrong: a decode rank cancels or is lost, a write fails, the body raises or is cancelled.
From then on nothing is submitted, what is under way is cancelled and drains, and the body is cancelled; when the last
write is over, the calls of the decode ranks end. They end whether or not the body has noticed, which may be in a thread
that computes: it cannot write any more.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

import aiote

from ..core.paging import integer
from ..service.background import Bell, TaskScope, to_the_end
from .cache_layout import CacheLayout, check_layer
from .fill import Numbers
from .lanes import Lane
from .orders import Order
from .traffic import PrefillTraffic
from .transfer_plan import PageTable

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Chunk", "Job", "JobEnded", "PrefillContext"]

BURST, BURST_S = 16, 200e-6
"""How many layers that are done at once are submitted in a row, and for how long: each turn of the loop between them
may take 50 us. The clock is the loop's, so that simulated runs do not depend on the machine; uvloop's and a virtual one
stand still for a turn, hence the number.
"""


SOON_S = 0.02
"""Within which cancelled writes are over, as a rule. They are waited for together so long: of a request of 16 layers
the scopes and tracebacks of waiting for each by itself were 108 of 188 objects for the garbage collector.
"""


class JobEnded(aiote.AioteError):
    """A job was stopped: nothing can be written for it any more. The message says why."""


@dataclass(slots=True)
class PrefillContext:
    """What the jobs of one prefiller share. `over` is called with each job once, at its end, `moved` with one that has
    submitted a write, and `failed` with one of which a write has failed, outside of tasks.
    """

    engine: aiote.Engine
    layout: CacheLayout
    region: aiote.Region
    pool_pages: int
    scope: Callable[[], TaskScope]
    over: Callable[[Job], object]
    moved: Callable[[Job], object]
    failed: Callable[[Job], object]
    traffic: PrefillTraffic
    time: Callable[[], float]


class Job:
    """A prompt whose cache is wanted; `async with job:` around computing it. Made by a `Prefiller`.

    Leaving the block waits until all writes are over. Where the job is stopped meanwhile the block is cancelled, and
    left without an error; `cancelled` tells. An error in it goes on as it is, after the decoder was told. A job has a
    greater `number` than those that came before it.
    """

    def __init__(self, context: PrefillContext, first: Order, number: int) -> None:
        self.context = context
        self.number = number
        self.orders = [first]
        self.request_id = first.fill.request
        self.tokens: Numbers = first.fill.tokens
        self.reason = ""
        self.entered = self.over = False
        self._sealed = False
        self._next = 0
        self._unfinished = 0
        self._tail_sent = False
        self._in_a_row = BURST
        self._yielded = 0.0
        self._failed: deque[aiote.Transfer] = deque()
        self._ending = False
        self._scope = anyio.CancelScope()
        self._bell = Bell()
        self._quiet = anyio.Event()
        self._running: AbstractAsyncContextManager[None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether it was stopped; `reason` says why."""
        return bool(self.reason)

    @property
    def wants_tail(self) -> bool:
        """Whether a decode rank takes the tail from this rank."""
        return any(order.tail is not None for order in self.orders)

    @property
    def in_flight(self) -> int:
        """How many writes are not over."""
        return sum(len(order.flight) for order in self.orders)

    # What the program does with it.

    def chunk(self, start: int, stop: int, source: PageTable | Sequence[int] | NDArray[np.integer]) -> Chunk:
        """Say which tokens are computed next: `start` to `stop` (exclusive), from where the last chunk ended.

        `source` are the numbers of the request's pages in this rank's cache, from its first page on or, a `PageTable`,
        from its place; they must stay untouched until the job's block is left. A page moves with the chunk that fills
        it, or with the last one. Raises UsageError.
        """
        self._require_entered()
        span = self.context.layout.span(start, stop)
        if span.start != self._next or span.stop > len(self.tokens):
            raise aiote.UsageError(
                f"chunk: tokens {start} to {stop} (exclusive), expected to begin at {self._next} and to end at most at "
                f"{len(self.tokens)}"
            )
        table = source if isinstance(source, PageTable) else PageTable(source, self.context.pool_pages)
        ready = span.ready(span.stop == len(self.tokens))
        if table.pool != self.context.pool_pages or ready.start < table.first or ready.stop > table.first + len(table):
            raise aiote.UsageError(
                f"chunk: {table!r} does not have the places {ready.start} to {ready.stop} (exclusive), of a cache of "
                f"{self.context.pool_pages} pages"
            )
        chunk = Chunk(self, table[ready.start - table.first : ready.stop - table.first], ready)
        self._next = span.stop
        self._unfinished += 1
        return chunk

    async def tail(self, data: Any) -> None:
        """Write what follows the last layer, in one write to each decode rank that takes it here; return when it is
        there.

        `data` is a Region of this engine, or memory that `Engine.register` takes, of exactly the length that the
        decoder gave as `tail_bytes`: another length stops the job. Where nobody takes it from this rank nothing
        happens. Raises UsageError, JobEnded.
        """
        self._require_entered()
        if self._tail_sent:
            raise aiote.UsageError("tail: it was written already")
        targets = [(order, order.tail) for order in self.orders if order.tail is not None]
        self._tail_sent = True
        if not targets:
            return
        region = data if isinstance(data, aiote.Region) else self.context.engine.register(data)
        try:
            for order, target in targets:
                if len(target) != len(region):
                    # Either side may be the one that is wrong, and the decoder's mistake must not end this program.
                    self.stop(f"tail: {len(region)} bytes, the decoder expects {len(target)}")
                imm = order.fill.imm + self.context.layout.layers
                await self._start(order, partial(self.context.engine.submit_write_imm, region, target, imm))
            while self.in_flight and not self.reason:
                await self._bell.wait()
            await self._require_live()
        except BaseException:
            self._tail_sent = False
            raise
        finally:
            if region is not data:
                await to_the_end(region.aclose)

    def refuse(self, reason: str) -> None:
        """Stop it for a reason, which the decoder is told: it may try elsewhere."""
        self.stop(reason or "the prefiller refused it")

    async def __aenter__(self) -> Job:
        if self.entered:
            raise aiote.UsageError("a job is entered once")
        self.entered = True
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._running is not None
        return await self._running.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        if self.over:
            self._quiet.set()
            self._scope.cancel()
        for order in self.orders:
            order.flight.changed = partial(self._landed, order)
            self.context.traffic.enter(order.flight)
        with self._scope:
            try:
                yield
                self._require_complete()
                self._seal()
                await self._quiet.wait()
            except Exception as error:
                self.stop(f"{type(error).__name__}: {error}", interrupt=False)
                raise
            except BaseException:
                self.stop("the prefiller's task was cancelled", interrupt=False)
                raise
            finally:
                if not self._quiet.is_set():
                    await to_the_end(self._quiet.wait)
                self._let_go()

    # How it ends.

    def stop(self, reason: str, *, interrupt: bool = True) -> None:
        """Let nothing more be written, and end what is under way; the decode ranks are told when that is over.

        `interrupt`: cancel the body, too. Idempotent; the first reason stays.
        """
        if self.reason or self.over:
            return
        self.reason = reason or "stopped"
        for order in self.orders:
            for transfer in order.flight:
                transfer.cancel()
        if interrupt:
            self._scope.cancel()
        self._bell.ring()
        if not self.entered:
            self._conclude()
        else:
            self.begin_end()

    def _seal(self) -> None:
        """Take note that no more writes come; it is over when the last one is."""
        self._sealed = True
        if not (self.in_flight or self._ending or self._failed):
            self._conclude()

    def _landed(self, order: Order, failed: aiote.Transfer | None) -> None:
        """Take note that a write of an order has failed, or that the last one that was under way is over."""
        if not order.flight:
            self.context.traffic.ended()
        if failed is not None:
            self._failed.append(failed)
            self.context.failed(self)
        elif self._sealed and not (self.in_flight or self._ending or self._failed):
            self._conclude()
        self._bell.ring()

    def begin_end(self) -> None:
        """Have it end, in a task of its own, with what has failed or was stopped. In a task."""
        if not (self._ending or self.over):
            self._ending = True
            self.context.scope().start(self._end)

    async def _end(self) -> None:
        """Stop for what has failed, and wait for all that is under way; shielded, for it is to be over in the end."""
        with anyio.CancelScope(shield=True):
            while self._failed or self.in_flight:
                while self._failed:
                    transfer = self._failed.popleft()
                    self.stop(str(transfer.exception()))
                await self._drain()
        self._conclude()

    async def _drain(self) -> None:
        """Wait for the writes that are under way, which were cancelled."""
        with anyio.move_on_after(SOON_S):
            while self.in_flight:
                await self._bell.wait()
        for order in self.orders:
            for transfer in order.flight:
                # Cancelled, the wait drains within the engine's drain_timeout; a plain one takes what it takes.
                with anyio.CancelScope() as draining:
                    draining.cancel()
                    with contextlib.suppress(aiote.AioteError):  # those that fail are told of
                        await transfer

    def _conclude(self) -> None:
        self.over = True
        self._quiet.set()
        self._bell.ring()
        for order in self.orders:
            order.news.ring()
        self.context.over(self)

    async def wait_over(self) -> None:
        """Wait until no write of it is under way, and none follows."""
        while not self.over:
            await self._bell.wait()

    def _let_go(self) -> None:
        for order in self.orders:
            order.flight.changed = None  # which refers to this job
            self.context.traffic.leave(order.flight)

    def _require_entered(self) -> None:
        if not self.entered:
            raise aiote.UsageError("enter the job first: async with job")

    def _require_complete(self) -> None:
        if self.reason:
            return
        if self._next < len(self.tokens) or self._unfinished:
            raise aiote.UsageError(
                f"the job's block was left with {self._next} of {len(self.tokens)} tokens in chunks, and "
                f"{self._unfinished} chunks with layers that are not done"
            )
        if self.wants_tail and not self._tail_sent:
            raise aiote.UsageError("the job's block was left without its tail, which the decoder waits for")

    async def _require_live(self) -> None:
        """Raise what ends the caller where the job was stopped: the cancellation in its own block, else JobEnded."""
        now = self.context.time
        turn = self._in_a_row >= BURST or now() - self._yielded > BURST_S
        if turn or self.reason or self._sealed or self.over:
            await anyio.lowlevel.checkpoint()
            self._in_a_row, self._yielded = 0, now()
        self._in_a_row += 1
        if self.reason or self._sealed or self.over:
            raise JobEnded(self.reason or "the job is over")

    async def _start(self, order: Order, submit: Callable[[], aiote.Transfer]) -> None:
        """Submit one transfer of an order's flight as soon as there is room for it toward its peer."""
        await self._require_live()
        transfer = None
        try:
            try:
                transfer = submit()
            except aiote.QueueFull:
                await self.context.engine.room(order.peer)
                if not self.reason:
                    transfer = submit()
        except aiote.UsageError:
            raise
        except aiote.AioteError as error:
            self.stop(str(error))
        if transfer is not None:
            if not order.flight:
                self.context.traffic.begun()
            transfer.join(order.flight)
            self.context.moved(self)
        if self.reason:
            await self._require_live()

    def lanes(self, source: PageTable, entries: slice) -> list[tuple[Order, Lane]]:
        """Return what goes where of some entries of the request's page table. For chunks."""
        found = []
        for order in self.orders:
            target = order.table[entries]
            found += [(order, Lane(route, source, target, self.context.region, order.pool)) for route in order.routes]
        return found

    async def write(self, layer: int, lanes: Sequence[tuple[Order, Lane]]) -> None:
        """Submit one layer of what `lanes` returned to every decode rank. For chunks."""
        for order, lane in lanes:
            pages = lane.pages(layer)
            if pages is not None:
                await self._start(
                    order, partial(self.context.engine.submit_write_pages, *pages, order.fill.imm + layer)
                )

    def chunk_finished(self) -> None:
        """Take note that all layers of a chunk were submitted."""
        self._unfinished -= 1


class Chunk:
    """Some tokens of a job, whose layers are written as they are done. Made by `Job.chunk`.

    Each call returns when its layers are submitted, which waits only where the engine has no room: their writes go on
    beside the next layer's computation. Raise JobEnded, or the cancellation of the job's block, once it was stopped.
    """

    def __init__(self, job: Job, source: PageTable, entries: slice) -> None:
        self._job = job
        self._lanes = job.lanes(source, entries)
        self._layers = job.context.layout.layers
        self._begun = [False] * self._layers
        self._missing = self._layers

    @property
    def missing(self) -> int:
        """How many layers are not done."""
        return self._missing

    async def done(self, layer: int) -> None:
        """Take note that a layer is computed, and submit its pages. Raises UsageError for one that was done."""
        layer = check_layer(layer, self._layers)
        if self._begun[layer]:
            raise aiote.UsageError(f"layer {layer} of this chunk was done before")
        self._begun[layer] = True
        await self._job.write(layer, self._lanes)
        self._missing -= 1
        if not self._missing:
            self._job.chunk_finished()

    async def done_to(self, layers: int) -> None:
        """Take note that the first so many layers are computed; those done before are left out."""
        if integer("layers", layers, 0) > self._layers:
            raise aiote.UsageError(f"layers is {layers}, expected at most {self._layers}")
        for layer in range(layers):
            if not self._begun[layer]:
                await self.done(layer)

    async def follow(self, word: Any, *, base: int = 0) -> None:
        """Take layers as done as a word in memory grows: `base` + n says that the first n are. Return when all are.

        The word is as of `Engine.watch`: 1 to 8 bytes that the model bumps, perhaps from a GPU, by one or more; it may
        run on beyond, for the next chunk, and may wrap around. Raises UsageError.
        """
        changes = self._job.context.engine.watch(word)
        try:
            # Looked at after the watch began, so no bump is missed between the two.
            await self.done_to(self._reached(_value(word), base, word))
            while self._missing:
                _, value = await anext(changes)
                await self.done_to(self._reached(value, base, word))
        finally:
            await changes.aclose()

    def _reached(self, value: int, base: int, word: Any) -> int:
        """Return how many layers a value stands for: a difference, as a signed number of the word's length."""
        span = 1 << 8 * _bytes_of(word).nbytes
        ahead = (value - base) % span
        return 0 if ahead >= span // 2 else min(ahead, self._layers)


def _bytes_of(word: Any) -> memoryview:
    try:
        return memoryview(word).cast("B")
    except TypeError:
        return np.asarray(word).reshape(-1).view(np.uint8).data


def _value(word: Any) -> int:
    return int.from_bytes(_bytes_of(word), sys.byteorder)
