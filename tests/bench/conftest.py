"""Tools of `tools/` that measure, as programs and as modules."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from support import ROOT

TOOLS = ROOT / "tools"


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a tool: `run("bench_moe", "--runs", "1")`."""

    def ran(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / f"{name}.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=150)

    return ran


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module as the workers have it, from bench/peers."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "peers"))
    monkeypatch.syspath_prepend(str(TOOLS))
    names = ["run_tests", "test_reports"]

    def imported(name: str) -> ModuleType:
        names.append(name)
        return importlib.import_module(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def program() -> Callable[[str], ModuleType]:
    """Load a tool as a module."""

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        path = list(sys.path)
        spec.loader.exec_module(module)
        sys.path[:] = path
        return module

    return loaded
