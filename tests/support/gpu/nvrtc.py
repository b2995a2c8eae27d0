"""NVRTC, NVIDIA's compiler of CUDA source at run time: it needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path


def library() -> Path | None:
    """Return the wheel's library, None where it is not installed."""
    if importlib.util.find_spec("nvidia") is None or not (found := importlib.util.find_spec("nvidia.cuda_nvrtc")):
        return None
    folders = found.submodule_search_locations or []
    return next((path for folder in folders for path in Path(folder, "lib").glob("libnvrtc.so.*")), None)


@functools.cache
def _loaded() -> ctypes.CDLL:
    path = library()
    assert path is not None
    return ctypes.CDLL(str(path))


class Program:
    """What one compilation gave: whether it succeeded, its log, the PTX, and a real GPU's machine code."""

    def __init__(self, source: bytes, *options: str) -> None:
        nvrtc, program = _loaded(), ctypes.c_void_p()
        assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
        try:
            flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            self.succeeded = nvrtc.nvrtcCompileProgram(program, len(options), flags) == 0
            self.log = self._bytes(program, "ProgramLog").decode().rstrip("\0")
            self.ptx = self._bytes(program, "PTX").decode() if self.succeeded else ""
            self.cubin = self._bytes(program, "CUBIN") if self.succeeded else b""
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        assert getattr(_loaded(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        content = ctypes.create_string_buffer(size.value)
        assert getattr(_loaded(), f"nvrtcGet{what}")(program, content) == 0
        return content.raw
