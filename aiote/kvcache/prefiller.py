"""The prefill side: takes requests, hands them to the program as jobs, and tells decoders what became of them.

A request is refused, with a sentence, where it does not fit (another layout, another rank than this one is, pages that
its leases do not have), where too many wait, and while draining.

With a decode group of several ranks a job begins when all ranks that this one writes to have sent theirs. The ranks do
not know of each other: each goes on to the next round, with other prefillers, when it hears of a failure. So that they
do it together, whatever ends a job before it began, or refuses a part of it, ends the parts of all ranks, also those
that are still to come (`RefusedRequests`). One that was already delivered everything does not come in a later
round, which nobody could have told the others. So where a part is missing after `gather_limit`

| in round  | it happens because                    | and                                       |
|-----------|---------------------------------------|-------------------------------------------|
| 1         | a rank asks others, or not at all     | the job is stopped: all go to round 2     |
| 2, 3, ... | a rank has everything, or is far away | the job begins with the parts that came   |
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import aiote

from .. import service
from ..aio import current_loop
from ..core.paging import integer
from ..service.background import Bell, beside, to_the_end
from .cache_layout import CacheLayout
from .decoder import pages_in
from .fill import FillRefused, FillRequest, Prefill
from .job import Job, PrefillContext
from .orders import Order, OrderBuilder
from .refused_requests import RefusedRequests
from .traffic import PrefillStatistics, PrefillTraffic

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Prefiller"]

QUEUED_S = 0.5
"""How often jobs that wait are told of, at most; far below any `stall_limit`."""
TOLD_S = 0.1
"""So long a prefiller that is closed gives decoders to hear why."""


class Jobs(AsyncIterator[Job]):
    """The requests of a prefiller. Made by `Prefiller.jobs`."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller

    async def __anext__(self) -> Job:
        job = await self._prefiller.next_job()
        if job is None:
            raise StopAsyncIteration
        return job


