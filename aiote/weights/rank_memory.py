"""A rank's tensors in memory, and memory for what an update makes on its way.

`RankMemory` finds the bytes of each named array of a rank and registers them. Arrays that lie next to each other, as
those of one storage do, share a registration. `StagingMemory` bounds what an update holds besides: whoever needs some
waits in line until there is room, so a source rank's peak is known before it starts.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from .. import aio, gpu
from ..core.gpu_arrays import GpuArray, gpu_array, part_of
from ..core.masked_arrays import require_unmasked
from ..service.background import to_the_end
from ..transfers.regions import Access
from .dtypes import ITEMSIZE, dtype_name
from .layout import Layout
from .placement import Held

__all__ = [
    "TENSOR_BYTES",
    "Bytes",
    "RankMemory",
    "StagingMemory",
    "TensorPlace",
    "extent_of",
    "in_thread",
    "plain_errors",
]

Bytes = NDArray[np.uint8]
ALIGNED = 64
LARGE = 1 << 20
"""From so many bytes on work is done in a thread, for it would hold the event loop for milliseconds."""
TENSOR_BYTES = 1 << 10
"""To find a tensor in memory takes as long as to work on so many bytes."""
SHARED_WORK = 1 << 16
"""So many candidates are looked at to find out whether two arrays share elements: a millisecond at most."""


async def in_thread(nbytes: int, function: Any) -> Any:
    """Call a function that works on so many bytes, in a thread where that takes long; a cancellation waits for it."""
    return await aio.in_thread(function) if nbytes >= LARGE else function()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what failed first in task groups as it is, not in groups of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


class TensorPlace(NamedTuple):
    """Where a tensor lies: which of the rank's regions, and the byte there at which it begins."""

    region: int
    offset: int
    nbytes: int


class Found(NamedTuple):
    """An array: where it begins, its shape, its strides in elements, and the name of its type; of a GPU's also all of
    the memory that it is a view of.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: GpuArray | None = None


def extent_of(held: Held, dtype: str) -> int:
    """Return how many bytes a rank's part takes, from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.strides, strict=True))
    return (last + 1) * ITEMSIZE[dtype]


