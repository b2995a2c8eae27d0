"""Memory that is allocated through the driver, in each library's own shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from aiote_native.cuda.owned import DeviceMemory, Owned, PinnedValue

from ..config import EngineConfig
from ..errors import FabricError, UsageError
from ..rails import StatusError, open_driver

__all__ = ["DeviceArray", "GpuMemory", "WatchedValue", "allocate"]

CUDA = 2


@contextmanager
def _asked(what: str, device: object) -> Iterator[None]:
    """Open the driver for what is to be allocated, and say of what it refuses where that was."""
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < 1 << 31:
        raise UsageError(f"{what}: device={device!r}: expected the number of a GPU")
    try:
        open_driver(EngineConfig().libcuda)
        yield
    except StatusError as error:
        text = f"{error.operation}: {error.strerror}"
        raise FabricError(error.errno or 0, text, operation=f"{what} on cuda:{device}") from error


class DeviceArray:
    """Memory as its GPU has it, for array libraries: CUDA Array Interface and DLPack. It keeps the memory.

    A value is one int64, other memory is bytes.
    """

    __slots__ = ("_owned",)

    def __init__(self, owned: Owned) -> None:
        self._owned = owned

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._owned.interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._owned.ordinal

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        # Nothing of ours is pending on the memory, so no stream has to wait.
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("the memory is lent where it is, and not copied")
        return self._owned.capsule(max_version is not None and max_version[0] >= 1)


class WatchedValue(PinnedValue):
    """A value of 64 bits that kernels change and `engine.watch` sees: pinned memory of the host, mapped into the GPU.

    `value` is what the host sees now, and may be set. Kernels that come before the change in its stream are over when
    it is seen; several changes may be seen as one. A context manager that frees it: no kernel, graph or array uses it
    then. What is never closed is freed with its last array. Closing raises BufferError while somebody watches it, and
    may wait for the GPU. Raises UsageError, and FabricError where the driver refuses or there is none.
    """

    def __init__(self, device: int = 0) -> None:
        with _asked("WatchedValue", device):
            super().__init__(device)

    @property
    def device(self) -> DeviceArray:
        """The value as its GPU has it: `cupy.asarray(word.device)` or `torch.as_tensor(word.device)`, to which a kernel
        between two layers adds 1, also in a captured graph.
        """
        return DeviceArray(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<WatchedValue on cuda:{self.ordinal}, {'closed' if self.closed else self.value}>"


class GpuMemory(DeviceArray):
    """Bytes of a GPU. Made by `allocate`; `engine.register` and array libraries take it as it is.

    A context manager that frees it: no kernel, transfer or array uses it then. What is never closed is freed with its
    last array.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return self._owned.nbytes

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self._owned.nbytes

    @property
    def closed(self) -> bool:
        """Whether it was freed."""
        return self._owned.closed

    def close(self) -> None:
        """Free it, for which the driver may wait for the GPU. Idempotent."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GpuMemory on cuda:{self._owned.ordinal}, {'closed' if self.closed else f'{self.nbytes} bytes'}>"


def allocate(nbytes: int, device: int = 0) -> GpuMemory:
    """Allocate memory of a GPU, in blocks of 2 MiB that hold nothing else: who shares it exposes no other array.

    Its contents are undefined. The CUDA context of the GPU is made where the process has none. Raises UsageError, and
    FabricError where the driver refuses or there is none.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < 1 << 62:
        raise UsageError(f"allocate: nbytes={nbytes!r}: expected a positive number of bytes")
    with _asked("allocate", device):
        return GpuMemory(DeviceMemory(device, nbytes))
