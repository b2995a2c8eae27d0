"""A rank's tensors in memory, and staging memory for the tensors that a source rank makes during an update.

`RankArrays` finds the bytes of each named array of a rank and registers them. Arrays that lie next to each other, such
as the arrays of one storage, share a registration. `StagingMemory` bounds all other memory of an update: a task that
needs some waits in a queue until there is room, so a source rank's peak is known before it starts.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiote

from .. import aio, gpu
from ..aio import TurnQueue, run_shielded
from ..core.allocator import ALIGNMENT, Allocator, aligned
from ..core.gpu_arrays import GpuArray, gpu_array, part_of
from ..core.masked_arrays import require_unmasked
from ..transfers.regions import Access
from .dtypes import ITEMSIZE, dtype_name
from .layout import Layout
from .placement import LocalTensor

__all__ = [
    "TENSOR_BYTES",
    "Bytes",
    "RankArrays",
    "StagingMemory",
    "TensorPlace",
    "extent_of",
    "in_thread",
]

Bytes = NDArray[np.uint8]
LARGE = 1 << 20
"""Work on this many bytes or more runs in a thread, because it would block the event loop for milliseconds."""
TENSOR_BYTES = 1 << 10
"""Finding a tensor in memory takes as long as working on this many bytes."""
SHARED_WORK = 1 << 16
"""The most candidates to examine when deciding whether two arrays share elements: this takes a millisecond at most."""


async def in_thread(nbytes: int, function: Any) -> Any:
    """Call a function that works on `nbytes` bytes, in a thread if that takes long. Cancellation waits for its end."""
    return await aio.in_thread(function) if nbytes >= LARGE else function()


class TensorPlace(NamedTuple):
    """Where a tensor lies: the index of one of the rank's regions, its first byte there, and its size in bytes."""

    region: int
    offset: int
    nbytes: int


class ArrayInfo(NamedTuple):
    """An array: its address, its shape, its strides in elements, and the name of its type.

    For an array on a GPU, `storage` is the whole memory that the array is a view of.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: GpuArray | None = None


def extent_of(held: LocalTensor, dtype: str) -> int:
    """Return how many bytes a rank's part spans, from its first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.strides, strict=True))
    return (last + 1) * ITEMSIZE[dtype]


