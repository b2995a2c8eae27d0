"""Run the native, contract and interleaving tests on the arm64 wheel, by an arm64 Python under qemu-user.

Python, its headers and the C library are Debian's for arm64, unpacked into a folder; what the tests import comes as
wheels. qemu-user emulates the processor and hands system calls to this kernel, so it shows that the code compiles,
loads and computes there. What it cannot show: the weaker memory order of an arm64 processor (the emulation runs on this
one, whose order is stronger), io_uring (not passed on, and not used), RDMA devices, and any speed.

The tests compile modules of their own: with zig, for arm64.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import debian_root
import ziglang
from environment import PINS, exact

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "arm64"
QEMU = "qemu-aarch64"
PYTHON = "usr/bin/python3.11"
PACKAGES = ("python3.11", "libpython3.11-dev", "libstdc++6", "libfabric1")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
NEEDS = (
    "anyio",
    "msgspec",
    "numpy",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "trio",
    "uvloop",
    "Cython>=3.1",
)
# It needs its stand-in built for arm64, which emulates a driver and no processor.
LEFT_OUT = ("tests/native/test_standin_cuda.py",)
TESTS = ("tests/native", "tests/rails/test_contract*.py")
# Rails of our own, over the host's memory. The check for leaks opens libfabric all the same.
CHOSEN = ("-m", "not libfabric or own_rails", "-k", "not gpu")
WRAPPER = """#!/bin/sh
preload=$LD_PRELOAD
unset LD_PRELOAD
export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{site}"
exec {qemu} -L "{system}" ${{preload:+-E "LD_PRELOAD=$preload"}} "{system}/{program}" "$@"
"""
SITECUSTOMIZE = "import sys\nsys.executable = {wrapper!r}\n"


def run(*command: str | Path, check: bool = True, **environment: str) -> int:
    print("--- " + " ".join(map(str, command)), flush=True)
    status = subprocess.run([*map(str, command)], env={**os.environ, **environment}).returncode
    if check and status:
        raise SystemExit(f"error: {command[0]} ended with status {status}")
    return status


def wheel(folder: Path) -> Path:
    """Return the wheel for every Python on arm64, built unless it is there."""
    found = sorted(folder.glob("aiote-*-abi3-*aarch64.whl"))
    if not found:
        run(sys.executable, ROOT / "tools" / "wheels.py", "--machine", "aarch64", "--kind", "limited", "--into", folder)
        found = sorted(folder.glob("aiote-*-abi3-*aarch64.whl"))
    return found[-1]


def installed(system: Path, built: Path) -> Path:
    """Install the wheel and what the tests import; return where."""
    site = FOLDER / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary=:all:")
    platforms = [f"--platform={each}" for each in PLATFORMS]
    there = ("--target", site, "--python-version=3.11", "--implementation=cp", *platforms, "--constraint", PINS)
    run(*pip, *there, built, *NEEDS, **exact())
    return site


def wrapper(system: Path, site: Path) -> Path:
    """Write a program that is the arm64 Python, and has Python take itself for it."""
    path = FOLDER / "python"
    # A library that is to be loaded first is an arm64 one; and tests may name a path of their own.
    path.write_text(WRAPPER.format(qemu=shutil.which(QEMU), system=system, program=PYTHON, site=site))
    path.chmod(0o755)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(wrapper=str(path)))
    return path


def compiler(system: Path) -> str:
    """Return the command that compiles for arm64, with the header that Debian keeps under the processor's name."""
    headers = FOLDER / "include" / "aarch64-linux-gnu"
    headers.mkdir(parents=True, exist_ok=True)
    if not (headers / "python3.11").exists():
        (headers / "python3.11").symlink_to(system / "usr" / "include" / "aarch64-linux-gnu" / "python3.11")
    zig = Path(ziglang.__file__).parent / "zig"
    return f"{zig} cc -target aarch64-linux-gnu.2.28 -fno-sanitize=undefined -I{headers.parent}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Test the arm64 wheel under qemu-user.")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="where the wheel lies (dist)")
    parser.add_argument("--again", action="store_true", help="keep what was unpacked and installed last time")
    parser.add_argument("tests", nargs="*", help="for pytest; by default the native tests and the contract suite")
    arguments = parser.parse_args()
    if shutil.which(QEMU) is None:
        raise SystemExit(f"error: {QEMU} was not found; run: apt-get install qemu-user")
    system, site = FOLDER / "system", FOLDER / "site"
    if not arguments.again or not site.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        debian_root.unpack(system, PACKAGES, "aarch64")
        installed(system, wheel(arguments.wheels))
        shutil.copytree(ROOT / "tests", FOLDER / "run" / "tests")
        shutil.copy(ROOT / "pyproject.toml", FOLDER / "run")
    python = wrapper(system, site)
    said = "import platform, aiote_native.core as c; print(platform.machine(), platform.python_version(), c.__file__)"
    run(python, "-P", "-c", said)
    os.chdir(FOLDER / "run")
    every = [str(path) for pattern in TESTS for path in sorted(Path().glob(pattern))]
    chosen = [*(arguments.tests or every), *CHOSEN, *(f"--ignore={name}" for name in LEFT_OUT)]
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "--combinations",
        "tests",
        "-o",
        "timeout=1200",
        "-o",
        "faulthandler_timeout=1500",
    )
    fabric = system / "usr" / "lib" / "aarch64-linux-gnu" / "libfabric.so.1"
    environment = {"CC": compiler(system), "AIOTE_LIBFABRIC": str(fabric)}
    return run(python, "-P", "-m", "pytest", *options, *chosen, check=False, **environment)


if __name__ == "__main__":
    sys.exit(main())
