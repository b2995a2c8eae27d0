"""Recipes: each target tensor as an expression of source tensors.

    Recipe({
        "layers.0.qkv_proj.weight": cat("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"),
        "layers.0.w13": quantized(
            stack(*(cat(f"experts.{e}.gate", f"experts.{e}.up") for e in range(8))), scale="layers.0.w13_scale"
        ),
        "lm_head.weight": source("embed.weight").pad(0, to=151_936).cast(),
    })

A target without an expression takes the source tensor of its own name. An expression always makes the whole tensor; the
layout (`packed`) describes how a fused tensor is spread over tensor-parallel ranks.

**Parts.** Every operation only moves elements, so an expression resolves to boxes. Within the box of a `Part`, target
index t takes source index

    source_start[d] + t[a] - target_start[a]    where axes[a] == d,    and source_start[d] where no a has that d

Boxes of one target never overlap. Elements that no box covers are padding: updates do not write them, so the target
keeps their values. A cast converts each element by itself. Quantization also needs the other elements of the block (in
the two innermost dimensions), so one rank must have the whole block. In a block that is partly padding, padding counts
as zeros and is written.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import UsageError
from .dtypes import dtype_name

__all__ = ["Expression", "Part", "Quantized", "Recipe", "cat", "quantized", "source", "stack"]

Shape = tuple[int, ...]
SourceOf = Callable[[str], tuple[Shape, str]]


class Part(NamedTuple):
    """A box of a target tensor that is made from one source tensor. Axis -1 marks a dimension that `stack` made."""

    source: str
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]


class ResolvedExpression(NamedTuple):
    """A resolved expression: its shape, its sources' dtype, the dtype it is cast to ("": the target's), its parts."""

    shape: Shape
    dtype: str
    cast: str | None
    parts: list[Part]


class Expression:
    """A tensor made from source tensors. Begin with `source`; each operation returns a new expression."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[SourceOf], ResolvedExpression]) -> None:
        self._make = make

    def resolve(self, source_of: SourceOf) -> ResolvedExpression:
        """Resolve the expression, given each source's shape and dtype. Raises UsageError if these do not fit."""
        return self._make(source_of)

    def _then(self, change: Callable[[ResolvedExpression], ResolvedExpression]) -> Expression:
        return Expression(lambda source_of: change(self._make(source_of)))

    def permute(self, *dims: int) -> Expression:
        """Reorder the dimensions: dimension i of the result is dimension `dims[i]` of this expression."""
        return self._then(lambda made: _permuted(made, dims))

    def transpose(self, first: int = -2, second: int = -1) -> Expression:
        """Exchange two dimensions."""

        def change(made: ResolvedExpression) -> ResolvedExpression:
            dims = list(range(len(made.shape)))
            a, b = _dim(first, len(dims)), _dim(second, len(dims))
            dims[a], dims[b] = dims[b], dims[a]
            return _permuted(made, dims)

        return self._then(change)

    def narrow(self, dim: int, start: int, length: int) -> Expression:
        """Take `length` indices of a dimension from `start` on."""
        return self._then(lambda made: _narrowed(made, dim, start, length))

    def select(self, dim: int, index: int) -> Expression:
        """Take one index of a dimension, and drop the dimension."""

        def change(made: ResolvedExpression) -> ResolvedExpression:
            at = _dim(dim, len(made.shape))
            one = _narrowed(made, at, index, 1)
            parts = [
                Part(
                    p.source, p.source_start, *(_without(numbers, at) for numbers in (p.target_start, p.extent, p.axes))
                )
                for p in one.parts
            ]
            return one._replace(shape=_without(one.shape, at), parts=parts)

        return self._then(change)

    def pad(self, dim: int, *, to: int, before: int = 0) -> Expression:
        """Pad a dimension to the extent `to`: `before` indices of padding, then these elements, then more padding."""
        return self._then(lambda made: _padded(made, dim, to, before))

    def cast(self, dtype: str = "") -> Expression:
        """Convert the elements to `dtype`, or without an argument to the target's dtype."""
        name = dtype_name(dtype) if dtype else ""
        return self._then(lambda made: made._replace(cast=name))


def source(name: str) -> Expression:
    """Return the source tensor of that name. A plain name means the same wherever an expression is expected."""

    def make(source_of: SourceOf) -> ResolvedExpression:
        shape, dtype = source_of(name)
        zeros = (0,) * len(shape)
        parts = [Part(name, zeros, zeros, shape, tuple(range(len(shape))))] if all(shape) else []
        return ResolvedExpression(shape, dtype, None, parts)

    return Expression(make)


def cat(*expressions: Expression | str, dim: int = 0) -> Expression:
    """Concatenate tensors along a dimension: q, k and v, or gate and up."""
    several = _several(expressions)

    def make(source_of: SourceOf) -> ResolvedExpression:
        made = [expression.resolve(source_of) for expression in several]
        at = _dim(dim, len(made[0].shape))
        if len({_without(one.shape, at) for one in made}) != 1:
            raise UsageError(
                f"cat: tensors of shapes {[one.shape for one in made]} differ in another dimension than {dim}"
            )
        whole = _replaced(made[0].shape, at, sum(one.shape[at] for one in made))
        parts, first = [], 0
        for one in made:
            parts += [part._replace(target_start=_moved(part.target_start, at, first)) for part in one.parts]
            first += one.shape[at]
        return ResolvedExpression(whole, *_common(made), parts)

    return Expression(make)


