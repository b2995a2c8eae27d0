"""The paged KV cache: its layout, who holds which page, how a prompt is cut, and how a request reads and writes it.

A pool is one array [layers, pages, 2 (K, V), kv_heads, page_tokens, head_size], so a page of a layer is one contiguous
run of bytes (the order HND) and a transfer names it by its number alone: page i of layer l begins at
`layer_offset(l) + i * page_bytes`. Two pools may differ in their number of pages, and nothing else.

A chunk is a whole number of pages, except the last. So each page belongs to exactly one chunk, is written exactly once
a layer, and the receiver can say beforehand how many writes make the whole: `expected_counts`.

Nothing here knows of processes, the network or an event loop.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiote.cli.demo.faults import DemoError

__all__ = ["Chunk", "PageAllocator", "PageLayout", "PagesExhausted", "RequestCache", "expected_counts", "plan"]

Floats = NDArray[np.float32]


class PagesExhausted(DemoError):
    """The pool has fewer free pages than were asked for."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..stop of a prompt and the entries first..end of its page table that they fill."""

    start: int
    stop: int
    first_page: int
    end_page: int

    @property
    def pages(self) -> int:
        """Return how many pages it fills."""
        return self.end_page - self.first_page


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The shape of a pool and the place of each page in it, in bytes."""

    layers: int
    pages: int
    kv_heads: int
    page_tokens: int
    head_size: int

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """Return the shape of the pool's array."""
        return (self.layers, self.pages, 2, self.kv_heads, self.page_tokens, self.head_size)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of one page of one layer, K and V together."""
        return 2 * self.kv_heads * self.page_tokens * self.head_size * np.dtype(np.float32).itemsize

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the pool."""
        return self.layers * self.pages * self.page_bytes

    def layer_offset(self, layer: int) -> int:
        """Return where page 0 of a layer begins, in bytes from the start of the pool."""
        return layer * self.pages * self.page_bytes

    def place(self, layer: int, chunk: Chunk, table: Sequence[int]) -> tuple[list[int], int]:
        """Return the page numbers of a chunk and the offset in bytes of a layer's page 0: what `aiote.Pages` takes."""
        return list(table[chunk.first_page : chunk.end_page]), self.layer_offset(layer)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def allocate(self) -> Floats:
        """Return a pool of zeros."""
        return np.zeros(self.shape, dtype=np.float32)


def plan(tokens: int, chunk_tokens: int, page_tokens: int) -> list[Chunk]:
    """Cut a prompt into chunks, each a whole number of pages but for the last.

    Raises DemoError if the chunk is not a whole number of pages or the prompt is empty.
    """
    if page_tokens < 1 or chunk_tokens < page_tokens or chunk_tokens % page_tokens:
        raise DemoError(f"a chunk of {chunk_tokens} tokens is not a whole number of pages of {page_tokens} tokens")
    if tokens < 1:
        raise DemoError("a prompt has at least one token")
    return [
        Chunk(start, stop, start // page_tokens, -(-stop // page_tokens))
        for start in range(0, tokens, chunk_tokens)
        for stop in (min(start + chunk_tokens, tokens),)
    ]


def expected_counts(layers: int, tokens: int, page_tokens: int) -> int:
    """Return the immediates that a whole prefill brings: one a page of each layer, and one for the logits."""
    return layers * -(-tokens // page_tokens) + 1


class PageAllocator:
    """Knows which page numbers are free. With a seed the first pages come in no order, as from a pool long in use."""

    def __init__(self, pages: int, *, seed: int | None = None) -> None:
        self._free = list(range(pages - 1, -1, -1))
        if seed is not None:
            random.Random(seed).shuffle(self._free)
        self._held: set[int] = set()
        self.pages = pages
        self.peak = 0

    @property
    def free(self) -> int:
        """Return how many pages can be taken now."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Return how many pages are out."""
        return len(self._held)

    def take(self, count: int) -> list[int]:
        """Hand out so many pages, all or none; raises PagesExhausted if there are not so many free."""
        if count > len(self._free):
            raise PagesExhausted(f"{count} pages wanted, {len(self._free)} of {self.pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self._held.update(pages)
        self.peak = max(self.peak, len(self._held))
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back; raises DemoError, and takes none, if one of them was not out or comes twice."""
        returned = list(pages)
        if len(set(returned)) != len(returned) or not self._held.issuperset(returned):
            raise DemoError(f"pages {returned} were given back, but not all of them were held once")
        self._held.difference_update(returned)
        self._free.extend(returned)


class RequestCache:
    """One request's view of a pool, through its page table. Position p lives in entry p // page_tokens."""

    def __init__(self, pool: Floats, table: Sequence[int]) -> None:
        self._pool = pool
        self._table = np.asarray(table, dtype=np.intp)
        self._page_tokens: int = pool.shape[4]

    @property
    def capacity(self) -> int:
        """Return how many tokens the table has room for."""
        return len(self._table) * self._page_tokens

    def write(self, layer: int, start: int, keys: Floats, values: Floats) -> None:
        """Store keys and values [tokens, kv_heads, head_size] of the positions from `start` on."""
        positions = np.arange(start, start + len(keys))
        pages = self._table[positions // self._page_tokens]
        slots = positions % self._page_tokens
        self._pool[layer, pages, 0, :, slots] = keys
        self._pool[layer, pages, 1, :, slots] = values

    def read(self, layer: int, stop: int) -> tuple[Floats, Floats]:
        """Gather the keys and values [kv_heads, stop, head_size] of positions 0..stop, as copies."""
        pages = self._pool[layer].take(self._table[: math.ceil(stop / self._page_tokens)], axis=0)
        count, _, heads, tokens, size = pages.shape
        both = pages.transpose(1, 2, 0, 3, 4).reshape(2, heads, count * tokens, size)
        return both[0, :, :stop], both[1, :, :stop]

    def checksum(self, stop: int) -> int:
        """Return a CRC-32 over the keys and values of positions 0..stop of all layers, wherever their pages lie."""
        value = 0
        for layer in range(len(self._pool)):
            for part in self.read(layer, stop):
                value = zlib.crc32(np.ascontiguousarray(part).data, value)
        return value
