"""Every function of CUDA's driver that aiote calls, by the tests in which the call fails once."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = [
    "AT_CLOSING",
    "AT_LOADING",
    "EXPORTING",
    "FLUSHING",
    "IMPORTING",
    "IN_TRANSFERS",
    "OF_ERRORS",
    "OF_NICS",
    "OF_VALUES",
    "SHARING",
    "UNMAPPING",
    "called",
    "failing_somewhere",
]

SOURCES = Path(__file__).parents[3] / "aiote_native"

AT_LOADING = ("cuInit", "cuDriverGetVersion")
OF_ERRORS = ("cuGetErrorName", "cuGetErrorString")
IN_TRANSFERS = (
    "cuPointerGetAttribute",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyAsync",
    "cuStreamCreate",
    "cuStreamQuery",
    "cuStreamWriteValue32_v2",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
)
AT_CLOSING = ("cuStreamDestroy_v2", "cuEventDestroy_v2", "cuMemFreeHost", "cuDevicePrimaryCtxRelease_v2")
OF_VALUES = ("cuMemAlloc_v2", "cuMemFree_v2")
SHARING = ("cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuIpcCloseMemHandle")
IMPORTING = ("cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess")
EXPORTING = ("cuMemRetainAllocationHandle", "cuMemExportToShareableHandle")
UNMAPPING = ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")
OF_NICS = ("cuMemGetHandleForAddressRange", "cuDeviceGetAttribute", "cuPointerSetAttribute")
FLUSHING = ("cuFlushGPUDirectRDMAWrites",)


def called() -> set[str]:
    """Return the names of all functions that the native sources look up in the driver."""
    texts = [path.read_text() for path in sorted(SOURCES.rglob("*.pyx"))]
    looked_up = {name for text in texts for name in re.findall(r'\bb"(cu[A-Z]\w+)"', text)}
    table = re.search(r"aiote_cuda_names\[\] = \{(.*?)\};", (SOURCES / "cuda" / "driver.pyx").read_text(), re.S)
    assert table is not None
    return looked_up | set(re.findall(r'"(cu\w+)"', table[1]))


def failing_somewhere() -> list[str]:
    """Return the names of all functions that fail once in a test."""
    of_nics = (*OF_NICS, *FLUSHING)
    sharing = (*SHARING, *IMPORTING, *EXPORTING, *UNMAPPING)
    return [*AT_LOADING, *OF_ERRORS, *IN_TRANSFERS, *AT_CLOSING, *OF_VALUES, *sharing, *of_nics]
