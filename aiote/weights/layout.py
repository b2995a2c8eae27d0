"""Layouts of one side of an update, trainers or inference ranks: the ranks that hold each part of each named tensor.

A layout contains no addresses: a tensor's local part begins at element 0, wherever the rank has put it. Either one
process describes all ranks at once (`Layout.over`, from meshes and placements), or every rank describes itself
(`Layout.of_buffers`, `Layout.of_module`) and `Layout.merge` combines the descriptions. Each side numbers its ranks from
0. The tensors of a pipeline stage are only on that stage's ranks.

`describe` turns a layout into plain values, which travel as JSON, and `from_description` turns them back.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UsageError
from .dtypes import ITEMSIZE, dtype_name
from .placement import (
    LocalBox,
    LocalTensor,
    Mesh,
    Placement,
    Replicate,
    Runs,
    Shard,
    Sharding,
    StridedShard,
    dense,
    shard_over,
)

__all__ = ["Layout", "Tensor", "TensorBuffer"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its global shape and element type, its different parts (`sharding`), and the ranks that hold each."""

    dtype: str
    sharding: Sharding
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def over(
        cls,
        shape: Sequence[int],
        dtype: Any,
        mesh: Mesh,
        placements: Sequence[Placement],
        order: Sequence[int] | None = None,
    ) -> Tensor:
        """Describe a tensor over a mesh by one placement for each axis of the mesh.

        Local parts are dense. If the dimensions lie in memory in another order than in the shape, `order` lists them
        from the outermost to the innermost: (1, 0) is a matrix that is stored transposed. Raises UsageError if shape,
        mesh, placements and order do not fit together, and for a `Partial` placement.
        """
        whole = tuple(map(int, shape))
        if order is not None and sorted(order) != list(range(len(whole))):
            raise UsageError(f"order is {order!r}, expected the numbers 0 to {len(whole) - 1} once each")
        kinds = tuple(_checked_placement(placement) for placement in placements)
        sharding, places = shard_over(whole, kinds, mesh.shape, None if order is None else tuple(order))
        return cls(dtype_name(dtype), sharding, _ranks_at(mesh.ranks, places))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.sharding.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.sharding.shape) * ITEMSIZE[self.dtype]

    def held_by(self) -> dict[int, LocalTensor]:
        """Return what each rank holds of the tensor, by rank. Ranks that hold no element are left out."""
        return {rank: held for held, ranks in zip(self.sharding.held, self.ranks, strict=True) for rank in ranks}


class TensorBuffer(NamedTuple):
    """One rank's part of a tensor, for any framework: an array that holds a box of the global tensor.

    `shape` is the global tensor's shape. `start` and `stop` are the box, by default the whole tensor. `strides` are the
    array's, in elements, and must not be negative; without them the array is dense.
    """

    shape: tuple[int, ...]
    dtype: Any
    start: tuple[int, ...] | None = None
    stop: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


