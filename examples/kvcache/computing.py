"""A prefill server: computes the prompts that decode servers ask for, while they have the cache moved to them.

A prompt is one call of `Prompts.compute`, by whoever receives it: the call offers the request's pages to
`aiote.kvcache`, which writes each layer when it is computed, and ends when all is moved and nothing is read from the
pages any more. A call that is cancelled stops all of that. One prompt is computed at a time, first come, first served,
in a thread, so that the event loop goes on serving the engine; the writes run on beside the next prompt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

import aiote
from aiote import service
from aiote.demo import Model, PrefixPages, RequestCache, Settings, plan
from aiote.kvcache import Offer, Producer
from caching import ModelCache, Slots

MATCH_S = 86400.0


class PromptRefused(aiote.AioteError):
    """A prompt is not computed, or not moved; the text says why."""


class Prompts(service.Service):
    """What a decode server asks of a prefill server."""

    name = "kvcache.example.Prompts"

    def __init__(self, server: PrefillServer) -> None:
        self._server = server

    @service.method(raises=[PromptRefused])
    async def compute(self, request: str, tokens: NDArray[np.uint32]) -> None:
        """Compute a prompt's cache and offer it under a name; return when it was moved."""
        await self._server.compute(request, tokens.tolist())


class PrefillServer:
    """A model, its pages, and the prompts that are computed in them: `async with server.serving()`.

    A layer of a chunk takes `slower` seconds more than it has to. `done` and `cancelled` count prompts that were moved
    and others, `tokens` and `cached_tokens` those of prompts, `bytes_written` those of the former.
    """

    def __init__(self, engine: aiote.Engine, settings: Settings, model: Model, *, name: str, slower: float) -> None:
        self.settings, self.model = settings, model
        self.cache = ModelCache(name, settings)
        self.pages = PrefixPages(settings.pool_pages, settings.page_tokens, settings.chunk_tokens)
        self.slots = Slots(settings.concurrency)
        self.running = self.done = self.cancelled = self.tokens = self.cached_tokens = self.bytes_written = 0
        self._engine, self._slower = engine, slower
        # The call of whoever receives a prompt ends the wait for it, on both sides: a queue may be long.
        self._producer = Producer(engine, self.cache.cache, match_timeout=MATCH_S)
        self._turn = anyio.Lock()

    @property
    def waiting(self) -> int:
        """How many prompts wait for a slot, or with their pages for their turn."""
        return self.slots.waiting + self._turn.statistics().tasks_waiting

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[service.Server]:
        """Serve for the length of the block; what is given drains the prompts."""
        async with self._producer, service.serve(self._engine, Prompts(self)) as server:
            yield server

    async def compute(self, request: str, tokens: Sequence[int]) -> None:
        """Compute a prompt and have it moved. Raises PromptRefused."""
        most = self.settings.pool_pages * self.settings.page_tokens
        if not 0 < len(tokens) <= most or not all(0 <= token < self.cache.logits.shape[1] for token in tokens):
            raise PromptRefused(f"a prompt of {len(tokens)} tokens, 1 to {most} of the vocabulary are computed here")
        self.running += 1
        outcome = "cancelled"
        try:
            # The pages stay lent until the offer's block is left, which is when nothing is read from them any more.
            async with self.slots.take() as slot, self.pages.borrow(tokens) as (table, cached):
                offer = self._producer.offer(request, tokens=len(tokens), rows=self.cache.rows(table, slot))
                async with offer:
                    async with self._turn:
                        await self._fill(offer, tokens, table, cached, slot)
                self.cached_tokens += cached
                outcome = offer.outcome
                if outcome == "moved":
                    self.pages.keep(tokens, table)
        finally:
            self.running -= 1
            self.done += outcome == "moved"
            self.cancelled += outcome != "moved"
        if outcome != "moved":
            raise PromptRefused(outcome)
        self.bytes_written += self.cache.bytes_of(len(tokens))

    async def _fill(self, offer: Offer, tokens: Sequence[int], table: list[int], cached: int, slot: int) -> None:
        """Compute a prompt chunk by chunk, and say of each layer when it is done; then the last logits."""
        cache = RequestCache(self.cache.memory, table)
        for layer in range(self.cache.layers):
            offer.computed(layer, cached)
        for part in plan(len(tokens), self.settings.chunk_tokens):
            if part.stop > cached and not offer.stopped:
                span = await anyio.to_thread.run_sync(self.model.begin, tokens[part.start : part.stop], part.start)
                for layer in range(self.cache.layers):
                    await anyio.to_thread.run_sync(self.model.layer, layer, span, cache)
                    await anyio.sleep(self._slower)
                    offer.computed(layer, part.stop)
                self.tokens += len(part)
        if not offer.stopped:
            # The last chunk was computed, so there is a span: `cached` is less than the prompt.
            self.cache.logits[slot] = self.model.logits(span)
            offer.computed(self.cache.layers)
