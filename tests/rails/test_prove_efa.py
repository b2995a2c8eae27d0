"""`aiote prove efa` over the stand-in for EFA: it passes, finds a damaged device, and names an unusable one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiote.cli import prove_suites
from aiote.testing.contract import CHECKS
from support.machine import LONG
from support.rails.standin_efa import environment, libraries, spoken

pytestmark = [pytest.mark.libfabric, pytest.mark.timeout(1000)]
ROOT = Path(__file__).parents[2]
QUICK = ("--no-bench", "--no-suites")
BOTH = ("--rails", "standin0-rdm,standin1-rdm", "--pull-rail")
NAMES = [check.name for check in CHECKS]
PARTS = {f"bench-{op}" for op in prove_suites.BENCHED} | prove_suites.SUITES.keys() - {prove_suites.GPU_SUITE}


def proven(
    folder: Path, *options: str, library: str = "", **behaviour: str
) -> tuple[int, dict[str, str], dict[str, str], str]:
    """Run the command; return its status, the status and the detail of each part, and the report's text."""
    path, wire = folder / "report.json", folder / "wire"
    wire.mkdir()
    command = [sys.executable, "-P", "-m", "aiote", "prove", "efa", *options, "--report", str(path)]
    env = environment(wire, library or libraries()[0], **behaviour)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=950)
    assert path.exists(), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["exit_status"] == done.returncode
    found = [{part["name"]: part[what] for part in report["outcomes"]} for what in ("status", "detail")]
    return done.returncode, found[0], found[1], path.with_suffix(".txt").read_text()


@pytest.mark.parametrize("library", libraries(), ids=spoken)
def test_every_check_passes(library, tmp_path):
    """A rail is lost, too: the engines have two NICs. Packets come in any order, and some of them twice.

    At full length benchmarks and tests run, too; their figures say nothing about EFA.
    """
    behaviour = {"EFA_STANDIN_NICS": "2", "EFA_STANDIN_DUPLICATE": "200"}
    options = ("--full", "--checkout", str(ROOT)) if LONG else QUICK
    status, found, details, text = proven(tmp_path, *options, *BOTH, library=library, **behaviour)
    assert {found[name] for name in (*NAMES, *(PARTS if LONG else ()))} == {"passed"}, details
    assert status == 0, text
    assert "doctor: hint: EFA: standin0-rdm, standin1-rdm can be used" in text
    assert "EFA_STANDIN_NICS=2" in text


@pytest.mark.parametrize(
    ("damage", "check", "says"),
    [
        ("short", "writes", "arrived changed"),
        ("early", "counts-follow-data", "the count arrived before the bytes"),
        ("twice", "exact-counts", "counts more than writes"),
    ],
)
def test_a_damaged_device_is_found(damage, check, says, tmp_path):
    status, found, details, text = proven(tmp_path, *QUICK, EFA_STANDIN_DAMAGE=damage)
    assert (status, found[check]) == (1, "failed"), text
    assert says in details[check]


@pytest.mark.parametrize("behaviour", ["old", "unsolicited", "no-write", "no-wait"])
def test_an_unusable_device_could_not_be_tried(behaviour, tmp_path):
    status, found, details, text = proven(tmp_path, EFA_STANDIN=behaviour)
    assert (status, set(found.values())) == (2, {"not run"})
    assert ("fi_cq_open" if behaviour == "no-wait" else "no usable EFA NIC") in details["writes"]
    assert "efa: NOTHING PROVEN: 0 passed, 0 failed" in text


def test_a_benchmark_runs(monkeypatch, tmp_path):
    """The figures say nothing about EFA."""
    for name, value in environment(tmp_path, libraries()[0]).items():
        monkeypatch.setenv(name, value)
    measured = prove_suites.bench("latency", "efa", "", 200)
    assert (measured.status, len(measured.figures)) == ("passed", 1), measured.detail


def test_a_suite_has_tests_over_efa(monkeypatch, tmp_path):
    for name, value in environment(tmp_path, libraries()[0]).items():
        monkeypatch.setenv(name, value)
    tested = prove_suites.suite("engine-suite", ROOT, "efa", 200, ["-k", "test_a_write_of_any_size"])
    assert tested.status == "passed", tested.detail
