"""C of the tests' own, and Cython modules, compiled against the declarations that the installed package carries.

What many runs of pytest and the processes of their tests use is compiled once in a checkout (`kept`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import aiote_native
from support import ROOT

COMPILER_S = 300
CACHE = ROOT / "build" / "compiled"


def kept(name: str, command: Sequence[str | Path], read: Iterable[Path] = ()) -> Path:
    """Return what a compiler makes of some sources, which it does once for all processes of this checkout.

    command: with its sources as paths, without the file that it makes. read: what the sources include.
    """
    taken = hashlib.sha256(platform.machine().encode())
    for part in (*command, *read):
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        taken.update(f"{len(content)}\n".encode() + content)
    target = CACHE / taken.hexdigest()[:20] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            made = target.with_name(f"{os.getpid()}-{name}")
            subprocess.run([*command, "-o", made], check=True, timeout=COMPILER_S)
            made.replace(target)
    return target


def _shared(source: Path, *more: str | Path) -> list[str | Path]:
    flags = ["-O2", "-shared", "-fPIC", "-D_GNU_SOURCE", f"-I{sysconfig.get_path('include')}"]
    return [*shlex.split(os.environ.get("CC") or "cc"), *flags, *more, source, "-ldl", "-lpthread"]


def shared(source: Path, folder: Path, *more: str | Path) -> Path:
    """Compile one C file into a shared object and return it."""
    target = folder / f"{source.stem}.so"
    subprocess.run([*_shared(source, *more), "-o", target], check=True, timeout=COMPILER_S)
    return target


def shared_by_all(source: Path, *more: str) -> Path:
    """Return the same of a file in this repository, compiled once."""
    return kept(f"{source.stem}.so", _shared(source, *more), sorted(source.parent.glob("*.h")))


def preloaded(library: str | Path) -> str:
    """Return what LD_PRELOAD is to be for this library: behind a sanitizer's, which has to be the first."""
    return f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()


def module(source: Path, folder: Path, *more: str | Path) -> Path:
    """Compile one Cython file into an extension module and return it."""
    site, c_file = Path(aiote_native.__file__).parents[1], folder / f"{source.stem}.c"
    command = [sys.executable, "-m", "cython", "-3", "-I", site, source, "-o", c_file]
    subprocess.run(command, check=True, timeout=COMPILER_S)
    return shared(c_file, folder, *more)
