"""Record a recipe and the targets' layout from the checkpoint loader that an inference engine has already.

    recording = record(model.load_weights, dict(model.named_parameters()), trained)     # on each inference rank
    targets, recipe = Recording.merge({0: recording, 1: ...}, trained)                  # of all ranks

The loader gets (name, tensor) pairs as from a checkpoint, but the tensors have no values (`traced`). For each element
of a parameter, a recording keeps only the element of a source tensor that the loader copied there. So no rules need to
be written for a model.

**The target tensors.** A loader knows its own rank's part of a parameter, and not the whole. So ranks that load the
same elements into a parameter share one part of the target tensor, and different parts follow one another along the
first dimension:

    norm, the same on ranks 0 and 1           a tensor of [4096], on both
    qkv, rank 0's heads and rank 1's          a tensor of [2 * 3072, 4096], a half on each

Such a target tensor names the memory of all ranks together; it exists as a whole in no engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import UsageError
from .copy_log import CopyLog, memory_of
from .dtypes import dtype_name
from .layout import Layout, Tensor
from .placement import LocalBox, LocalTensor, Sharding, dense
from .recipe import Expression, Part, Recipe, ResolvedExpression, SourceOf
from .traced import Elements, RecordError
from .traced_numpy import TracedArray
from .traced_torch import traced_tensor
from .watched import read_only, refuse_later_changes

__all__ = ["Recording", "record"]

Shape = tuple[int, ...]
LIBRARY_ERRORS = (TypeError, ValueError, IndexError, BufferError, RuntimeError)
"""The errors that libraries raise if an argument is not an array to them."""


class Parameter(NamedTuple):
    """One rank's part of a parameter: its memory layout, the type of its source tensors, and the parts filling it."""

    dtype: str
    shape: Shape
    strides: Shape
    source_dtype: str
    parts: tuple[Part, ...]


class Recording(NamedTuple):
    """The record of one rank's loader. `sources` has the shape of each source tensor that the loader copied from."""

    parameters: dict[str, Parameter]
    sources: dict[str, Shape]

    def describe(self) -> dict[str, Any]:
        """Return the recording as mappings, tuples, strings and integers, which travel as JSON."""
        return {"parameters": self.parameters, "sources": self.sources}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Recording:
        """Return the recording whose description `describe` returned. Raises UsageError for anything else."""
        try:
            # A round trip through JSON turns tuples into lists, so that a description is the same before and after
            # JSON.
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
            raise UsageError(f"this is not the description of a recording: {error!r}") from None

    @staticmethod
    def merge(
        recordings: Mapping[int, Recording], *, unused: Iterable[str] = (), untouched: Iterable[str] = ()
    ) -> tuple[Layout, Recipe]:
        """Return the layout of all inference ranks and the recipe, from the recording of each rank.

        `unused` and `untouched` are as for `Recipe`. Raises UsageError for a parameter that no rank's loader wrote and
        that is not listed as untouched, and for ranks whose parameters differ in type or beyond the first dimension.
        """
        names = dict.fromkeys(name for one in recordings.values() for name in one.parameters)
        listed = Recipe({}, tuple(unused), tuple(untouched))
        shapes = {name: shape for one in recordings.values() for name, shape in one.sources.items()}
        tensors, made, silent = {}, {}, []
        for name in names:
            of_rank = {rank: one.parameters[name] for rank, one in recordings.items() if name in one.parameters}
            tensors[name], parts = _joined(name, of_rank)
            if parts or not all(tensors[name].shape):
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
    """Run one rank's loader on tensors without values, and return a recording of its copies.

    `load` takes an iterator of (name, tensor) pairs, as vLLM's `load_weights` does. `parameters` are either torch
    tensors on any device (also "meta") or numpy arrays, not both; the recorded copies do not change them. `sources`
    gives the shape and type of each tensor of the checkpoint. A loader's call means what it means in the library of its
    parameters. The loader may slice, permute, split, combine and convert tensors, and copies them with torch's `copy_`,
    with torch's assignment to an index, or with `numpy.copyto`. Raises RecordError, a UsageError that names the call
    and the tensor, for anything else, even if the loader catches it.
    """
    if isinstance(sources, Layout):
        sources = {name: (tensor.shape, tensor.dtype) for name, tensor in sources.tensors.items()}
    known = {name: (tuple(map(int, shape)), dtype_name(dtype)) for name, (shape, dtype) in sources.items()}
    torch = _are_torch(parameters)
    make = traced_tensor if torch else TracedArray
    log = CopyLog(parameters, known)
    with refuse_later_changes(log) if torch else read_only(parameters):
        _run(load, ((name, make(log, Elements.of(name, *known[name]))) for name in known), log)
    for name, memory in log.memory.items():
        if memory_of(parameters[name]) != memory:
            raise RecordError(
                f"{name}: the loader replaces this parameter's memory; it must copy into the memory that is there"
            )
    return _recording(log, known)


