"""Strided copies: which elements of one array go where in another. This module knows neither memory nor transfers.

A copy consists of rows of both arrays, as write lists take them. On each side, offsets and strides count elements of
that side's own type, from the beginning of the tensor's local part (or of the task's staging array). Dimensions that
are contiguous on both sides are merged, so that a contiguous block is one dimension with strides of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .cells import clip
from .placement import LocalBox, LocalTensor, dense
from .recipe import Part

__all__ = ["Copy"]

Point = tuple[int, ...]


class Copy(NamedTuple):
    """Element i goes from source_offset + i . source_strides to target_offset + i . target_strides.

    i is a tuple of indices within `shape`.
    """

    source: str
    target: str
    shape: Point
    source_offset: int
    source_strides: Point
    target_offset: int
    target_strides: Point

    @property
    def elements(self) -> int:
        """How many elements it moves."""
        return math.prod(self.shape)

    @property
    def run(self) -> int:
        """How many elements are contiguous on both sides. The copy consists of elements / run such runs."""
        return self.shape[-1] if self.source_strides[-1] == self.target_strides[-1] == 1 else 1


def merged(
    source: str, target: str, shape: Point, offsets: tuple[int, int], source_strides: Point, target_strides: Point
) -> Copy:
    """Return a copy with as few dimensions as possible, sorted by the target's strides, the innermost last."""
    rows = [row for row in zip(target_strides, source_strides, shape, strict=True) if row[2] > 1]
    kept: list[tuple[int, int, int]] = []
    for there, here, extent in sorted(rows, key=lambda row: (-row[0], -row[1])):
        if kept and kept[-1][:2] == (there * extent, here * extent):
            kept[-1] = (there, here, kept[-1][2] * extent)
        else:
            kept.append((there, here, extent))
    inner, outer, extents = zip(*kept, strict=True) if kept else ((1,), (1,), (1,))
    return Copy(source, target, extents, offsets[0], outer, offsets[1], inner)


def pieces_in(held: LocalTensor, start: Point, stop: Point) -> Iterator[tuple[LocalBox, Point, Point]]:
    """Yield each piece of a rank's part that overlaps a box, and the start and stop of the overlap."""
    for piece in held.pieces:
        shared = clip(start, stop, piece.start, piece.stop)
        if shared:
            yield piece, *shared


def offset_in(held: LocalTensor, piece: LocalBox, at: Point) -> int:
    """Return the offset, in elements, of an index of the tensor in a rank's part."""
    numbers = zip(at, piece.start, piece.local, held.strides, strict=True)
    return sum((index - start + local) * stride for index, start, local, stride in numbers)


class Origin(NamedTuple):
    """The origin of a box of the target: a recipe part, a rank's part of the source tensor, and a piece of that."""

    part: Part
    held: LocalTensor
    piece: LocalBox

    def offset(self, at: Point) -> int:
        """Return the offset in the source rank's part of the element that an index of the target takes."""
        index = list(self.part.source_start)
        for a, d in enumerate(self.part.axes):
            if d >= 0:
                index[d] += at[a] - self.part.target_start[a]
        return offset_in(self.held, self.piece, tuple(index))

    @property
    def strides(self) -> Point:
        """The source's strides by the target's dimensions: how far apart neighbours along a dimension lie."""
        return tuple(self.held.strides[d] if d >= 0 else 0 for d in self.part.axes)


def relocate(origin: Origin, target: LocalTensor, name: str, start: Point, stop: Point) -> Iterator[Copy]:
    """Yield the copies of a box of the target straight from a source rank's part into a target rank's part."""
    for piece, low, high in pieces_in(target, start, stop):
        offsets = origin.offset(low), offset_in(target, piece, low)
        extent = tuple(map(int.__sub__, high, low))
        yield merged(origin.part.source, name, extent, offsets, origin.strides, target.strides)


def load(origin: Origin, name: str, box: tuple[Point, Point], start: Point, stop: Point) -> Copy:
    """Return the copy of a part of `box` out of a source rank's part into a dense staging array of the whole box."""
    strides = dense(tuple(map(int.__sub__, box[1], box[0])))
    there = sum(map(int.__mul__, map(int.__sub__, start, box[0]), strides))
    extent = tuple(map(int.__sub__, stop, start))
    return merged(origin.part.source, name, extent, (origin.offset(start), there), origin.strides, strides)


def store(target: LocalTensor, name: str, start: Point, stop: Point) -> Iterator[Copy]:
    """Yield the copies out of a dense staging array of a box into a target rank's part."""
    strides = dense(tuple(map(int.__sub__, stop, start)))
    for piece, low, high in pieces_in(target, start, stop):
        here = sum(map(int.__mul__, map(int.__sub__, low, start), strides))
        extent = tuple(map(int.__sub__, high, low))
        yield merged(name, name, extent, (here, offset_in(target, piece, low)), strides, target.strides)
