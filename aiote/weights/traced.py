"""Trace where the elements of a tensor without values come from, while an inference engine's loader moves the tensor.

`Elements` are a strided view of a storage. A storage is a source tensor, or a combination of such views. The libraries
themselves define their views: numpy and torch apply a call to a stand-in without memory (`traced_numpy`,
`traced_torch`), and these modules read the strides of the result. So a loader's call means what it means in the library
of the arrays that the loader writes to. These modules refuse all other calls, with an error that names the call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from .boxes import Array, boxes_between
from .placement import dense

__all__ = ["Elements", "Log", "RecordError", "TracedBox", "flat", "put_together", "whole_numbers"]

Shape = tuple[int, ...]


class RecordError(UsageError, AttributeError):
    """A loader did something that no recipe can express.

    This is an AttributeError as well, so that `hasattr` and `getattr` work in a loader.
    """


class TracedBox(NamedTuple):
    """A box of a traced tensor. Its element i is element offset + i . strides of a dense source tensor."""

    start: Shape
    extent: Shape
    source: str
    offset: int
    strides: Shape


class Log(Protocol):
    """A log that records a loader's copies and refusals."""

    def copied(self, target: Any, elements: Elements) -> None:
        """Record that the loader copies elements to a view of a parameter of the same shape."""

    def refused(self, error: RecordError) -> RecordError:
        """Record a refusal, so that it is raised at the end even if the loader catches it; return it."""

    def loaded_in(self, values: Any) -> str | None:
        """Return the name of the parameter with which `values` share elements that the loader has copied, or None."""


