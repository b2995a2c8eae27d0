"""Describe a cache: tensors in the caller's memory, in groups. Each group has one page table in a request.

A tensor is one field of one layer (keys, values, scales, a state), in pages. It says where its items lie:

    item(page, head, token) = offset + page * page_stride + head * head_stride + token * token_stride

Therefore K and V may lie together or apart, and pages may be HND or NHD, without separate names for these layouts. The
keys and the values of an array that holds both are two tensors of one memory. `Cache.add` reads the strides from an
array.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..core.gpu_arrays import gpu_array
from ..core.masked_arrays import require_unmasked
from ..errors import UsageError

__all__ = ["FEW_TENSORS", "Cache", "CacheSpec", "CacheTensor"]

MAX_MEMORIES = 1024
MAX_TENSORS = 16384
MAX_GROUPS = 1024
FEW_TENSORS = 512
"""Specs with more tensors are checked and mapped in a thread; for a thousand tensors this takes 10 to 20 ms."""
AXES = ("layer", "field", "page", "head", "token", "item")

Size: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 47)]
Count: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 40)]
Small: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
Text: TypeAlias = Annotated[str, Meta(max_length=64)]


class CacheTensor(msgspec.Struct, array_like=True, frozen=True):
    """One field of one layer, in pages. Sizes, offsets and strides are in bytes.

    The tensor has `head_count` of the model's heads, from `first_head` on; a field without heads has one head, which
    all ranks of a tensor-parallel group have. `tokens` is the number of tokens in a page; 0 makes a page opaque: one
    item, which is moved as it is. `memory` is the number of the memory among the cache's memories.
    """

    field: Text
    layer: Small
    group: Small
    dtype: Text
    memory: Small
    offset: Size
    pages: Count
    page_stride: Size
    tokens: Small
    token_stride: Size
    first_head: Small
    head_count: Annotated[int, Meta(ge=1, lt=1 << 20)]
    head_stride: Size
    item_bytes: Count

    @property
    def key(self) -> tuple[int, int, str]:
        """The identity of the tensor, independent of where it lies: group, layer and field."""
        return self.group, self.layer, self.field

    @property
    def axes(self) -> list[tuple[int, int]]:
        """The count and the stride of pages, heads and tokens."""
        return [
            (self.pages, self.page_stride),
            (self.head_count, self.head_stride),
            (max(self.tokens, 1), self.token_stride),
        ]

    def of_heads(self, first: int, stop: int) -> CacheTensor:
        """Return the part of the tensor with the heads from `first` to `stop` - 1."""
        offset = self.offset + (first - self.first_head) * self.head_stride
        return msgspec.structs.replace(self, offset=offset, first_head=first, head_count=stop - first)

    def __str__(self) -> str:
        page = f"{self.tokens} tokens" if self.tokens else "one opaque item"
        heads = f"heads {self.first_head} to {self.first_head + self.head_count - 1}"
        return (
            f"{self.field!r} of layer {self.layer} in group {self.group} ({self.dtype}, {heads}, pages of {page}, "
            f"items of {self.item_bytes} bytes)"
        )


class CacheSpec(msgspec.Struct, array_like=True, frozen=True, dict=True):
    """A rank's description of its cache: a name for errors, the length of each memory in bytes, and the tensors.

    `ranks`: the number of ranks in its group; all of them receive each request.
    """

    name: Annotated[str, Meta(max_length=200)]
    memories: Annotated[tuple[Size, ...], Meta(max_length=MAX_MEMORIES)]
    tensors: Annotated[tuple[CacheTensor, ...], Meta(max_length=MAX_TENSORS)]
    ranks: Annotated[int, Meta(ge=1, lt=1 << 20)] = 1

    def check(self) -> None:
        """Raise UsageError for a tensor that leaves its memory, overlaps itself, or comes twice.

        Also for too many groups, and for tensors of one group whose pages hold different numbers of tokens. Tensors
        that overlap each other are not checked: that is the caller's responsibility.
        """
        seen, groups = set[tuple[int, int, str]](), set[int]()
        tokens: dict[int, int] = {}
        for tensor in self.tensors:
            if tensor.memory >= len(self.memories):
                raise UsageError(
                    f"{self.name}: {tensor} names memory {tensor.memory}, and there are {len(self.memories)}"
                )
            end = tensor.item_bytes
            for count, stride in sorted(tensor.axes, key=lambda axis: axis[1]):
                if count > 1 and stride < end:
                    raise UsageError(
                        f"{self.name}: {tensor}: a stride of {stride} bytes is less than the {end} bytes "
                        "of its elements"
                    )
                end += (count - 1) * stride
            if tensor.offset + end > self.memories[tensor.memory]:
                raise UsageError(
                    f"{self.name}: {tensor} ends at byte {tensor.offset + end}, and its memory has "
                    f"{self.memories[tensor.memory]} bytes"
                )
            if tensor.key in seen:
                raise UsageError(f"{self.name}: {tensor} was added twice")
            seen.add(tensor.key)
            groups.add(tensor.group)
            if tensor.tokens and tokens.setdefault(tensor.group, tensor.tokens) != tensor.tokens:
                raise UsageError(
                    f"{self.name}: {tensor}: its group also has pages of {tokens[tensor.group]} tokens; "
                    "use another group for other pages"
                )
        if len(groups) > MAX_GROUPS:
            raise UsageError(f"{self.name}: its tensors are in {len(groups)} groups, expected at most {MAX_GROUPS}")

    @cached_property
    def layers(self) -> list[int]:
        """The layers with at least one tensor, ascending."""
        return sorted({tensor.layer for tensor in self.tensors})

    @cached_property
    def groups(self) -> dict[int, int]:
        """The number of pages of each group; the tensor with the fewest pages decides."""
        found: dict[int, int] = {}
        for tensor in self.tensors:
            found[tensor.group] = min(found.get(tensor.group, tensor.pages), tensor.pages)
        return found

    @cached_property
    def page_tokens(self) -> dict[int, int]:
        """The number of tokens in a page of each group; 0 if all its pages are opaque."""
        found: dict[int, int] = {}
        for tensor in self.tensors:
            found[tensor.group] = max(found.get(tensor.group, 0), tensor.tokens)
        return found


class Cache:
    """The cache of one rank, made of the caller's arrays; it neither copies nor allocates memory.

    ranks: the number of ranks in its group. It matters for a decode rank if an offer does not announce its readers.
    """

    def __init__(self, name: str, *, ranks: int = 1) -> None:
        self.name, self.ranks = name, ranks
        self.memories: list[NDArray[Any]] = []
        self.tensors: list[CacheTensor] = []

    def add(
        self,
        array: Any,
        axes: str,
        *,
        layer: int = 0,
        group: int = 0,
        first_head: int = 0,
        fields: Sequence[str] = ("kv",),
        dtype: str = "",
    ) -> None:
        """Add the tensors of an array whose axes are named, outermost first: "field page head token item".

        Axes: `layer` counts from `layer` on; `field` has one entry for each of `fields`; `page`; `head` counts from
        `first_head` on; `token`; `item`, last and as often as needed, covers the values that always move together.
        Without `token` a page is opaque. array: an array of numpy, torch or cupy, or any object with
        `__array_interface__`, `__cuda_array_interface__` or `__dlpack__` on the CPU. Arrays that are views of one array
        or storage, or lie in a memory passed to `hold`, share that memory. dtype: the name of the type, if the array's
        own type differs (integers that stand for bfloat16). Raises UsageError for axes that do not match the array, and
        for items with gaps.
        """
        require_unmasked(self.name, array)
        array, named, storage = gpu_array(array) or _view_array(array)
        dtype = dtype or named
        shape, strides, item_bytes = _axes(array, axes)
        if shape["field"] != len(fields) or "page" not in axes.split():
            raise UsageError(f"{axes!r}: expected a page axis, and {shape['field']} names in fields, got {fields!r}")
        memory, offset = self._memory(array, storage)
        for i in range(shape["layer"]):
            for j, field in enumerate(fields):
                tensor = CacheTensor(
                    field=field,
                    layer=layer + i,
                    group=group,
                    dtype=dtype,
                    memory=memory,
                    offset=offset + i * strides["layer"] + j * strides["field"],
                    pages=shape["page"],
                    page_stride=strides["page"],
                    tokens=shape["token"] if "token" in axes.split() else 0,
                    token_stride=strides["token"],
                    first_head=first_head,
                    head_count=shape["head"],
                    head_stride=strides["head"],
                    item_bytes=item_bytes,
                )
                self.tensors.append(tensor)

    def hold(self, memory: NDArray[Any]) -> int:
        """Declare a contiguous memory in which arrays to be added lie, to register it as a whole; return its number.

        Use it for a storage that holds many arrays which are not views of one array. Raises UsageError.
        """
        require_unmasked(self.name, memory)
        if memory.dtype.hasobject:
            raise UsageError(
                f"{self.name}: an array of {memory.dtype} holds Python objects, which cannot move to another process"
            )
        if not memory.flags.c_contiguous:
            raise UsageError(f"{self.name}: expected a contiguous memory, got strides {memory.strides}")
        self.memories.append(memory)
        return len(self.memories) - 1

    def _memory(self, array: NDArray[Any], storage: NDArray[Any] | None) -> tuple[int, int]:
        """Return the number of the memory that an array lies in, and its offset there. If no memory contains the array,
        add its storage, or the array that it is a view of, as a new memory.
        """
        begin, end = _span(array)
        for number, memory in enumerate(self.memories):
            start, stop = _span(memory)
            if start <= begin and end <= stop:
                return number, begin - start
        root = array if storage is None else storage
        while storage is None and isinstance(root.base, np.ndarray):
            root = root.base
        return self.hold(root), begin - _span(root)[0]

    @property
    def spec(self) -> CacheSpec:
        """The description that is sent to peers. Raises UsageError as `CacheSpec.check` does."""
        spec = CacheSpec(self.name, tuple(memory.nbytes for memory in self.memories), tuple(self.tensors), self.ranks)
        spec.check()
        return spec


def _view_array(array: Any) -> tuple[NDArray[Any], str, NDArray[Any] | None]:
    """Return numpy's view of an array, the name of its type, and its whole storage if numpy cannot tell that (or None).

    Raises UsageError for an array that is not in memory of the CPU.
    """
    torch = sys.modules.get("torch")  # an array cannot be a tensor of torch before torch is imported
    if torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise UsageError(f"the cache is on {array.device}: expected memory of the CPU or of an NVIDIA GPU")
        # numpy has neither bfloat16 nor eight-bit floats, so view them as integers of the same size.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()]
        storage = torch.empty(0, dtype=torch.uint8).set_(array.untyped_storage())
        return array.detach().view(integers).numpy(), str(array.dtype).removeprefix("torch."), storage.numpy()
    try:
        found = np.asarray(array) if hasattr(array, "__array_interface__") else np.from_dlpack(array)
    except (TypeError, AttributeError, BufferError, RuntimeError) as error:
        raise UsageError(f"expected an array in memory of the CPU, got {type(array).__name__}: {error}") from error
    return found, str(found.dtype), None


def _span(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the byte after its last."""
    begin = array.__array_interface__["data"][0]
    reach = sum((count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True))
    return begin, begin + (reach + array.itemsize if array.size else 0)


def _axes(array: NDArray[Any], axes: str) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the length and the stride of each axis, and the number of contiguous bytes of an item.

    Raises UsageError for axes that do not match the array, and for items with gaps.
    """
    names = axes.split()
    shape, strides = dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0)
    item_bytes = array.itemsize
    outer = [name for name in names if name != "item"]
    if len(names) != array.ndim or names[: len(outer)] != outer or len(set(outer)) < len(outer):
        raise UsageError(
            f"{axes!r} for an array of {array.ndim} dimensions: expected a name for each dimension, each "
            "once, items last"
        )
    for name, count, stride in zip(names[::-1], array.shape[::-1], array.strides[::-1], strict=True):
        if name == "item":
            if stride != item_bytes:
                raise UsageError(f"{axes!r}: the items of the array have gaps: strides {array.strides}")
            item_bytes *= count
        elif name in AXES and stride >= 0:
            shape[name], strides[name] = count, stride
        else:
            raise UsageError(f"{axes!r}: axis {name!r} with stride {stride}: expected {', '.join(AXES)}")
    return shape, strides, item_bytes