def found_in(array: Any) -> ArrayInfo:
    """Return where an array lies. It may be numpy's, torch's, any array on a GPU, or a DTensor (its local part).

    Raises UsageError for anything else, and for strides that are not multiples of the element's size.
    """
    array = array.to_local() if hasattr(array, "to_local") else array
    if not isinstance(array, np.ndarray) and (on_gpu := gpu_array(array)) is not None:
        return _found_on_gpu(array, *on_gpu)
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise aiote.UsageError(f"the array is on {array.device}: give a copy on the CPU, which may be pinned")
        return ArrayInfo(array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype_name(array.dtype))
    require_unmasked("the array", array)
    if not isinstance(array, np.ndarray):
        raise aiote.UsageError(f"expected a numpy array or a torch tensor, got {type(array).__name__}")
    name = dtype_name(array.dtype)
    if any(stride % ITEMSIZE[name] for stride in array.strides):
        raise aiote.UsageError(
            f"its strides {array.strides} are not multiples of the element size of {ITEMSIZE[name]} bytes"
        )
    strides = tuple(stride // ITEMSIZE[name] for stride in array.strides)
    return ArrayInfo(array.ctypes.data, tuple(array.shape), strides, name)


def _found_on_gpu(array: Any, view: GpuArray, named: str, storage: GpuArray) -> ArrayInfo:
    name = dtype_name(array.dtype) if hasattr(array, "data_ptr") else dtype_name(np.dtype(named))
    size = ITEMSIZE[name]
    if any(stride % size for stride in view.strides):
        raise aiote.UsageError(f"its strides {view.strides} are not multiples of the element size of {size} bytes")
    address = int(view.__array_interface__["data"][0])
    return ArrayInfo(address, view.shape, tuple(stride // size for stride in view.strides), name, storage)


class RankArrays:
    """The arrays of one rank by name, as its layout describes them.

    This object keeps the arrays alive. Raises UsageError, which names the tensor, for an array that is missing, that
    has another shape, type or strides than the layout says, or that is read-only although it is to be `written`.
    """

    def __init__(self, layout: Layout, rank: int, arrays: Mapping[str, Any], *, written: bool = False) -> None:
        self.layout, self.rank = layout, rank
        self.arrays = dict(arrays)
        self.regions: list[aiote.Region] = []
        self.places: dict[str, TensorPlace] = {}
        spans: dict[str, tuple[int, int]] = {}
        self._found: dict[str, tuple[int, LocalTensor, str]] = {}
        self._ranges: list[tuple[int, int]] = []
        # Arrays on a GPU are registered by storage, because neighbours there may belong to different allocations.
        self._on_gpu: dict[int, GpuArray] = {}
        for name, tensor in layout.tensors.items():
            held = tensor.held_by().get(rank)
            if held is not None:
                if written and isinstance(arrays.get(name), np.ndarray) and not arrays[name].flags.writeable:
                    raise aiote.UsageError(
                        f"{name}: the array is read-only, but updates write to it; give a writable one"
                    )
                address, storage = _check_array(name, held, tensor.dtype, arrays)
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
        """Record where a tensor lies in a GPU's memory."""
        first = int(storage.__array_interface__["data"][0])
        extent = first, first + storage.nbytes
        if extent not in self._ranges:
            self._on_gpu[len(self._ranges)] = storage
            self._ranges.append(extent)
        self.places[name] = TensorPlace(self._ranges.index(extent), address - first, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions together."""
        return sum(view.nbytes for view in self.views)

    def tied(self) -> dict[str, str]:
        """Return, for each tensor that is the same array as an earlier tensor, the name of that earlier tensor."""
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
    def allocated(
        cls,
        layout: Layout,
        rank: int,
        tied: Mapping[str, str] | None = None,
        memory: Bytes | None = None,
    ) -> RankArrays:
        """Allocate memory, in one piece, for everything that a rank holds in a layout. `tied` tensors share memory.

        `memory` is used in its place, where it is given: as many bytes as an allocation of this layout has.
        """
        held = {name: tensor.held_by().get(rank) for name, tensor in layout.tensors.items()}
        sizes = {name: extent_of(one, layout.tensors[name].dtype) for name, one in held.items() if one is not None}
        others = {name: first for name, first in (tied or {}).items() if sizes.pop(name, 0)}
        if memory is None:
            memory = np.zeros(sum(map(aligned, sizes.values())) + ALIGNMENT, np.uint8)
        made = cls(Layout({}), rank, {"": memory})
        made.layout = layout
        at = -memory.ctypes.data % ALIGNMENT
        for name, size in sizes.items():
            made.places[name] = TensorPlace(0, at, size)
            at += aligned(size)
        # Places must be in the layout's order, because tensors are numbered in this order.
        made.places |= {name: made.places[first] for name, first in others.items()}
        made.places = {name: made.places[name] for name in layout.tensors if name in made.places}
        made.views = [memory]
        return made

    async def register(self, engine: aiote.Engine, access: Access) -> None:
        """Register all regions. If one registration fails, close those made before it, and raise."""
        try:
            for view in self.views:
                self.regions.append(await engine.register_async(view, access))
        except BaseException:
            await run_shielded(self.close)
            raise

    async def close(self) -> None:
        """Close the registrations, once no transfer uses them. Idempotent."""
        while self.regions:
            await self.regions[-1].aclose()
            self.regions.pop()

    def drop(self) -> None:
        """Release arrays that `allocated` made, once their registrations are closed; the places stay."""
        self.arrays.clear()
        self.views.clear()

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of a tensor, from its first element to its last.

        For a tensor on a GPU this is a copy, which takes time; otherwise it is a view.
        """
        region, offset, nbytes = self.places[name]
        view = self.views[region]
        if isinstance(view, GpuArray):
            copied = np.empty(nbytes, np.uint8)
            gpu.copy(copied, part_of(view, offset, offset + nbytes))
            return copied
        return view[offset : offset + nbytes]

    def copy_to(self, other: RankArrays, names: Iterable[str] | None = None) -> None:
        """Copy tensors into another memory of the same layout and rank. Without `names`, copy all of them."""
        for name in self.places if names is None else names:
            # Copy elements and not the whole span, because the gaps between them may belong to another tensor.
            there = other.bytes_of(name)
            other.elements_in(name, there)[...] = self.elements_in(name, self.bytes_of(name))
            region, offset, nbytes = other.places[name]
            view = other.views[region]
            if isinstance(view, GpuArray):
                gpu.copy(part_of(view, offset, offset + nbytes), there)

    def elements_in(self, name: str, its_bytes: Bytes) -> NDArray[Any]:
        """Return a view of a tensor's elements, in its shape and as plain bytes, in the bytes from `bytes_of`."""
        tensor = self.layout.tensors[name]
        held, size = tensor.held_by()[self.rank], ITEMSIZE[tensor.dtype]
        strides = [size * stride for stride in held.strides]
        return np.ndarray(held.shape, f"V{size}", buffer=its_bytes.data, strides=strides)


def _share(*both: tuple[int, LocalTensor, str]) -> bool:
    """Return whether two arrays share elements; True as well if finding out takes more than `SHARED_WORK`."""
    one, other = (
        np.lib.stride_tricks.as_strided(
            _bytes_at(address, ITEMSIZE[dtype]).view(f"V{ITEMSIZE[dtype]}"),
            held.shape,
            [ITEMSIZE[dtype] * stride for stride in held.strides],
        )
        for address, held, dtype in both
    )
    work: Any = SHARED_WORK  # Any, because the type hints of NumPy 2.4 (not of later releases) allow only 0 and -1
    try:
        return bool(np.shares_memory(one, other, work))
    except np.exceptions.TooHardError:
        return True


def _check_array(name: str, held: LocalTensor, dtype: str, arrays: Mapping[str, Any]) -> tuple[int, GpuArray | None]:
    """Return an array's address, and its storage if it is on a GPU. Raises UsageError unless it fits the layout."""
    if name not in arrays:
        raise aiote.UsageError(f"{name}: the layout gives it to this rank, but arrays has no such name; add it")
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
    """Staging memory of at most `limit` bytes. Tasks get memory in the order in which they ask for it.

    `peak` is the largest number of bytes that were held at once.
    """

    def __init__(self, engine: aiote.Engine, limit: int) -> None:
        self.limit = limit
        self.held = self.peak = 0
        self._engine = engine
        self._memory: Bytes | None = None
        self._region: aiote.Region | None = None
        self._places = Allocator(limit // ALIGNMENT * ALIGNMENT)
        self._queue = TurnQueue()

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[tuple[Bytes, aiote.Region]]:
        """Lend memory and its registration until the end of an `async with`, once there is room. It is not cleared.

        Raises UsageError for more bytes than the limit.
        """
        async with self.reserve_elsewhere(nbytes) as start:
            if self._memory is None:
                self._memory = np.empty(self.limit, np.uint8)
                self._region = self._engine.register(self._memory, "local")
            assert self._region is not None
            yield self._memory[start : start + nbytes], self._region[start : start + nbytes]

    @asynccontextmanager
    async def reserve_elsewhere(self, nbytes: int) -> AsyncIterator[int]:
        """Count memory that is allocated elsewhere against the limit, until the end of an `async with`.

        Waits until there is room. Raises UsageError for more bytes than the limit.
        """
        size = aligned(nbytes)
        if size > self._places.nbytes:
            raise aiote.UsageError(f"staging_bytes={self.limit}: expected at least {size}")
        start = await self._queue.take(lambda: self._find_gap(size))
        try:
            yield start
        finally:
            self._release(start, size)

    async def close(self) -> None:
        """Close the registration and release the memory, once no task uses it."""
        if self._region is not None:
            await self._region.aclose()
        self._region = self._memory = None

    def _find_gap(self, size: int) -> int | None:
        """Take the first gap that is large enough, and return its start."""
        start = self._places.take(size)
        if start is not None:
            self.held += size
            self.peak = max(self.peak, self.held)
        return start

    def _release(self, start: int, size: int) -> None:
        self.held -= size
        self._places.give(start, size)
        self._queue.wake()
