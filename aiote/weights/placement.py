"""Which part of a tensor each place of a mesh of ranks holds.

A mesh is an array of ranks. Each of its axes has one placement, as in torch's DTensor:

| placement                  | coordinate c of an axis of n holds                                                    |
|----------------------------|---------------------------------------------------------------------------------------|
| `Replicate()`              | all                                                                                   |
| `Shard(dim)`               | chunk c of `torch.chunk`: ceil(extent / n) each, the last ones smaller or empty       |
| `StridedShard(dim, f)`     | the same, but split after a later axis's `Shard(dim)`, of f places: FSDP2 over TP or EP |
| `Runs(dim, runs)`          | the index ranges `runs[c]`, one after another: fused projections, tables of experts   |

Axes apply in order; each splits what the ones before it left. What a place holds of a dimension is therefore a list of
ranges, which lie one after another in its memory, and what it holds of the tensor is their product: `Piece`s. A
`Sharding` is all of that for one kind of tensor, without ranks: the planner works on shardings, so that a model's
thousands of equal parameters are computed once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.masked_arrays import require_unmasked
from ..errors import UsageError

__all__ = [
    "Held",
    "Mesh",
    "Piece",
    "Placement",
    "Replicate",
    "Runs",
    "Shard",
    "Sharding",
    "StridedShard",
    "packed",
    "slots",
]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every place of the axis holds all."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits dimension `dim` by `torch.chunk`: of 10 over 4 places they hold 3, 3, 3 and 1."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis splits dimension `dim` after a later axis did, which has a `Shard(dim)` over `split_factor` places.

    FSDP2 makes it where the module was split by tensor or expert parallelism along the same dimension before.
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Place c of the axis holds the ranges `runs[c]` of dimension `dim`, one after another.

    Each range is (start, stop). Ranges may come in any order and several times.
    """

    dim: int
    runs: tuple[tuple[Span, ...], ...]


Placement = Replicate | Shard | StridedShard | Runs


