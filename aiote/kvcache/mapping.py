"""Compute which bytes move where between two caches: arithmetic on the specs of both sides, native for each request.

Before the first request a decode rank divides its cache among the prefill ranks that have it (`assign`). Each part and
the cache of its prefill rank make a `CacheMap` (the moves of each layer), which both sides compute. A request adds page
tables; each move then becomes one batched page write, from and to `Pattern.offsets`. `CacheMap.counts` returns the
number of pieces of each layer, on which the decode rank waits.

A group's pages may hold more tokens on one side than on the other, by a whole multiple. Both sides are then treated as
rows of *units*; a unit has as many tokens as a page of the smaller side. An opaque page is one unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.masked_arrays import require_unmasked
from ..errors import UsageError
from ..rails import PageIndex, PageNumbers, RequestPlan, piece_offsets
from .tensors import CacheSpec, CacheTensor

__all__ = ["CacheMap", "LayerMove", "MappingError", "PageRow", "Pattern", "assign"]


class MappingError(UsageError):
    """Two caches, or the pages of a request on both sides, cannot be mapped onto each other; the text names both."""


class PageRow(PageNumbers):
    """Page numbers of one group in the order of their tokens. The first is page `start` of the request; the `start`
    pages before it are not moved, because the decode rank has them already or a sliding window has passed them.

    The numbers are copied unless they are an array of 64-bit integers. Raises UsageError for anything but a row of
    integers, and a start that is not from 0 to 2**40 - 1.
    """

    __slots__ = ()

    def __init__(self, pages: Sequence[int] | NDArray[np.integer], start: int = 0) -> None:
        if type(pages) is not np.ndarray:
            require_unmasked("pages", pages)
        given = np.asarray(pages)
        if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu") or not 0 <= start < 1 << 40:
            raise UsageError(
                f"PageRow: expected a row of integers and a start from 0 to 2**40 - 1, got {pages!r} and {start}"
            )
        super().__init__(given.astype(np.int64, copy=False), start)

    def __reduce__(self) -> tuple[object, ...]:
        return PageRow, (self.pages, self.start)

    def __repr__(self) -> str:
        return f"PageRow({self.pages.tolist()}, {self.start})"


MOST_PIECES = 1 << 22
"""The most pieces of a layer of a request. `moving.MOST_AT_ONCE` of them are computed and submitted at a time."""


class Grid(NamedTuple):
    """The layout of units in the pages of one side: the number of units in a page, and the strides in bytes."""

    units: int
    page_stride: int
    unit_stride: int


class Axis(NamedTuple):
    """A loop over pieces of a unit: the number of steps, and the stride in bytes on either side."""

    times: int
    source: int
    target: int


class Pattern(NamedTuple):
    """How a unit moves: pieces of `nbytes` bytes, along axes. Moves with the same pattern share a request's offsets."""

    group: int
    nbytes: int
    axes: tuple[Axis, ...]
    source: Grid
    target: Grid

    @property
    def pieces(self) -> int:
        """The number of pieces of a unit."""
        return math.prod(axis.times for axis in self.axes)

    def offsets(self, source: PageRow, target: PageRow, span: range) -> tuple[PageIndex, PageIndex]:
        """Return the byte offsets of the pieces of the units `span` on either side, from the beginning of page 0."""
        return piece_offsets(self.source, self.target, self.axes, source, target, span)


class LayerMove(NamedTuple):
    """Pieces of a layer that move in one batch: their pattern, and where page 0 begins on either side."""

    source_memory: int
    source_offset: int
    target_memory: int
    target_offset: int
    pattern: Pattern