def found_in(array: Any) -> Found:
    """Return where an array lies: numpy's, torch's, any of a GPU, a DTensor's local part. Raises UsageError."""
    array = array.to_local() if hasattr(array, "to_local") else array
    if not isinstance(array, np.ndarray) and (on_gpu := gpu_array(array)) is not None:
        return _found_on_gpu(array, *on_gpu)
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise aiote.UsageError(f"it is on {array.device}; give a copy on the CPU, which may be pinned")
        return Found(array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype_name(array.dtype))
    require_unmasked("the array", array)
    if not isinstance(array, np.ndarray):
        raise aiote.UsageError(f"a numpy array or a torch tensor is expected, got {type(array).__name__}")
    name = dtype_name(array.dtype)
    if any(stride % ITEMSIZE[name] for stride in array.strides):
        raise aiote.UsageError(f"its strides {array.strides} are no multiples of its elements' {ITEMSIZE[name]} bytes")
    strides = tuple(stride // ITEMSIZE[name] for stride in array.strides)
    return Found(array.ctypes.data, tuple(array.shape), strides, name)


def _found_on_gpu(array: Any, view: GpuArray, named: str, storage: GpuArray) -> Found:
    name = dtype_name(array.dtype) if hasattr(array, "data_ptr") else dtype_name(np.dtype(named))
    size = ITEMSIZE[name]
    if any(stride % size for stride in view.strides):
        raise aiote.UsageError(f"its strides {view.strides} are no multiples of its elements' {size} bytes")
    address = int(view.__array_interface__["data"][0])
    return Found(address, view.shape, tuple(stride // size for stride in view.strides), name, storage)


class RankMemory:
    """The arrays of one rank by name, as its layout describes them.

    They stay alive as long as this does. Raises UsageError, which names the tensor, for an array that is missing or has
    another shape, type or strides than the layout says, or is read-only and is to be `written`.
    """

    def __init__(self, layout: Layout, rank: int, arrays: Mapping[str, Any], *, written: bool = False) -> None:
        self.layout, self.rank = layout, rank
        self.arrays = dict(arrays)
        self.regions: list[aiote.Region] = []
        self.places: dict[str, TensorPlace] = {}
        spans: dict[str, tuple[int, int]] = {}
        self._found: dict[str, tuple[int, Held, str]] = {}
        self._ranges: list[tuple[int, int]] = []
        # What lies on a GPU is registered by storage: neighbours there may be of two allocations.
        self._on_gpu: dict[int, GpuArray] = {}
        for name, tensor in layout.tensors.items():
            held = tensor.held_by().get(rank)
            if held is not None:
                if written and isinstance(arrays.get(name), np.ndarray) and not arrays[name].flags.writeable:
                    raise aiote.UsageError(f"{name}: the array is read-only, and updates write to it")
                address, storage = _checked(name, held, tensor.dtype, arrays)
                self._found[name] = address, held, tensor.dtype
                if storage is None:
                    spans[name] = address, extent_of(held, tensor.dtype)
                else:
                    self._place_on_gpu(name, address, extent_of(held, tensor.dtype), storage)
        of_gpu = len(self._ranges)
        for name, (address, nbytes) in sorted(spans.items(), key=lambda item: item[1]):
            if len(self._ranges) == of_gpu or address > self._ranges[-1][1]:
                self._ranges.append((address, address + nbytes))
            first, last = self._ranges[-1]
            self._ranges[-1] = (first, max(last, address + nbytes))
            self.places[name] = TensorPlace(len(self._ranges) - 1, address - first, nbytes)
        self.views: list[Bytes] = [
            self._on_gpu[number] if number in self._on_gpu else _bytes_at(first, last - first)
            for number, (first, last) in enumerate(self._ranges)
        ]

    def _place_on_gpu(self, name: str, address: int, nbytes: int, storage: GpuArray) -> None:
        """Note where a tensor lies in a GPU's memory."""
        first = int(storage.__array_interface__["data"][0])
        extent = first, first + storage.nbytes
        if extent not in self._ranges:
            self._on_gpu[len(self._ranges)] = storage
            self._ranges.append(extent)
        self.places[name] = TensorPlace(self._ranges.index(extent), address - first, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(view.nbytes for view in self.views)

    def tied(self) -> dict[str, str]:
        """Return by name the first tensor that is the same array, where that is another one."""
        first: dict[object, str] = {}
        found = {
            name: first.setdefault((address, held.shape, held.strides, dtype), name)
            for name, (address, held, dtype) in self._found.items()
        }
        return {name: other for name, other in found.items() if name != other}

    def overlapping(self) -> list[tuple[str, str]]:
        """Return the pairs of tensors that share elements and are not the same array."""
        tied, pairs = self.tied(), []
        near: list[tuple[int, str]] = []
        spans = sorted((address, name) for name, (address, _, _) in self._found.items() if name not in tied)
        for address, name in spans:
            near = [(end, other) for end, other in near if end > address]
            pairs += [(other, name) for _, other in near if _share(self._found[other], self._found[name])]
            near.append((address + self.places[name].nbytes, name))
        return pairs

    @classmethod
    def allocated(cls, layout: Layout, rank: int, tied: Mapping[str, str] | None = None) -> RankMemory:
        """Return memory for all that a rank has in a layout, in one piece; tensors that are `tied` share theirs."""
        held = {name: tensor.held_by().get(rank) for name, tensor in layout.tensors.items()}
        sizes = {name: extent_of(one, layout.tensors[name].dtype) for name, one in held.items() if one is not None}
        others = {name: first for name, first in (tied or {}).items() if sizes.pop(name, 0)}
        memory = np.zeros(sum(-(-size // ALIGNED) * ALIGNED for size in sizes.values()) + ALIGNED, np.uint8)
        made = cls(Layout({}), rank, {"": memory})
        made.layout = layout
        at = -memory.ctypes.data % ALIGNED
        for name, size in sizes.items():
            made.places[name] = TensorPlace(0, at, size)
            at += -(-size // ALIGNED) * ALIGNED
        # In the layout's order, for that is the order of names.
        made.places |= {name: made.places[first] for name, first in others.items()}
        made.places = {name: made.places[name] for name in layout.tensors if name in made.places}
        made.views = [memory]
        return made

    async def register(self, engine: aiote.Engine, access: Access) -> None:
        """Register all of it; what was registered is closed again where one fails."""
        try:
            for view in self.views:
                self.regions.append(await engine.register_async(view, access))
        except BaseException:
            await to_the_end(self.close)
            raise

    async def close(self) -> None:
        """End the registrations, once nothing uses them. Idempotent."""
        while self.regions:
            await self.regions[-1].aclose()
            self.regions.pop()

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of a tensor, from its first element to its last; of a GPU's a copy, which takes its time."""
        region, offset, nbytes = self.places[name]
        view = self.views[region]
        if isinstance(view, GpuArray):
            copied = np.empty(nbytes, np.uint8)
            gpu.copy(copied, part_of(view, offset, offset + nbytes))
            return copied
        return view[offset : offset + nbytes]

    def copy_to(self, other: RankMemory, names: Iterable[str] | None = None) -> None:
        """Copy tensors, all without `names`, to where another memory of the same layout and rank has them."""
        for name in self.places if names is None else names:
            # Element by element where there are gaps: they may be another tensor's.
            there = other.bytes_of(name)
            other.elements_in(name, there)[...] = self.elements_in(name, self.bytes_of(name))
            region, offset, nbytes = other.places[name]
            view = other.views[region]
            if isinstance(view, GpuArray):
                gpu.copy(part_of(view, offset, offset + nbytes), there)

    def elements_in(self, name: str, its_bytes: Bytes) -> NDArray[Any]:
        """Return a tensor's elements in what `bytes_of` gave, each as plain bytes, in its shape."""
        tensor = self.layout.tensors[name]
        held, size = tensor.held_by()[self.rank], ITEMSIZE[tensor.dtype]
        strides = [size * stride for stride in held.strides]
        return np.ndarray(held.shape, f"V{size}", buffer=its_bytes.data, strides=strides)


def _share(*both: tuple[int, Held, str]) -> bool:
    """Tell whether two arrays share elements; where that takes long to find out they may."""
    one, other = (
        np.lib.stride_tricks.as_strided(
            _bytes_at(address, ITEMSIZE[dtype]).view(f"V{ITEMSIZE[dtype]}"),
            held.shape,
            [ITEMSIZE[dtype] * stride for stride in held.strides],
        )
        for address, held, dtype in both
    )
    work: Any = SHARED_WORK  # the types of NumPy 2.4, and no later one's, allow 0 and -1 alone
    try:
        return bool(np.shares_memory(one, other, work))
    except np.exceptions.TooHardError:
        return True


def _checked(name: str, held: Held, dtype: str, arrays: Mapping[str, Any]) -> tuple[int, GpuArray | None]:
    """Return where an array begins, and a GPU's storage; raise UsageError unless it is as the layout says."""
    if name not in arrays:
        raise aiote.UsageError(f"{name}: the layout says that this rank has it, and there is no array of that name")
    try:
        found = found_in(arrays[name])
    except aiote.UsageError as error:
        raise aiote.UsageError(f"{name}: {error}") from None
    pairs = zip(found.strides, held.strides, held.shape, strict=False)
    same = found.shape == held.shape and all(ours == theirs for ours, theirs, size in pairs if size > 1)
    if not same or found.dtype != dtype:
        raise aiote.UsageError(
            f"{name}: the array is {found.dtype} {found.shape} with strides {found.strides}, "
            f"the layout says {dtype} {held.shape} with strides {held.strides}"
        )
    return found.address, found.storage


def _bytes_at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class StagingMemory:
    """Memory for what updates make, `limit` bytes of it; tasks get theirs in the order in which they ask.

    `peak` is the most that was held at once.
    """

    def __init__(self, engine: aiote.Engine, limit: int) -> None:
        self.limit = limit
        self.held = self.peak = 0
        self._engine = engine
        self._memory: Bytes | None = None
        self._region: aiote.Region | None = None
        self._free: list[tuple[int, int]] = [(0, limit // ALIGNED * ALIGNED)]
        self._line: deque[object] = deque()
        self._changed = anyio.Event()

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[tuple[Bytes, aiote.Region]]:
        """Lend memory for the length of an `async with`, with its registration; it is not cleared.

        Raises UsageError for more than the limit.
        """
        async with self.count(nbytes) as start:
            if self._memory is None:
                self._memory = np.empty(self.limit, np.uint8)
                self._region = self._engine.register(self._memory, "local")
            assert self._region is not None
            yield self._memory[start : start + nbytes], self._region[start : start + nbytes]

    @asynccontextmanager
    async def count(self, nbytes: int) -> AsyncIterator[int]:
        """Count memory that is allocated elsewhere, for the length of an `async with`."""
        size = max(ALIGNED, -(-nbytes // ALIGNED) * ALIGNED)
        if size > self.limit // ALIGNED * ALIGNED:
            raise aiote.UsageError(f"{size} bytes of staging memory are needed, staging_bytes is {self.limit}")
        start = await self._wait(size)
        try:
            yield start
        finally:
            self._give(start, size)

    async def close(self) -> None:
        """Let go of the memory, once nothing uses it."""
        if self._region is not None:
            await self._region.aclose()
        self._region = self._memory = None

    async def _wait(self, size: int) -> int:
        start = self._find(size) if not self._line else -1
        if start < 0:
            token = object()
            self._line.append(token)
            try:
                while self._line[0] is not token or (start := self._find(size)) < 0:
                    await self._changed.wait()
            finally:
                self._line.remove(token)
                self._wake()
        return start

    def _find(self, size: int) -> int:
        """Take the first gap that is large enough; -1 where there is none."""
        for number, (first, length) in enumerate(self._free):
            if length >= size:
                self._free[number] = (first + size, length - size)
                self.held += size
                self.peak = max(self.peak, self.held)
                return first
        return -1

    def _give(self, start: int, size: int) -> None:
        self.held -= size
        kept: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (start, size)]):
            if kept and kept[-1][0] + kept[-1][1] == first:
                kept[-1] = (kept[-1][0], kept[-1][1] + length)
            elif length:
                kept.append((first, length))
        self._free = kept
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
