"""The benchmarks of bench/entries, as programs and as modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from support import ROOT

BENCH = ROOT / "bench"
PATHS = (str(BENCH), str(ROOT / "tools"))
"""What bench/run.py puts on the path."""


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one: `run("moe", "--rounds", "1")`."""

    def ran(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCH / "run.py"), name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=150)

    return ran


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module as the workers have it, from bench/peers."""
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    names: list[str] = []

    def imported(name: str) -> ModuleType:
        names.append(name)
        return importlib.import_module(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def program() -> Callable[[str], ModuleType]:
    """Load one as a module."""

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, BENCH / "entries" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        path = list(sys.path)
        sys.path[:0] = PATHS
        spec.loader.exec_module(module)
        sys.path[:] = path
        return module

    return loaded
