"""The cache of the example's model, as both sides describe it to `aiote.kvcache`, and who has which pages of it.

Group 0 has the keys and values, in the pages of a prompt. Group 1 has the logits for the first token, one page a
request, as if they were one layer more: what a decode server needs to begin arrives in the same way as the cache.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np

from aiote.demo import Settings
from aiote.demo import tokens as vocabulary
from aiote.kvcache import Cache, PageRow

KEYS_VALUES, LOGITS = 0, 1


class ModelCache:
    """The memories of one server, made here as an inference engine would, and what `aiote.kvcache` is told of them."""

    def __init__(self, name: str, settings: Settings) -> None:
        config = settings.config()
        shape = (config.layers, settings.pool_pages, 2, config.kv_heads, settings.page_tokens, config.head_size)
        self.memory = np.zeros(shape, np.float32)
        self.logits = np.zeros((settings.concurrency, vocabulary.VOCABULARY), np.float32)
        self.layers = config.layers
        self.page_tokens = settings.page_tokens
        self.page_bytes = self.memory[0, 0].nbytes
        self.cache = Cache(name)
        self.cache.add(self.memory, "layer page field head token item", group=KEYS_VALUES, fields=["k", "v"])
        self.cache.add(self.logits, "page item", layer=config.layers, group=LOGITS, fields=["logits"])

    def pages_for(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // self.page_tokens)

    def bytes_of(self, tokens: int) -> int:
        """Return how many bytes are moved for a prompt."""
        return self.pages_for(tokens) * self.page_bytes * self.layers + self.logits[0].nbytes

    def rows(self, pages: Sequence[int], slot: int) -> dict[int, PageRow]:
        """Return a request's page tables: its pages, and the one with its logits."""
        return {KEYS_VALUES: PageRow(list(pages)), LOGITS: PageRow([slot])}


class Slots:
    """So many requests at a time have a slot; the others wait, first come, first served."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._semaphore = anyio.Semaphore(count)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._semaphore.statistics().tasks_waiting

    @asynccontextmanager
    async def take(self) -> AsyncIterator[int]:
        """Lend one for the length of the block."""
        async with self._semaphore:
            number = self._free.pop()
            try:
                yield number
            finally:
                self._free.append(number)


class FreePages:
    """A free list. There are pages for all slots at their longest, so nobody who has a slot waits for pages."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))

    @property
    def held(self) -> int:
        """How many pages requests have."""
        return self.count - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take pages out."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Put pages back."""
        self._free.extend(pages)
