"""Put the transports of torch 2.15 into an environment with an earlier torch.

They are a few Python files that run on the CPU build of 2.13. The wheel that has them is of 540 MB and for CUDA; pip
fetches and checks it once, and only these files of it are kept, in `build/`.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

from environment import ROOT, exact

RELEASE = "2.15.0"
PACKAGE = "torch/distributed/_transport/"
KEPT = ROOT / "build" / f"torch-transports-{RELEASE}"
WHEEL = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64")
QUIET = ("--disable-pip-version-check", "--no-input", "--quiet")


def fetched(python: Path) -> bool:
    """Fetch the files, where they are not kept from an earlier time."""
    if KEPT.exists():
        return True
    wheels, unfinished = ROOT / "build" / "torch-wheel", KEPT.with_suffix(".unfinished")
    for folder in (wheels, unfinished):
        shutil.rmtree(folder, ignore_errors=True)
    command = (python, "-m", "pip", "download", *QUIET, *WHEEL, "--dest", wheels, f"torch=={RELEASE}")
    print(f"--- fetching torch {RELEASE}, 540 MB, for its transports", flush=True)
    words = [str(part) for part in command]
    if subprocess.run(words, check=False, stdin=subprocess.DEVNULL, env=exact()).returncode:
        return False
    with zipfile.ZipFile(next(wheels.glob("torch-*.whl"))) as wheel:
        wheel.extractall(unfinished, [name for name in wheel.namelist() if name.startswith(PACKAGE)])
    unfinished.rename(KEPT)
    shutil.rmtree(wheels)
    return True


def install(python: Path) -> str:
    """Put the files beside the torch of an environment; return why that could not be."""
    if not fetched(python):
        return f"the wheel of torch {RELEASE}, which has the transports that are tested, could not be had"
    (package,) = python.parent.parent.glob("lib/python*/site-packages/torch/distributed")
    shutil.copytree(KEPT / PACKAGE, package / "_transport", dirs_exist_ok=True)
    return ""