def stack(*expressions: Expression | str, dim: int = 0) -> Expression:
    """Stack tensors of the same shape along a new dimension: experts."""
    several = _several(expressions)

    def make(source_of: SourceOf) -> ResolvedExpression:
        made = [expression.resolve(source_of) for expression in several]
        at = _dim(dim, len(made[0].shape) + 1)
        if len({one.shape for one in made}) != 1:
            raise UsageError(f"tensors of shapes {sorted({one.shape for one in made})} cannot be stacked")
        parts = [
            Part(name, begin, _with(start, at, i), _with(extent, at, 1), _with(axes, at, -1))
            for i, one in enumerate(made)
            for name, begin, start, extent, axes in one.parts
        ]
        return ResolvedExpression(_with(made[0].shape, at, len(made)), *_common(made), parts)

    return Expression(make)


@dataclass(frozen=True, slots=True)
class Quantized:
    """An expression whose result is quantized by blocks; the blocks' scales go to another target tensor."""

    expression: Expression
    scale: str
    block: tuple[int, int]


def quantized(expression: Expression | str, *, scale: str, block: tuple[int, int] = (128, 128)) -> Quantized:
    """Quantize a target by blocks of its two innermost dimensions. `scale` names the target tensor for the scales.

    Blocks are counted from index 0 of the whole target. The tensor of scales has the target's shape, except that the
    two innermost dimensions have ceil(n / block) indices. It must be spread over the ranks in the same way. Raises
    UsageError for block sizes below 1.
    """
    rows, columns = (int(size) for size in block)
    if min(rows, columns) < 1:
        raise UsageError(f"block is {block!r}, expected two sizes of at least 1")
    return Quantized(_several([expression])[0], scale, (rows, columns))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of each target tensor, by name: an expression, a source's name, or the result of `quantized`.

    `unused` lists patterns (fnmatch) of source tensors that no target takes. `untouched` lists patterns of target
    tensors that no update writes: tables of rotary embeddings, scales of a KV cache. All other tensors of both sides
    must occur in the recipe or have the same name on both sides.
    """

    targets: Mapping[str, Expression | Quantized | str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unused", "untouched"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is a string, expected several patterns")
        object.__setattr__(self, "targets", dict(self.targets))

    def is_unused(self, name: str) -> bool:
        """Return whether a source tensor is listed as one that no target takes."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unused)

    def is_untouched(self, name: str) -> bool:
        """Return whether a target tensor is listed as one that no update writes."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.untouched)


def _several(expressions: Iterable[Expression | str]) -> list[Expression]:
    several = [source(one) if isinstance(one, str) else one for one in expressions]
    for one in several:
        if not isinstance(one, Expression):
            raise UsageError(f"expected an expression or a source tensor's name, got {type(one).__name__}")
    if not several:
        raise UsageError("expected at least one expression")
    return several


def _dim(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise UsageError(f"there is no dimension {dim}: the tensor has {dims}")
    return dim % dims


def _without(values: tuple[int, ...], at: int) -> tuple[int, ...]:
    return values[:at] + values[at + 1 :]


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at:])


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _moved(values: tuple[int, ...], at: int, by: int) -> tuple[int, ...]:
    return _replaced(values, at, values[at] + by)


def _common(made: list[ResolvedExpression]) -> tuple[str, str | None]:
    """Return the common dtype and cast of resolved expressions. Raises UsageError if they differ."""
    kinds = {(one.dtype, one.cast) for one in made}
    if len(kinds) != 1:
        names = sorted(dtype if cast is None else f"{dtype} cast to {cast or 'the target'}" for dtype, cast in kinds)
        raise UsageError(f"tensors of several types cannot be one: {', '.join(names)}; make them one in the trainer")
    return kinds.pop()


def _permuted(made: ResolvedExpression, dims: Iterable[int]) -> ResolvedExpression:
    order = [_dim(dim, len(made.shape)) for dim in dims]
    if sorted(order) != list(range(len(made.shape))):
        raise UsageError(f"dims are {order}, expected each of 0 to {len(made.shape) - 1} once")

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    parts = [Part(p.source, p.source_start, *map(turned, p[2:])) for p in made.parts]
    return made._replace(shape=turned(made.shape), parts=parts)


def _narrowed(made: ResolvedExpression, dim: int, start: int, length: int) -> ResolvedExpression:
    at = _dim(dim, len(made.shape))
    if start < 0 or length < 1 or start + length > made.shape[at]:
        raise UsageError(f"{start} to {start + length} (exclusive) is not within dimension {dim} of {made.shape}")
    parts = []
    for part in made.parts:
        low = max(part.target_start[at], start)
        high = min(part.target_start[at] + part.extent[at], start + length)
        if low < high:
            begin, axis = part.source_start, part.axes[at]
            if axis >= 0:
                begin = _moved(begin, axis, low - part.target_start[at])
            moved, extent = _replaced(part.target_start, at, low - start), _replaced(part.extent, at, high - low)
            parts.append(Part(part.source, begin, moved, extent, part.axes))
    return made._replace(shape=_replaced(made.shape, at, length), parts=parts)


def _padded(made: ResolvedExpression, dim: int, to: int, before: int) -> ResolvedExpression:
    at = _dim(dim, len(made.shape))
    if before < 0 or to < before + made.shape[at]:
        raise UsageError(f"dimension {dim} of {made.shape} cannot be {to} long with {before} of padding before it")
    parts = [part._replace(target_start=_moved(part.target_start, at, before)) for part in made.parts]
    return made._replace(shape=_replaced(made.shape, at, to), parts=parts)
