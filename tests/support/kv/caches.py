"""Caches of a made-up model for tests: kept in different ways by two sides, and what must be in each byte."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiote.kvcache.mapping import PageRow
from aiote.kvcache.tensors import Cache, CacheTensor

NONE = PageRow(np.empty(0, np.int64))
PAGE_ORDERS = ("field head token", "field token head", "head token field", "token head field", "head field token")


@dataclass
class Side:
    """How one side keeps its caches: ranks over heads and layers, the order of axes, and the tokens of a page."""

    ranks: int = 1
    stages: int = 1
    tokens: int = 4
    order: str = "field head token"
    apart: bool = False
    pages: int = 12
    start: int = 0
    caches: list[Cache] = field(default_factory=list)


@dataclass
class Model:
    """What is cached: heads of items in layers, replicated heads where ranks are more, a state, scales."""

    layers: int = 2
    heads: int = 4
    item: int = 3
    state: int = 0
    scales: bool = False


def rank_cache(
    model: Model, side: Side, name: str, rank: int, stage: int, make: Callable[..., Any] = np.zeros
) -> Cache:
    """Make the cache of one rank, with memory of its own."""
    cache = Cache(f"{name} {stage}.{rank}")
    count = max(1, model.heads // side.ranks)
    first = rank * model.heads // side.ranks
    size = {"field": 2, "head": count, "token": side.tokens}
    for layer in range(stage, model.layers, side.stages):
        axes = side.order.split()
        if side.apart:
            axes.remove("field")
            for name_ in ("k", "v"):
                array = make((side.pages, *(size[axis] for axis in axes), model.item), np.uint8)
                cache.add(array, f"page {' '.join(axes)} item", layer=layer, first_head=first, fields=[name_])
        else:
            array = make((side.pages, *(size[axis] for axis in axes), model.item), np.uint8)
            cache.add(array, f"page {' '.join(axes)} item", layer=layer, first_head=first, fields=["k", "v"])
        if model.scales:
            array = make((side.pages, side.tokens, count, 2), np.uint8)
            cache.add(array, "page token head item", layer=layer, first_head=first, fields=["scale"])
        if model.state:
            array = make((side.pages, model.state), np.uint8)
            cache.add(array, "page item", layer=layer, group=1, fields=["state"])
    return cache


def built(model: Model, side: Side, name: str) -> Side:
    side.caches = [rank_cache(model, side, name, r, s) for s in range(side.stages) for r in range(side.ranks)]
    return side


def item(cache: Cache, tensor: CacheTensor, page: int, head: int, token: int) -> slice:
    """Return where an item lies, by the definition alone."""
    begin = tensor.offset + page * tensor.page_stride + token * tensor.token_stride
    begin += (head - tensor.first_head) * tensor.head_stride
    return slice(begin, begin + tensor.item_bytes)


def value(tensor: CacheTensor, head: int, token: int, salt: int = 0) -> np.ndarray:
    """Return the bytes that an item of the model has, wherever it lies; `salt` differs between requests."""
    seed = zlib.crc32(repr((*tensor.key, head, token, salt)).encode())
    return np.frombuffer(hashlib.shake_128(seed.to_bytes(4, "little")).digest(tensor.item_bytes), np.uint8)


def rows(side: Side, tokens: int, random: np.random.Generator, start: int = 0) -> dict[int, PageRow]:
    """Draw pages in any order, from page `start` on, for so many tokens; one page of state."""
    count = max(0, -(-tokens // side.tokens) - start)
    return {
        0: PageRow(random.permutation(side.pages)[:count].astype(np.int64), start),
        1: PageRow(random.permutation(side.pages)[:1].astype(np.int64)),
    }


def spread(tensor: CacheTensor, row: PageRow, tokens: int) -> list[tuple[int, int, int, int]]:
    """List (page, head, token in the page, token) of all items that a row of pages has of so many tokens."""
    found = []
    for place, page in enumerate(row.pages):
        for inner in range(tensor.tokens or 1):
            token = (row.start + place) * (tensor.tokens or 1) + inner
            if tensor.tokens == 0 or token < tokens:
                found += [(int(page), tensor.first_head + head, inner, token) for head in range(tensor.head_count)]
    return found


def fill(side: Side, row: dict[int, PageRow], tokens: int, salt: int = 0) -> None:
    """Give every item of a request its value."""
    for cache in side.caches:
        flat = [memory.reshape(-1).view(np.uint8) for memory in cache.memories]
        for tensor in cache.tensors:
            for page, head, inner, token in spread(tensor, row[tensor.group], tokens):
                flat[tensor.memory][item(cache, tensor, page, head, inner)] = value(tensor, head, token, salt)


def expected(cache: Cache, row: dict[int, PageRow], tokens: int, before: int = 0, salt: int = 0) -> list[np.ndarray]:
    """Return what the memories of a cache hold when a request is there: elsewhere they are as `before`."""
    found = [np.full(memory.nbytes, before, np.uint8) for memory in cache.memories]
    for tensor in cache.tensors:
        for page, head, inner, token in spread(tensor, row.get(tensor.group, NONE), tokens):
            found[tensor.memory][item(cache, tensor, page, head, inner)] = value(tensor, head, token, salt)
    return found


def same(cache: Cache, wanted: list[np.ndarray]) -> bool:
    """Tell whether the memories of a cache are these bytes."""
    flat = [memory.reshape(-1).view(np.uint8) for memory in cache.memories]
    return all(np.array_equal(a, b) for a, b in zip(flat, wanted, strict=True))
