"""The services over two and four rails of EFA's stand-in of which one fails in the midst, a process for each case.

What a case does is in tests/standin_efa/services.py. `make test-all` has each with both libraries, and over the
stand-in all tests of the services that run over any provider.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.machine import LONG
from support.rails.standin_efa import SOURCES, environment, libraries, spoken

ROOT = Path(__file__).parents[2]
CASES = ("kvcache:2", "weights:4", "moe:2")
MORE = ("kvcache:4", "weights:2", "moe:4")
CHOSEN = (
    [(library, case) for library in libraries() for case in (*CASES, *MORE)]
    if LONG
    else [(libraries()[at % len(libraries())], case) for at, case in enumerate(CASES)]
)
SERVICES = ("kvcache", "moe", "weights")
pytestmark = [pytest.mark.libfabric, pytest.mark.timeout(1500)]


def named(value: str) -> str:
    return spoken(value) if "/" in value else value


@pytest.mark.parametrize(("library", "case"), CHOSEN, ids=named)
def test_a_service_goes_on_when_nics_break(tmp_path: Path, library: str, case: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-P", str(SOURCES / "services.py"), case]
    env = environment(tmp_path, library, EFA_STANDIN_NICS="4")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("service", SERVICES if LONG else ("moe",))
def test_what_a_service_does_over_any_provider_it_does_over_efa(tmp_path: Path, service: str) -> None:
    env = environment(tmp_path, libraries()[0], EFA_STANDIN_NICS="2", PROVE_OVER="efa")
    choice = "all" if LONG else "tests"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--combinations", choice]
    command += ["-W", "ignore:provider='efa' was never run:RuntimeWarning", "-k", "efa", f"tests/{service}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "passed" in done.stdout