def assign(sources: Sequence[CacheSpec], target: CacheSpec, turn: int = 0) -> list[CacheSpec]:
    """Divide the target cache among the source ranks; return one part for each rank, some of them empty.

    Each head of each field and layer belongs to exactly one part. If several ranks have it, `turn` and the layer select
    one, so that ranks of a decode group with different turns spread over them. Raises MappingError for a head that no
    rank has.
    """
    holders: dict[tuple[int, int, str], list[tuple[int, CacheTensor]]] = {}
    for number, source in enumerate(sources):
        for tensor in source.tensors:
            holders.setdefault(tensor.key, []).append((number, tensor))
    parts: list[list[CacheTensor]] = [[] for _ in sources]
    for tensor in target.tensors:
        first, stop = tensor.first_head, tensor.first_head + tensor.head_count
        have = holders.get(tensor.key, [])
        edges = {edge for _, held in have for edge in (held.first_head, held.first_head + held.head_count)}
        edges = {first, stop} | {edge for edge in edges if first < edge < stop}
        chosen: list[list[int]] = []
        for begin, end in itertools.pairwise(sorted(edges)):
            able = [number for number, held in have if held.first_head <= begin < held.first_head + held.head_count]
            if not able:
                names = ", ".join(source.name for source in sources)
                raise MappingError(f"{target.name}: {tensor}: no prefill rank ({names}) has its head {begin}")
            number = able[(turn + tensor.layer) % len(able)]
            if chosen and chosen[-1][0] == number:
                chosen[-1][2] = end
            else:
                chosen.append([number, begin, end])
        for number, begin, end in chosen:
            parts[number].append(tensor.of_heads(begin, end))
    return [CacheSpec(target.name, target.memories, tuple(part), target.ranks) for part in parts]


