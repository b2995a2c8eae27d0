"""The decode side: own a rank's registered cache, and receive requests into its pages.

A request borrows its pages from the program and returns them when its block is left: all writes to them are over then.

| the request ends because            | possible writers           | their writes are over when                        |
|-------------------------------------|----------------------------|---------------------------------------------------|
| all has arrived                     | -                          | -                                                 |
| it is left earlier, or fails        | prefill ranks that push    | each has ended its stream, or is disconnected     |
| the same, but this rank reads       | this rank's NIC            | its reads are drained                             |

All has arrived when all counts are complete and, if several ranks write, each of them has ended its stream without an
error. The counts alone do not suffice then: all ranks count in one row, so extra counts of one rank could hide missing
ones of another. Ranks of the group that write nothing for the request do not count.

Until the writes are over the pages are in *quarantine*. A rank that does not confirm its stop within `confirm_timeout`,
or leaves more than `quarantine_pages` pages unconfirmed, is disconnected; its other requests fail, too.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import anyio

import aiote

from .. import service
from ..aio import Condition, current_loop, run_background_tasks, run_shielded
from .immediates import Block, Immediates
from .moving import PagedMoves, Rows, TransferBatch, check_rows, check_target, token_count
from .producers import Links, Place, PrefillSession
from .protocol import NoSessionError, PushRequest, TransferRefused, rows_of, rows_to
from .tensors import Cache

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Consumer", "Reception"]


class Reception:
    """A request whose cache moves into pages of this rank. `Consumer.receive` makes it.

    `layers` is the number of layers that have arrived, in the order of their numbers; `failed` says why no more come.
    """

    def __init__(
        self, consumer: Consumer, links: Sequence[PrefillSession], request: str, rows: Rows, tokens: int, reads: bool
    ) -> None:
        self._reads = reads
        self.request, self.rows, self.tokens = request, rows, tokens
        self.layers = 0
        self.failed = ""
        self._consumer = consumer
        self._links = links
        self._open: set[PrefillSession] = set()
        # Ranks that must confirm their end in addition to the counts.
        self._unconfirmed: set[PrefillSession] = set()
        self._streams: dict[PrefillSession, service.Stream] = {}
        self._block: Block | None = None
        self._reading: anyio.CancelScope | None = None
        self._batches: list[TransferBatch] = []
        self._read_over = not reads
        self._changed = Condition()
        self._moved_at, self._seen = consumer.now(), 0

    def record_progress(self) -> None:
        """Record that the request is not stuck: layers came, or a rank says that it waits in a moving queue or is
        computed.
        """
        self._moved_at = self._consumer.now()

    def check_progress(self, stall_timeout: float) -> None:
        """Record new layers; fail the request if it has been stuck for `stall_timeout` seconds."""
        arrived = self._block.row.progress[0] if self._block is not None and not self.failed else self.layers
        arrived += sum(batch.landed for batch in self._batches)
        if arrived != self._seen:
            self._seen = arrived
            self.record_progress()
        if self._consumer.now() - self._moved_at > stall_timeout:
            self.fail(
                f"no layer arrived for {stall_timeout} s (stall_timeout), and no prefill rank reported "
                "that it queues or computes it"
            )

    @property
    def pages(self) -> int:
        """The number of pages of the request."""
        return sum(len(row.pages) for row in self.rows.values())

    @property
    def complete(self) -> bool:
        """Whether all has arrived and, if needed, is confirmed."""
        if self.failed or self._unconfirmed:
            return False
        if self._block is not None and not self._consumer.engine.closed:
            # Only while the engine is open: a row that was closed with it has no pending waits and looks complete.
            return self._block.row.progress[0] == len(self._consumer.layers)
        return self.layers == len(self._consumer.layers)

    @property
    def counts_suffice(self) -> bool:
        """Whether the counts alone tell that a layer has arrived: one rank writes, and this rank does not read."""
        return not (self._reads or self._unconfirmed)

    async def arrived(self, layers: int | None = None) -> None:
        """Wait until the first `layers` layers of the cache have arrived, by default all. Raises TransferRefused.

        For fewer than all layers the counts of the prefill ranks decide. For all layers the ranks' streams must also
        have ended without an error, if several ranks write.
        """
        most = len(self._consumer.layers)
        wanted = most if layers is None else layers
        while self.layers < wanted or (wanted == most and not self.complete):
            if self.failed:
                raise TransferRefused(self.failed)
            if self._block is None or self.layers == most:
                await self._changed.wait()
                continue
            try:
                self.layers = await self._block.row.wait(wanted)
            except aiote.ClosedError:
                self.fail("the engine is closed")

    def fail(self, reason: str) -> None:
        """End the request with a reason, unless it has failed or is complete; the first reason stays. Idempotent."""
        if not (self.failed or self.complete):
            self.failed = reason
            if self._reading is not None:
                self._reading.cancel()
            if self._block is not None:
                self._block.row.close()
            for stream in self._streams.values():
                stream.close()
            self._changed.wake_all()

    # Push: the prefill ranks write.

    async def ask_ranks(self) -> None:
        """Ask all ranks to write; they answer with counts on the request's immediates."""
        counts, writers = dict.fromkeys(self._consumer.layers, 0), set[PrefillSession]()
        for link in self._links:
            theirs = link.map.counts(link.map.spans(self.rows, self.tokens))
            if any(theirs):
                writers.add(link)
            for layer, count in zip(link.map.layers, theirs, strict=True):
                counts[layer] += count
        if len(writers) > 1:
            self._unconfirmed = writers
        self._block = block = self._consumer.immediates.open(list(counts.values()), [link.peer for link in writers])
        for link in self._links:
            rows = rows_to({group: row for group, row in self.rows.items() if group in link.map.units})
            fetch = PushRequest(
                link.session, self.request, self.tokens, block.first, rows, counts_suffice=not self._unconfirmed
            )
            stream = cast("service.Stream", link.client.push(fetch))
            link.readers.add(self)
            # The rank may write from the moment the call is sent until the call has ended there.
            self._open.add(link)
            self._streams[link] = stream
            try:
                await stream.listen(_ignore, partial(self._ended, link))
            except BaseException as error:
                # The call was not sent, so the rank does not write.
                self.record_stop(link, f"{link.map.source.name}: {error}")
                if not isinstance(error, service.CallError):
                    raise
                return

    def _ended(self, link: PrefillSession, error: Exception | None) -> None:
        """Record that the call to a rank has ended, or that the rank is lost."""
        if isinstance(error, service.CallLostError):
            link.end(str(error))
        if isinstance(error, NoSessionError):
            link.forgotten = True
        self.record_stop(link, f"{link.map.source.name}: {error}" if error is not None else "")

    # Pull: this rank reads.

    async def read(self) -> None:
        """Read from all ranks concurrently, each after its answer; all layers arrive together at the end."""
        try:
            with anyio.CancelScope() as self._reading:
                if self.failed:
                    self._reading.cancel()
                async with anyio.create_task_group() as group:
                    for link in self._links:
                        group.start_soon(self._read, link)
            if not self.failed:
                self.layers = len(self._consumer.layers)
        except* Exception as errors:
            # Any error: the answer of a prefill rank may end this request, but not the consumer.
            self.fail(str(errors.exceptions[0]) or type(errors.exceptions[0]).__name__)
        finally:
            self._read_over = True
            self._changed.wake_all()

    async def _read(self, link: PrefillSession) -> None:
        async with link.pulls:
            await self._pull(link)

    async def _pull(self, link: PrefillSession) -> None:
        link.readers.add(self)
        stream = cast("service.Stream", link.client.pull(link.session, self.request))
        try:
            pinned = await anext(stream, None)
            if pinned is None:
                raise TransferRefused(f"{link.map.source.name} did not say where its pages of {self.request!r} are")
            rows = rows_of(pinned.rows)
            check_rows(link.map.source, rows)
            spans = link.map.spans(self.rows, self.tokens)
            if pinned.tokens < self.tokens:
                raise TransferRefused(f"it has {pinned.tokens} tokens of {self.request!r}, expected {self.tokens}")
            link.map.check_source(rows, spans)
            self.record_progress()
            await self._read_pages(link, rows, spans)
            if not await link.client.finish(link.session, self.request):
                raise TransferRefused(
                    f"{link.map.source.name} freed its pages of {self.request!r} before they were read"
                )
        except NoSessionError:
            link.forgotten = True
            raise
        finally:
            stream.close()

    async def _read_pages(self, link: PrefillSession, rows: Rows, spans: list[range]) -> None:
        engine = self._consumer.engine
        moves = PagedMoves(link.map, link.memories, self._consumer.regions, rows, self.rows)
        batch = TransferBatch(engine, link.peer, Condition())
        self._batches.append(batch)
        try:
            for layer in link.map.layers:
                for source, target in moves.layer(layer, spans):
                    if not batch.has_room:
                        await batch.room()
                    batch.submit(len(source), engine.submit_read_pages, source, target)
            await batch.changed.until(lambda: not batch.is_busy)
        finally:
            await run_shielded(batch.drain)

    # Its end.

    def record_stop(self, link: PrefillSession, failure: str = "") -> None:
        """Record that a rank has stopped writing for this request, and why if that is a failure."""
        if failure:
            self.fail(failure)
        self._open.discard(link)
        self._unconfirmed.discard(link)
        self._changed.wake_all()

    async def leave(self) -> None:
        """End the request, wait until all writes for it are over, and free its immediates."""
        self.fail("the program left it before it was complete")
        if self._reads:
            await self._changed.until(lambda: self._read_over)
        elif not self.complete:
            await self._confirmed()
        self._let_go()

    def leave_if_over(self) -> bool:
        """End the request as `leave` does if all writes for it are over; return whether they are."""
        over = self._read_over and self.complete
        if over:
            self._let_go()
        return over

    def _let_go(self) -> None:
        for link in self._links:
            link.readers.discard(self)
            link.quarantine.pop(self, None)
        if self._block is not None:
            self._block.close(complete=not self.failed)
            self._block = None

    async def _confirmed(self) -> None:
        """Wait until each rank that was asked has ended its stream or is disconnected."""
        for link in tuple(self._open):
            link.quarantine[self] = self.pages
            if sum(link.quarantine.values()) > self._consumer.quarantine_pages:
                link.end(f"more than {self._consumer.quarantine_pages} pages wait for its confirmations")
        with anyio.move_on_after(self._consumer.confirm_timeout):
            await self._all_over()
        for link in tuple(self._open):
            link.end(f"it has not confirmed within {self._consumer.confirm_timeout} s that it has stopped")
        await self._all_over()

    async def _all_over(self) -> None:
        await self._changed.until(lambda: not self._open)


