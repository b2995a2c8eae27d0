"""A prefill server: computes the prompts that `aiote.kvcache.Prefiller` gives out, and says when a layer is done.

The library writes each layer's pages into the decoder's cache while the next layer is computed, and lets a job's block
end when every write is over; so that is when its pages here are free again, or kept for prompts that begin alike. One
prompt is computed at a time, first come, first served, in threads, so that the event loop goes on serving the engine;
writes run on beside the computation of the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

import aiote
from aiote.demo.model import Model
from aiote.demo.prefixes import PrefixPages
from aiote.demo.request_cache import Floats, RequestCache, plan
from aiote.demo.settings import Settings
from aiote.kvcache import Job, Prefiller

__all__ = ["PrefillServer"]


class PrefillServer:
    """A model, a pool of pages, and the jobs that are computed with them: `serve`, inside `async with prefiller`.

    `written` is called with a job and a number of pages when so many more are on their way. A layer of a chunk takes
    `slower` seconds more than it has to. `done`, `cancelled` (jobs), `tokens` and `cached_tokens` count.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        settings: Settings,
        model: Model,
        *,
        slower: float = 0.0,
        written: Callable[[Job, int], object] = lambda job, pages: None,
    ) -> None:
        self.settings, self.model = settings, model
        self.layout = settings.layout(model.config)
        self.memory = settings.memory(model.config)
        self.pages = PrefixPages(settings.pool_pages, settings.page_tokens, settings.chunk_tokens)
        self.prefiller = Prefiller(engine, self.layout, self.memory)
        self.done = self.cancelled = self.tokens = self.cached_tokens = 0
        self._slower, self._written = slower, written
        self._turn = anyio.Lock()

    async def serve(self) -> None:
        """Compute jobs, as many at a time as there are pages for, until the prefiller is drained."""
        async with anyio.create_task_group() as group:
            async for job in self.prefiller.jobs():
                group.start_soon(self._compute, job)

    async def _compute(self, job: Job) -> None:
        tokens = job.tokens.tolist()
        if self.layout.pages_for(len(tokens)) > self.pages.pages:
            most = self.pages.pages * self.settings.page_tokens
            job.refuse(f"a prompt of {len(tokens)} tokens, the most here are {most}")
            return
        # The pages stay lent until the job's block is left, which is when nothing is read from them any more.
        async with self.pages.borrow(tokens) as (table, cached):
            async with job:
                async with self._turn:
                    logits = await self._fill(job, tokens, table, cached)
                await job.tail(logits)
                self.cached_tokens += cached
            if job.cancelled:
                self.cancelled += 1
                return
            self.done += 1
            self.pages.keep(tokens, table)

    async def _fill(self, job: Job, tokens: Sequence[int], table: Sequence[int], cached: int) -> Floats:
        """Compute a prompt chunk by chunk, have each layer written when it is done, and return the last logits."""
        cache = RequestCache(self.memory, table)
        for part in plan(len(tokens), self.settings.chunk_tokens):
            chunk = job.chunk(part.start, part.stop, table)
            pages = self.layout.span(part.start, part.stop).pages
            if part.stop > cached:
                span = await anyio.to_thread.run_sync(self.model.begin, tokens[part.start : part.stop], part.start)
            for layer in range(self.layout.layers):
                if part.stop > cached:
                    await anyio.to_thread.run_sync(self.model.layer, layer, span, cache)
                    await anyio.sleep(self._slower)
                await chunk.done(layer)
                self._written(job, pages)
            self.tokens += len(part)
        # The last chunk was computed, so there is a span: `cached` is less than the prompt.
        return self.model.logits(span)
