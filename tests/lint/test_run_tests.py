"""What `make test` passes for: some runs may be left without a test by the arguments, but not all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import run_tests
from run_tests import NOTHING_CHOSEN, Outcome, concluded, main, passes
from test_reports import Report


@pytest.mark.parametrize(
    ("status", "arguments", "verdict"),
    [
        (0, [], True),
        (0, ["-k", "write"], True),
        (NOTHING_CHOSEN, ["-k", "write"], True),
        (NOTHING_CHOSEN, [], False),
        (1, ["-k", "write"], False),
        (4, ["--nonsense"], False),
        (-11, ["-k", "write"], False),
    ],
)
def test_a_run_is_judged_by_its_status(status, arguments, verdict):
    assert passes(status, arguments) is verdict


LINT = Outcome("lint", True, "")


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([LINT, Outcome("a", True, "", report=Report((3, 0, 0))), Outcome("b", True, "")], 0),
        ([LINT, Outcome("a", True, "", report=Report((3, 0, 0))), Outcome("b", False, "")], 1),
        ([LINT, Outcome("a", True, ""), Outcome("b", True, "")], 1),
    ],
    ids=["one chose nothing", "one failed", "all chose nothing"],
)
def test_all_runs_are_judged_together(outcomes, status, capsys):
    assert concluded(outcomes) == status
    said = capsys.readouterr().out
    assert ("NOT ONE TEST WAS RUN" in said) is (not any(any(outcome.report.counts) for outcome in outcomes))
    assert ("FAILED" in said) is bool(status)


@pytest.mark.parametrize("rdma", [True, False], ids=["here", "in the guest"])
@pytest.mark.parametrize("found", [0, 1])
def test_arguments_that_choose_nothing_anywhere_fail(rdma, found, tmp_path, monkeypatch, capsys):
    """Every run ends as pytest does that finds nothing; then one of them has found a test after all."""
    reports = iter([Report((found, 0, 0))])
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", "-k", "typo"])
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    monkeypatch.setattr(run_tests, "made", lambda _target: LINT)
    monkeypatch.setattr(run_tests, "version", lambda _library: (2, 5))
    monkeypatch.setattr(run_tests, "system_library", lambda: Path("libfabric.so.1"))
    monkeypatch.setattr(run_tests, "has_rdma", lambda: rdma)
    monkeypatch.setattr(run_tests, "read", lambda _path: next(reports, Report()))

    def run(command: list[str], **_settings: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, NOTHING_CHOSEN if "pytest" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert main() == 1 - found
    assert ("NOT ONE TEST WAS RUN" in capsys.readouterr().out) is (not found)