class Elements:
    """A strided view of a storage. `casts` names the types of the elements so far; `name` is a source's, for errors."""

    __slots__ = ("_storage", "_whole", "casts", "name", "offset", "shape", "strides")

    def __init__(
        self,
        name: str,
        casts: tuple[str, ...],
        storage: tuple[TracedBox, ...],
        whole: Shape,
        view: tuple[Shape, int, Shape],
    ) -> None:
        self.name, self.casts = name, casts
        self._storage, self._whole = storage, whole
        self.shape, self.offset, self.strides = view

    @classmethod
    def of(cls, name: str, shape: Shape, dtype: str) -> Elements:
        """Return the elements of a source tensor."""
        return cls.dense(name, (dtype,), shape, (TracedBox((0,) * len(shape), shape, name, 0, dense(shape)),))

    @classmethod
    def dense(cls, name: str, casts: tuple[str, ...], shape: Shape, pieces: tuple[TracedBox, ...]) -> Elements:
        """Return the elements of a new dense storage that consists of pieces."""
        return cls(name, casts, pieces, shape, (shape, 0, dense(shape)))

    @property
    def dtype(self) -> str:
        """The present type of the elements, by safetensors' name."""
        return self.casts[-1]

    def view(self, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Elements:
        """Return another view of the same storage. Offset and strides are in elements."""
        return Elements(self.name, self.casts, self._storage, self._whole, (tuple(shape), offset, tuple(strides)))

    def pieces(self) -> tuple[TracedBox, ...]:
        """Return pieces that say where each element comes from. Raises RecordError if these are too many boxes."""
        piece = self._storage[0] if len(self._storage) == 1 else None
        if piece is not None and (piece.extent, piece.strides) == (self._whole, dense(self._whole)):
            return (
                TracedBox((0,) * len(self.shape), self.shape, piece.source, piece.offset + self.offset, self.strides),
            )
        here = Array(self._whole), self.offset, self.strides
        there = Array(self.shape), 0, dense(self.shape)
        try:
            found = boxes_between(self.shape, here, there)
        except UsageError as error:
            raise RecordError(
                f"{self.name}: the loader's result cannot be described as boxes of sources: {error}"
            ) from None
        return tuple(part for box in found for piece in self._storage for part in _common(piece, *box))

    def copied(self) -> Elements:
        """Return the same elements in a dense storage of their own."""
        return Elements.dense(self.name, self.casts, self.shape, self.pieces())

    def cast(self, dtype: str) -> Elements:
        """Return the elements converted to a type."""
        if dtype == self.dtype:
            return self
        return Elements.dense(self.name, (*self.casts, dtype), self.shape, self.pieces())

    def reshaped(self, shape: Sequence[int]) -> Elements:
        """Return the elements in the same order with another shape, which must have as many elements."""
        strides = _viewed(self.shape, self.strides, shape)
        if strides is None:
            return self.copied().view(shape, 0, dense(shape))
        return self.view(shape, self.offset, strides)

    def gathered(self, at: int, indices: Sequence[int]) -> Elements:
        """Return the elements at these indices of a dimension. The indices must be within it, and not negative."""
        several = []
        for first, step, length in _runs(indices):
            shape, strides = _put(self.shape, at, length), _put(self.strides, at, self.strides[at] * step)
            several.append(self.view(shape, self.offset + first * self.strides[at], strides))
        if not several:
            return Elements.dense(self.name, self.casts, _put(self.shape, at, 0), ())
        return put_together(several, at)


def put_together(several: Sequence[Elements], at: int) -> Elements:
    """Concatenate tensors along a dimension. Raises RecordError if their shapes or types differ."""
    first = several[0]
    if len({(_put(one.shape, at, 0), one.casts) for one in several}) != 1:
        made = ", ".join(f"{one.name} {' to '.join(one.casts)} {one.shape}" for one in several)
        raise RecordError(f"{first.name}: the loader joins tensors that differ in shape or type: {made}")
    pieces: list[TracedBox] = []
    begin = 0
    for one in several:
        pieces += [piece._replace(start=_put(piece.start, at, piece.start[at] + begin)) for piece in one.pieces()]
        begin += one.shape[at]
    return Elements.dense(first.name, first.casts, _put(first.shape, at, begin), tuple(pieces))


def flat(*values: Any) -> Iterator[Any]:
    """Yield values, and in place of lists, tuples, mappings and slices the values in them, at any depth."""
    for one in values:
        if isinstance(one, dict):
            yield from flat(*one.values())
        elif isinstance(one, (list, tuple)):
            yield from flat(*one)
        elif isinstance(one, slice):
            yield from (one.start, one.stop, one.step)
        else:
            yield one


def whole_numbers(values: Any) -> list[int] | None:
    """Return the integers of a list, a tuple, a range or an array of one dimension; None for anything else."""
    several = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(several, (list, tuple, range)) or not all(type(one) is int for one in several):
        return None
    return list(several)


def _common(piece: TracedBox, start: Shape, begin: Shape, extent: Shape, axes: Shape) -> Iterator[TracedBox]:
    """Yield the part of a box of a view that lies in a piece of the view's storage, as a piece of the view.

    The box begins at `start` in the storage and at `begin` in the view. `extent` and `axes` have one number for each
    dimension of the view.
    """
    length = [1] * len(start)
    for size, axis in zip(extent, axes, strict=True):
        if axis >= 0:
            length[axis] = size
    low = list(map(max, start, piece.start))
    high = [min(a + n, b + m) for a, n, b, m in zip(start, length, piece.start, piece.extent, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    offset = piece.offset + sum((a - b) * stride for a, b, stride in zip(low, piece.start, piece.strides, strict=True))
    dims = list(zip(begin, axes, strict=True))
    yield TracedBox(
        tuple(at + low[axis] - start[axis] if axis >= 0 else at for at, axis in dims),
        tuple(high[axis] - low[axis] if axis >= 0 else 1 for _, axis in dims),
        piece.source,
        offset,
        tuple(piece.strides[axis] if axis >= 0 else 0 for _, axis in dims),
    )


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the first index, the step and the length of runs of indices; the step is 1, 0 or -1."""
    first = 0
    while first < len(indices):
        last = first + 1
        step = indices[last] - indices[first] if last < len(indices) else 2
        if abs(step) <= 1:
            while last < len(indices) and indices[last] - indices[last - 1] == step:
                last += 1
        yield indices[first], step if last - first > 1 else 1, last - first
        first = last


def _put(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at + 1 :])


def _viewed(shape: Shape, strides: Shape, wanted: Sequence[int]) -> Shape | None:
    """Return the strides of a view with another shape, None if it needs a copy, like numpy's attempt_nocopy_reshape."""
    old = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    new = [extent for extent in wanted if extent != 1]
    if math.prod(wanted) == 0:
        return (0,) * len(wanted)
    found: list[int] = []
    i = j = 0
    while j < len(new):
        begin, first, here, there = j, i, new[j], old[i][0]
        while here != there:
            if here < there:
                j += 1
                here *= new[j]
            else:
                i += 1
                there *= old[i][0]
        run = old[first : i + 1]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in itertools.pairwise(run)):
            return None
        found += [run[-1][1] * step for step in dense(new[begin : j + 1])]
        i, j = i + 1, j + 1
    rest = iter(found)
    return tuple(0 if extent == 1 else next(rest) for extent in wanted)
