"""EFA's rails where network, NIC or peer fail, over the stand-in for its provider, a process for each case.

What a case does is in tests/standin_efa: `storm.py` and `adversity.py`. `make test` has each once, with one library or
the other. Each is a test of its own, because `make test` would choose one of a parameter's values. `make test-all` has
all of them with both libraries, and at full length.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.machine import LONG
from support.rails.efa_cases import tried
from support.rails.standin_efa import SOURCES, environment, libraries

STORMS = 400 if LONG else 40
PAIRS = "256" if LONG else "48"
pytestmark = [pytest.mark.libfabric, pytest.mark.one_library, pytest.mark.timeout(1500)]


def run(wire: Path, library: str, program: str, *arguments: str, **behaviour: str) -> str:
    """Run a program of the stand-in's; return what it printed. Nothing of it is left on the network."""
    command = [sys.executable, "-X", "faulthandler", "-P", str(SOURCES / program), *arguments]
    env = environment(wire, library, EFA_STANDIN_NICS="4", **behaviour)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(wire.iterdir())
    return done.stdout


def storms(tmp_path: Path, part: int) -> None:
    first = part * STORMS // 2
    library = libraries()[part % len(libraries())]
    said = run(tmp_path, library, "storm.py", str(first), str(STORMS // 2), EFA_STANDIN_SILENCE_MS="300")
    seen = dict(item.split(": ") for item in said.strip().strip("{}").replace("'", "").split(", "))
    assert int(seen["rails failed"]) > STORMS // 8
    assert int(seen["duplicated"]) > 0


def test_counts_are_exact_while_nics_fail_and_completions_are_dropped(tmp_path: Path) -> None:
    storms(tmp_path, 0)


def test_counts_are_as_exact_with_the_other_library(tmp_path: Path) -> None:
    storms(tmp_path, 1)


@tried(0, 2, 1)
def test_no_byte_lands_after_a_cancelled_await(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"cancelled:{nics}")


@tried(1, 2, 1)
def test_no_byte_lands_after_a_lease_is_revoked(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"revoked:{nics}")


@tried(0, 1)
def test_no_byte_lands_in_memory_that_is_leased_again_with_the_same_key(
    tmp_path: Path, library: str, nics: int
) -> None:
    run(tmp_path, library, "adversity.py", f"granted_again:{nics}")


@tried(1, 1, 2)
def test_no_byte_lands_after_a_peer_is_lost(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"lost:{nics}")


@tried(0, 2, 1)
def test_nothing_is_posted_on_a_closed_pair(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"closed:{nics}")


@tried(1, 2)
def test_counts_that_a_close_drops_are_counted_again(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"forgotten:{nics}")


@tried(0, 1)
def test_a_slow_receiver_loses_nothing(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"slow_receiver:{nics}")


@tried(1, 1)
def test_peers_that_come_and_go_leave_nothing(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"joins:{nics}")


@tried(0, 2)
def test_what_a_nic_fails_is_done_again(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"failed:{nics}")


@tried(1, 1, 2)
def test_a_peer_whose_pairs_are_gone_is_lost(tmp_path: Path, library: str, nics: int) -> None:
    run(tmp_path, library, "adversity.py", f"gone:{nics}")


def test_a_network_that_lets_no_packet_through_is_told(tmp_path: Path) -> None:
    said = run(tmp_path, libraries()[-1], "adversity.py", "unreachable", EFA_STANDIN_SILENCE_MS="300")
    assert "No route to host" in said


def test_a_socket_carries_whom_the_nic_has_no_queue_pair_for(tmp_path: Path) -> None:
    said = run(tmp_path, libraries()[0], "adversity.py", "crowded", EFA_STANDIN_QPS=PAIRS)
    assert f"by a socket: {int(PAIRS) * 300 // 256 - int(PAIRS)}" in said
