"""What every rank of a prefill group writes to every rank of a decode group.

**Pieces.** A route goes from one rank to one. It carries the heads that both have, which are a run, so that a page's
part is rows of `piece_bytes` at a constant distance on either side (the `stride` of that side):

| the two ranks' heads are | HND                       | NHD                                 |
|--------------------------|---------------------------|-------------------------------------|
| the same                 | 1 piece: the page         | 1 piece: the page                   |
| different                | 2 pieces: of K and of V   | 2 * page_tokens: one for each token |

Rows merge when they follow one another on both sides, and they do that only where the route takes all of both; then all
merge. So a route is always one family of pieces, and one `write_pages` moves it for all pages of a layer.

**Turns.** Where a head has a = copies(prefill) > 1 copies in the prefill group, any of them could write it to each of
its b = copies(decode) holders. They take turns, page by page: with p the place of a page in the request's table, layer
l and holder t (0 <= t < b), the writer is copy

    s = ((p + l) * b + t) mod a

This numbers the holders' pages of a layer one after another and deals them round, so that with n pages in a row

    the pages that the prefill ranks write, each page counted once for each holder, differ by 1 at most in a layer

over all ranks, and by 0 where n * b is a multiple of a. With g = gcd(a, b) and c = a / g, the formula asks of p + l a
certain remainder by c: `turn`, of a route that takes one page in `every` = c, and none unless g divides s - t. The
layer in it evens the rest out: c layers together are exactly even, so L layers differ by at most min(L mod c, c - L mod
c). Whoever has turns must cut requests as the others do, or use tables that know their place (`PageTable`).

A page's part comes whole from one rank, so how many writes a decode rank gets does not depend on the turns:
`TransferPlan.writes`.

This module computes; it posts nothing and knows no region. What it says about bytes rests on `CacheLayout`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.paging import integer
from ..errors import UsageError
from .cache_layout import CacheLayout, check_layer

__all__ = ["Move", "PageFamily", "PageTable", "Route", "Run", "Side", "TransferPlan", "plan_transfer"]

Indices = NDArray[np.int64]


class PageFamily(NamedTuple):
    """What `aiote.Pages` takes after the region: `Pages(region, *family)`.

    `indices` is a contiguous array of 64-bit integers, which Pages copies at once; the others are in bytes.
    """

    indices: Indices
    page_bytes: int
    stride: int
    offset: int


class Move(NamedTuple):
    """Both sides of one `write_pages`: the regions are the source rank's cache and the target rank's, as a whole."""

    source: PageFamily
    target: PageFamily

    @property
    def writes(self) -> int:
        """How many writes it is, and immediates at the target. With 0 there is nothing to submit."""
        return len(self.source.indices)


class PageTable:
    """The page numbers of a request in one rank's cache, in the order of its tokens, checked once.

    `numbers` is any sequence of integers, copied; `pool` is how many pages a layer has in that cache; `first` the
    place in the request of the first number. A slice is a table that knows its place. Raises UsageError for what is
    not a row of integers and for a number outside of the pool.
    """

    __slots__ = ("distinct", "first", "numbers", "pool")

    def __init__(self, numbers: Sequence[int] | NDArray[np.integer], pool: int, first: int = 0) -> None:
        self.pool = integer("pool", pool, 1)
        self.first = integer("first", first, 0)
        self.numbers = _page_numbers(numbers, self.pool)
        self.distinct = _distinct(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: slice) -> PageTable:
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise UsageError(f"a page table takes a slice without a step, got {item!r}")
        start, stop, _ = item.indices(len(self.numbers))
        if (start, stop) == (0, len(self.numbers)):
            return self
        part = PageTable.__new__(PageTable)
        part.numbers, part.pool, part.first = self.numbers[start:stop], self.pool, self.first + start
        part.distinct = self.distinct or _distinct(part.numbers)
        return part

    def __repr__(self) -> str:
        return f"<PageTable of {len(self)} pages from place {self.first}, in a pool of {self.pool}>"


@dataclass(frozen=True, slots=True)
class Side:
    """Where a route's pieces lie in each page of one side, in bytes.

    The first begins at `offset` in a page of `page_bytes`, each next one `stride` later; as many strides as there are
    pieces make the page.
    """

    page_bytes: int
    offset: int
    stride: int


@dataclass(frozen=True, slots=True)
class Run:
    """The part of one page that goes from one rank to another: `pieces` of `piece_bytes`, and where on either side."""

    pieces: int
    piece_bytes: int
    source: Side
    target: Side

    @property
    def nbytes(self) -> int:
        """Bytes of a page that go this way."""
        return self.pieces * self.piece_bytes


@dataclass(frozen=True, slots=True)
class Route:
    """What one prefill rank (`source`) writes to one decode rank (`target`).

    It takes the pages at places p of a request for which (p + layer) % `every` is `turn`: all of them unless several
    prefill ranks have the same heads. `layers` is how many the cache has.
    """

    source: int
    target: int
    run: Run
    every: int
    turn: int
    layers: int

    def share(self, layer: int, first: int) -> slice:
        """Return which entries of a table whose first one is at place `first` it takes in a layer."""
        return slice((self.turn - first - layer) % self.every, None, self.every)

    def steps(self, source: PageTable, target: PageTable) -> tuple[int, int]:
        """Return how many bytes further a layer lies than the one before it, in the caches of two tables.

        Layers whose numbers differ by a multiple of `every` have the same share; by these steps their moves differ.
        """
        return source.pool * self.run.source.page_bytes, target.pool * self.run.target.page_bytes

    def move(self, layer: int, source: PageTable, target: PageTable) -> Move:
        """Return the one `write_pages` that moves this route's share of a layer; page i of a table goes to page i.

        The tables name the pages in the caches of the two ranks. Turns follow the places of the target's table, so
        all prefill ranks must be given the same cuts of it. Raises UsageError for an unknown layer, tables of
        different lengths, a target page that comes twice, and a cache too large to address.
        """
        layer = check_layer(layer, self.layers)
        if len(source) != len(target):
            raise UsageError(
                f"{len(source)} source pages for {len(target)} target pages: page i goes to page i; "
                "slice both tables to the same pages"
            )
        if not target.distinct:
            raise UsageError("a target page comes twice in its table: two pages of the source cannot both go there")
        share = self.share(layer, target.first)
        run = self.run
        return Move(
            _family(run, run.source, source, share, layer, self.layers),
            _family(run, run.target, target, share, layer, self.layers),
        )


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All routes from a prefill group of `prefill` ranks to a decode group of `decode`, by source, then by target.

    Every byte of a page of every decode rank is written exactly once, by one prefill rank.
    """

    layout: CacheLayout
    prefill: int
    decode: int
    routes: tuple[Route, ...]

    def outgoing(self, source: int) -> tuple[Route, ...]:
        """Return what a prefill rank writes, by target; raise UsageError for a rank that is none."""
        _check_rank("source", source, self.prefill)
        return tuple(route for route in self.routes if route.source == source)

    def incoming(self, target: int) -> tuple[Route, ...]:
        """Return what is written to a decode rank, by source; raise UsageError for a rank that is none."""
        _check_rank("target", target, self.decode)
        return tuple(route for route in self.routes if route.target == target)

    def writes(self, target: int, pages: int, layers: int = 1) -> int:
        """Return how many writes, hence immediates, a decode rank gets for so many pages in each of so many layers.

        Raises UsageError for a rank that is none, and for negative numbers.
        """
        # Of the routes that share pages, each has another turn, and the same pieces.
        each = sum(route.run.pieces for route in self.incoming(target) if route.turn == 0)
        return each * integer("pages", pages, 0) * integer("layers", layers, 0)


