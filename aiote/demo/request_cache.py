"""One request's keys and values in a paged cache, and the split of a prompt into chunks.

The cache is an array [layers, pages, 2 (K, V), kv_heads, page_tokens, head_size], HND. This module must not know
processes, the network or an event loop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "RequestCache", "plan"]

Floats = NDArray[np.float32]


def plan(tokens: int, chunk_tokens: int) -> list[range]:
    """Split a prompt into chunks of `chunk_tokens` tokens; the last one may be shorter."""
    return [range(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


class RequestCache:
    """One request's view of a pool, through its page table. Position p is in entry p // page_tokens of the table."""

    def __init__(self, pool: Floats, table: Sequence[int]) -> None:
        self._pool = pool
        self._table = np.asarray(table, dtype=np.intp)
        self._page_tokens: int = pool.shape[4]

    @property
    def capacity(self) -> int:
        """How many tokens fit into the table's pages."""
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
        """Return a CRC-32 over the keys and values of positions 0..stop of all layers, independent of their pages."""
        value = 0
        for layer in range(len(self._pool)):
            for part in self.read(layer, stop):
                value = zlib.crc32(np.ascontiguousarray(part).data, value)
        return value
