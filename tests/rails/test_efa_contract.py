"""The contract of every rail on kind `efa`, over the stand-in for its provider, with each libfabric that is here.

In processes of their own, for what has found the provider once lists it for good. Of 1000 packets 200 come twice.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.machine import LONG
from support.rails.standin_efa import environment, libraries, spoken

HERE = Path(__file__).parent
SUITE = sorted(str(path) for path in HERE.glob("test_contract*.py"))
CHOICE = "all" if LONG else "tests"
pytestmark = [pytest.mark.libfabric, pytest.mark.timeout(600)]


def contract(wire: Path, library: str, **behaviour: str) -> None:
    """Run the suite in a process. Fails as it does, and where nothing was run."""
    env = environment(wire, library, EFA_STANDIN_NICS="3", EFA_STANDIN_DUPLICATE="200", **behaviour)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--combinations", CHOICE]
    command += ["-W", "ignore:provider='efa' was never run:RuntimeWarning", "-k", "efa", *SUITE]
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "passed" in done.stdout
    assert not list(wire.iterdir())


NICS = [("8192", str(1 << 20)), ("1024", "65536")]
"""The MTU, and the longest write."""
ALL = [(library, *nic) for library in libraries() for nic in NICS]


def named(value: str) -> str:
    return spoken(value) if "/" in value else value


@pytest.mark.parametrize(("library", "mtu", "rma"), ALL if LONG else [ALL[0], ALL[-1]], ids=named)
def test_the_contract_holds(tmp_path: Path, library: str, mtu: str, rma: str) -> None:
    contract(tmp_path, library, EFA_STANDIN_MTU=mtu, EFA_STANDIN_RMA=rma)
