"""Where the bytes of a paged KV cache lie in the memory of each rank of a tensor-parallel group.

A rank's memory is one region, layer by layer, each layer `pages` pages in a row: page i of layer l begins at

    (l * pages + i) * page_bytes(ranks)

One page holds `page_tokens` tokens of one layer, for the heads that the rank has:

| cache | a page                                         | a run of heads within a page is        |
|-------|------------------------------------------------|----------------------------------------|
| HND   | [2 (K, V)][heads][page_tokens][head_size]      | two pieces, one of K and one of V      |
| NHD   | [2 (K, V)][page_tokens][heads][head_size]      | a piece for each token of K and of V   |
| MLA   | [page_tokens][head_size]                       | the page: every rank has the same one  |

Heads are spread over a group of `ranks` in order. With H = `kv_heads`

| sizes          | a rank r has                        | copies of a head         |
|----------------|-------------------------------------|--------------------------|
| H % ranks == 0 | H // ranks heads from r * that on   | 1                        |
| ranks % H == 0 | head r // copies alone              | ranks // H, side by side |

and no other sizes are possible. MLA is the second row with one head: the latent vector.

This module computes. It knows no engine, no region, no peer and no page table; `transfer_plan` builds on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from ..core.paging import integer
from ..errors import UsageError

__all__ = ["CacheLayout", "TokenSpan"]

# Types of models that numpy does not have by itself, in bytes. Four-bit types are not among them: an element has to
# begin at a byte.
NARROW = {
    "bfloat16": 2,
    "float8_e3m4": 1,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The entries of a request's page table that hold the tokens `start` to `stop` (exclusive) of its sequence.

    Entries `first` to `end` (exclusive) hold them. Those before `full` are filled to their end once the tokens are
    there; at most one entry is not, and its first `tail_tokens` tokens are valid (0 where there is none).
    """

    start: int
    stop: int
    first: int
    full: int
    end: int
    tail_tokens: int

    @property
    def pages(self) -> int:
        """How many pages the tokens touch."""
        return self.end - self.first

    def ready(self, last: bool) -> slice:
        """Return which entries to move when the tokens have been computed; `last` says that no more tokens follow.

        A page moves when it is full, or with the last tokens, and then as a whole. So where a sequence is cut in any
        spans, one after another, every page moves exactly once.
        """
        return slice(self.first, self.end if last else self.full)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the KV cache of a model lies in memory, for tensor-parallel groups of every size.

    `layers`, `kv_heads` (of the whole model), `page_tokens`; `head_size` in elements of `dtype`, which is what numpy
    takes as one or the name of a type such as "bfloat16" or "float8_e4m3fn", and is kept as a name. `order` is "HND"
    or "NHD". With `mla` a token has one latent vector of `head_size` elements, the rope part included, in place of
    heads with keys and values; `kv_heads` is 1 and `order` makes no difference. All fields are plain: the layout can
    travel as JSON. Raises UsageError for what is none of that.
    """

    layers: int
    kv_heads: int
    head_size: int
    page_tokens: int
    dtype: DTypeLike
    order: Literal["HND", "NHD"] = "HND"
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_size", "page_tokens"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        object.__setattr__(self, "dtype", _type_name(self.dtype))
        object.__setattr__(self, "mla", bool(self.mla))
        if self.order not in ("HND", "NHD"):
            raise UsageError(f'order is {self.order!r}, expected "HND" (heads first) or "NHD" (tokens first)')
        if self.mla and self.kv_heads != 1:
            raise UsageError(
                f"kv_heads is {self.kv_heads} with mla, expected 1: a token has one latent vector; give 1, and the "
                "vector's length with its rope part as head_size"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        name = str(self.dtype)
        return NARROW.get(name) or np.dtype(name).itemsize

    @property
    def parts(self) -> int:
        """How many vectors a token has for each head: 2, the key and the value, or 1 with `mla`."""
        return 1 if self.mla else 2

    def copies(self, ranks: int) -> int:
        """Return how many ranks of a group have the same heads; raise UsageError for an impossible size of a group."""
        ranks = integer("ranks", ranks, 1)
        if self.kv_heads % ranks == 0:
            return 1
        if ranks % self.kv_heads:
            raise UsageError(
                f"{self.kv_heads} heads cannot be spread over {ranks} ranks: expected a number of ranks that divides "
                f"{self.kv_heads}, or a multiple of {self.kv_heads}; choose another tensor-parallel size"
            )
        return ranks // self.kv_heads

    def heads(self, rank: int, ranks: int) -> range:
        """Return the heads that a rank of a group has; raise UsageError for a rank or a size that is not possible."""
        copies = self.copies(ranks)
        rank = integer("rank", rank, 0)
        if rank >= ranks:
            raise UsageError(f"rank is {rank}, expected 0 to {ranks - 1} in a group of {ranks}")
        held = self.heads_held(ranks)
        first = rank // copies * held
        return range(first, first + held)

    def heads_held(self, ranks: int) -> int:
        """Return how many heads each rank of a group has; raise UsageError for an impossible size of a group."""
        return self.kv_heads * self.copies(ranks) // integer("ranks", ranks, 1)

    def page_shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of one page of one layer, in elements; raise UsageError for an impossible size."""
        heads = self.heads_held(ranks)
        if self.mla:
            return (self.page_tokens, self.head_size)
        inner = (heads, self.page_tokens) if self.order == "HND" else (self.page_tokens, heads)
        return (self.parts, *inner, self.head_size)

    def token_bytes(self, ranks: int) -> int:
        """Return the bytes of one token in one layer on one rank; raise UsageError for an impossible size."""
        return self.parts * self.heads_held(ranks) * self.head_size * self.itemsize

    def page_bytes(self, ranks: int) -> int:
        """Return the bytes of one page of one layer on one rank; raise UsageError for an impossible size."""
        return self.page_tokens * self.token_bytes(ranks)

    def pool_bytes(self, ranks: int, pages: int) -> int:
        """Return the bytes of a rank's whole cache of so many pages a layer; raise UsageError for bad numbers."""
        return self.layers * integer("pages", pages, 1) * self.page_bytes(ranks)

    def layer_offset(self, layer: int, ranks: int, pages: int) -> int:
        """Return where page 0 of a layer begins in a rank's cache of so many pages a layer, in bytes.

        Raises UsageError for a layer that the model does not have, and for bad numbers.
        """
        pages = integer("pages", pages, 1)
        return check_layer(layer, self.layers) * pages * self.page_bytes(ranks)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold so many tokens; raise UsageError for a negative number."""
        return -(-integer("tokens", tokens, 0) // self.page_tokens)

    def span(self, start: int, stop: int) -> TokenSpan:
        """Return which pages hold the tokens `start` to `stop` (exclusive) of a sequence.

        Raises UsageError for a negative start, and for no tokens.
        """
        start = integer("start", start, 0)
        stop = integer("stop", stop, 0)
        if stop <= start:
            raise UsageError(f"the tokens {start} to {stop} (exclusive) are none, expected a stop after the start")
        full, tail = divmod(stop, self.page_tokens)
        return TokenSpan(start, stop, start // self.page_tokens, full, full + (tail > 0), tail)

    def filled_bytes(self, tokens: int, ranks: int) -> int:
        """Return how many bytes of one page are valid when its first `tokens` tokens are, on one rank.

        Pages always move whole: what lies behind the last token, perhaps an earlier request's, moves with it, and
        `page_bytes` are written. Only in MLA are the valid bytes the first of the page.
        Raises UsageError for more tokens than a page has.
        """
        tokens = integer("tokens", tokens, 0)
        if tokens > self.page_tokens:
            raise UsageError(f"tokens is {tokens}, expected at most {self.page_tokens}, which is what a page has")
        return tokens * self.token_bytes(ranks)


def check_layer(layer: int, layers: int) -> int:
    """Return a layer's number as an int; raise UsageError unless it is one of so many layers."""
    number = integer("layer", layer, 0)
    if number >= layers:
        raise UsageError(f"layer is {number}, expected 0 to {layers - 1}: the cache has {layers}")
    return number


def _type_name(dtype: DTypeLike) -> str:
    """Return the name of an element type, by which its size is found; raise UsageError for what is none."""
    name = str(dtype).removeprefix("torch.")  # what str(tensor.dtype) gives in torch
    if name in NARROW:
        return name
    wrong = UsageError(
        f"dtype is {dtype!r}, expected a number type of numpy or one of {', '.join(NARROW)}; for packed elements of "
        'less than a byte give "uint8" and their bytes as head_size'
    )
    if dtype is None:  # numpy would take it for float64
        raise wrong
    try:
        known = np.dtype(name if str(dtype) != name else dtype)
    except (TypeError, ValueError):
        raise wrong from None
    if known.kind not in "biufc" and known.name not in NARROW:
        raise wrong
    if not known.isnative:
        raise UsageError(f"dtype is {dtype!r} in the other byte order: give the machine's own, bytes move as they are")
    return known.name
