"""What every target tensor is made of: an expression of source tensors.

    Recipe({
        "layers.0.qkv_proj.weight": cat("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"),
        "layers.0.w13": quantized(
            stack(*(cat(f"experts.{e}.gate", f"experts.{e}.up") for e in range(8))), scale="layers.0.w13_scale"
        ),
        "lm_head.weight": source("embed.weight").pad(0, to=151_936).cast(),
    })

A target that has no expression takes the source tensor of its own name. How a fused tensor is spread over tensor
parallel ranks is the layout's matter (`packed`), not the recipe's: an expression makes the whole tensor.

**Parts.** Every operation only moves elements, so an expression comes down to boxes. Within the box of a `Part`, target
index t stands for source index

    source_start[d] + t[a] - target_start[a]    where axes[a] == d,    and source_start[d] where no a has that d

Boxes of one target never overlap. What no box covers is padding: it is not written, so a target keeps there what it
has. A cast changes an element on its way; quantization also needs the other elements of its block, of two innermost
dimensions, hence a whole block in one place. In a block that is partly padding, padding counts as zeros and is written.
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
    """A box of a target tensor that comes from one source tensor. A target dimension that `stack` made has axis -1."""

    source: str
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]


class Made(NamedTuple):
    """What an expression comes to: its shape, the sources' dtype, that of a cast ("" for the target's own), parts."""

    shape: Shape
    dtype: str
    cast: str | None
    parts: list[Part]


class Expression:
    """A tensor that is made of source tensors; each operation returns a new one. Begin with `source`."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[SourceOf], Made]) -> None:
        self._make = make

    def resolve(self, source_of: SourceOf) -> Made:
        """Return what it comes to, given each source's shape and dtype. Raises UsageError for what does not fit."""
        return self._make(source_of)

    def _then(self, change: Callable[[Made], Made]) -> Expression:
        return Expression(lambda source_of: change(self._make(source_of)))

    def permute(self, *dims: int) -> Expression:
        """Reorder the dimensions: the result's dimension i is this one's `dims[i]`."""
        return self._then(lambda made: _permuted(made, dims))

    def transpose(self, first: int = -2, second: int = -1) -> Expression:
        """Exchange two dimensions."""

        def change(made: Made) -> Made:
            dims = list(range(len(made.shape)))
            a, b = _dim(first, len(dims)), _dim(second, len(dims))
            dims[a], dims[b] = dims[b], dims[a]
            return _permuted(made, dims)

        return self._then(change)

    def narrow(self, dim: int, start: int, length: int) -> Expression:
        """Take `length` indices of a dimension from `start` on."""
        return self._then(lambda made: _narrowed(made, dim, start, length))

    def select(self, dim: int, index: int) -> Expression:
        """Take one index of a dimension, which then is no more."""

        def change(made: Made) -> Made:
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
        """Make a dimension `to` long: `before` elements of padding, these, and padding for the rest."""
        return self._then(lambda made: _padded(made, dim, to, before))

    def cast(self, dtype: str = "") -> Expression:
        """Convert the elements to a type, without one to that of the target."""
        name = dtype_name(dtype) if dtype else ""
        return self._then(lambda made: made._replace(cast=name))


def source(name: str) -> Expression:
    """Return the source tensor of that name. Where an expression is expected, the name alone means the same."""

    def make(source_of: SourceOf) -> Made:
        shape, dtype = source_of(name)
        zeros = (0,) * len(shape)
        parts = [Part(name, zeros, zeros, shape, tuple(range(len(shape))))] if all(shape) else []
        return Made(shape, dtype, None, parts)

    return Expression(make)


