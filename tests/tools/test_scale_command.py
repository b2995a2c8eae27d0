"""`make scale`: how many simulated peers it opens, and what it says where the system does not allow so many."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import ROOT

pytestmark = pytest.mark.blocking_allowed("no event loop runs here")


def scaled(arguments: str, limit: int) -> subprocess.CompletedProcess[str]:
    """Run the command in a shell whose processes may have so many descriptors."""
    command = f"ulimit -n {limit} && exec {sys.executable} -P {ROOT / 'bench' / 'run.py'} scale {arguments}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


def test_ten_thousand_peers_are_the_default():
    done = scaled("", 512)
    assert done.returncode == 1
    assert "10000 simulated peers take 70064 descriptors, and the limit here is 512" in done.stderr


def test_what_a_peer_takes_is_what_is_allowed():
    """Its count of descriptors decides whether they fit: it has to be right."""
    done = scaled("peers --count 50", 50 * 7 + 64)
    assert done.returncode == 0, done.stderr
    assert "50 engines: " in done.stdout
    assert "5.00 descriptors" in done.stdout
    assert "2.00 descriptors" in done.stdout
