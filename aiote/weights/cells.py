"""The division of target tensors into cells. The planner assigns cells to the source ranks.

A cell is a box of the target that one source rank can make and send. Along each dimension, cells end where a source
part ends, where a source rank's share of it ends, or where a target rank's part ends. With quantization, they end at
both edges of the block around such an end instead:

    source rank 0 | rank 1        edges at rows 0, 300, 600 with blocks of 128
    cells: [0, 256) of rank 0, [256, 384) of both, [384, 512) of rank 1, ...

A `direct` cell lies completely in what one rank holds. Any other cell has a block that crosses an edge: the cell
consists of several `atoms`, different ranks hold different atoms, and one rank must gather them. With `whole`, cells
end only between the tensors of a stack and around padding: each rank makes complete tensors, like a schedule that is
built on `full_tensor`.

Cells refer to parts and to what ranks hold by number (`Holder`). They contain no ranks and no names, so tensors that
look the same share their cells.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import UsageError
from .placement import LocalBox, Sharding
from .recipe import Part

__all__ = ["Atom", "Cell", "Need", "cells_of", "clip", "from_source"]

Point = tuple[int, ...]
Holder = tuple[int, int, int]
"""Three indices: a part, an entry of its source tensor's `Sharding.held`, and a piece of that entry."""


class Atom(NamedTuple):
    """A box of a cell, and the holders that can provide it."""

    start: Point
    stop: Point
    holders: tuple[Holder, ...]


class Need(NamedTuple):
    """The elements and blocks (with scales) of a cell that each rank with entry `held` of the target needs."""

    held: int
    elements: int
    blocks: int


class Cell(NamedTuple):
    """A box of the target. Each of its `holders` has all of it; without holders it is gathered from its `atoms`."""

    start: Point
    stop: Point
    holders: tuple[Holder, ...]
    atoms: tuple[Atom, ...]
    needs: tuple[Need, ...]

    @property
    def direct(self) -> bool:
        """Whether a single rank holds everything that the cell is made of."""
        return bool(self.holders)


def clip(start: Point, stop: Point, low: Point, high: Point) -> tuple[Point, Point] | None:
    """Return the intersection of two boxes, or None if they do not overlap."""
    first, last = tuple(map(max, start, low)), tuple(map(min, stop, high))
    return (first, last) if all(map(int.__lt__, first, last)) else None


def from_source(part: Part, piece: LocalBox) -> tuple[Point, Point] | None:
    """Return the box of the target that a part makes from a piece of its source; None if it does not use the piece."""
    fixed = set(range(len(part.source_start))).difference(part.axes)
    if not all(piece.start[d] <= part.source_start[d] < piece.stop[d] for d in fixed):
        return None
    start, stop = list(part.target_start), list(map(int.__add__, part.target_start, part.extent))
    for a, d in enumerate(part.axes):
        if d >= 0:
            shift = part.target_start[a] - part.source_start[d]
            start[a], stop[a] = max(start[a], piece.start[d] + shift), min(stop[a], piece.stop[d] + shift)
            if start[a] >= stop[a]:
                return None
    return tuple(start), tuple(stop)


