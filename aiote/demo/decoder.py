"""The decoder: `aiote.kvcache.Consumer` moves each prompt's cache into its pages, and it generates from there.

The pages are the decoder's own, from a pool. This module holds what a serving system adds: the model, and the order of
the requests' steps.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np

import aiote
from aiote.demo import tokens
from aiote.demo.model import Model
from aiote.demo.request_cache import Floats, RequestCache
from aiote.demo.settings import Settings
from aiote.kvcache import Consumer, PagePool, PageRow

__all__ = ["Answer", "DecodeWorker"]


class DecodeWorker:
    """A model, and the pages that receive its prompts' caches. Call `request` inside `async with consumer`."""

    def __init__(self, engine: aiote.Engine, settings: Settings, model: Model) -> None:
        self.settings, self.model = settings, model
        self.memory, self._logits, cache = settings.cache(model.config, "decoder")
        self.consumer = Consumer(engine, cache)
        self.pool = PagePool(settings.pool_pages, settings.pool_pages, line=1 << 20)
        self.step_lock = anyio.Lock()

    @asynccontextmanager
    async def request(
        self, request: str, prompt: Sequence[int], prefiller: aiote.Address, max_tokens: int
    ) -> AsyncIterator[Answer]:
        """Receive the cache of a prompt that this prefiller computes, and provide the tokens that follow it.

        The pages are free again when the block is left for any reason. Raises as `Consumer.receive` and
        `Reception.arrived` do.
        """
        own = self.settings.pages_for(len(prompt))
        async with self.pool.lend(self.settings.pages_for(len(prompt) + max_tokens - 1)) as holding:
            rows = {0: PageRow(holding.pages[:own]), 1: PageRow(holding.pages[own - 1 : own])}
            async with self.consumer.receive([prefiller], request, tokens=len(prompt), rows=rows) as reception:
                await reception.arrived()
            logits = self._logits[holding.pages[own - 1]]
            yield Answer(self, len(prompt), holding.pages, logits, max_tokens)


class Answer(AsyncIterator[int]):
    """Iterate over the tokens that follow a prompt, greedily. The steps of several answers take turns.

    The iteration ends after the end mark or `max_tokens` tokens. Made by `DecodeWorker.request`.
    """

    def __init__(
        self, worker: DecodeWorker, prompt: int, pages: Sequence[int], logits: Floats, max_tokens: int
    ) -> None:
        self._worker, self._prompt, self._logits = worker, prompt, logits
        self._cache = RequestCache(worker.memory, pages)
        self._token, self._count, self._most = -1, 0, max_tokens

    async def __anext__(self) -> int:
        if self._token == tokens.END or self._count == self._most:
            raise StopAsyncIteration
        if self._count:
            async with self._worker.step_lock:
                position = self._prompt + self._count - 1
                step = self._worker.model.step
                self._logits = await anyio.to_thread.run_sync(step, self._token, position, self._cache)
        self._token, self._count = int(np.argmax(self._logits)), self._count + 1
        return self._token

    async def checksum(self) -> int:
        """Return the checksum of the prompt's keys and values as they arrived."""
        return await anyio.to_thread.run_sync(self._cache.checksum, self._prompt)