@dataclass
class CacheMap:
    """How one rank's cache moves into a part of another rank's; see `assign`. Raises MappingError if it cannot.

    Every item of every head and token of the part is written once, from the same item of the source.
    """

    source: CacheSpec
    part: CacheSpec
    moves: dict[int, list[LayerMove]] = field(init=False)
    layers: list[int] = field(init=False)
    units: dict[int, tuple[int, int, int]] = field(init=False, default_factory=dict)
    pieces: dict[int, tuple[tuple[int, int], ...]] = field(init=False)
    """For each layer: the group of each of its moves, and the number of pieces of a unit."""

    def __post_init__(self) -> None:
        self.layers = self.part.layers
        self.moves = {layer: [] for layer in self.layers}
        together: dict[tuple[object, ...], list[tuple[CacheTensor, CacheTensor]]] = {}
        has: dict[tuple[int, int, str], CacheTensor] = {}
        for tensor in self.source.tensors:
            has[tensor.key] = tensor
        for target in self.part.tensors:
            found = has.get(target.key)
            if found is None:
                raise MappingError(
                    f"{self.part.name}: {target}: {self.source.name} has no field of that name in that layer and group"
                )
            stop = target.first_head + target.head_count
            if target.first_head < found.first_head or stop > found.first_head + found.head_count:
                raise MappingError(f"{self.part.name}: {target}: {self.source.name} has other heads: {found}")
            source = found.of_heads(target.first_head, stop)
            self._require_alike(source, target)
            alike = (target.group, target.layer, _geometry(source), _geometry(target))
            together.setdefault(alike, []).append((source, target))
        for pairs in together.values():
            self.moves[pairs[0][1].layer].extend(self._moves(pairs))
        self.pieces = {
            layer: tuple((move.pattern.group, move.pattern.pieces) for move in moves)
            for layer, moves in self.moves.items()
        }
        places = {group: place for place, group in enumerate(self.units)}
        self.plan = RequestPlan(
            self.units, [tuple((places[group], times) for group, times in pieces) for pieces in self.pieces.values()]
        )

    def _require_alike(self, source: CacheTensor, target: CacheTensor) -> None:
        """Record the unit of the target's group. Raises MappingError if items, types or pages do not fit."""
        same = (source.dtype, source.item_bytes) == (target.dtype, target.item_bytes)
        small, large = sorted((source.tokens, target.tokens))
        if not same or (small == 0 < large) or (small and large % small):
            raise MappingError(
                f"{self.source.name} has {source}, {self.part.name} has {target}: expected the same "
                "types and items, and "
                "numbers of tokens in a page of which one is a whole multiple of the other"
            )
        has, here, there = self.units.get(target.group, (0, 0, 0))
        units = _grid(source, small).units, _grid(target, small).units
        self.units[target.group] = max(has, small), *units
        if here and (here, there) != units:
            raise MappingError(
                f"group {target.group} of {self.source.name} and {self.part.name} has opaque pages beside pages of "
                f"different numbers of tokens: {source}, {target}"
            )

    def _moves(self, pairs: list[tuple[CacheTensor, CacheTensor]]) -> Iterator[LayerMove]:
        """Yield the moves of fields with the same layout: one for all if they are evenly spaced on both sides."""
        pairs.sort(key=lambda pair: pair[1].offset)
        steps = {(b[0].offset - a[0].offset, b[1].offset - a[1].offset) for a, b in itertools.pairwise(pairs)}
        step = steps.pop() if len(steps) == 1 else (0, 0)
        row = min(step) > 0
        fields = Axis(len(pairs), *step) if row else Axis(1, 0, 0)
        for source, target in pairs[: 1 if row else None]:
            unit = min(source.tokens, target.tokens)
            axes = [
                fields,
                Axis(target.head_count, source.head_stride, target.head_stride),
                Axis(max(unit, 1), source.token_stride, target.token_stride),
            ]
            nbytes, rest = _coalesced(target.item_bytes, axes)
            pattern = Pattern(target.group, nbytes, rest, _grid(source, unit), _grid(target, unit))
            yield LayerMove(source.memory, source.offset, target.memory, target.offset, pattern)

    def spans(self, targets: dict[int, PageRow], tokens: int) -> list[range]:
        """Return the units of each group, in the order of `units`, that are moved into these pages for a request of
        `tokens` tokens.
        """
        return self.plan.spans(targets, tokens)

    def counts(self, spans: list[range]) -> list[int]:
        """Return the number of pieces of each layer of a request. Raises MappingError if a layer has too many."""
        counts = self.plan.counts(spans)
        if max(counts, default=0) > MOST_PIECES:
            raise MappingError(
                f"{self.source.name} and {self.part.name} have such different layouts that a layer of a request would "
                f"move in {max(counts)} pieces, expected at most {MOST_PIECES}; use more similar layouts"
            )
        return counts

    def check_source(self, sources: dict[int, PageRow], spans: list[range]) -> None:
        """Raise MappingError if the pages of the source do not hold the units `spans` of each group."""
        place = self.plan.lacks(sources, spans)
        if place < 0:
            return
        group, wanted = self.plan.groups[place], spans[place]
        in_page, row = self.units[group][1], sources.get(group)
        has = range(row.start * in_page, (row.start + len(row.pages)) * in_page) if row else range(0)
        raise MappingError(
            f"group {group}: {self.part.name} wants units {wanted.start} to {wanted.stop - 1} of the request, "
            f"{self.source.name} has {f'{has.start} to {has.stop - 1}' if has else 'none'}"
        )


def _grid(tensor: CacheTensor, unit: int) -> Grid:
    """Return the layout of units of `unit` tokens (0 for opaque pages) in the pages of a tensor."""
    return Grid(tensor.tokens // unit if unit else 1, tensor.page_stride, unit * tensor.token_stride)


def _geometry(tensor: CacheTensor) -> tuple[int, ...]:
    """Return the properties that are equal for tensors with the same layout."""
    return (
        tensor.memory,
        tensor.page_stride,
        tensor.tokens,
        tensor.token_stride,
        tensor.first_head,
        tensor.head_count,
        tensor.head_stride,
        tensor.item_bytes,
    )


def _coalesced(nbytes: int, axes: list[Axis]) -> tuple[int, tuple[Axis, ...]]:
    """Grow a piece by the axes along which pieces touch on both sides; return its length and the other axes."""
    left = [axis for axis in axes if axis.times > 1]
    while touching := [axis for axis in left if axis.source == axis.target == nbytes]:
        nbytes *= touching[0].times
        left.remove(touching[0])
    return nbytes, tuple(sorted(left, key=lambda axis: -axis.target))