class _Grid:
    """The edges along each dimension of a target, and the boxes between the edges."""

    def __init__(self, shape: Point) -> None:
        self.edges: list[list[int]] = [[0, extent] for extent in shape]

    def add(self, start: Point, stop: Point, block: Point) -> None:
        """Add both ends of a box; each end adds the two edges of the block around it."""
        for edges, *ends, size in zip(self.edges, start, stop, block, strict=True):
            for end in ends:
                edges += (end // size * size, min(-(-end // size) * size, edges[1]))

    def close(self) -> None:
        self.edges = [sorted(set(edges)) for edges in self.edges]

    def overlapping(self, start: Point, stop: Point) -> Iterator[Point]:
        """Yield each of the grid's boxes that overlaps a box, as one number for each dimension."""
        spans = (
            range(bisect_right(edges, low) - 1, bisect_left(edges, high))
            for edges, low, high in zip(self.edges, start, stop, strict=True)
        )
        return itertools.product(*spans)

    def box(self, at: Point) -> tuple[Point, Point]:
        start = tuple(edges[i] for edges, i in zip(self.edges, at, strict=True))
        return start, tuple(edges[i + 1] for edges, i in zip(self.edges, at, strict=True))


def cells_of(
    target: Sharding, parts: Sequence[tuple[Part, Sharding]], block: tuple[int, int] | None, whole: bool
) -> tuple[Cell, ...]:
    """Return the cells of a target with this sharding, in order. Each part comes with its source's sharding.

    Raises UsageError if a part takes elements that no source rank holds.
    """
    size = (1,) * len(target.shape) if block is None else (1,) * (len(target.shape) - 2) + block
    boxes = [
        (*box, (number, held, at))
        for number, (part, sharding) in enumerate(parts)
        for held, entry in enumerate(sharding.held)
        for at, piece in enumerate(entry.pieces)
        if (box := from_source(part, piece))
    ]
    coarse = _coarse_grid(target, parts, boxes, size, whole)
    atoms = _atoms(target, parts, boxes, coarse)
    needs = _needs(target, coarse, size)
    found = []
    for at in sorted(atoms.keys() & needs.keys()):
        inside = atoms[at]
        # A cell with padding is never direct: it consists of its atoms alone, even if one rank holds all of them.
        full = sum(_volume(atom.start, atom.stop) for atom in inside) == _volume(*coarse.box(at))
        common = [h for h in inside[0].holders if full and all(h in atom.holders for atom in inside)]
        wants = tuple(Need(held, *counts) for held, counts in sorted(needs[at].items()))
        found.append(Cell(*coarse.box(at), tuple(common), () if common else tuple(inside), wants))
    return tuple(found)


def _volume(start: Point, stop: Point) -> int:
    return math.prod(map(int.__sub__, stop, start))


def _box_of(part: Part) -> tuple[Point, Point]:
    return part.target_start, tuple(map(int.__add__, part.target_start, part.extent))


def _coarse_grid(
    target: Sharding,
    parts: Sequence[tuple[Part, Sharding]],
    boxes: Iterable[tuple[Point, Point, Holder]],
    size: Point,
    whole: bool,
) -> _Grid:
    grid = _Grid(target.shape)
    if not whole:
        for start, stop, _ in boxes:
            grid.add(start, stop, size)
        for held in target.held:
            for piece in held.pieces:
                grid.add(piece.start, piece.stop, size)
    for dim, extent in enumerate(target.shape):
        if whole and all(part.axes[dim] < 0 for part, _ in parts):
            grid.edges[dim] += range(0, extent, size[dim])
    if not whole or sum(math.prod(part.extent) for part, _ in parts) < math.prod(target.shape):
        # Padding needs cells of its own: as part of a larger cell it would be written.
        for part, _ in parts:
            grid.add(*_box_of(part), size)
    grid.close()
    return grid


def _atoms(
    target: Sharding,
    parts: Sequence[tuple[Part, Sharding]],
    boxes: Iterable[tuple[Point, Point, Holder]],
    coarse: _Grid,
) -> dict[Point, list[Atom]]:
    """Return, by cell, the boxes in it whose elements all come from the same ranks; padding is in no box."""
    fine, one = _Grid(target.shape), (1,) * len(target.shape)
    for edges, coarse_edges in zip(fine.edges, coarse.edges, strict=True):
        edges += coarse_edges
    for start, stop, _ in boxes:
        fine.add(start, stop, one)
    for part, _ in parts:
        fine.add(*_box_of(part), one)
    fine.close()
    holders: dict[Point, list[Holder]] = {}
    for start, stop, holder in boxes:
        for at in fine.overlapping(start, stop):
            holders.setdefault(at, []).append(holder)
    found: dict[Point, list[Atom]] = {}
    for part, _ in parts:
        for at in fine.overlapping(*_box_of(part)):
            start, stop = fine.box(at)
            if at not in holders:
                raise UsageError(
                    f"no source rank holds the elements of {part.source} that fill {start} to {stop} (exclusive)"
                )
            cell = next(coarse.overlapping(start, stop))
            found.setdefault(cell, []).append(Atom(start, stop, tuple(holders[at])))
    return found


def _needs(target: Sharding, coarse: _Grid, size: Point) -> dict[Point, dict[int, tuple[int, int]]]:
    """Return, by cell, how many elements and blocks of it each entry of the target's `Sharding.held` takes."""
    needs: dict[Point, dict[int, tuple[int, int]]] = {}
    for number, held in enumerate(target.held):
        for piece in held.pieces:
            for at in coarse.overlapping(piece.start, piece.stop):
                low, high = clip(*coarse.box(at), piece.start, piece.stop) or (at, at)
                elements = _volume(low, high)
                blocks = math.prod(-(-(b - a) // s) for a, b, s in zip(low, high, size, strict=True))
                before = needs.setdefault(at, {}).get(number, (0, 0))
                needs[at][number] = (before[0] + elements, before[1] + blocks)
    return needs