def packed(dim: int, ranks: int, *parts: int | tuple[int, int]) -> Runs:
    """Return the placement of a tensor that is fused of parts along `dim`, each split over `ranks` by itself.

    Each rank holds its shares of all parts, one after another, as fused projections do under tensor parallelism:
    `packed(0, tp, (q, q_heads), (k, kv_heads), (v, kv_heads))`, `packed(0, tp, gate, up)`. A part is its size, or its
    size and how many heads it has: heads are never split, and where there are fewer than ranks, ranks / heads
    neighbours hold the same one. Raises UsageError for what cannot be spread evenly.
    """
    rows: list[list[Span]] = [[] for _ in range(ranks)]
    first = 0
    for part in parts:
        size, heads = part if isinstance(part, tuple) else (part, ranks)
        copies = max(1, ranks // heads)
        shares = ranks // copies
        if copies * shares != ranks or heads % shares or size % heads:
            raise UsageError(f"a part of {size} with {heads} heads cannot be spread over {ranks} ranks evenly")
        share = size // shares
        for rank, row in enumerate(rows):
            start = first + rank // copies * share
            row.append((start, start + share))
        first += size
    return Runs(dim, tuple(map(tuple, rows)))


def slots(dim: int, table: Sequence[Sequence[int]]) -> Runs:
    """Return the placement in which rank r holds the indices `table[r]` of `dim` in that order: a table of experts."""
    return Runs(dim, tuple(tuple((int(index), int(index) + 1) for index in row) for row in table))


@dataclass(frozen=True, slots=True)
class Mesh:
    """An array of ranks, given flat in C order, with its shape. Raises UsageError unless both fit."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(int, self.ranks)))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise UsageError(f"a mesh of shape {self.shape} takes as many different ranks, got {self.ranks}")
        if min(self.ranks) < 0:
            raise UsageError(f"a mesh has rank {min(self.ranks)}, expected numbers from 0")

    @classmethod
    def of(cls, ranks: Any) -> Mesh:
        """Make a mesh of anything that numpy takes as an array of integers; a range or a list is one axis."""
        require_unmasked("the ranks of a mesh", ranks)
        array = np.asarray(ranks)
        return cls(tuple(array.ravel().tolist()), array.shape)


class Piece(NamedTuple):
    """A box of a tensor, by its first and last (exclusive) indices, and where in the rank's local tensor it begins."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    local: tuple[int, ...]


class Held(NamedTuple):
    """What one rank holds of a tensor: its pieces, the local tensor's shape, and its strides in elements."""

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Sharding:
    """The different things that ranks hold of one kind of tensor. Equal ones are the same object, by `Sharding.of`."""

    __slots__ = ("held", "shape")

    def __init__(self, shape: tuple[int, ...], held: tuple[Held, ...]) -> None:
        self.shape = shape
        self.held = held

    def __repr__(self) -> str:
        return f"<Sharding of {self.shape} into {len(self.held)}>"

    @staticmethod
    @functools.lru_cache(maxsize=1 << 14)
    def of(shape: tuple[int, ...], held: tuple[Held, ...]) -> Sharding:
        """Return the sharding of a tensor of this shape into these."""
        return Sharding(shape, held)


def dense(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array whose dimensions lie in memory in `order`, outermost first."""
    strides, size = [0] * len(shape), 1
    for dim in reversed(tuple(range(len(shape)) if order is None else order)):
        strides[dim], size = size, size * shape[dim]
    return tuple(strides)


@functools.lru_cache(maxsize=1 << 12)
def shard_over(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...], order: tuple[int, ...] | None
) -> tuple[Sharding, tuple[tuple[int, ...], ...]]:
    """Return the sharding of a tensor over a mesh of that shape, and the places of the mesh where each thing is held.

    Places that hold nothing are left out. Raises UsageError for placements that fit neither the tensor nor the mesh.
    """
    axes = _ordered(placements, mesh)
    places: dict[Held, list[int]] = {}
    for place, coordinates in enumerate(itertools.product(*map(range, mesh))):
        runs: list[list[Span]] = [[(0, extent)] if extent else [] for extent in shape]
        for axis, placement in axes:
            if not isinstance(placement, Replicate):
                dim = _dim(placement, len(shape))
                runs[dim] = _share(runs[dim], placement, coordinates[axis], mesh[axis], shape[dim])
        held = _held(runs, order)
        if held.pieces:
            places.setdefault(held, []).append(place)
    return Sharding.of(shape, tuple(places)), tuple(map(tuple, places.values()))


def _ordered(placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> list[tuple[int, Placement]]:
    """Return the axes in the order in which they split: strided ones right after the `Shard` that they waited for.

    As `_explicit_order_placements` of torch/distributed/tensor/_utils.py does, and as FSDP2 fills its shards. What
    torch 2.13's `compute_local_shape_and_global_offset` says of uneven strided shards differs from that: of 7 rows over
    (3, 2) places FSDP2 has the last at (2, 1), where it says that (2, 0) has it.
    """
    if len(placements) != len(mesh):
        raise UsageError(f"{len(placements)} placements for a mesh of {len(mesh)} axes, expected one for each")
    ordered: list[tuple[int, Placement]] = []
    waiting: dict[int, list[tuple[int, StridedShard]]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            waiting.setdefault(placement.dim, []).append((axis, placement))
            continue
        ordered.append((axis, placement))
        if isinstance(placement, Shard):
            factor = mesh[axis]
            for strided_axis, strided in reversed(waiting.pop(placement.dim, [])):
                if strided.split_factor != factor:
                    raise UsageError(f"{strided} is followed by shards over {factor} places, expected as many")
                ordered.append((strided_axis, Shard(strided.dim)))
                factor *= mesh[strided_axis]
    for dim in waiting:
        raise UsageError(f"a StridedShard of dimension {dim} needs a later mesh axis with Shard({dim})")
    return ordered


def _dim(placement: Shard | StridedShard | Runs, dims: int) -> int:
    if not -dims <= placement.dim < dims:
        raise UsageError(f"{placement} splits dimension {placement.dim} of a tensor that has {dims}")
    return placement.dim % dims


def _share(runs: list[Span], placement: Placement, place: int, places: int, extent: int) -> list[Span]:
    """Return what one place of an axis holds of ranges that all places of the axis share."""
    if isinstance(placement, Runs):
        if len(placement.runs) != places:
            raise UsageError(f"a Runs placement has ranges for {len(placement.runs)} places on an axis of {places}")
        if runs != ([(0, extent)] if extent else []):
            raise UsageError("a Runs placement must be the first that splits its dimension")
        if any(not 0 <= start <= stop <= extent for start, stop in placement.runs[place]):
            raise UsageError(f"a Runs placement has {placement.runs[place]}, expected ranges within 0 to {extent}")
        return _merged(placement.runs[place])
    size = -(-sum(stop - start for start, stop in runs) // places)
    return _slice(runs, size * place, size * (place + 1))


def _slice(runs: list[Span], first: int, last: int) -> list[Span]:
    """Return what lies from `first` to `last` (exclusive) in ranges that follow one another."""
    found, position = [], 0
    for start, stop in runs:
        low, high = max(first - position, 0) + start, min(last - position + start, stop)
        if low < high:
            found.append((low, high))
        position += stop - start
    return found


def _merged(runs: Iterable[Span]) -> list[Span]:
    """Return ranges without the empty ones; those that continue each other become one."""
    merged: list[Span] = []
    for start, stop in runs:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def _held(runs: list[list[Span]], order: tuple[int, ...] | None) -> Held:
    """Return the pieces that ranges of each dimension make, in a dense local tensor."""
    dims: list[list[tuple[int, int, int]]] = []
    for spans in runs:
        locals_ = itertools.accumulate((stop - start for start, stop in spans), initial=0)
        dims.append([(start, stop, local) for (start, stop), local in zip(spans, locals_, strict=False)])
    pieces = tuple(
        Piece(*zip(*spans, strict=True)) if spans else Piece((), (), ()) for spans in itertools.product(*dims)
    )
    shape = tuple(sum(stop - start for start, stop in spans) for spans in runs)
    return Held(pieces, shape, dense(shape, order))
