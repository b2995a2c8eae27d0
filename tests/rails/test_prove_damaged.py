"""`aiote prove` finds what is damaged below it: a driver that copies too little or calls copies done too early, a
network that changes bytes, and a NIC that leaves one out. `test_prove_efa` damages the stand-in for EFA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiote.testing.contract import CHECKS
from support import TESTS
from support.checkout.compiled import preloaded, shared

STANDIN = TESTS / "support" / "gpu" / "standin"
PASSED = {**dict.fromkeys([check.name for check in CHECKS], "passed"), "pulled-rail": "not run"}


def proven(folder: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Run the command; return its status, and its report."""
    path = folder / "report.json"
    command = [sys.executable, "-P", "-m", "aiote", "prove", *arguments, "--no-bench", "--no-suites"]
    done = subprocess.run(
        [*command, "--report", str(path)], env=os.environ | environment, capture_output=True, text=True, timeout=150
    )
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text())


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {outcome["name"]: outcome["status"] for outcome in report["outcomes"]}


def details(report: dict[str, Any]) -> dict[str, str]:
    return {outcome["name"]: outcome["detail"] for outcome in report["outcomes"]}


def on_standin(folder: Path, damage: str, over: str = "socket") -> tuple[int, dict[str, Any]]:
    """Prove a GPU over the stand-in for its driver: staged over TCP, or shared on this machine."""
    cupy = str(STANDIN / "cupy_on_standin")
    return proven(folder, "cuda", "--over", over, PYTHONPATH=cupy, STANDIN_DAMAGE=damage)


@pytest.mark.parametrize("over", ["socket", "local"])
def test_over_a_whole_driver_every_check_passes(over, tmp_path):
    status, report = on_standin(tmp_path, "", over)
    assert statuses(report) == PASSED, details(report)
    assert (status, report["memory"]) == (0, "cupy on the stand-in, stand-in")


@pytest.mark.parametrize(
    ("damage", "check", "says"),
    [
        ("short", "writes", "a write of 1 bytes arrived changed"),
        ("early", "counts-follow-data", "the count arrived before the bytes"),
    ],
)
def test_a_damaged_driver_is_found(damage, check, says, tmp_path):
    status, report = on_standin(tmp_path, damage)
    assert (status, report["exit_status"], statuses(report)[check]) == (1, 1, "failed")
    assert says in details(report)[check]
    assert "FAILED" in report["conclusion"]


def test_a_network_that_changes_bytes_is_found(tmp_path):
    library = shared(STANDIN / "damaged_receive.c", tmp_path)
    status, report = proven(tmp_path, "socket", LD_PRELOAD=preloaded(library))
    assert (status, statuses(report)["writes"]) == (1, "failed")
    assert "arrived changed" in details(report)["writes"]
    assert (statuses(report)["registration"], statuses(report)["idle"]) == ("passed", "passed")


@pytest.mark.needs_rdma
def test_a_nic_that_sends_too_little_is_found(tmp_path):
    library = shared(STANDIN / "damaged_verbs.c", tmp_path)
    status, report = proven(tmp_path, "verbs", LD_PRELOAD=preloaded(library))
    assert (status, statuses(report)["writes"]) == (1, "failed")
    assert "a write of 4096 bytes arrived changed" in details(report)["writes"]
    assert statuses(report)["idle"] == "passed"
