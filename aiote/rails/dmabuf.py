"""DMA-BUFs of GPU memory, asked of the driver that owns it: what the kernel lets a NIC reach a GPU by.

CUDA: `cuMemGetHandleForAddressRange` (11.7 and newer) with the open kernel modules, for whole pages of the host.
The driver is asked in the memory's own context, and is open when that is
registered. ROCm: `hsa_amd_portable_export_dmabuf` (5.6 and newer), whose library is opened by name and only here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiote_native.cuda.dmabufs import export_range
from aiote_native.status import StatusError

from ..errors import FabricError

__all__ = ["EXPORTERS", "DmaBuf", "exported"]

ROCM_LIBRARY = "libhsa-runtime64.so.1"


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """A descriptor, owned by whoever has it, and where in it the memory begins, in bytes."""

    fd: int
    offset: int


def _function(library: str, name: str) -> Callable[..., int]:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise FabricError(
            errno.EOPNOTSUPP, f"{error}; a driver that has {name} is needed", operation="export memory of a GPU"
        ) from error
    return found


def _checked(name: str, code: int, hint: str) -> None:
    if code != 0:
        raise FabricError(errno.EOPNOTSUPP, f"{name} returned {code}: {hint}", operation="export memory of a GPU")


def _cuda(address: int, length: int) -> DmaBuf:
    page = os.sysconf("SC_PAGE_SIZE")
    start = address - address % page
    stop = -(-(address + length) // page) * page
    try:
        fd = export_range(start, stop - start)
    except StatusError as error:
        hint = "NVIDIA's open kernel modules give DMA-BUFs of memory of cudaMalloc; `aiote doctor` looks"
        raise FabricError(
            errno.EOPNOTSUPP, f"{error.operation}: {error.strerror}: {hint}", operation="export memory of a GPU"
        ) from error
    return DmaBuf(fd, address - start)


def _rocm(address: int, length: int) -> DmaBuf:
    name = "hsa_amd_portable_export_dmabuf"
    fd, offset = ctypes.c_int(-1), ctypes.c_uint64(0)
    code = _function(ROCM_LIBRARY, name)(
        ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.byref(fd), ctypes.byref(offset)
    )
    _checked(name, code, "it takes memory of hipMalloc, on a kernel with CONFIG_DMABUF_MOVE_NOTIFY")
    return DmaBuf(fd.value, offset.value)


EXPORTERS: dict[str, Callable[[int, int], DmaBuf]] = {"cuda": _cuda, "rocm": _rocm}
"""By the device of a buffer."""


@contextlib.contextmanager
def exported(device: str, address: int, length: int) -> Iterator[DmaBuf]:
    """Ask the owner of `length` bytes at `address` for a DMA-BUF of them; its descriptor is closed in the end.

    What was registered by it stays so: the kernel holds the memory. Raises FabricError where there is none.
    """
    found = EXPORTERS[device](address, length)
    try:
        yield found
    finally:
        os.close(found.fd)
