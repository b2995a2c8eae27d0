"""Placements: which part of a tensor each place of a mesh of ranks holds.

A mesh is an array of ranks. A tensor has one placement for each axis of the mesh, as in torch's DTensor:

| placement                  | coordinate c of an axis of n holds                                                    |
|----------------------------|---------------------------------------------------------------------------------------|
| `Replicate()`              | all                                                                                   |
| `Shard(dim)`               | chunk c of `torch.chunk`: ceil(extent / n) each, the last ones smaller or empty       |
| `StridedShard(dim, f)`     | the same, but split after a later axis's `Shard(dim)`, of f places: FSDP2 over TP or EP |
| `Runs(dim, runs)`          | the index ranges `runs[c]`, one after another: fused projections, tables of experts   |

Axes apply in order; each axis splits what the axes before it left. So a place holds a list of ranges of each dimension,
which lie one after another in its memory, and it holds the product of these ranges of the tensor: its `LocalBox`s. A
`Sharding` describes all places for one kind of tensor, without ranks. The planner works on shardings, so that it
computes a model's thousands of equal parameters once.
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
    "LocalBox",
    "LocalTensor",
    "Mesh",
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
    """Every place of the axis holds all elements."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits dimension `dim` like `torch.chunk`: of 10 indices, 4 places hold 3, 3, 3 and 1."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis splits dimension `dim` after a later axis, which has a `Shard(dim)` over `split_factor` places.

    FSDP2 creates it if tensor or expert parallelism has split the module along the same dimension before.
    """

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Place c of the axis holds the ranges `runs[c]` of dimension `dim`, one after another.

    Each range is (start, stop). Ranges may be in any order and may repeat.
    """

    dim: int
    runs: tuple[tuple[Span, ...], ...]


Placement = Replicate | Shard | StridedShard | Runs


def packed(dim: int, ranks: int, *parts: int | tuple[int, int]) -> Runs:
    """Return the placement of a tensor that is fused from parts along `dim`, where each part is split over `ranks`.

    Each rank holds its share of every part, one after another, as for fused projections under tensor parallelism:
    `packed(0, tp, (q, q_heads), (k, kv_heads), (v, kv_heads))`, `packed(0, tp, gate, up)`. A part is given as its size,
    or as its size and its number of heads. Heads are never split; if there are fewer heads than ranks, ranks / heads
    neighbours hold the same head. Raises UsageError if a part cannot be spread evenly.
    """
    rows: list[list[Span]] = [[] for _ in range(ranks)]
    first = 0
    for part in parts:
        size, heads = part if isinstance(part, tuple) else (part, ranks)
        copies = max(1, ranks // heads)
        shares = ranks // copies
        if copies * shares != ranks or heads % shares or size % heads:
            raise UsageError(
                f"a part of {size} elements with {heads} heads cannot be divided evenly among {ranks} ranks"
            )
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
    """An array of different ranks, flat in C order, and its shape. Raises UsageError unless both fit."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(int, self.ranks)))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise UsageError(f"a mesh of shape {self.shape}: expected as many different ranks, got {self.ranks}")
        if min(self.ranks) < 0:
            raise UsageError(f"a mesh has rank {min(self.ranks)}: expected ranks from 0 on")

    @classmethod
    def of(cls, ranks: Any) -> Mesh:
        """Make a mesh of anything that numpy accepts as an array of integers. A range or a list becomes one axis."""
        require_unmasked("the ranks of a mesh", ranks)
        array = np.asarray(ranks)
        return cls(tuple(array.ravel().tolist()), array.shape)


class LocalBox(NamedTuple):
    """A box of a tensor: its first and last (exclusive) indices, and its first index in the rank's local tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    local: tuple[int, ...]


class LocalTensor(NamedTuple):
    """One rank's part of a tensor: its pieces, and the local tensor's shape and strides in elements."""

    pieces: tuple[LocalBox, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Sharding:
    """The different parts that ranks hold of one kind of tensor. `Sharding.of` makes equal shardings one object."""

    __slots__ = ("held", "shape")

    def __init__(self, shape: tuple[int, ...], held: tuple[LocalTensor, ...]) -> None:
        self.shape = shape
        self.held = held

    def __repr__(self) -> str:
        return f"<Sharding of {self.shape} into {len(self.held)}>"

    @staticmethod
    @functools.lru_cache(maxsize=1 << 14)
    def of(shape: tuple[int, ...], held: tuple[LocalTensor, ...]) -> Sharding:
        """Return the sharding of a tensor of this shape into these parts."""
        return Sharding(shape, held)


def dense(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array; `order` lists its dimensions, outermost in memory first."""
    strides, size = [0] * len(shape), 1
    for dim in reversed(tuple(range(len(shape)) if order is None else order)):
        strides[dim], size = size, size * shape[dim]
    return tuple(strides)


@functools.lru_cache(maxsize=1 << 12)
def shard_over(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: tuple[int, ...], order: tuple[int, ...] | None
) -> tuple[Sharding, tuple[tuple[int, ...], ...]]:
    """Return the sharding of a tensor over a mesh of shape `mesh`, and the places of the mesh that hold each part.

    Places without elements are left out. Raises UsageError for placements that do not fit the tensor or the mesh.
    """
    axes = _ordered(placements, mesh)
    places: dict[LocalTensor, list[int]] = {}
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
    """Return the axes in the order in which they split. Strided axes come right after the `Shard` that they wait for.

    `_explicit_order_placements` of torch/distributed/tensor/_utils.py uses this order, and so does FSDP2 when it fills
    its shards. torch 2.13's `compute_local_shape_and_global_offset` differs for uneven strided shards: of 7 rows over
    (3, 2) places, FSDP2 puts the last row at (2, 1), and that function says (2, 0).
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
                    raise UsageError(
                        f"{strided}: the shards after it divide the dimension into {factor} places, "
                        "expected as many as its split_factor"
                    )
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
    """Return one place's share of the ranges that a placement splits among all places of an axis."""
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
    """Return the ranges at the positions from `first` to `last` (exclusive) of ranges that follow one another."""
    found, position = [], 0
    for start, stop in runs:
        low, high = max(first - position, 0) + start, min(last - position + start, stop)
        if low < high:
            found.append((low, high))
        position += stop - start
    return found


def _merged(runs: Iterable[Span]) -> list[Span]:
    """Return ranges without empty ones, and with adjacent ones joined."""
    merged: list[Span] = []
    for start, stop in runs:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def _held(runs: list[list[Span]], order: tuple[int, ...] | None) -> LocalTensor:
    """Return a dense local tensor whose pieces are the product of the ranges of each dimension."""
    dims: list[list[tuple[int, int, int]]] = []
    for spans in runs:
        locals_ = itertools.accumulate((stop - start for start, stop in spans), initial=0)
        dims.append([(start, stop, local) for (start, stop), local in zip(spans, locals_, strict=False)])
    pieces = tuple(
        LocalBox(*zip(*spans, strict=True)) if spans else LocalBox((), (), ()) for spans in itertools.product(*dims)
    )
    shape = tuple(sum(stop - start for start, stop in spans) for spans in runs)
    return LocalTensor(pieces, shape, dense(shape, order))
