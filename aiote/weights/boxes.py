"""Express a copy between two strided arrays as boxes of both arrays: turn strides into indices.

A copy loops over some dimensions, each with a stride on either side. A loop that runs along a single dimension of both
arrays becomes a side of a box. Any other loop is merged with a neighbour (the array was flattened), split in two (the
array was given more dimensions), or unrolled index by index (a slice with a step), up to a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import UsageError
from .placement import dense

__all__ = ["Array", "boxes_between"]

Shape = tuple[int, ...]
MOST_BOXES = 1 << 16
"""The most boxes of one copy. A copy with more would move an array element by element, by as many writes."""


class Array:
    """The shape of an array and its strides in elements. Without `strides` the array is dense."""

    def __init__(self, shape: Shape, strides: Shape | None = None) -> None:
        self.shape = shape
        self.strides = dense(shape) if strides is None else strides
        self._order = sorted(range(len(shape)), key=lambda d: -self.strides[d])

    def index(self, offset: int) -> Shape:
        """Return the index of the element at an offset."""
        found = [0] * len(self.shape)
        for dim in self._order:
            if self.shape[dim] > 1:
                found[dim], offset = divmod(offset, self.strides[dim])
        return tuple(found)

    def has(self, offset: int) -> bool:
        """Return whether an element of the array lies at an offset."""
        index = self.index(offset)
        there = sum(map(int.__mul__, index, self.strides))
        return there == offset and all(at < extent for at, extent in zip(index, self.shape, strict=True))

    def dimension(self, stride: int) -> int | None:
        """Return the dimension with the largest stride that is at most `stride`, or None.

        Dimensions with a single index are ignored.
        """
        fitting = (dim for dim in self._order if self.shape[dim] > 1 and self.strides[dim] <= stride)
        return next(fitting, None)


class _Loop(NamedTuple):
    """A dimension that a copy loops over: its extent, and the stride on either side."""

    extent: int
    here: int
    there: int


Side = tuple[Array, int, Shape]
Box = tuple[Shape, Shape, Shape, Shape]


def boxes_between(extent: Shape, source: Side, target: Side) -> list[Box]:
    """Return a copy of `extent` elements as boxes: start in the source, start in the target, extent, and axes.

    Each side is a tuple: the array, the offset of the first element, and the strides for the dimensions of `extent`,
    all in elements. A box's extent and axes have one number for each dimension of the target, as in `recipe.Part`.
    Raises UsageError if the copy needs more than `MOST_BOXES` boxes, or if a part of the target lies outside its array.
    """
    if not all(extent):
        return []
    loops = [_Loop(*row) for row in zip(extent, source[2], target[2], strict=True) if row[0] > 1]
    found: list[Box] = []
    for box in _boxes(_merged(loops), (source[0], source[1]), (target[0], target[1])):
        found.append(box)
        if len(found) > MOST_BOXES:
            raise UsageError(f"it consists of more than {MOST_BOXES} pieces, which is the limit")
    return found


def _merged(loops: list[_Loop]) -> list[_Loop]:
    """Return the loops sorted by the target's stride, outermost first; merge loops that continue one another."""
    kept: list[_Loop] = []
    for loop in sorted(loops, key=lambda loop: (-loop.there, -loop.here)):
        if kept and (kept[-1].here, kept[-1].there) == (loop.here * loop.extent, loop.there * loop.extent):
            kept[-1] = _Loop(kept[-1].extent * loop.extent, loop.here, loop.there)
        else:
            kept.append(loop)
    return kept


def _boxes(loops: list[_Loop], source: tuple[Array, int], target: tuple[Array, int]) -> Iterator[Box]:
    (here, first), (there, second) = source, target
    start, begin = here.index(first), there.index(second)
    sides: dict[int, tuple[int, int]] = {}
    for number, loop in enumerate(loops):
        rest = loops[:number] + loops[number + 1 :]
        inner = min(_inside(loop.extent, loop.here, here, start), _inside(loop.extent, loop.there, there, begin))
        if 1 < inner < loop.extent:
            outer = _Loop(loop.extent // inner, loop.here * inner, loop.there * inner)
            yield from _boxes([*rest, outer, loop._replace(extent=inner)], source, target)
            return
        dim, axis = there.dimension(loop.there), here.dimension(loop.here)
        if inner == 1 or dim is None or axis is None or dim in sides or axis in [d for d, _ in sides.values()]:
            for i in range(loop.extent):
                yield from _boxes(rest, (here, first + i * loop.here), (there, second + i * loop.there))
            return
        sides[dim] = axis, loop.extent
    every = [sides.get(dim, (-1, 1)) for dim in range(len(there.shape))]
    extent = tuple(size for _, size in every)
    _check_within(there, second, begin, extent)
    yield start, begin, extent, tuple(axis for axis, _ in every)


def _check_within(array: Array, offset: int, start: Shape, extent: Shape) -> None:
    """Raise UsageError unless a box that begins at an offset lies completely within an array."""
    there = sum(map(int.__mul__, start, array.strides))
    if there != offset or any(at < 0 or at + n > size for at, n, size in zip(start, extent, array.shape, strict=True)):
        raise UsageError(f"it goes beyond the array of shape {array.shape}, from the element at {offset} on")


def _inside(extent: int, stride: int, array: Array, start: Shape) -> int:
    """Return how many steps at a time stay within one dimension of an array; the number divides `extent`.

    It is 1 if a step skips indices of the dimension.
    """
    dim = array.dimension(stride)
    if dim is None or array.strides[dim] != stride:
        return 1
    room = array.shape[dim] - start[dim]
    return extent if extent <= room else math.gcd(room, array.shape[dim], extent)
