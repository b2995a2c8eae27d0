"""The services over EFA's stand-in with their processes on two hosts: network namespaces that one cable joins.

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
from support.process.modules import command
from support.rails.standin_efa import environment, libraries, spoken

SIDES = {"kvcache": ("prefill", "decode"), "moe": ("0|1", "2|3")}
"""The roles of a demo's processes on each side."""
PROGRAM = "import sys; sys.executable = {wrapper!r}; from aiote.__main__ import main; sys.exit(main())"
pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.needs_namespaces,
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
    pytest.mark.timeout(300),
]


def on_side(network: Network, side: int) -> list[str]:
    """Return what a command begins with that runs on a side, with a NIC of its own."""
    return ["env", f"AIOTE_HOST={end_of(0, side)}", f"EFA_STANDIN_HOST=side{side}", *network.enter(side)]


def wrapper(folder: Path, network: Network, demo: str) -> Path:
    """Write an interpreter that runs each of the demo's roles on its side."""
    cases = [
        f'{roles}) exec {" ".join(on_side(network, side))} {sys.executable} "$@" ;;'
        for side, roles in enumerate(SIDES[demo])
    ]
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", 'case "$4" in', *cases, f'*) exec {sys.executable} "$@" ;;', "esac\n"]))
    path.chmod(0o755)
    return path


@pytest.fixture(params=libraries() if LONG else libraries()[:1], ids=spoken)
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the environment of processes that share the wire in the test's folder."""
    (tmp_path / "wire").mkdir()
    env = environment(tmp_path / "wire", request.param)
    return {**env, "PATH": ENVIRONMENT["PATH"], "AIOTE_CLUSTER_KEY": "a key of sixteen bytes"}


def left(folder: Path) -> int:
    """Return how many endpoints are left on the wire."""
    return len(list((folder / "wire").iterdir()))


def shown(folder: Path, settings: dict[str, str], demo: str, *options: str) -> str:
    """Run a demo over two hosts and return what it says."""
    with Network() as network:
        program = PROGRAM.format(wrapper=str(wrapper(folder, network, demo)))
        run = [sys.executable, "-P", "-c", program, "demo", demo, "--provider", "efa", *options]
        done = subprocess.run(run, env=settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_generates_the_same_tokens_over_two_hosts(tmp_path: Path, settings: dict[str, str]) -> None:
    said = json.loads(shown(tmp_path, settings, "kvcache", "--requests", "2", "--new-tokens", "8", "--json"))
    assert "efa" in json.dumps(said)
    assert not left(tmp_path)


def test_experts_on_two_hosts_go_on_when_one_of_four_ranks_is_killed(tmp_path: Path, settings: dict[str, str]) -> None:
    said = shown(tmp_path, settings, "moe", "--tokens", "8", "--layers", "2", "--plain")
    assert "four ranks again: 32 tokens and all bits" in said


def test_weights_come_from_a_source_on_another_host(tmp_path: Path, settings: dict[str, str]) -> None:
    with Network() as network:
        source = [*on_side(network, 0), *command("support.weights.source_process", "efa", "quantized")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(source, env=settings, **pipes) as serving:
            address = serving.stdout.readline().strip()
            target = [*on_side(network, 1), *command("support.weights.target_process", "efa", "quantized", address)]
            done = subprocess.run(target, env=settings, capture_output=True, text=True, timeout=240)
            serving.communicate("\n", timeout=60)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
    assert not left(tmp_path)
