"""Every native module has a stub, and the stub says what the binary says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "aiote_native"

# Full names, as patterns, of what Cython adds by itself, and of what a compiled type cannot tell: its arguments.
CYTHON = r"""
.*\.__pyx_\w+__
.*\.__(reduce|setstate)_cython__
.*\.__test__
.*\.__(release_)?buffer__
.*\.[A-Z]\w*\.__(init|new)__
"""
OPTIONS = ["--ignore-unused-allowlist", "--ignore-disjoint-bases"]


def stubtest(tmp_path: Path, *modules: str, search: Path) -> subprocess.CompletedProcess[str]:
    allowed = tmp_path / "cython.txt"
    allowed.write_text(CYTHON)
    command = [sys.executable, "-m", "mypy.stubtest", *OPTIONS, "--allowlist", str(allowed), *modules]
    environment = {**os.environ, "MYPYPATH": str(search)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)


def test_every_native_module_has_a_stub():
    modules = {path.relative_to(NATIVE).with_suffix("") for path in NATIVE.rglob("*.pyx")}
    stubs = {path.relative_to(NATIVE).with_suffix("") for path in NATIVE.rglob("*.pyi")}
    assert modules
    assert modules == {stub for stub in stubs if stub.name != "__init__"}


def test_stubs_agree_with_the_binaries(tmp_path):
    done = stubtest(tmp_path, "aiote_native", search=NATIVE.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_stub_is_found(tmp_path):
    package = tmp_path / "aiote_native" / "system"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.pyi").write_text("")
    (package / "base.pyi").write_text("def error_text(number: int, more: int) -> str: ...\n")
    done = stubtest(tmp_path, "aiote_native.system.base", search=tmp_path)
    assert done.returncode == 1
    assert "error_text" in done.stdout
    assert "StatusError" in done.stdout
