"""The log of the copies that a loader makes to its parameters while it is recorded.

The log holds recipe parts, by the box of the parameter that each part fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from .boxes import Array, boxes_between
from .dtypes import ITEMSIZE, dtype_name, single_cast
from .placement import dense
from .recipe import Part
from .traced import Elements, RecordError

__all__ = ["CopyLog", "StridedView", "memory_of"]

ROUNDED_DIFFERENTLY = {("F64", "F16")}
"""Conversions whose result depends on the library: torch rounds to 32 bits first, numpy does not. A trainer uses torch
for conversions if it has loaded torch."""
Shape = tuple[int, ...]
Box = tuple[Shape, Shape]


class StridedView(NamedTuple):
    """Where a tensor or an array lies: its storage, its first byte there, its shape, its strides in elements."""

    storage: int
    first: int
    shape: Shape
    strides: Shape
    dtype: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return not all(self.shape)

    @property
    def end(self) -> int:
        """The byte after the last element. Strides must not be negative."""
        reach = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return self.first + (reach + 1) * ITEMSIZE[self.dtype]


def memory_of(tensor: Any) -> StridedView:
    """Return where a torch tensor or a NumPy array lies. Raises UsageError for anything else."""
    if hasattr(tensor, "untyped_storage"):
        tensor = tensor.data
        name, shape = dtype_name(tensor.dtype), tuple(map(int, tensor.shape))
        # Use the storage and not the address, because tensors on the device "meta" have no address.
        storage, first = tensor.untyped_storage()._cdata, tensor.storage_offset() * ITEMSIZE[name]
        return StridedView(storage, first, shape, tuple(map(int, tensor.stride())), name)
    if not isinstance(tensor, np.ndarray):
        raise UsageError(f"expected a torch tensor or a numpy array, got {type(tensor).__name__}")
    name, shape = dtype_name(tensor.dtype), tuple(map(int, tensor.shape))
    if any(stride % ITEMSIZE[name] for stride, extent in zip(tensor.strides, shape, strict=True) if extent > 1):
        raise UsageError(f"strides are {tensor.strides} bytes, expected multiples of {ITEMSIZE[name]}")
    strides = tuple(int(stride) // ITEMSIZE[name] for stride in tensor.strides)
    return StridedView(0, int(tensor.__array_interface__["data"][0]), shape, strides, name)


class CopyLog:
    """The copies that a loader makes. `sources` has the shape and the type of each source tensor by name."""

    def __init__(self, parameters: Mapping[str, Any], sources: Mapping[str, tuple[Shape, str]]) -> None:
        self._sources = sources
        self.memory: dict[str, StridedView] = {}
        for name, parameter in parameters.items():
            memory = _memory_of_parameter(name, parameter)
            if memory not in self.memory.values():  # otherwise it is another name of the same memory: tied weights
                self.memory[name] = memory
        self._in_storage: dict[int, list[str]] = {}
        for name, memory in self.memory.items():
            if not memory.is_empty:
                self._in_storage.setdefault(memory.storage, []).append(name)
        self.parts: dict[str, dict[Box, Part]] = {name: {} for name in self.memory}
        self.dtypes: dict[str, str] = {}
        self._refusal: RecordError | None = None

    def refused(self, error: RecordError) -> RecordError:
        """Record a refusal, so that `check` raises it even if the loader catches it; return it."""
        self._refusal = self._refusal or error
        return error

    def check(self) -> None:
        """Raise the first refusal, which the loader may have caught. Raise RecordError for boxes that overlap.

        Boxes must not overlap because a plan does not order its writes.
        """
        if self._refusal is not None:
            raise self._refusal
        for name, parts in self.parts.items():
            _check_apart(name, sorted(parts))

    def copied(self, target: Any, elements: Elements) -> None:
        """Record that the loader copies elements to a view of a parameter of the same shape."""
        try:
            self._copied(memory_of(target), elements)
        except RecordError as error:
            raise self.refused(error) from None
        except UsageError as error:
            raise self.refused(
                RecordError(f"{elements.name}: the loader copies it to a tensor that cannot be recorded: {error}")
            ) from None

    def _copied(self, view: StridedView, elements: Elements) -> None:
        if view.is_empty:
            return
        name, parameter, offset = self._find(view, elements)
        self._check_types(name, parameter, elements)
        there = Array(parameter.shape, parameter.strides)
        made: dict[Box, Part] = {}
        for piece in elements.pieces():
            begin = offset + sum(map(int.__mul__, piece.start, view.strides))
            here = Array(self._sources[piece.source][0])
            try:
                found = boxes_between(piece.extent, (here, piece.offset, piece.strides), (there, begin, view.strides))
            except UsageError as error:
                raise RecordError(
                    f"{name}: the loader's copy from {piece.source} cannot be described as boxes: {error}"
                ) from None
            for source_start, start, extent, axes in found:
                box = start, tuple(map(int.__add__, start, extent))
                if box in made:
                    raise RecordError(
                        f"{name}: the loader copies several elements of {piece.source} to one place, "
                        f"{start}; it must copy each once"
                    )
                made[box] = Part(piece.source, source_start, start, extent, axes)
        # A part that fills the same box as an earlier part replaces it.
        self.parts[name].update(made)

    def _find(self, view: StridedView, elements: Elements) -> tuple[str, StridedView, int]:
        """Return the name and the memory of the parameter of a view, and the element at which the view begins."""
        for name in self._in_storage.get(view.storage, ()):
            memory = self.memory[name]
            offset, rest = divmod(view.first - memory.first, ITEMSIZE[memory.dtype])
            # One parameter may lie in the gaps of another, so being within its extent is not enough.
            if offset >= 0 and Array(memory.shape, memory.strides).has(offset):
                if view.dtype != memory.dtype or rest:
                    raise RecordError(f"{name}: the loader writes {elements.name} to it as {view.dtype}")
                return name, memory, offset
        raise RecordError(
            f"{elements.name}: the loader copies it to a tensor that is not a parameter; a recording "
            "needs copies to parameters"
        )

    def _check_types(self, name: str, parameter: StridedView, elements: Elements) -> None:
        casts = *elements.casts, parameter.dtype
        once = single_cast(casts)
        if len(once) > 2:
            steps = " to ".join(casts)
            raise RecordError(
                f"{name}: the loader converts {elements.name} from {steps}; a recipe converts once, so "
                "leave out the steps between"
            )
        if once in ROUNDED_DIFFERENTLY or (len(once) == 2 and once[1] == "F8_E8M0"):
            raise RecordError(
                f"{name}: the loader converts {elements.name} from {once[0]} to {once[1]}, which torch and "
                "numpy round differently; convert it in the trainer"
            )
        if self.dtypes.setdefault(name, casts[0]) != casts[0]:
            raise RecordError(
                f"{name}: the loader fills it from tensors of {self.dtypes[name]} and {casts[0]}; make "
                "them one type in the trainer"
            )

    def loaded_in(self, values: Any) -> str | None:
        """Return the name of the parameter with which `values` share elements that the loader has copied, or None."""
        try:
            view = memory_of(values)
        except (UsageError, RuntimeError, NotImplementedError):
            return self._loaded_beside(values)
        for name in () if view.is_empty else self._in_storage.get(view.storage, ()):
            if self.parts[name] and self._meets(view, self.memory[name], self.parts[name]):
                return name
        return None

    def _loaded_beside(self, values: Any) -> str | None:
        """Return the name of a loaded parameter in the same storage as `values`, whose type has no name; or None."""
        try:
            names = self._in_storage.get(values.untyped_storage()._cdata, ())
        except (AttributeError, RuntimeError, NotImplementedError):
            return None  # `values` have no memory that a parameter could share
        return next((name for name in names if self.parts[name]), None)

    def _meets(self, view: StridedView, memory: StridedView, parts: Mapping[Box, Part]) -> bool:
        if view.first >= memory.end or memory.first >= view.end:
            return False
        offset, rest = divmod(view.first - memory.first, ITEMSIZE[memory.dtype])
        if rest or view.dtype != memory.dtype:
            return True
        whole = Array(view.shape), 0, dense(view.shape)
        try:
            found = boxes_between(view.shape, whole, (Array(memory.shape, memory.strides), offset, view.strides))
        except UsageError:
            return True  # the view also covers other memory, or consists of too many boxes
        boxes = [(start, tuple(map(int.__add__, start, extent))) for _, start, extent, _ in found]
        return any(_overlap(box, part) for box in boxes for part in parts)


def _memory_of_parameter(name: str, parameter: Any) -> StridedView:
    try:
        memory = memory_of(parameter)
    except (UsageError, RuntimeError, NotImplementedError) as error:
        raise UsageError(f"parameter {name}: {error}") from None
    reach = 0
    for stride, extent in sorted(zip(memory.strides, memory.shape, strict=True)):
        if extent > 1 and not memory.is_empty:
            if stride <= reach:
                raise UsageError(
                    f"parameter {name}: with shape {memory.shape} and strides {memory.strides} several elements share "
                    "one place, or a stride is negative; give the array that it is a view of"
                )
            reach += (extent - 1) * stride
    return memory


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for a, b, c, d in zip(*one, *other, strict=True))


def _check_apart(name: str, boxes: list[Box]) -> None:
    """Raise RecordError if any two boxes overlap. The boxes must be sorted by their starts."""
    near: list[Box] = []
    for start, stop in boxes:
        near = [(low, high) for low, high in near if high[:1] > start[:1]]
        for low, high in near:
            if _overlap((start, stop), (low, high)):
                raise RecordError(
                    f"{name}: the loader's copies to {low} up to {high} and to {start} up to {stop} "
                    "overlap; copy each element once"
                )
        near.append((start, stop))
