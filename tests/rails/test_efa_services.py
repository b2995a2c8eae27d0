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
from support.rails.efa_cases import tried
from support.rails.standin_efa import SOURCES, environment, libraries

ROOT = Path(__file__).parents[2]
SERVICES = ("kvcache", "moe", "weights")
pytestmark = [pytest.mark.libfabric, pytest.mark.one_library, pytest.mark.timeout(1500)]


def go_on(tmp_path: Path, library: str, case: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-P", str(SOURCES / "services.py"), case]
    env = environment(tmp_path, library, EFA_STANDIN_NICS="4")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@tried(0, 2, 4)
def test_a_kv_cache_goes_on_when_nics_break(tmp_path: Path, library: str, nics: int) -> None:
    go_on(tmp_path, library, f"kvcache:{nics}")


@tried(1, 4, 2)
def test_weight_updates_go_on_when_nics_break(tmp_path: Path, library: str, nics: int) -> None:
    go_on(tmp_path, library, f"weights:{nics}")


@tried(0, 2, 4)
def test_moe_rounds_go_on_when_nics_break(tmp_path: Path, library: str, nics: int) -> None:
    go_on(tmp_path, library, f"moe:{nics}")


@pytest.mark.parametrize("service", SERVICES if LONG else ("moe",))
def test_what_a_service_does_over_any_provider_it_does_over_efa(tmp_path: Path, service: str) -> None:
    env = environment(tmp_path, libraries()[0], EFA_STANDIN_NICS="2", PROVE_OVER="efa")
    choice = "all" if LONG else "tests"
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--combinations", choice]
    command += ["-W", "ignore:provider='efa' was never run:RuntimeWarning", "-k", "efa", f"tests/{service}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "passed" in done.stdout
