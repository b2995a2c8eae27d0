"""DMA-BUFs of GPU memory, exported by the driver that owns it. The kernel lets a NIC reach a GPU through them.

CUDA: `cuMemGetHandleForAddressRange` (11.7 and newer) with the open kernel modules exports whole pages of the host's
page size. The driver is called in the memory's own context; registering CUDA memory has opened the driver before. ROCm:
`hsa_amd_portable_export_dmabuf` (5.6 and newer); only this module opens its library, by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aiote_native.cuda.driver import export_range
from aiote_native.system.base import StatusError

from ..errors import FabricError

__all__ = ["EXPORTERS", "DmaBuf", "export_dmabuf"]

ROCM_LIBRARY = "libhsa-runtime64.so.1"


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """A DMA-BUF descriptor, owned by its holder, and the offset in bytes at which the memory begins in it."""

    fd: int
    offset: int


def _function(library: str, name: str) -> Callable[..., int]:
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise FabricError(
            errno.EOPNOTSUPP, f"{error}; install a driver that has {name}", operation="export memory of a GPU"
        ) from error
    return found


def _check_code(name: str, code: int, hint: str) -> None:
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
    _check_code(name, code, "it takes memory of hipMalloc, on a kernel with CONFIG_DMABUF_MOVE_NOTIFY")
    return DmaBuf(fd.value, offset.value)


EXPORTERS: dict[str, Callable[[int, int], DmaBuf]] = {"cuda": _cuda, "rocm": _rocm}
"""Functions that export a DMA-BUF, by the kind of device of a buffer."""


@contextlib.contextmanager
def export_dmabuf(device: str, address: int, length: int) -> Iterator[DmaBuf]:
    """Ask the driver that owns `length` bytes at `address` for a DMA-BUF of them, and close its descriptor at the end.

    A registration made with the descriptor outlives it, because the kernel holds the memory. Raises FabricError if the
    driver exports none.
    """
    found = EXPORTERS[device](address, length)
    try:
        yield found
    finally:
        os.close(found.fd)
