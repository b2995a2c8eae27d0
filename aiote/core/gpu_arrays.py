"""Arrays in memory of a GPU as NumPy describes arrays: shape, strides, addresses. Their bytes are never loaded.

Code that computes where tensors lie in memory can then work on NumPy arrays alone. The bytes of a `GpuArray` are a
GPU's: the array lends them by `__cuda_array_interface__`, so registering it registers the GPU's memory, and it refuses
every operation that would touch them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["GpuArray", "gpu_array", "part_of"]


class GpuArray(np.ndarray[Any, Any]):
    """The place of an array in memory of a GPU. It keeps its lender alive."""

    lender: Any = None
    __array_ufunc__ = None  # type: ignore[assignment]
    """This makes NumPy refuse to compute with the array."""

    def __array_finalize__(self, made_of: Any) -> None:
        self.lender = getattr(made_of, "lender", None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory of this array, whose elements must be bytes. Raises AttributeError otherwise."""
        found = self.__array_interface__
        if self.dtype != np.uint8:
            raise AttributeError("this lends bytes only, of dtype uint8")
        return {key: found[key] for key in ("shape", "typestr", "data", "strides")} | {"version": 3}

    def __dlpack_device__(self) -> Any:
        return self.lender.__dlpack_device__()

    def __dlpack__(self, **given: Any) -> Any:
        raise BufferError("this array lies in GPU memory and has no buffer: give the array library's own object")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError(f"numpy.{func.__name__} of memory of a GPU")

    def __repr__(self) -> str:
        return f"<GpuArray {self.dtype} {self.shape} of {type(self.lender).__name__}>"

    __str__ = __repr__


class _Interface:
    """The array interface of a GPU's memory. NumPy makes an array of it without looking at the memory."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str, writable: bool):
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (address, not writable),
        }


def _made(
    lender: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, *, writable: bool
) -> GpuArray:
    kind = f"|u{itemsize}" if itemsize == 1 else f"|V{itemsize}"
    made: GpuArray = np.asarray(_Interface(address, shape, strides, kind, writable)).view(GpuArray)
    made.lender = lender
    return made


def _flat(lender: Any, address: int, nbytes: int, *, writable: bool) -> GpuArray:
    return _made(lender, address, (nbytes,), (1,), 1, writable=writable)


def part_of(array: GpuArray, start: int, stop: int) -> GpuArray:
    """Return bytes `start` to `stop` of a flat array."""
    address = int(array.__array_interface__["data"][0]) + start
    return _flat(array.lender, address, stop - start, writable=array.flags.writeable)


def _of_torch(array: Any) -> tuple[GpuArray, str, GpuArray]:
    size = array.element_size()
    strides = tuple(size * stride for stride in array.stride())
    storage = array.untyped_storage()
    view = _made(array, array.data_ptr(), tuple(array.shape), strides, size, writable=True)
    whole = _flat(array, storage.data_ptr(), storage.nbytes(), writable=True)
    return view, str(array.dtype).removeprefix("torch."), whole


def _extent(view: NDArray[Any]) -> tuple[int, int]:
    """Return the address where an array begins and the number of bytes that it spans.

    Raises UsageError for negative strides and for an empty array.
    """
    if any(stride < 0 for stride in view.strides) or not view.size:
        raise UsageError(f"an array of shape {view.shape} has strides {view.strides}: expected positive ones")
    last = sum((count - 1) * stride for count, stride in zip(view.shape, view.strides, strict=True))
    return int(view.__array_interface__["data"][0]), last + view.itemsize


def _interface_of(lender: Any) -> tuple[GpuArray, str]:
    found = lender.__cuda_array_interface__
    address, readonly = found["data"]
    kind = np.dtype(found["typestr"])
    shape = tuple(found["shape"])
    strides = found.get("strides") or tuple(
        kind.itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))
    )
    name = kind.name if kind.kind != "V" else f"void{8 * kind.itemsize}"
    return _made(lender, address, shape, tuple(strides), kind.itemsize, writable=not readonly), name


def gpu_array(array: Any) -> tuple[GpuArray, str, GpuArray] | None:
    """Describe an array of a GPU: its view, the name of its type, and as bytes all of the memory that it is a view of.

    Returns None if the array is not a GPU's. It accepts torch's tensors, and objects with `__cuda_array_interface__`;
    of an object that is a view of a `base`, all memory of the base. Raises UsageError for negative strides and for
    empty memory.
    """
    torch = sys.modules.get("torch")  # without an import of torch there is no tensor
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(array) if array.device.type == "cuda" else None
    if not hasattr(array, "__cuda_array_interface__"):
        return None
    view, name = _interface_of(array)
    root = array
    while hasattr(getattr(root, "base", None), "__cuda_array_interface__"):
        root = root.base
    whole = _interface_of(root)[0]
    begin, nbytes = _extent(whole)
    return view, name, _flat(root, begin, nbytes, writable=view.flags.writeable)