class Prefiller:
    """One prefill rank's cache on one engine; `async with Prefiller(engine, layout, memory) as prefiller:`.

    `memory` is what `Engine.register` takes: [layers, pages, *layout.page_shape(ranks)] elements, in whole; transfers
    only read from it. `rank` of `ranks` is its place in the prefill group. Up to `queue` requests wait, those of which
    a decode rank's part is missing included; for that they wait `gather_limit` seconds at most, which is to be less
    than the decoders' `stall_limit`. An engine has one prefiller, beside other services. Raises UsageError for memory
    of another size.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        layout: CacheLayout,
        memory: Any,
        *,
        rank: int = 0,
        ranks: int = 1,
        queue: int = 64,
        gather_limit: float = 10.0,
    ) -> None:
        self.engine = engine
        self.layout = layout
        layout.heads(rank, ranks)
        self._memory = memory
        self._rank, self._ranks = rank, ranks
        self._queue_limit = integer("queue", queue, 1)
        self._gather_limit = gather_limit
        self._orders = OrderBuilder(layout, rank, ranks, engine.attach)
        self._jobs: dict[Job, None] = {}
        self._gathering: dict[tuple[bytes, int], Job] = {}
        self._refused = RefusedRequests(gather_limit)
        self._queue: deque[Job] = deque()
        self._bell = Bell()
        self._failed: deque[Job] = deque()
        self._failure = Bell()
        self._numbers = itertools.count()
        self._earliest_moved = math.inf
        self._move = Bell()
        self._draining = ""
        self._entered = False
        self._stack = AsyncExitStack()

    # What the program does with it.

    @property
    def pages(self) -> int:
        """How many pages a layer has."""
        return self._context.pool_pages

    @property
    def live(self) -> int:
        """How many requests are not over: gathering, waiting and running."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """How many requests wait, for `jobs` or for a decode rank's part."""
        return len(self._queue) + len(self._gathering)

    def statistics(self) -> PrefillStatistics:
        """Return what was written since the prefiller was entered."""
        return self._context.traffic.read()

    def jobs(self) -> Jobs:
        """Iterate over requests, oldest first; it ends with the prefiller, or when it is drained.

        Several tasks may do so, and a loop may be left at any time. Cancelling loses nothing, but who was given a job
        has to enter it or to refuse it.
        """
        return Jobs(self)

    async def next_job(self) -> Job | None:
        """Wait for a request and return it, None where no more come."""
        while not self._queue:
            if self._draining and not self._gathering:
                return None
            await self._bell.wait()
        return self._queue.popleft()

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when those that are here are over."""
        self._drain("it takes no more requests")
        await self._all_over()

    async def _all_over(self) -> None:
        while self._jobs:
            await self._bell.wait()

    def _drain(self, reason: str) -> None:
        self._draining = self._draining or reason
        self._bell.ring()

    # Its life.

    async def __aenter__(self) -> Prefiller:
        if self._entered:
            raise aiote.UsageError("a prefiller is entered once")
        self._entered = True
        async with AsyncExitStack() as stack:
            region = await self.engine.register_async(self._memory)
            stack.push_async_callback(to_the_end, region.aclose)
            self._context = PrefillContext(
                engine=self.engine,
                layout=self.layout,
                region=region,
                pool_pages=pages_in(region, self.layout, self._ranks),
                scope=lambda: self._scope,
                over=self._over,
                moved=self._moved_on,
                failed=self._fell,
                traffic=PrefillTraffic(current_loop().time),
                time=current_loop().time,
            )
            self._scope = await stack.enter_async_context(beside(self._end_failed, self._tell_queued))
            self._server = await stack.enter_async_context(service.serve(self.engine, Prefill(self._take)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Stop all jobs, and return when no write is under way any more."""
        self._drain("the prefiller is closed")
        for job in tuple(self._jobs):
            job.stop("the prefiller was closed")
        await to_the_end(self._all_told)
        return await self._stack.__aexit__(kind, error, traceback)

    async def _all_told(self) -> None:
        await self._all_over()
        with anyio.move_on_after(TOLD_S):
            await self._server.drain()

    # What decoders ask for.

    def _take(self, peer: aiote.Peer, fill: FillRequest) -> tuple[Job, Order]:
        """Make a job of a request, or a part of one. Raises FillRefused."""
        try:
            order = self._orders.order(peer, fill)
            job = self._join(order)
        except aiote.AioteError as error:
            self._refuse(fill, str(error))
            raise FillRefused(str(error)) from None
        self._bell.ring()
        return job, order

    def _refuse(self, fill: FillRequest, reason: str) -> None:
        """Refuse with a decode rank's part those of the others, which would wait for it in vain."""
        rank, name = fill.ranks.decode, (fill.request, fill.round)
        job = self._gathering.get(name)
        if fill.ranks.of_decode > 1 and (job is None or rank in self._missing(job)):
            why = f"the part of decode rank {rank} was refused: {reason}"
            self._refused.note(name, why, {rank})
            if job is not None:
                job.stop(why)

    def _join(self, order: Order) -> Job:
        """Return the job that an order is a part of, a new one where it is the first. Raises UsageError, QueueFull."""
        fill = order.fill
        name = fill.request, fill.round
        job = self._gathering.get(name)
        if job is not None:
            self._check_part(job, order)
            job.orders.append(order)
        else:
            job = self._gathering[name] = self._begin(order)
            self._jobs[job] = None
        missing = self._missing(job)
        if not missing:
            self._enqueue(job)
        elif len(job.orders) == 1:
            self._scope.start(self._expire, job)
        return job

    def _begin(self, order: Order) -> Job:
        """Return a new job. Raises what its first part is refused with."""
        if why := self._refused.take((order.fill.request, order.fill.round), order.fill.ranks.decode):
            raise aiote.UsageError(why)
        if self._draining:
            raise aiote.ClosedError(self._draining)
        if self.waiting >= self._queue_limit:
            raise aiote.QueueFull(f"{self._queue_limit} requests wait already")
        return Job(self._context, order, next(self._numbers))

    def _enqueue(self, job: Job) -> None:
        """Have a job given out that waits for nobody any more."""
        del self._gathering[name_of(job)]
        self._queue.append(job)
        self._bell.ring()

    @staticmethod
    def _check_part(job: Job, order: Order) -> None:
        first = job.orders[0].fill
        if any(other.fill.ranks.decode == order.fill.ranks.decode for other in job.orders):
            raise aiote.UsageError(f"decode rank {order.fill.ranks.decode} has asked for this request already")
        if first.ranks.of_decode != order.fill.ranks.of_decode or not np.array_equal(first.tokens, order.fill.tokens):
            raise aiote.UsageError("the decode ranks of this request ask for different things")

    def _missing(self, job: Job) -> set[int]:
        wanted = self._orders.wanted_by(job.orders[0].fill.ranks.of_decode)
        return wanted - {order.fill.ranks.decode for order in job.orders}

    async def _expire(self, job: Job) -> None:
        """End the waiting for a job that is still gathering after the limit."""
        with anyio.move_on_after(self._gather_limit):
            while self._gathering.get(name_of(job)) is job:
                await self._bell.wait()
            return
        if name_of(job)[1] > 1:
            self._enqueue(job)
            return
        missing = ", ".join(map(str, sorted(self._missing(job))))
        job.stop(f"the decode ranks {missing} have not asked for it within {self._gather_limit} s")

    def _fell(self, job: Job) -> None:
        """Have a job end of which a write has failed, which is told in the middle of a round: no task runs then."""
        self._failed.append(job)
        self._failure.ring()

    async def _end_failed(self) -> None:
        while True:
            while self._failed:
                self._failed.popleft().begin_end()
            await self._failure.wait()

    def _moved_on(self, job: Job) -> None:
        """Have those told that wait for a job, and for others before them, if there are any."""
        if len(self._jobs) > 1:
            self._earliest_moved = min(self._earliest_moved, job.number)
            self._move.ring()

    async def _tell_queued(self) -> None:
        """Tell decoders of the jobs that come after one that has moved on.

        Not of those before it: a job that was forgotten is to be noticed, however busy this prefiller is with others.
        """
        while True:
            while self._earliest_moved == math.inf:
                await self._move.wait()
            moved, self._earliest_moved = self._earliest_moved, math.inf
            for job in self._jobs:
                if job.number > moved:
                    for order in job.orders:
                        order.queued = True
                        order.news.ring()
            await anyio.sleep(QUEUED_S)

    def _over(self, job: Job) -> None:
        """Forget a job that is over."""
        self._moved_on(job)
        self._jobs.pop(job, None)
        name = name_of(job)
        if self._gathering.get(name) is job:
            del self._gathering[name]
            self._refused.note(name, job.reason, {order.fill.ranks.decode for order in job.orders})
        if job in self._queue:
            self._queue.remove(job)
        self._bell.ring()


def name_of(job: Job) -> tuple[bytes, int]:
    """Return what the parts of a job have in common: the request and its round."""
    return job.request_id, job.orders[0].fill.round
