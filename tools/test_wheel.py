"""Build the wheel, install it into a folder of its own, and run the tests from a copy of them far from the sources.

usage: test_wheel.py [--dist FOLDER] [PYTEST'S ARGUMENTS...]

With --dist nothing is built: the tests run on the wheel that pip takes from the folder for this Python.

What an installed package lacks that the tree has (a module that no build file names, a stub, a file of data) shows here
alone. Tests about the tree itself stay behind: those of lint, docs, tools and examples. Then the wheel is used where
nothing else is (clean_install.py); of a folder, the wheel that pip takes for each Python is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import wheels

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "aio",
    "bench",
    "core",
    "demo",
    "discovery",
    "engine",
    "kvcache",
    "links",
    "native",
    "rails",
    "reference",
    "service",
    "standin_efa",
    "support",
)
# They run or read what lies in bench/, tools/, docs/ or the native sources, which no wheel has.
OF_THE_TREE = (
    *(f"tests/bench/test_bench_{name}.py" for name in ("compare", "guard", "kvcache", "lone", "moe", "weights")),
    *(f"tests/{name}.py" for name in ("engine/test_gpu_faults", "kvcache/test_published_transfers")),
    "tests/kvcache/test_simulated_latency.py",
    "tests/links/test_tls.py",
)
WANTED = (
    "aiote/py.typed",
    "aiote/bench/aiote-bench-raw",
    "aiote_native/engine/core.pyi",
    "aiote_native/engine/core.pxd",
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
UNWANTED = ("__pycache__", "meson.build", ".c")


def run(*command: str | Path, **options: object) -> int:
    print("--- " + " ".join(map(str, command)), flush=True)
    return subprocess.run([str(each) for each in command], check=False, **options).returncode  # type: ignore[call-overload,no-any-return]


def complaints(wheel: Path) -> list[str]:
    """Say what is in a wheel and should not be, and the other way round."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [f"{name} is missing" for name in WANTED if name not in names]
    return missing + [
        f"{name} should not be there" for name in names if any(name.endswith(u) or f"{u}/" in name for u in UNWANTED)
    ]


def made(into: Path) -> Path:
    """Build this checkout's wheel."""
    command = ("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", into, ROOT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if run(*PIP, *command, env={**os.environ, "PATH": path}):
        raise SystemExit(1)
    (wheel,) = into.glob("aiote-*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(description="Test a wheel away from the sources.")
    parser.add_argument("--dist", type=Path, help="the folder of wheels to take (one is built)")
    given, for_pytest = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="aiote-wheel-") as folder:
        here = Path(folder)
        own = "{}.{}".format(*sys.version_info)
        wheel = wheels.taken(given.dist, own, os.uname().machine) if given.dist else made(here)
        if wrong := complaints(wheel):
            print(f"{wheel.name}:", *wrong, sep="\n  ")
            return 1
        if run(*PIP, "install", "--no-index", "--no-deps", "--target", here / "site", wheel):
            return 1
        for name in FOLDERS:
            shutil.copytree(ROOT / "tests" / name, here / "tests" / name)
        shutil.copy(ROOT / "tests" / "conftest.py", here / "tests")
        shutil.copy(ROOT / "pyproject.toml", here)
        environment = {**os.environ, "PYTHONPATH": str(here / "site")}
        where = f"import aiote, sys; sys.exit(not aiote.__file__.startswith({str(here)!r}))"
        if run(sys.executable, "-P", "-c", where, cwd=here, env=environment):
            print("Python imported another aiote than the wheel's")
            return 1
        chosen = (
            "-q",
            "-p",
            "no:cacheprovider",
            "--combinations",
            "tests",
            *(f"--ignore={each}" for each in OF_THE_TREE),
        )
        status = run(sys.executable, "-P", "-m", "pytest", *chosen, *for_pytest, cwd=here, env=environment)
        return status or run(sys.executable, ROOT / "tools" / "clean_install.py", given.dist or wheel)


if __name__ == "__main__":
    sys.exit(main())
