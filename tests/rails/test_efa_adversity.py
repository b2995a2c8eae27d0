"""EFA's rails where network, NIC or peer fail, over the stand-in for its provider, a process for each case.

What a case does is in tests/standin_efa: `storm.py` and `adversity.py`. `make test` has each once, with one library or
the other; `make test-all` all of them with both, and at full length.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.machine import LONG
from support.rails.standin_efa import SOURCES, environment, libraries, spoken

STORMS = 400 if LONG else 40
CASES = ("cancelled:1", "cancelled:2", "revoked:2", "lost:1", "closed:2", "forgotten", "slow_receiver", "joins")
CASES += ("failed", "gone:1", "granted_again")
MORE = ("revoked:1", "lost:2", "closed:1", "gone:2")
CHOSEN = (
    [(library, case) for library in libraries() for case in (*CASES, *MORE)]
    if LONG
    else [(libraries()[at % len(libraries())], case) for at, case in enumerate(CASES)]
)
PAIRS = "256" if LONG else "48"
pytestmark = [pytest.mark.libfabric, pytest.mark.timeout(1500)]


def named(value: str) -> str:
    return spoken(value) if "/" in value else value


def run(wire: Path, library: str, program: str, *arguments: str, **behaviour: str) -> str:
    """Run a program of the stand-in's; return what it printed. Nothing of it is left on the network."""
    command = [sys.executable, "-X", "faulthandler", "-P", str(SOURCES / program), *arguments]
    env = environment(wire, library, EFA_STANDIN_NICS="4", **behaviour)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(wire.iterdir())
    return done.stdout


@pytest.mark.parametrize("part", [0, 1])
def test_counts_are_exact_while_nics_fail_and_completions_are_dropped(tmp_path: Path, part: int) -> None:
    first = part * STORMS // 2
    library = libraries()[part % len(libraries())]
    said = run(tmp_path, library, "storm.py", str(first), str(STORMS // 2), EFA_STANDIN_SILENCE_MS="300")
    seen = dict(item.split(": ") for item in said.strip().strip("{}").replace("'", "").split(", "))
    assert int(seen["rails failed"]) > STORMS // 8
    assert int(seen["duplicated"]) > 0


@pytest.mark.parametrize(("library", "case"), CHOSEN, ids=named)
def test_promises_hold_on_a_network_that_holds_packets_and_peers_that_are_slow(
    tmp_path: Path, library: str, case: str
) -> None:
    run(tmp_path, library, "adversity.py", case)


def test_a_network_that_lets_no_packet_through_is_told(tmp_path: Path) -> None:
    said = run(tmp_path, libraries()[-1], "adversity.py", "unreachable", EFA_STANDIN_SILENCE_MS="300")
    assert "No route to host" in said


def test_a_socket_carries_whom_the_nic_has_no_queue_pair_for(tmp_path: Path) -> None:
    said = run(tmp_path, libraries()[0], "adversity.py", "crowded", EFA_STANDIN_QPS=PAIRS)
    assert f"by a socket: {int(PAIRS) * 300 // 256 - int(PAIRS)}" in said