def plan_transfer(layout: CacheLayout, prefill: int, decode: int) -> TransferPlan:
    """Return what each of `prefill` ranks writes to each of `decode` ranks; the last plans asked for are kept.

    Raises UsageError for a size of a group over which the heads cannot be spread.
    """
    if not isinstance(layout, CacheLayout):
        raise UsageError(f"layout must be a CacheLayout, got {type(layout).__name__}")
    for group, ranks in (("prefill", prefill), ("decode", decode)):
        try:
            layout.copies(ranks)
        except UsageError as error:
            raise UsageError(f"the {group} group: {error}") from None
    return _plan(layout, int(prefill), int(decode))


@functools.lru_cache(maxsize=64)
def _plan(layout: CacheLayout, prefill: int, decode: int) -> TransferPlan:
    writers, holders = layout.copies(prefill), layout.copies(decode)
    routes = []
    for source in range(prefill):
        has = layout.heads(source, prefill)
        for target in range(decode):
            wants = layout.heads(target, decode)
            heads = range(max(has.start, wants.start), min(has.stop, wants.stop))
            turn = _turn(source % writers, target % holders, writers, holders)
            if heads and turn is not None:
                every = writers // math.gcd(writers, holders)
                routes.append(Route(source, target, _run(layout, heads, has, wants), every, turn, layout.layers))
    return TransferPlan(layout, prefill, decode, tuple(routes))


