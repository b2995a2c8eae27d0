"""The KV-cache demo over EFA's stand-in with its processes on two hosts: network namespaces that one cable joins.

The data goes by the stand-in's own wire, which is of no namespace; the cable has the control connection alone. Each
side has a NIC with a GID of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.machine import LONG
from support.network.namespaces import ENVIRONMENT, Network, end_of
from support.rails.standin_efa import environment, libraries, spoken

ROLES = ("prefill", "decode")
PROGRAM = "import sys; sys.executable = {wrapper!r}; from aiote.__main__ import main; sys.exit(main())"
pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.needs_namespaces,
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
    pytest.mark.timeout(300),
]


def wrapper(folder: Path, network: Network) -> Path:
    """Write an interpreter that runs each of the demo's roles on its side."""
    cases = [
        f"{role}) exec env AIOTE_HOST={end_of(0, side)} EFA_STANDIN_HOST=side{side} "
        f'{" ".join(network.enter(side))} {sys.executable} "$@" ;;'
        for side, role in enumerate(ROLES)
    ]
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", 'case "$4" in', *cases, f'*) exec {sys.executable} "$@" ;;', "esac\n"]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("library", libraries() if LONG else libraries()[:1], ids=spoken)
def test_the_demo_generates_the_same_tokens_over_two_hosts(tmp_path: Path, library: str) -> None:
    wire = tmp_path / "wire"
    wire.mkdir()
    with Network() as network:
        program = PROGRAM.format(wrapper=str(wrapper(tmp_path, network)))
        options = ["demo", "kvcache", "--provider", "efa", "--requests", "2", "--new-tokens", "8", "--json"]
        env = {**environment(wire, library), "PATH": ENVIRONMENT["PATH"], "AIOTE_CLUSTER_KEY": "a key of sixteen bytes"}
        command = [sys.executable, "-P", "-c", program, *options]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert "efa" in json.dumps(said)
    assert not list(wire.iterdir())
