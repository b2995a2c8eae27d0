"""The prefiller: it computes prompts, and offers their caches to the decoder during the computation.

`aiote.kvcache.Producer` writes each layer's pages into the decoder's cache while the next layer is computed. The block
around an offer ends when every write is complete. Then the prefiller frees the pages, or keeps them for prompts with
the same beginning. One prompt is computed at a time, first come, first served, in threads, so that the event loop
continues to serve the engine; writes continue during the computation of the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread

import aiote
from aiote.demo.model import Model
from aiote.demo.prefixes import PrefixPages
from aiote.demo.request_cache import RequestCache, plan
from aiote.demo.settings import Settings
from aiote.kvcache import Offer, PageRow, Producer

__all__ = ["PrefillWorker"]


class PrefillWorker:
    """A model, and a pool of pages to compute prompts in. Call `compute` inside `async with producer`.

    `written` is called with a request and the number of its pages that are newly in flight. `cached_tokens` counts the
    tokens that were not computed again. Both sides of a request, offer and demand, wait `match_timeout` for the other.
    """

    def __init__(
        self,
        engine: aiote.Engine,
        settings: Settings,
        model: Model,
        *,
        match_timeout: float = 30.0,
        written: Callable[[str, int], object] = lambda request, pages: None,
    ) -> None:
        self.settings, self.model = settings, model
        self.pages = PrefixPages(settings.pool_pages, settings.page_tokens, settings.chunk_tokens)
        self._memory, self._logits, cache = settings.cache(model.config, "prefiller")
        self.producer = Producer(engine, cache, match_timeout=match_timeout)
        self.cached_tokens = 0
        self._written = written
        self._turn = anyio.Lock()

    async def compute(self, request: str, tokens: Sequence[int]) -> None:
        """Compute a prompt; return when its cache was moved or is not wanted. Raises ValueError for one too long."""
        # The pages stay lent until the offer's block is left. After that the NIC reads no more from them.
        async with self.pages.borrow(tokens) as (table, cached):
            rows = {0: PageRow(table), 1: PageRow(table[-1:])}
            async with self.producer.offer(request, tokens=len(tokens), rows=rows) as offer:
                async with self._turn:
                    await self._fill(offer, tokens, table, cached)
            if offer.complete:
                self.cached_tokens += cached
                self.pages.keep(tokens, table)

    async def _fill(self, offer: Offer, tokens: Sequence[int], table: Sequence[int], cached: int) -> None:
        """Compute a prompt chunk by chunk, and write each layer when it is computed, the logits last."""
        cache, layers = RequestCache(self._memory, table), self.model.config.layers
        for part in plan(len(tokens), self.settings.chunk_tokens):
            pages = self.settings.pages_for(part.stop) - part.start // self.settings.page_tokens
            if part.stop > cached:
                span = self.model.begin(tokens[part.start : part.stop], part.start)
            for layer in range(layers):
                if offer.failures:
                    offer.stop(offer.failures[0])
                    return
                if part.stop > cached:
                    await anyio.to_thread.run_sync(self.model.layer, layer, span, cache)
                offer.computed(layer, part.stop)
                self._written(offer.request, pages)
        # The last chunk was computed, so there is a span: `cached` is less than the prompt.
        self._logits[table[-1]] = self.model.logits(span)
        offer.computed(layers)