def _ignore(_: object) -> None:
    """Ignore an item of a push stream, which should have none before its end."""


class Consumer:
    """One decode rank's cache on one engine; `async with Consumer(engine, cache) as consumer:`.

    `turn` should differ among the ranks of a group that want the same heads, so that they spread over the prefill ranks
    that have these. A prefill rank that does not confirm its stop within `confirm_timeout`, or leaves more than
    `quarantine_pages` pages unconfirmed, is disconnected. A request fails if for `stall_timeout` no layer of it has
    arrived and no rank has said that it waits in a moving queue (`Producer.queued`) or is computed; by default it waits
    as long as its ranks live. The cache's memories stay registered until the block is left. An engine may have several
    consumers.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        cache: Cache,
        *,
        turn: int = 0,
        confirm_timeout: float = 2.0,
        quarantine_pages: int = 1 << 20,
        stall_timeout: float = math.inf,
    ) -> None:
        self.engine = engine
        self.spec = cache.spec
        self.layers = self.spec.layers
        if not self.layers:
            raise aiote.UsageError(f"{self.spec.name}: the cache has no tensors; add them before you receive")
        self.confirm_timeout, self.quarantine_pages = confirm_timeout, quarantine_pages
        self._stall_timeout = stall_timeout
        self._receptions: set[Reception] = set()
        self.regions: list[aiote.Region] = []
        self.immediates = Immediates(engine)
        self._arrays, self._turn = cache.memories, turn
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Consumer:
        self.now = current_loop().time
        async with AsyncExitStack() as stack:
            for array in self._arrays:
                self.regions.append(await self.engine.register_async(array, "write"))
                stack.push_async_callback(run_shielded, self.regions[-1].aclose)
            self._scope = await stack.enter_async_context(run_background_tasks())
            self._links = Links(self.engine, self.spec, self.regions, self._turn, self._scope, self._stall_timeout)
            if self._stall_timeout < math.inf:
                self._scope.start(self._check_receptions)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _check_receptions(self) -> None:
        while True:
            await anyio.sleep(self._stall_timeout / 8)
            for reception in tuple(self._receptions):
                reception.check_progress(self._stall_timeout)

    async def connect(self, producers: Sequence[Place], *, reads: bool = False) -> None:
        """Make the handshake with a group of prefill ranks now; otherwise the first request makes it.

        Raises MappingError, which names both sides, if their caches do not fit; TransferRefused, CallError, PeerError.
        """
        await self._links.group(producers, reads=reads)

    async def renew(self, producer: Place, requests: Sequence[str]) -> None:
        """Make a prefill rank keep requests that wait here for pages, for another `match_timeout` of that rank.

        The rank keeps a request until its `renewal_limit` at most, and ignores requests that it does not offer. Raises
        PeerError, CallError.
        """
        await self._links.renew(producer, requests)

    @asynccontextmanager
    async def receive(
        self, producers: Sequence[Place], request: str, *, tokens: int, rows: Rows, reads: bool = False
    ) -> AsyncIterator[Reception]:
        """Move a request's cache into pages of this rank: `async with consumer.receive(...) as reception`.

        producers: all ranks of the prefill group, always in the same order. tokens: the number of tokens. rows: the
        target pages of each group, in any order; the first page of a row is the request's page `start`, so that pages
        that are here already are left out; a group without a row is not moved. reads: this rank reads once all layers
        are computed; otherwise the prefill ranks write layer by layer. When the block is left, all writes are over and
        the program owns the pages again. Raises as `connect`, and UsageError for a row that ends before the last token.
        """
        tokens = token_count(tokens)
        check_target(self.spec, rows, tokens)
        links = await self._links.group(producers, reads=reads)
        reception = Reception(self, links, request, rows, tokens, reads)
        self._receptions.add(reception)
        try:
            if reads:
                self._scope.start(reception.read)
            else:
                await reception.ask_ranks()
            yield reception
        finally:
            self._receptions.discard(reception)
            if not reception.leave_if_over():
                await run_shielded(reception.leave)
