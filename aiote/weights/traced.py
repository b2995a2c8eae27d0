"""Where the elements of a tensor without values come from: an inference engine's loader moves it as if it had some.

`Elements` are a strided view of a storage, and a storage is a source tensor or what was put together of such views.
The libraries themselves say what a view is: numpy and torch move a stand-in without memory (`traced_numpy`,
`traced_torch`), and its strides are read. So a loader's call means what it means in the library of the arrays that it
writes to. What neither of these modules knows is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from .boxes import Array, boxes_between
from .placement import dense

__all__ = ["Elements", "Log", "Piece", "RecordError", "flat", "put_together", "whole_numbers"]

Shape = tuple[int, ...]


class RecordError(UsageError, AttributeError):
    """A loader did what no recipe can say. An AttributeError as well, so that `hasattr` and `getattr` work in it."""


class Piece(NamedTuple):
    """A box of a traced tensor: element i of it is that at offset + i . strides of a dense source tensor."""

    start: Shape
    extent: Shape
    source: str
    offset: int
    strides: Shape


class Log(Protocol):
    """Who notes copies and refusals."""

    def copied(self, target: Any, elements: Elements) -> None:
        """Note that a part of a parameter, as a view of it, gets these elements, which have its shape."""

    def refused(self, error: RecordError) -> RecordError:
        """Note a refusal, so that it is told even if the loader catches it; return it."""

    def loaded_in(self, values: Any) -> str | None:
        """Return the parameter of which values have elements that were copied before, if they are of any."""


class Elements:
    """See the module. `casts` are the types that the elements had so far, by name; `name` is a source's, for errors."""

    __slots__ = ("_storage", "_whole", "casts", "name", "offset", "shape", "strides")

    def __init__(
        self,
        name: str,
        casts: tuple[str, ...],
        storage: tuple[Piece, ...],
        whole: Shape,
        view: tuple[Shape, int, Shape],
    ) -> None:
        self.name, self.casts = name, casts
        self._storage, self._whole = storage, whole
        self.shape, self.offset, self.strides = view

    @classmethod
    def of(cls, name: str, shape: Shape, dtype: str) -> Elements:
        """Return those of a source tensor."""
        return cls.dense(name, (dtype,), shape, (Piece((0,) * len(shape), shape, name, 0, dense(shape)),))

    @classmethod
    def dense(cls, name: str, casts: tuple[str, ...], shape: Shape, pieces: tuple[Piece, ...]) -> Elements:
        """Return those of a new storage that is made of pieces."""
        return cls(name, casts, pieces, shape, (shape, 0, dense(shape)))

    @property
    def dtype(self) -> str:
        """Their type now, by safetensors' name."""
        return self.casts[-1]

    def view(self, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Elements:
        """Return another view of the same storage, all in elements."""
        return Elements(self.name, self.casts, self._storage, self._whole, (tuple(shape), offset, tuple(strides)))

    def pieces(self) -> tuple[Piece, ...]:
        """Return where each element comes from. Raises RecordError where that takes too many boxes."""
        piece = self._storage[0] if len(self._storage) == 1 else None
        if piece is not None and (piece.extent, piece.strides) == (self._whole, dense(self._whole)):
            return (Piece((0,) * len(self.shape), self.shape, piece.source, piece.offset + self.offset, self.strides),)
        here = Array(self._whole), self.offset, self.strides
        there = Array(self.shape), 0, dense(self.shape)
        try:
            found = boxes_between(self.shape, here, there)
        except UsageError as error:
            raise RecordError(f"{self.name}: what the loader makes of it cannot be said: {error}") from None
        return tuple(part for box in found for piece in self._storage for part in _common(piece, *box))

    def copied(self) -> Elements:
        """Return the same in a dense storage of their own."""
        return Elements.dense(self.name, self.casts, self.shape, self.pieces())

    def cast(self, dtype: str) -> Elements:
        """Return them converted to a type."""
        if dtype == self.dtype:
            return self
        return Elements.dense(self.name, (*self.casts, dtype), self.shape, self.pieces())

    def reshaped(self, shape: Sequence[int]) -> Elements:
        """Return them in the same order with another shape, which has as many."""
        strides = _viewed(self.shape, self.strides, shape)
        if strides is None:
            return self.copied().view(shape, 0, dense(shape))
        return self.view(shape, self.offset, strides)

    def gathered(self, at: int, indices: Sequence[int]) -> Elements:
        """Return what a dimension has at each of these indices, which are from 0 and within it."""
        several = []
        for first, step, length in _runs(indices):
            shape, strides = _put(self.shape, at, length), _put(self.strides, at, self.strides[at] * step)
            several.append(self.view(shape, self.offset + first * self.strides[at], strides))
        if not several:
            return Elements.dense(self.name, self.casts, _put(self.shape, at, 0), ())
        return put_together(several, at)


def put_together(several: Sequence[Elements], at: int) -> Elements:
    """Return tensors one after another along a dimension. Raises RecordError for shapes or types that differ."""
    first = several[0]
    if len({(_put(one.shape, at, 0), one.casts) for one in several}) != 1:
        made = ", ".join(f"{one.name} {' to '.join(one.casts)} {one.shape}" for one in several)
        raise RecordError(f"{first.name}: the loader puts together tensors that differ in shape or type: {made}")
    pieces: list[Piece] = []
    begin = 0
    for one in several:
        pieces += [piece._replace(start=_put(piece.start, at, piece.start[at] + begin)) for piece in one.pieces()]
        begin += one.shape[at]
    return Elements.dense(first.name, first.casts, _put(first.shape, at, begin), tuple(pieces))


def flat(*values: Any) -> Iterator[Any]:
    """Yield what lists, tuples and mappings among values hold, however deep."""
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
    """Return integers of a list, a tuple, a range or an array of one dimension; None for anything else."""
    several = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(several, (list, tuple, range)) or not all(type(one) is int for one in several):
        return None
    return list(several)


def _common(piece: Piece, start: Shape, begin: Shape, extent: Shape, axes: Shape) -> Iterator[Piece]:
    """Yield what a box of a view takes of a piece of its storage, as a piece of the view.

    The box begins at `start` in the storage and at `begin` in the view; extent and axes are by the view's dimensions.
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
    yield Piece(
        tuple(at + low[axis] - start[axis] if axis >= 0 else at for at, axis in dims),
        tuple(high[axis] - low[axis] if axis >= 0 else 1 for _, axis in dims),
        piece.source,
        offset,
        tuple(piece.strides[axis] if axis >= 0 else 0 for _, axis in dims),
    )


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first, step and length of runs that go up or down by one, or stay."""
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
    """Return the strides of a view of another shape, None where there is none: as numpy's attempt_nocopy_reshape."""
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
