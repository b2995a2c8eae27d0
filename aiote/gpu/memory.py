"""Own memory that is allocated through the CUDA driver; lend it by the CUDA Array Interface and by DLPack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from aiote_native.cuda.memory import DeviceMemory, Owned, PinnedValue

from ..config import EngineConfig
from ..errors import FabricError, UsageError
from ..rails import StatusError, open_driver

__all__ = ["DeviceArray", "GpuMemory", "WatchedValue", "allocate"]

CUDA = 2


@contextmanager
def _asked(what: str, device: object) -> Iterator[None]:
    """Open the driver for an allocation `what` on `device`; raise its refusal as a FabricError that names both."""
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < 1 << 31:
        raise UsageError(f"{what}: device={device!r}: expected the number of a GPU, from 0 on")
    try:
        open_driver(EngineConfig().libcuda)
        yield
    except StatusError as error:
        text = f"{error.operation}: {error.strerror}"
        raise FabricError(error.errno or 0, text, operation=f"{what} on cuda:{device}") from error


class DeviceArray:
    """Memory as its GPU sees it, for array libraries: CUDA Array Interface and DLPack. It keeps the memory alive.

    A watched value appears as one int64, other memory as bytes.
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
        # aiote has no work pending on the memory, so the caller's stream need not wait.
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(
                "the memory is lent in place, neither copied nor moved to another device; copy the array that you get"
            )
        return self._owned.capsule(max_version is not None and max_version[0] >= 1)


class WatchedValue(PinnedValue):
    """A value of 64 bits that kernels change and `engine.watch` sees: pinned host memory, mapped into the GPU.

    `value` is the value that the host sees now; it may be set. When the host sees a change, the kernels before it in
    its stream are over; it may see several changes as one. A context manager that frees the memory: no kernel, graph or
    array may use it then. Without `close` the memory is freed with the last array that uses it. Closing raises
    BufferError while a task watches the value, and may wait for the GPU. Raises UsageError, and FabricError when the
    driver refuses or is missing.
    """

    def __init__(self, device: int = 0) -> None:
        with _asked("WatchedValue", device):
            super().__init__(device)

    @property
    def device(self) -> DeviceArray:
        """The value as its GPU sees it: `cupy.asarray(word.device)` or `torch.as_tensor(word.device)`. A kernel between
        two layers adds 1 to that array, also in a captured graph.
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
    """Bytes of a GPU. `allocate` makes it; `engine.register` and array libraries take it as it is.

    A context manager that frees the memory: no kernel, transfer or array may use it then. Without `close` the memory is
    freed with the last array that uses it.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return self._owned.nbytes

    @property
    def nbytes(self) -> int:
        """The length of the memory in bytes."""
        return self._owned.nbytes

    @property
    def closed(self) -> bool:
        """Whether the memory was freed."""
        return self._owned.closed

    def close(self) -> None:
        """Free the memory; the driver may wait for the GPU. Idempotent."""
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
    """Allocate memory of a GPU, in 2 MiB blocks without other allocations, so that sharing it exposes no other array.

    Its contents are undefined. If the process has no CUDA context of the GPU yet, one is made. Raises UsageError, and
    FabricError when the driver refuses or is missing.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes < 1 << 62:
        raise UsageError(f"allocate: nbytes={nbytes!r}: expected a positive number of bytes")
    with _asked("allocate", device):
        return GpuMemory(DeviceMemory(device, nbytes))