def cat(*expressions: Expression | str, dim: int = 0) -> Expression:
    """Put tensors one after another along a dimension: q, k and v, or gate and up."""
    several = _several(expressions)

    def make(source_of: SourceOf) -> Made:
        made = [expression.resolve(source_of) for expression in several]
        at = _dim(dim, len(made[0].shape))
        if len({_without(one.shape, at) for one in made}) != 1:
            raise UsageError(f"tensors of shapes {[one.shape for one in made]} cannot follow one another along {dim}")
        whole = _replaced(made[0].shape, at, sum(one.shape[at] for one in made))
        parts, first = [], 0
        for one in made:
            parts += [part._replace(target_start=_moved(part.target_start, at, first)) for part in one.parts]
            first += one.shape[at]
        return Made(whole, *_common(made), parts)

    return Expression(make)


def stack(*expressions: Expression | str, dim: int = 0) -> Expression:
    """Put tensors of one shape beside each other along a new dimension: experts."""
    several = _several(expressions)

    def make(source_of: SourceOf) -> Made:
        made = [expression.resolve(source_of) for expression in several]
        at = _dim(dim, len(made[0].shape) + 1)
        if len({one.shape for one in made}) != 1:
            raise UsageError(f"tensors of shapes {sorted({one.shape for one in made})} cannot be stacked")
        parts = [
            Part(name, begin, _with(start, at, i), _with(extent, at, 1), _with(axes, at, -1))
            for i, one in enumerate(made)
            for name, begin, start, extent, axes in one.parts
        ]
        return Made(_with(made[0].shape, at, len(made)), *_common(made), parts)

    return Expression(make)


@dataclass(frozen=True, slots=True)
class Quantized:
    """An expression whose target is quantized by blocks, with the blocks' scales in another target tensor."""

    expression: Expression
    scale: str
    block: tuple[int, int]


def quantized(expression: Expression | str, *, scale: str, block: tuple[int, int] = (128, 128)) -> Quantized:
    """Quantize a target by blocks of its two innermost dimensions; `scale` names the tensor that takes their scales.

    Blocks are counted from index 0 of the whole target. The scale tensor has the same shape, but ceil(n / block) for
    the two innermost dimensions, and is spread in the same way over the ranks.
    """
    rows, columns = (int(size) for size in block)
    if min(rows, columns) < 1:
        raise UsageError(f"block is {block!r}, expected two sizes from 1")
    return Quantized(_several([expression])[0], scale, (rows, columns))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What each target tensor is made of, by name: an expression, a source's name, or what `quantized` returns.

    `unused` has patterns (fnmatch) of source tensors that go nowhere, `untouched` of target tensors that no update
    writes: tables of rotary embeddings, scales of a KV cache. All others must be named on both sides.
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
        """Tell whether a source tensor may go nowhere."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.unused)

    def is_untouched(self, name: str) -> bool:
        """Tell whether a target tensor is none of an update's."""
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


def _common(made: list[Made]) -> tuple[str, str | None]:
    """Return the dtype and the cast that all have; raise UsageError where they differ."""
    kinds = {(one.dtype, one.cast) for one in made}
    if len(kinds) != 1:
        names = sorted(dtype if cast is None else f"{dtype} cast to {cast or 'the target'}" for dtype, cast in kinds)
        raise UsageError(f"tensors of several types cannot be one: {', '.join(names)}; make them one in the trainer")
    return kinds.pop()


def _permuted(made: Made, dims: Iterable[int]) -> Made:
    order = [_dim(dim, len(made.shape)) for dim in dims]
    if sorted(order) != list(range(len(made.shape))):
        raise UsageError(f"dims are {order}, expected each of 0 to {len(made.shape) - 1} once")

    def turned(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    parts = [Part(p.source, p.source_start, *map(turned, p[2:])) for p in made.parts]
    return made._replace(shape=turned(made.shape), parts=parts)


def _narrowed(made: Made, dim: int, start: int, length: int) -> Made:
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


def _padded(made: Made, dim: int, to: int, before: int) -> Made:
    at = _dim(dim, len(made.shape))
    if before < 0 or to < before + made.shape[at]:
        raise UsageError(f"dimension {dim} of {made.shape} cannot be {to} long with {before} of padding before it")
    parts = [part._replace(target_start=_moved(part.target_start, at, before)) for part in made.parts]
    return made._replace(shape=_replaced(made.shape, at, to), parts=parts)
