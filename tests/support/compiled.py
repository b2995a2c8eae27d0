"""Cython modules of the tests' own, compiled against the declarations that the installed package carries."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import aiote_native

COMPILER_S = 120


def shared(source: Path, folder: Path, *more: str | Path) -> Path:
    """Compile one C file into a shared object and return it."""
    target = folder / f"{source.stem}.so"
    flags = ["-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{sysconfig.get_path('include')}"]
    command = [*shlex.split(os.environ.get("CC") or "cc"), *flags, *more, source, "-o", target, "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=COMPILER_S)
    return target


def preloaded(library: str | Path) -> str:
    """Return what LD_PRELOAD is to be for this library: behind a sanitizer's, which has to be the first."""
    return f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()


def module(source: Path, folder: Path, *more: str | Path) -> Path:
    """Compile one Cython file into an extension module and return it."""
    site, c_file = Path(aiote_native.__file__).parents[1], folder / f"{source.stem}.c"
    command = [sys.executable, "-m", "cython", "-3", "-I", site, source, "-o", c_file]
    subprocess.run(command, check=True, timeout=COMPILER_S)
    return shared(c_file, folder, *more)
