"""A tensor without values, which an inference engine's loader slices, turns and copies in place of the real one.

It notes where its elements come from: strided views of named source tensors, several where tensors were put together.
torch hands it the operations of its own tensors (`__torch_function__`), numpy those of its arrays
(`__array_function__`); neither is imported here. What is no move of elements is refused by name: a loader that looks
at values fails when it is recorded, and not later.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError
from .dtypes import LONG_NAMES, dtype_name
from .placement import dense

__all__ = ["Log", "Piece", "RecordError", "Traced"]

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
    """Who takes note of copies."""

    def copied(self, target: Any, traced: Traced) -> None:
        """Take note that a part of a parameter, as a view of it, gets the elements of a traced tensor."""


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """See the module. `casts` are the types that its elements were converted to so far, by name."""

    __slots__ = ("_log", "casts", "name", "pieces", "shape")

    def __init__(self, log: Log, name: str, shape: Shape, pieces: Sequence[Piece], casts: tuple[str, ...]) -> None:
        self._log, self.name, self.shape = log, name, tuple(map(int, shape))
        self.pieces, self.casts = tuple(pieces), casts

    @classmethod
    def of(cls, log: Log, name: str, shape: Shape, dtype: str) -> Traced:
        """Return a source tensor as a loader gets it."""
        return cls(log, name, shape, [Piece((0,) * len(shape), shape, name, 0, dense(shape))], (dtype,))

    def __repr__(self) -> str:
        return f"<traced {self.name} {self.dtype} {self.shape}>"

    def _with(self, shape: Sequence[int], pieces: Sequence[Piece]) -> Traced:
        return Traced(self._log, self.name, tuple(shape), pieces, self.casts)

    def _refuse(self, what: str) -> RecordError:
        return RecordError(f"{self.name}: the loader calls {what}, which moves no elements that a recipe could name")

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(name)

    # What a loader asks.

    @property
    def dtype(self) -> Any:
        """The type: torch's where the program has loaded torch, else safetensors' name of it."""
        name = self.casts[-1]
        torch = sys.modules.get("torch")
        return getattr(torch, LONG_NAMES[name], name) if torch is not None else name

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def data(self) -> Traced:
        """Itself, as `detach` gives."""
        return self

    @property
    def T(self) -> Traced:
        """It with its dimensions reversed."""
        return self.permute(*reversed(range(self.ndim)))

    def dim(self) -> int:
        """Return how many dimensions it has."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return its shape, or the extent of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return how many elements it has."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise self._refuse("bool()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RecordError(
            f"{self.name}: the loader reads its values; a recorded loader copies with tensor.copy_ or numpy.copyto"
        )

    # What leaves every element where it is.

    def contiguous(self, *args: Any, **kwargs: Any) -> Traced:
        """Return itself: a copy has the same elements."""
        return self

    clone = detach = cpu = cuda = copy = requires_grad_ = contiguous

    def to(self, *args: Any, **kwargs: Any) -> Traced:
        """Convert to the type that is among the arguments, if any; the device does not matter."""
        for one in (*args, *kwargs.values()):
            if isinstance(one, bool) or one is None:
                continue
            try:
                name = dtype_name(getattr(one, "dtype", one))
            except UsageError:
                continue
            return Traced(self._log, self.name, self.shape, self.pieces, (*self.casts, name))
        return self

    type = astype = to

    def float(self) -> Traced:
        """Convert to 32 bits."""
        return self.to("F32")

    def half(self) -> Traced:
        """Convert to 16 bits."""
        return self.to("F16")

    def bfloat16(self) -> Traced:
        """Convert to bfloat16."""
        return self.to("BF16")

    # What takes or moves elements.

    def narrow(self, dim: int, start: int, length: int) -> Traced:
        """Take `length` indices of a dimension from `start` on."""
        at, first = self._dim(dim), int(start)
        first += self.shape[at] if first < 0 else 0
        if not 0 <= first <= first + length <= self.shape[at]:
            raise RecordError(f"{self.name}: narrow({dim}, {start}, {length}) is not within {self.shape}")
        return self._sliced(at, first, int(length), 1)

    def _sliced(self, at: int, first: int, length: int, step: int) -> Traced:
        pieces = []
        for piece in self.pieces:
            low, high = piece.start[at], piece.start[at] + piece.extent[at]
            begin = max(0, -(-(low - first) // step))  # of the chosen indices the first that is within the piece
            count = min(length, -(-(high - first) // step)) - begin
            here = first + begin * step - low
            if count > 0:
                pieces.append(
                    piece._replace(
                        start=_put(piece.start, at, begin),
                        extent=_put(piece.extent, at, count),
                        offset=piece.offset + here * piece.strides[at],
                        strides=_put(piece.strides, at, piece.strides[at] * step),
                    )
                )
        return self._with(_put(self.shape, at, length), pieces)

    def select(self, dim: int, index: int) -> Traced:
        """Take one index of a dimension, which then is no more."""
        at = self._dim(dim)
        one = self.narrow(at, index, 1)
        return one._with(_drop(one.shape, at), [_without(piece, at) for piece in one.pieces])

    def squeeze(self, dim: int | None = None) -> Traced:
        """Take away dimensions of one index: all, or this one."""
        found = self
        for at in reversed(range(self.ndim) if dim is None else [self._dim(dim)]):
            if found.shape[at] == 1:
                found = found.select(at, 0)
        return found

    def unsqueeze(self, dim: int) -> Traced:
        """Add a dimension of one index."""
        at = dim % (self.ndim + 1)
        pieces = [
            piece._replace(
                start=_add(piece.start, at, 0), extent=_add(piece.extent, at, 1), strides=_add(piece.strides, at, 0)
            )
            for piece in self.pieces
        ]
        return self._with(_add(self.shape, at, 1), pieces)

    def permute(self, *dims: Any) -> Traced:
        """Reorder the dimensions."""
        order = [self._dim(dim) for dim in _numbers(dims)]
        if sorted(order) != list(range(self.ndim)):
            raise RecordError(f"{self.name}: permute{dims} of {self.ndim} dimensions")

        def turned(values: Shape) -> Shape:
            return tuple(values[dim] for dim in order)

        pieces = [
            piece._replace(start=turned(piece.start), extent=turned(piece.extent), strides=turned(piece.strides))
            for piece in self.pieces
        ]
        return self._with(turned(self.shape), pieces)

    def transpose(self, *dims: Any) -> Traced:
        """Exchange two dimensions, as torch does; with none or all of them reorder, as numpy does."""
        several = _numbers(dims)
        if len(several) != 2:
            return self.permute(*several) if several else self.T
        first, second = (self._dim(dim) for dim in several)
        order = list(range(self.ndim))
        order[first], order[second] = second, first
        return self.permute(*order)

    swapaxes = transpose

    def t(self) -> Traced:
        """Exchange the dimensions of a matrix."""
        return self.T

    def reshape(self, *shape: Any) -> Traced:
        """Have the same elements in the same order with another shape, where that is a view of one source tensor."""
        wanted = list(_numbers(shape))
        if -1 in wanted:
            wanted[wanted.index(-1)] = self.numel() // max(1, -math.prod(wanted))
        if math.prod(wanted) != self.numel():
            raise RecordError(f"{self.name}: {self.shape} cannot have the shape {tuple(wanted)}")
        if tuple(wanted) == self.shape:
            return self
        if len(self.pieces) != 1 or self.pieces[0].extent != self.shape:
            raise self._refuse("reshape on tensors that were put together")
        piece = self.pieces[0]
        strides = _viewed(piece.extent, piece.strides, wanted)
        if strides is None:
            raise self._refuse(f"reshape from {self.shape} to {tuple(wanted)} after its dimensions were reordered")
        found = piece._replace(start=(0,) * len(wanted), extent=tuple(wanted), strides=strides)
        return self._with(wanted, [found])

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Traced:
        """Make one dimension of several."""
        first, last = self._dim(start_dim), self._dim(end_dim)
        return self.reshape(*self.shape[:first], math.prod(self.shape[first : last + 1]), *self.shape[last + 1 :])

    ravel = flatten

    def expand(self, *shape: Any) -> Traced:
        """Repeat what has one index."""
        wanted = _numbers(shape)
        found = self
        while found.ndim < len(wanted):
            found = found.unsqueeze(0)
        for at, extent in enumerate(wanted):
            if extent not in (-1, found.shape[at]):
                if found.shape[at] != 1:
                    raise RecordError(f"{self.name}: {self.shape} cannot be copied to the shape {wanted}")
                pieces = [
                    p._replace(extent=_put(p.extent, at, extent), strides=_put(p.strides, at, 0)) for p in found.pieces
                ]
                found = found._with(_put(found.shape, at, extent), pieces)
        return found

    def split(self, sizes: Any, dim: int = 0) -> tuple[Traced, ...]:
        """Split along a dimension into pieces of one size, or of these sizes."""
        at = self._dim(dim)
        extent = self.shape[at]
        several = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * -(-extent // sizes)
        starts = [sum(several[:i]) for i in range(len(several))]
        return tuple(
            self.narrow(at, first, min(size, extent - first)) for first, size in zip(starts, several, strict=True)
        )

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
        """Split along a dimension into so many pieces, as torch does."""
        return self.split(max(1, -(-self.shape[self._dim(dim)] // chunks)), dim)

    def unbind(self, dim: int = 0) -> tuple[Traced, ...]:
        """Return what each index of a dimension has."""
        return tuple(self.select(dim, index) for index in range(self.shape[self._dim(dim)]))

    def __iter__(self) -> Iterator[Traced]:
        return iter(self.unbind())

    def __getitem__(self, index: Any) -> Traced:
        several = list(index) if isinstance(index, tuple) else [index]
        taken = sum(one is not None and one is not Ellipsis for one in several)
        if Ellipsis not in several:
            several.append(Ellipsis)
        where = several.index(Ellipsis)
        several[where : where + 1] = [slice(None)] * (self.ndim - taken)
        found, at = self, 0
        for one in several:
            if one is None:
                found, at = found.unsqueeze(at), at + 1
            elif isinstance(one, slice):
                first, stop, step = one.indices(found.shape[at])
                if step < 0:
                    raise self._refuse("a slice backwards")
                found, at = found._sliced(at, first, len(range(first, stop, step)), step), at + 1
            elif hasattr(one, "__index__") and not isinstance(one, bool):
                found = found.select(at, one.__index__())
            else:
                raise self._refuse(f"an index of {type(one).__name__}")
        return found

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise RecordError(f"{self.name}: there is no dimension {dim} of {self.ndim}")
        return dim % self.ndim

    # What torch and numpy call with it.

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take an operation of torch on a tensor of this kind and others."""
        return _called(function.__name__, args, kwargs or {})

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Take an operation of numpy on a tensor of this kind and others."""
        name = function.__name__
        if name == "transpose" and args[0] is self:
            # numpy's takes an order, torch's two dimensions.
            order = args[1] if len(args) > 1 else kwargs.get("axes")
            return self.T if order is None else self.permute(*order)
        return _called(name, args, {"dim" if k == "axis" else k: v for k, v in kwargs.items()})

    def __array_ufunc__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse arithmetic."""
        raise self._refuse(function.__name__)

    def copied_to(self, target: Any) -> None:
        """Take note that a parameter, or a part of it, gets these elements."""
        self._log.copied(target, self.expand(*target.shape))


def _called(name: str, args: Any, kwargs: Any) -> Any:
    """Carry out an operation by its name; raise RecordError for one that is not known."""
    traced = next(one for one in _flat(args, kwargs) if isinstance(one, Traced))
    if name in ("copy_", "copyto") and isinstance(args[1], Traced) and not isinstance(args[0], Traced):
        args[1].copied_to(args[0])
        return args[0]
    if name == "__setitem__" and isinstance(args[2], Traced):
        args[2].copied_to(args[0][args[1]])
        return None
    if name in PUT_TOGETHER and all(isinstance(one, Traced) for one in args[0]):
        return PUT_TOGETHER[name](args[0], *args[1:], **kwargs)
    if name in ALSO_FUNCTIONS and isinstance(args[0], Traced):
        return getattr(args[0], name)(*args[1:], **kwargs)
    raise traced._refuse(name)


def _flat(args: Any, kwargs: Any) -> Iterator[Any]:
    for one in (*args, *kwargs.values()):
        yield from one if isinstance(one, (list, tuple)) else (one,)


def _cat(several: Sequence[Traced], dim: int = 0) -> Traced:
    first = several[0]
    at = first._dim(dim)
    if len({(_drop(one.shape, at), one.casts) for one in several}) != 1:
        raise first._refuse(f"cat with {', '.join(map(repr, several[1:]))}")
    pieces, begin = [], 0
    for one in several:
        pieces += [piece._replace(start=_put(piece.start, at, piece.start[at] + begin)) for piece in one.pieces]
        begin += one.shape[at]
    return first._with(_put(first.shape, at, begin), pieces)


def _stack(several: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([one.unsqueeze(dim) for one in several], dim)


PUT_TOGETHER: dict[str, Callable[..., Traced]] = {
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "stack": _stack,
}
ALSO_FUNCTIONS = {"chunk", "flatten", "narrow", "permute", "ravel", "reshape", "select", "split", "squeeze"}
ALSO_FUNCTIONS |= {"swapaxes", "t", "transpose", "unbind", "unsqueeze"}


def _numbers(values: Any) -> tuple[int, ...]:
    several = values[0] if len(values) == 1 and isinstance(values[0], (list, tuple)) else values
    return tuple(map(int, several))


def _put(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at + 1 :])


def _add(values: Shape, at: int, value: int) -> Shape:
    return (*values[:at], value, *values[at:])


def _drop(values: Shape, at: int) -> Shape:
    return values[:at] + values[at + 1 :]


def _without(piece: Piece, at: int) -> Piece:
    return piece._replace(
        start=_drop(piece.start, at), extent=_drop(piece.extent, at), strides=_drop(piece.strides, at)
    )


def _viewed(shape: Shape, strides: Shape, wanted: Sequence[int]) -> Shape | None:
    """Return the strides of a view of another shape, None where there is none: as numpy's attempt_nocopy_reshape."""
    old = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    new = [extent for extent in wanted if extent != 1]
    if 0 in new:
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
