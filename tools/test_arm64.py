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
from dataclasses import dataclass
from pathlib import Path

import debian_root
import pythons
import wheels
import ziglang
from environment import PINS, exact

ROOT = Path(__file__).resolve().parents[1]
QEMU = "qemu-aarch64"
PACKAGES = ("python{0}", "libpython{0}-dev", "libstdc++6", "libfabric1")
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
exec {qemu} -L "{system}" ${{preload:+-E "LD_PRELOAD=$preload"}} "{system}/usr/bin/python{version}" "$@"
"""
SITECUSTOMIZE = "import sys\nsys.executable = {wrapper!r}\n"


def run(*command: str | Path, check: bool = True, **environment: str) -> int:
    print("--- " + " ".join(map(str, command)), flush=True)
    status = subprocess.run([*map(str, command)], env={**os.environ, **environment}).returncode
    if check and status:
        raise SystemExit(f"error: {command[0]} ended with status {status}")
    return status


@dataclass(frozen=True)
class Place:
    """Where an arm64 Python lies, and the wheel for it or, if `limited`, the one for all Pythons."""

    version: str
    limited: bool

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "arm64" / (self.version + "-limited" * self.limited)

    @property
    def system(self) -> Path:
        return self.folder / "system"

    @property
    def site(self) -> Path:
        return self.folder / "site"

    def make(self, folder: Path) -> None:
        """Unpack the Python, and install a wheel from this folder with the tests and what they import."""
        shutil.rmtree(self.folder, ignore_errors=True)
        packages = [name.format(self.version) for name in PACKAGES]
        if (suite := debian_root.suite_with(packages, "aarch64")) is None:
            raise SystemExit(f"error: Debian has no Python {self.version} for arm64")
        print(f"--- an arm64 Python {self.version}, Debian's, of {suite}", flush=True)
        debian_root.unpack(self.system, packages, "aarch64", suite)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", self.site)
        there = wheels.tags_of(self.version, "aarch64")
        run(*pip, *there, "--constraint", PINS, self.wheel(folder.absolute()), *NEEDS, **exact())
        shutil.copytree(ROOT / "tests", self.folder / "run" / "tests")
        shutil.copy(ROOT / "pyproject.toml", self.folder / "run")

    def wheel(self, folder: Path) -> Path:
        """Return the wheel, built unless it is there."""
        tag = wheels.Target("limited", wheels.OLDEST, "aarch64").tag
        kind = ("--kind", "limited") if self.limited else ("--kind", "own", "--python", self.version)
        if not list(folder.glob(f"aiote-*-{tag}-*aarch64.whl" if self.limited else "aiote-*aarch64.whl")):
            run(sys.executable, ROOT / "tools" / "wheels.py", "--machine", "aarch64", *kind, "--into", folder)
        if self.limited:
            return sorted(folder.glob(f"aiote-*-{tag}-*aarch64.whl"))[-1]
        return wheels.taken(folder, self.version, "aarch64")

    def python(self) -> Path:
        """Write a program that is the arm64 Python, and has Python take itself for it."""
        path = self.folder / "python"
        # A library that is to be loaded first is an arm64 one; and tests may name a path of their own.
        places = {"system": self.system, "site": self.site, "version": self.version}
        path.write_text(WRAPPER.format(qemu=shutil.which(QEMU), **places))
        path.chmod(0o755)
        (self.site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(wrapper=str(path)))
        return path

    def compiler(self) -> str:
        """Return the command that compiles for arm64, with the header that Debian keeps under the processor's name."""
        python = f"python{self.version}"
        headers = self.folder / "include" / "aarch64-linux-gnu"
        headers.mkdir(parents=True, exist_ok=True)
        if not (headers / python).exists():
            (headers / python).symlink_to(self.system / "usr" / "include" / "aarch64-linux-gnu" / python)
        zig = Path(ziglang.__file__).parent / "zig"
        found = f"-I{headers.parent} -I{self.system}/usr/include/{python}"
        return f"{zig} cc -target aarch64-linux-gnu.2.28 -fno-sanitize=undefined {found}"


def test(place: Place, tests: list[str]) -> int:
    """Run tests on what a place has; return pytest's status."""
    python = place.python()
    said = "import platform as p, aiote_native.engine.core as c; print(p.machine(), p.python_version(), c.__file__)"
    run(python, "-P", "-c", said)
    os.chdir(place.folder / "run")
    every = [str(path) for pattern in TESTS for path in sorted(Path().glob(pattern))]
    chosen = [*(tests or every), *CHOSEN, *(f"--ignore={name}" for name in LEFT_OUT)]
    limits = ("-o", "timeout=1200", "-o", "faulthandler_timeout=1500")
    options = ("-q", "-p", "no:cacheprovider", "--combinations", "tests", *limits)
    fabric = place.system / "usr" / "lib" / "aarch64-linux-gnu" / "libfabric.so.1"
    environment = {"CC": place.compiler(), "AIOTE_LIBFABRIC": str(fabric)}
    return run(python, "-P", "-m", "pytest", *options, *chosen, check=False, **environment)


def main() -> int:
    parser = argparse.ArgumentParser(description="Test the arm64 wheel under qemu-user.")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="where the wheel lies (dist)")
    parser.add_argument("--python", choices=pythons.named(), default=wheels.OLDEST, help=f"which ({wheels.OLDEST})")
    parser.add_argument("--limited", action="store_true", help="the wheel for all Pythons, not the one that pip takes")
    parser.add_argument("--again", action="store_true", help="keep what was unpacked and installed last time")
    parser.add_argument("tests", nargs="*", help="for pytest; by default the native tests and the contract suite")
    arguments = parser.parse_args()
    if shutil.which(QEMU) is None:
        raise SystemExit(f"error: {QEMU} was not found; run: apt-get install qemu-user")
    place = Place(arguments.python, arguments.limited)
    if not arguments.again or not place.site.exists():
        place.make(arguments.wheels)
    return test(place, arguments.tests)


if __name__ == "__main__":
    sys.exit(main())
