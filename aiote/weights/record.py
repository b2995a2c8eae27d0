"""A recipe and the targets' layout, recorded from the loader that an inference engine has for a checkpoint anyway.

    recording = record(model.load_weights, dict(model.named_parameters()), trained)     # on each inference rank
    targets, recipe = Recording.merge({0: recording, 1: ...}, trained)                  # of all ranks

The loader gets (name, tensor) pairs as from a checkpoint, but the tensors have no values (`traced`). Which element of
a source went to which element of a parameter is all that is kept; no rules are written for a model.

**The target tensors.** A loader knows its own rank's part of a parameter, and no whole. So what ranks have of a
parameter in the same way counts once, and different ones follow one another along the first dimension:

    norm, the same on ranks 0 and 1           a tensor of [4096], on both
    qkv, rank 0's heads and rank 1's          a tensor of [2 * 3072, 4096], a half on each

which is a name for all the memory there is, and nothing that an engine has anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UsageError
from .boxes import Array, boxes_between
from .dtypes import ITEMSIZE, dtype_name
from .layout import Layout, Tensor
from .placement import Held, Piece, Sharding, dense
from .recipe import Expression, Made, Part, Recipe, SourceOf
from .traced import RecordError, Traced

__all__ = ["Recording", "record"]

WIDE = ("F32", "F64")
Shape = tuple[int, ...]


class Parameter(NamedTuple):
    """What one rank has of a parameter, and the boxes of it that came from source tensors of which type."""

    dtype: str
    shape: Shape
    strides: Shape
    source_dtype: str
    parts: tuple[Part, ...]


class Recording(NamedTuple):
    """What one rank's loader did. `sources` has the shapes of the source tensors that it took something of."""

    parameters: dict[str, Parameter]
    sources: dict[str, Shape]

    def describe(self) -> dict[str, Any]:
        """Return it as mappings, tuples, strings and integers, which travel as JSON."""
        return {"parameters": self.parameters, "sources": self.sources}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Recording:
        """Make the recording that `describe` returned the description of. Raises UsageError for anything else."""
        try:
            # As JSON has it there are lists where a recording has tuples.
            plain = json.loads(json.dumps(description))
            parameters = {
                str(name): Parameter(
                    dtype_name(dtype),
                    tuple(map(int, shape)),
                    tuple(map(int, strides)),
                    dtype_name(source_dtype) if parts else "",
                    tuple(Part(str(part[0]), *(tuple(map(int, numbers)) for numbers in part[1:])) for part in parts),
                )
                for name, (dtype, shape, strides, source_dtype, parts) in plain["parameters"].items()
            }
            return cls(parameters, {str(name): tuple(map(int, shape)) for name, shape in plain["sources"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"this is no description of a recording: {error!r}") from None

    @staticmethod
    def merge(
        recordings: Mapping[int, Recording], *, unused: Iterable[str] = (), untouched: Iterable[str] = ()
    ) -> tuple[Layout, Recipe]:
        """Return the layout of all inference ranks, and the recipe, from what each rank's loader did.

        `unused` and `untouched` are as of `Recipe`. Raises UsageError for a parameter that no rank's loader wrote and
        that is not listed as untouched, and for ranks whose parameters differ in type.
        """
        names = dict.fromkeys(name for one in recordings.values() for name in one.parameters)
        listed = Recipe({}, tuple(unused), tuple(untouched))
        shapes = {name: shape for one in recordings.values() for name, shape in one.sources.items()}
        tensors, made, silent = {}, {}, []
        for name in names:
            of_rank = {rank: one.parameters[name] for rank, one in recordings.items() if name in one.parameters}
            tensors[name], parts = _joined(name, of_rank)
            if parts:
                made[name] = _expression(tensors[name], parts, of_rank, shapes)
            elif not listed.is_untouched(name):
                silent.append(name)
        if silent:
            some = ", ".join(silent[:5]) + (", ..." if len(silent) > 5 else "")
            raise UsageError(f"the loader wrote nothing to {len(silent)} parameters: {some}; list them as untouched")
        return Layout(tensors), Recipe(made, listed.unused, listed.untouched)


def record(
    load: Callable[[Iterator[tuple[str, Any]]], object],
    parameters: Mapping[str, Any],
    sources: Layout | Mapping[str, tuple[Sequence[int], Any]],
) -> Recording:
    """Run one rank's loader on tensors without values, and return what it copied where.

    `load` takes (name, tensor) pairs, as vLLM's `load_weights` does; its parameters are torch tensors on any device,
    "meta" among them, or numpy arrays, and keep their values. `sources` say shape and type of each tensor of the
    checkpoint. What a loader calls may slice, turn, split, put together and convert tensors, and copies them with
    `tensor.copy_`, by an index, or with `numpy.copyto`. Raises UsageError, which names the call and the tensor, for
    anything else.
    """
    if isinstance(sources, Layout):
        sources = {name: (tensor.shape, tensor.dtype) for name, tensor in sources.tensors.items()}
    known = {name: (tuple(map(int, shape)), dtype_name(dtype)) for name, (shape, dtype) in sources.items()}
    log = _Copies(parameters, known)
    load((name, Traced.of(log, name, *known[name])) for name in known)
    return log.recording()


class _Memory(NamedTuple):
    """Where a tensor or an array lies: in which storage, from which byte on, and by which strides, in elements."""

    storage: int
    first: int
    shape: Shape
    strides: Shape
    dtype: str


def _memory(tensor: Any) -> _Memory:
    tensor = tensor.data if hasattr(tensor, "untyped_storage") else tensor
    name, shape = dtype_name(tensor.dtype), tuple(map(int, tensor.shape))
    if hasattr(tensor, "untyped_storage"):
        # The storage and not the address: there is none on the device "meta".
        storage, first = tensor.untyped_storage()._cdata, tensor.storage_offset() * ITEMSIZE[name]
        return _Memory(storage, first, shape, tuple(map(int, tensor.stride())), name)
    strides = tuple(int(stride) // ITEMSIZE[name] for stride in tensor.strides)
    return _Memory(0, tensor.__array_interface__["data"][0], shape, strides, name)


class _Copies:
    """The copies that a loader makes, by parameter: parts by the box of the parameter that they fill."""

    def __init__(self, parameters: Mapping[str, Any], sources: Mapping[str, tuple[Shape, str]]) -> None:
        self._sources = sources
        self._memory: dict[str, _Memory] = {}
        for name, parameter in parameters.items():
            memory = _memory(parameter)
            if memory not in self._memory.values():  # else it is another name of the same: tied weights
                self._memory[name] = memory
        self._in_storage: dict[int, list[str]] = {}
        for name, memory in self._memory.items():
            self._in_storage.setdefault(memory.storage, []).append(name)
        self._parts: dict[str, dict[tuple[Shape, Shape], Part]] = {name: {} for name in self._memory}
        self._dtypes: dict[str, str] = {}

    def copied(self, target: Any, traced: Traced) -> None:
        """Take note that a part of a parameter, as a view of it, gets the elements of a traced tensor."""
        view = _memory(target)
        name, parameter, offset = self._find(view, traced)
        self._check_types(name, parameter, traced)
        there = Array(parameter.shape, parameter.strides)
        for piece in traced.pieces:
            begin = offset + sum(map(int.__mul__, piece.start, view.strides))
            here = Array(self._sources[piece.source][0])
            try:
                found = boxes_between(piece.extent, (here, piece.offset, piece.strides), (there, begin, view.strides))
            except UsageError as error:
                raise RecordError(f"{name}: what the loader copies of {piece.source} cannot be said: {error}") from None
            for source_start, start, extent, axes in found:
                self._add(name, Part(piece.source, source_start, start, extent, axes))

    def _find(self, view: _Memory, traced: Traced) -> tuple[str, _Memory, int]:
        """Return the parameter that a view is of, and where in it the view begins, in elements."""
        for name in self._in_storage.get(view.storage, ()):
            memory = self._memory[name]
            offset, rest = divmod(view.first - memory.first, ITEMSIZE[memory.dtype])
            # Parameters may lie in each other's gaps.
            if offset >= 0 and Array(memory.shape, memory.strides).has(offset):
                if view.dtype != memory.dtype or rest:
                    raise RecordError(f"{name}: the loader writes {traced.name} to it as {view.dtype}")
                return name, memory, offset
        raise RecordError(f"{traced.name}: the loader copies it to a tensor that is none of the parameters")

    def _check_types(self, name: str, parameter: _Memory, traced: Traced) -> None:
        first, *casts = traced.casts
        if any(cast not in (first, parameter.dtype, *WIDE) for cast in casts):
            steps = " to ".join([*traced.casts, parameter.dtype])
            raise RecordError(f"{name}: the loader converts {traced.name} from {steps}; a recipe converts once")
        if self._dtypes.setdefault(name, first) != first:
            raise RecordError(f"{name}: the loader makes it of {self._dtypes[name]} and {first}; make them one type")

    def _add(self, name: str, part: Part) -> None:
        """Take note of a part; one that fills the same box as an earlier one takes its place."""
        stop = tuple(map(int.__add__, part.target_start, part.extent))
        self._parts[name][part.target_start, stop] = part

    def recording(self) -> Recording:
        """Return what was noted. Raises RecordError for boxes that overlap: a plan has no order of writes."""
        for name, parts in self._parts.items():
            _check_apart(name, sorted(parts))
        parameters = {
            name: Parameter(m.dtype, m.shape, m.strides, self._dtypes.get(name, ""), tuple(self._parts[name].values()))
            for name, m in self._memory.items()
        }
        used = {part.source for parts in self._parts.values() for part in parts.values()}
        return Recording(parameters, {name: self._sources[name][0] for name in self._sources if name in used})


def _check_apart(name: str, boxes: list[tuple[Shape, Shape]]) -> None:
    """Raise RecordError unless boxes, in the order of their starts, have nothing in common."""
    near: list[tuple[Shape, Shape]] = []
    for start, stop in boxes:
        near = [(low, high) for low, high in near if high[:1] > start[:1]]
        for low, high in near:
            if all(a < d and c < b for a, b, c, d in zip(start, stop, low, high, strict=True)):
                raise RecordError(f"{name}: the loader writes {low} to {high} and {start} to {stop}, which overlap")
        near.append((start, stop))


def _joined(name: str, of_rank: Mapping[int, Parameter]) -> tuple[Tensor, list[Part]]:
    """Return one tensor of what ranks have of a parameter, and its parts; equal ones are one."""
    groups: dict[tuple[Shape, tuple[Part, ...]], list[int]] = {}
    for rank, one in of_rank.items():
        groups.setdefault((one.shape, tuple(sorted(one.parts))), []).append(rank)
    first = next(iter(of_rank.values()))
    for one in of_rank.values():
        if (one.dtype, len(one.shape), one.shape[1:]) != (first.dtype, len(first.shape), first.shape[1:]):
            raise UsageError(
                f"{name}: it is {first.dtype} {first.shape} on one rank, {one.dtype} {one.shape} on another"
            )
    if len(groups) > 1 and not first.shape:
        raise UsageError(f"{name}: a parameter of one element is loaded differently on ranks {sorted(of_rank)}")
    shape = (sum(own[0] for own, _ in groups), *first.shape[1:]) if first.shape else ()
    parts: list[Part] = []
    ranks_of: dict[Held, list[int]] = {}
    begin = 0
    for (own, several), ranks in groups.items():
        zeros = (0,) * len(own)
        start = (begin, *zeros[1:]) if own else ()
        parts += [p._replace(target_start=tuple(map(int.__add__, p.target_start, start))) for p in several]
        piece = Piece(start, tuple(map(int.__add__, start, own)), zeros)
        for rank in ranks:
            held = Held((piece,), own, _usual(of_rank[rank]))
            ranks_of.setdefault(held, []).append(rank)
        begin += own[0] if own else 0
    sharding = Sharding.of(shape, tuple(ranks_of))
    return Tensor(first.dtype, sharding, tuple(tuple(sorted(ranks)) for ranks in ranks_of.values())), parts


def _usual(parameter: Parameter) -> Shape:
    """Return a parameter's strides, those of dimensions of one element as in a dense array."""
    rows = zip(parameter.shape, parameter.strides, dense(parameter.shape), strict=True)
    return tuple(usual if extent == 1 else stride for extent, stride, usual in rows)


def _expression(
    tensor: Tensor, parts: list[Part], of_rank: Mapping[int, Parameter], shapes: Mapping[str, Shape]
) -> Expression:
    """Return the expression of a target of which the parts are known."""
    dtypes = {one.source_dtype for one in of_rank.values() if one.parts}
    if len(dtypes) != 1:
        raise UsageError(f"ranks load a parameter from tensors of several types: {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()

    def make(source_of: SourceOf) -> Made:
        for name in dict.fromkeys(part.source for part in parts):
            shape, found = source_of(name)
            if (shape, found) != (shapes[name], dtype):
                raise UsageError(f"{name} is {found} {shape}, but was {dtype} {shapes[name]} when it was recorded")
        return Made(tensor.shape, dtype, None if dtype == tensor.dtype else "", parts)

    return Expression(make)