def _are_torch(parameters: Mapping[str, Any]) -> bool:
    """Return whether parameters are torch tensors. Without parameters, return whether torch is loaded.

    Raises UsageError for a mixture of torch tensors and numpy arrays.
    """
    kinds = {hasattr(parameter, "untyped_storage") for parameter in parameters.values()}
    if len(kinds) > 1:
        raise UsageError(
            "some parameters are torch tensors and some are numpy arrays, and their calls have different meanings: "
            "record a loader for each kind"
        )
    return kinds.pop() if kinds else "torch" in sys.modules


def _run(load: Callable[[Iterator[tuple[str, Any]]], object], pairs: Iterator[tuple[str, Any]], log: CopyLog) -> None:
    """Run a loader. A refusal is raised even if the loader or a library has caught or replaced the error."""
    last = "no tensor yet"

    def noted() -> Iterator[tuple[str, Any]]:
        nonlocal last
        for name, tensor in pairs:
            last = name
            yield name, tensor

    try:
        load(noted())
    except RecordError:
        raise
    except Exception as error:
        log.check()
        if isinstance(error, ValueError) and "read-only" in str(error):
            raise RecordError(
                f"{last}: the loader changes a parameter by another call than numpy.copyto(parameter[index], "
                f"tensor) ({error}): a recipe has copies alone, so do that before it is recorded, or in on_commit"
            ) from error
        if isinstance(error, LIBRARY_ERRORS):
            raise RecordError(
                f"{last}: the loader, or a call that it makes with a tensor without values, fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        raise
    log.check()


def _recording(log: CopyLog, known: Mapping[str, tuple[Shape, str]]) -> Recording:
    parameters = {
        name: Parameter(m.dtype, m.shape, m.strides, log.dtypes.get(name, ""), tuple(log.parts[name].values()))
        for name, m in log.memory.items()
    }
    used = {part.source for parts in log.parts.values() for part in parts.values()}
    return Recording(parameters, {name: known[name][0] for name in known if name in used})


def _joined(name: str, of_rank: Mapping[int, Parameter]) -> tuple[Tensor, list[Part]]:
    """Combine ranks' parts of a parameter into one tensor; return it and its recipe parts. Equal parts are merged.

    Raises UsageError for ranks whose types differ, or whose shapes differ beyond the first dimension.
    """
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
    ranks_of: dict[LocalTensor, list[int]] = {}
    begin = 0
    for (own, several), ranks in groups.items():
        zeros = (0,) * len(own)
        start = (begin, *zeros[1:]) if own else ()
        parts += [p._replace(target_start=tuple(map(int.__add__, p.target_start, start))) for p in several]
        piece = LocalBox(start, tuple(map(int.__add__, start, own)), zeros)
        for rank in ranks if all(own) else ():
            held = LocalTensor((piece,), own, _dense_strides(of_rank[rank]))
            ranks_of.setdefault(held, []).append(rank)
        begin += own[0] if own else 0
    sharding = Sharding.of(shape, tuple(ranks_of))
    return Tensor(first.dtype, sharding, tuple(tuple(sorted(ranks)) for ranks in ranks_of.values())), parts


def _dense_strides(parameter: Parameter) -> Shape:
    """Return a parameter's strides. Dimensions of one index get a dense array's stride."""
    rows = zip(parameter.shape, parameter.strides, dense(parameter.shape), strict=True)
    return tuple(usual if extent == 1 else stride for extent, stride, usual in rows)


def _expression(
    tensor: Tensor, parts: list[Part], of_rank: Mapping[int, Parameter], shapes: Mapping[str, Shape]
) -> Expression:
    """Return an expression that makes a target from known parts. Raises UsageError for sources of several types."""
    dtypes = {one.source_dtype for one in of_rank.values() if one.parts} or {tensor.dtype}
    if len(dtypes) != 1:
        raise UsageError(f"ranks load a parameter from tensors of several types: {', '.join(sorted(dtypes))}")
    dtype = dtypes.pop()

    def make(source_of: SourceOf) -> ResolvedExpression:
        for name in dict.fromkeys(part.source for part in parts):
            shape, found = source_of(name)
            if (shape, found) != (shapes[name], dtype):
                raise UsageError(f"{name} is {found} {shape}, but was {dtype} {shapes[name]} when it was recorded")
        return ResolvedExpression(tensor.shape, dtype, None if dtype == tensor.dtype else "", parts)

    return Expression(make)