class Layout:
    """The named tensors of one side, and the ranks that hold their parts. Immutable.

    Raises UsageError for a name that is empty or not a string.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        for name in self.tensors:
            if not isinstance(name, str) or not name:
                raise UsageError(f"a tensor is named {name!r}: expected text of at least one character")

    def __repr__(self) -> str:
        return f"<Layout of {len(self.tensors)} tensors on {len(self.ranks)} ranks>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold any element, in order."""
        groups = {ranks for tensor in self.tensors.values() for ranks in tensor.ranks}
        return tuple(sorted({rank for ranks in groups for rank in ranks}))

    @classmethod
    def over(
        cls, mesh: Mesh | Any, tensors: Mapping[str, tuple[Sequence[int], Any, Sequence[Placement] | Placement]]
    ) -> Layout:
        """Describe tensors that share a mesh, each by its shape, dtype and placements, one for each axis of the mesh.

        `mesh` is a Mesh, or an argument of `Mesh.of`. Raises UsageError, which names the tensor, if these do not fit
        together.
        """
        mesh = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh)
        found = {}
        for name, (shape, dtype, placements) in tensors.items():
            several = placements if isinstance(placements, (list, tuple)) else (placements,)
            found[name] = _named(name, Tensor.over, shape, dtype, mesh, several)
        return cls(found)

    @classmethod
    def of_buffers(cls, rank: int, buffers: Mapping[str, TensorBuffer]) -> Layout:
        """Describe what one rank holds by its arrays. Raises UsageError, which names the tensor, for an invalid box."""
        return cls({name: _named(name, _tensor_of_buffer, rank, buffer) for name, buffer in buffers.items()})

    @classmethod
    def of_module(cls, module: Any, rank: int) -> Layout:
        """Describe what this rank holds of a torch module, or of a mapping such as its `state_dict()` returns.

        A DTensor is described by its placements and mesh; any other tensor counts as held whole by this rank. The
        layout contains only this rank's parts: gather the layouts of all ranks and `merge` them. Raises UsageError,
        which names the parameter, for `Partial` and other placements that parameters cannot have.
        """
        state = module if isinstance(module, Mapping) else module.state_dict()
        return cls({name: _named(name, _tensor_of_torch, int(rank), value) for name, value in state.items()})

    @classmethod
    def merge(cls, layouts: Iterable[Layout]) -> Layout:
        """Combine several layouts of the same side into one.

        Raises UsageError for a tensor with two shapes or types, and for a rank that holds a tensor in two ways.
        """
        parts: dict[str, list[Tensor]] = {}
        for layout in layouts:
            for name, tensor in layout.tensors.items():
                parts.setdefault(name, []).append(tensor)
        return cls({name: _named(name, _joined, tensors) for name, tensors in parts.items()})

    def only(self, rank: int) -> Layout:
        """Return the layout of one rank's parts, without the other ranks, and the tensors that have no elements."""
        found = {}
        for name, tensor in self.tensors.items():
            held = tensor.held_by().get(rank)
            if held is not None:
                found[name] = Tensor(tensor.dtype, Sharding.of(tensor.shape, (held,)), ((rank,),))
            elif not all(tensor.shape):
                found[name] = tensor
        return Layout(found)

    def describe(self) -> dict[str, Any]:
        """Return the layout as mappings, tuples, strings and integers. Shardings that tensors share appear once."""
        shardings: dict[Sharding, int] = {}
        groups: dict[tuple[tuple[int, ...], ...], int] = {}
        tensors = {
            name: [t.dtype, shardings.setdefault(t.sharding, len(shardings)), groups.setdefault(t.ranks, len(groups))]
            for name, t in self.tensors.items()
        }
        return {
            "shardings": [[sharding.shape, sharding.held] for sharding in shardings],
            "ranks": list(groups),
            "tensors": tensors,
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Layout:
        """Return the layout whose description `describe` returned. Raises UsageError for anything else."""
        try:
            shardings = [_sharding_of_plain(*entry) for entry in description["shardings"]]
            groups = [tuple(tuple(map(int, ranks)) for ranks in group) for group in description["ranks"]]
            tensors = {}
            for name, (dtype, sharding, group) in description["tensors"].items():
                if len(shardings[sharding].held) != len(groups[group]):
                    raise UsageError(
                        f"{name}: expected {len(shardings[sharding].held)} groups of ranks, one for "
                        f"each part, got {len(groups[group])}"
                    )
                tensors[str(name)] = Tensor(dtype_name(dtype), shardings[sharding], groups[group])
        except UsageError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UsageError(f"this is not the description of a layout: {error!r}") from None
        return cls(tensors)

    def digest(self) -> bytes:
        """Return a hash of 32 bytes, equal if and only if two layouts have the same tensors in the same order."""
        text = json.dumps(self.describe(), separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _named(name: str, make: Any, *args: Any) -> Tensor:
    try:
        tensor: Tensor = make(*args)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    return tensor


@functools.lru_cache(maxsize=1 << 14)
def _ranks_at(ranks: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks at places of a mesh. Equal results are the same object."""
    return tuple(tuple(ranks[place] for place in group) for group in places)


def _checked_placement(placement: Any) -> Placement:
    """Return this module's placement for one of its own or for torch's. Raises UsageError for anything else."""
    if isinstance(placement, Replicate | Shard | StridedShard | Runs):
        return placement
    if hasattr(placement, "split_factor"):
        return StridedShard(placement.dim, placement.split_factor)
    for test in ("is_partial", "is_replicate", "is_shard"):
        if getattr(placement, test, bool)():
            break
    else:
        raise UsageError(f"placement {placement!r}: expected Replicate, Shard, StridedShard or Runs")
    if test == "is_partial":
        raise UsageError("a Partial placement holds summands, not values: reduce the tensor before you describe it")
    return Shard(placement.dim) if test == "is_shard" else Replicate()


def _tensor_of_torch(rank: int, value: Any) -> Tensor:
    """Describe what one rank holds of a torch tensor, without importing torch."""
    shape, dtype = tuple(map(int, value.shape)), dtype_name(value.dtype)
    if not hasattr(value, "placements"):
        return _tensor_of_buffer(rank, TensorBuffer(shape, dtype, strides=tuple(value.stride())))
    array = value.device_mesh.mesh
    mesh = Mesh(tuple(array.flatten().tolist()), tuple(array.shape))
    if rank not in mesh.ranks:
        raise UsageError(f"rank is {rank}, expected one of the tensor's mesh: {mesh.ranks}")
    held = Tensor.over(shape, dtype, mesh, value.placements).held_by().get(rank)
    local = value.to_local()
    expected = held.shape if held else None
    if tuple(local.shape) != expected and (held or local.numel()):
        raise UsageError(f"the local tensor has shape {tuple(local.shape)}, but its placements give it {expected}")
    if held is None:
        return Tensor(dtype, Sharding.of(shape, ()), ())
    return Tensor(
        dtype, Sharding.of(shape, (held._replace(strides=_dense_strides(local.stride(), held.shape)),)), ((rank,),)
    )


def _dense_strides(strides: Iterable[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides in elements. Dimensions of one index get a dense array's stride, because theirs is never used."""
    pairs = zip(strides, dense(shape), shape, strict=True)
    return tuple(usual if extent == 1 else int(stride) for stride, usual, extent in pairs)


def _tensor_of_buffer(rank: int, buffer: TensorBuffer) -> Tensor:
    shape = tuple(map(int, buffer.shape))
    start = tuple(map(int, buffer.start or [0] * len(shape)))
    stop = tuple(map(int, buffer.stop or shape))
    local = tuple(last - first for first, last in zip(start, stop, strict=False))
    strides = dense(local) if buffer.strides is None else tuple(map(int, buffer.strides))
    if not len(shape) == len(start) == len(stop) == len(strides):
        raise UsageError(f"shape {shape}, start {start}, stop {stop} and strides {strides} differ in length")
    held = LocalTensor((LocalBox(start, stop, (0,) * len(shape)),), local, _dense_strides(strides, local))
    sharding = _checked_sharding(shape, (held,) if all(local) else ())
    return Tensor(dtype_name(buffer.dtype), sharding, ((int(rank),),) * len(sharding.held))


def _sharding_of_plain(shape: Sequence[int], held: Iterable[Any]) -> Sharding:
    return _checked_sharding(
        tuple(map(int, shape)),
        tuple(
            LocalTensor(
                tuple(LocalBox(*(tuple(map(int, numbers)) for numbers in piece)) for piece in pieces),
                tuple(map(int, local)),
                tuple(map(int, strides)),
            )
            for pieces, local, strides in held
        ),
    )


def _checked_sharding(shape: tuple[int, ...], held: tuple[LocalTensor, ...]) -> Sharding:
    """Return the sharding.

    Raises UsageError if a piece lies outside the tensor or the local tensor, or if several elements of a local tensor
    lie in one place.
    """
    for pieces, local, strides in held:
        if not len(local) == len(strides) == len(shape) or min(strides, default=0) < 0:
            raise UsageError(f"a part has shape {local} and strides {strides}, expected {len(shape)} of each, from 0")
        reach = 0
        for stride, extent in sorted(zip(strides, local, strict=True)):
            if extent > 1 and stride <= reach:
                raise UsageError(
                    f"with shape {local} and strides {strides} several elements share one place; expected "
                    "strides that separate them"
                )
            reach += max(0, extent - 1) * stride
        for piece in pieces:
            rows = list(zip(shape, *piece, local, strict=True))
            if not all(0 <= start < stop <= extent for extent, start, stop, _, _ in rows):
                raise UsageError(f"a part from {piece.start} to {piece.stop} leaves the tensor's shape {shape}")
            if not all(0 <= at <= size - (stop - start) for _, start, stop, at, size in rows):
                raise UsageError(f"a piece at {piece.local} does not fit in its rank's part of shape {local}")
    return Sharding.of(shape, held)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Combine several descriptions of one tensor. Raises UsageError if they contradict each other."""
    first = tensors[0]
    parts: dict[LocalTensor, set[int]] = {}
    owner: dict[int, LocalTensor] = {}
    for tensor in tensors:
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise UsageError(f"it is {tensor.dtype} {tensor.shape} here and {first.dtype} {first.shape} there")
        for held, ranks in zip(tensor.sharding.held, tensor.ranks, strict=True):
            parts.setdefault(held, set()).update(ranks)
            for rank in ranks:
                if owner.setdefault(rank, held) != held:
                    raise UsageError(f"rank {rank} holds it in two ways: {owner[rank]} and {held}")
    ordered = sorted(parts, key=lambda held: min(parts[held]))
    return Tensor(
        first.dtype, Sharding.of(first.shape, tuple(ordered)), tuple(tuple(sorted(parts[h])) for h in ordered)
    )