def _turn(writer: int, holder: int, writers: int, holders: int) -> int | None:
    """Solve p * holders + holder = writer (mod writers) for p; None where no p does."""
    common = math.gcd(writers, holders)
    quotient, rest = divmod(writer - holder, common)
    if rest:
        return None
    every = writers // common
    return quotient * pow(holders // common, -1, every) % every


def _run(layout: CacheLayout, heads: range, has: range, wants: range) -> Run:
    """Return the part of a page that these heads are, between a rank that `has` some and one that `wants` some."""
    tokens_first = layout.order == "NHD"
    head_bytes = layout.head_size * layout.itemsize * (1 if tokens_first else layout.page_tokens)
    rows = layout.parts * (layout.page_tokens if tokens_first else 1)
    if has == wants:
        # All rows follow one another on both sides.
        head_bytes, rows = head_bytes * rows, 1
    source, target = (
        Side(rows * len(held) * head_bytes, (heads.start - held.start) * head_bytes, len(held) * head_bytes)
        for held in (has, wants)
    )
    return Run(rows, len(heads) * head_bytes, source, target)


def _family(run: Run, side: Side, table: PageTable, share: slice, layer: int, layers: int) -> PageFamily:
    """Return the pieces of a share of a table's pages in a layer, page by page."""
    nbytes = layers * table.pool * side.page_bytes
    if nbytes >= 1 << 63:  # the indices would not fit in 64 bits
        raise UsageError(f"a cache of {table.pool} pages a layer has {nbytes} bytes, expected less than 2**63")
    rows = table.numbers[share, np.newaxis] * run.pieces + np.arange(run.pieces, dtype=np.int64)
    return PageFamily(rows.ravel(), run.piece_bytes, side.stride, layer * table.pool * side.page_bytes + side.offset)


def _check_rank(name: str, rank: int, ranks: int) -> None:
    if integer(name, rank, 0) >= ranks:
        raise UsageError(f"{name} is {rank}, expected a rank from 0 to {ranks - 1}")


def _distinct(numbers: Indices) -> bool:
    return len(set(numbers.tolist())) == len(numbers)


def _page_numbers(numbers: Sequence[int] | NDArray[np.integer], pool: int) -> Indices:
    """Return a copy of page numbers that cannot be changed; raise UsageError for what is none."""
    try:
        given = np.asarray(numbers)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"page numbers must be a row of integers, got {type(numbers).__name__}: {error}") from None
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise UsageError(
            f"page numbers must be a row of integers, got {type(numbers).__name__} with {given.ndim} dimensions "
            f"of {given.dtype}"
        )
    if given.size and (given.min() < 0 or given.max() >= pool):
        place = int(np.flatnonzero((given < 0) | (given >= pool))[0])
        raise UsageError(f"page {place} of the table is {given[place]}, expected 0 to {pool - 1} in a pool of {pool}")
    copy = np.array(given, dtype=np.int64)
    copy.setflags(write=False)
    return copy
