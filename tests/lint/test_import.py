"""`import aiote` works where there is no libfabric, and brings in nothing that only some users have."""

from __future__ import annotations

import os
import subprocess
import sys

LAZY = {"aiote.machine.topology", "aiote.machine.sysfs", "aiote.machine.numa", "aiote.diagnosis.findings", "ctypes"}
OPTIONAL = {"torch", "cupy", "trio", "uvloop", "typer", "rich", "safetensors", "httpx"}


def imported_by(statement: str) -> set[str]:
    return {name for name in imported_modules(statement) if "." not in name}


def imported_modules(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    environment = {**os.environ, "AIOTE_LIBFABRIC": "/nonexistent/libfabric.so.1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_needs_no_library_and_no_extra():
    names = imported_by("import aiote")
    assert "aiote" in names
    assert names & OPTIONAL == set()
    assert imported_by("import aiote.discovery.etcd, aiote.discovery.embedded") & OPTIONAL == set()


def test_import_reads_no_topology():
    assert imported_modules("import aiote") & LAZY == set()


def test_an_interpreter_without_a_gil_is_refused():
    """Before any extension is imported, for that would switch the GIL on behind everybody's back."""
    code = (
        "import sys; sys._is_gil_enabled = lambda: False\n"
        "try: import aiote\n"
        "except ImportError as error: print(error, [n for n in sys.modules if n.startswith('aiote_native.')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert "PYTHON_GIL=1" in done.stdout
    assert done.stdout.endswith(" []\n")
    imported_by("import sys; sys._is_gil_enabled = lambda: True; import aiote")


def test_modules_that_an_import_loads_are_found():
    assert "rich" in imported_by("import rich")
    assert imported_modules("import aiote.machine.sysfs, aiote.machine.numa, aiote.diagnosis.findings") >= LAZY
