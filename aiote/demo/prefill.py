"""The prefill process: computes the prompts that `aiote.kvcache.Prefiller` gives out, and says when a layer is done.

The library writes each layer's pages into the decoder's cache while the next layer is computed, and lets a job's block
end when every write is over; so that is when its pages here are free again. One prompt is computed at a time, in
threads, so that the event loop goes on serving the engine; writes run on beside the computation of the next prompt.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

import aiote
from aiote.demo import weights, wire
from aiote.demo.mail import Mail
from aiote.demo.model import Model
from aiote.demo.pages import Floats, RequestCache, plan
from aiote.demo.settings import Settings
from aiote.kvcache import Job, Prefiller
from aiote.kvcache.pool import PagePool

__all__ = ["PrefillServer"]

# A decoder's first pages come in order. Those here lie anywhere, as in a pool long in use, so that a page's numbers on
# the two sides have nothing to do with each other. Any seed does.
_SCATTER = 20


class PrefillServer:
    """Serves a decoder's requests; `run` is its life."""

    def __init__(self, mail: Mail, router: aiote.Peer, settings: Settings, model: Model) -> None:
        self._mail, self._router, self._settings, self._model = mail, router, settings, model
        self._layout = settings.layout(model.config)
        self._memory = settings.memory(model.config)
        self._pages = PagePool(settings.pool_pages, settings.concurrency, settings.concurrency)
        self._numbers = random.Random(_SCATTER).sample(range(settings.pool_pages), settings.pool_pages)
        self._turn = anyio.Lock()
        self._prefiller = Prefiller(mail.mailroom, self._layout, self._memory)

    async def run(self) -> None:
        """Serve until Stop, report once the last request is over, and stay until cancelled."""
        hello = wire.Hello("prefill", os.getpid(), str(self._mail.engine.address), weights.fingerprint(self._model))
        async with self._prefiller:
            async with anyio.create_task_group() as group:
                await self._mail.send(self._router, hello)
                group.start_soon(self._drain_when_told)
                async for job in self._prefiller.jobs():
                    group.start_soon(self._compute, job)
            await self._report()
            # The engine must outlive the report's way to the router, which then closes this process's standard input.
            await anyio.sleep_forever()

    async def _drain_when_told(self) -> None:
        _, message = await anext(self._mail)
        if not isinstance(message, wire.Stop):
            raise wire.WireError(f"a {type(message).__name__} is not for a prefiller")
        await self._prefiller.drain()

    async def _report(self) -> None:
        written, held = self._prefiller.statistics(), self._pages.pages - self._pages.free
        busy_ns = int(written.busy_s * 1e9)
        report = wire.Report("prefill", held, self._pages.pages, written.transfers, written.bytes, busy_ns)
        await self._mail.send(self._router, report)

    @asynccontextmanager
    async def _borrow(self, tokens: int) -> AsyncIterator[list[int]]:
        holding = await self._pages.take(self._layout.pages_for(tokens))
        try:
            yield [self._numbers[page] for page in holding.pages]
        finally:
            self._pages.give(holding)

    async def _compute(self, job: Job) -> None:
        """Compute a job; where the decoder does not want it any more, its block ends without an error."""
        async with self._borrow(len(job.tokens)) as table, job:
            async with self._turn:
                logits = await self._fill(job, table)
            await job.tail(logits)

    async def _fill(self, job: Job, table: Sequence[int]) -> Floats:
        """Compute a prompt chunk by chunk, have each layer written when it is done, and return the last logits."""
        request, tokens, cache = wire.request_of(job.request_id), job.tokens.tolist(), RequestCache(self._memory, table)
        for part in plan(len(tokens), self._settings.chunk_tokens):
            chunk = job.chunk(part.start, part.stop, table)
            pages = self._layout.span(part.start, part.stop).pages
            span = await anyio.to_thread.run_sync(self._model.begin, tokens[part.start : part.stop], part.start)
            for layer in range(self._layout.layers):
                await anyio.to_thread.run_sync(self._model.layer, layer, span, cache)
                await chunk.done(layer)
                await self._mail.send(self._router, wire.Progress(request, pages))
        return self._model.logits(span)
