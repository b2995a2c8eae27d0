"""Lenders of GPU memory, each with what the real one offers, and no more: cupy, torch, numba and cuda.core."""

from __future__ import annotations

import ctypes
from typing import Any

from support.gpu.dlpack import DLTensor
from support.gpu.standin_cuda import GpuArray

CUDA = 2
READ_ONLY = 1


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Lender:
    """Memory of a device; `asked` are the streams with which DLPack was asked for."""

    def __init__(self, nbytes: int, device: int = 0, *, readonly: bool = False) -> None:
        self.memory = GpuArray(nbytes, device)
        self.nbytes, self.device, self.readonly = nbytes, device, readonly
        self.asked: list[object] = []
        self.kept: list[object] = []

    @property
    def seen(self) -> Any:
        return self.memory.seen

    def interface(self, version: int, **more: object) -> dict[str, object]:
        data = (self.memory.address, self.readonly)
        return {"version": version, "shape": (self.nbytes,), "typestr": "|u1", "data": data, **more}

    def capsule(self, versioned: bool) -> Any:
        shape = (ctypes.c_int64 * 1)(self.nbytes)
        tensor = DLTensor(self.memory.address, CUDA, self.device, 1, 1, 8, 1, shape, None, 0)
        managed: Any = (
            DLManagedTensorVersioned(1, 0, None, None, READ_ONLY * self.readonly, tensor)
            if versioned
            else DLManagedTensor(tensor, None, None)
        )
        self.kept += [shape, managed]
        return new_capsule(ctypes.addressof(managed), b"dltensor_versioned" if versioned else b"dltensor", None)


class Cupy(Lender):
    """cupy 14: the interface with its current stream, DLPack of both versions."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.interface(3, stream=1, strides=None, descr=[("", "|u1")])

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: object = None, max_version: tuple[int, int] | None = None) -> Any:
        self.asked.append(stream)
        return self.capsule(max_version is not None and max_version[0] >= 1)


class Torch(Lender):
    """torch: version 2 of the interface, which says no stream; DLPack for its current device alone."""

    current = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.interface(2, strides=None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: object = -1, max_version: tuple[int, int] | None = None) -> Any:
        self.asked.append(stream)
        if self.device != self.current:
            raise BufferError(f"Can't export tensors on a different CUDA device index. Expected: {self.device}.")
        return self.capsule(max_version is not None)


class TorchFloat8(Torch):
    """torch's tensors of a type that the interface has no name for."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise TypeError("Cannot get typestr of torch.float8_e4m3fn")

    def __dlpack__(self, **given: Any) -> Any:
        raise BufferError("float8_e4m3fn has no DLPack type")


class Numba(Lender):
    """numba: the interface with a stream, and no word of the device."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.interface(3, stream=None, strides=None)


class CudaCore(Lender):
    """cuda.core's Buffer: DLPack alone, whose stream it insists on."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        self.asked.append(stream)
        if not isinstance(stream, int):
            raise BufferError("stream must be -1 or the number of a stream")
        return self.capsule(max_version is not None)


LENDERS = {"cupy": Cupy, "torch": Torch, "numba": Numba, "cuda.core": CudaCore}
