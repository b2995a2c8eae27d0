"""What `make test` passes for: some runs may be left without a test by the arguments, but not all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import run_tests
from run_tests import CHOICES, NOTHING_CHOSEN, Outcome, affordable, concluded, main, passes
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


def test_a_long_run_ends_no_test_that_takes_ten_minutes(monkeypatch):
    """Both limits of pytest: its own ends the whole run, and is not lifted by lifting that of a test.

    Other targets have the usual limits: mutants hang.
    """
    options: list[list[str]] = []

    def ran(*_: object) -> list[Outcome]:
        options.append(os.environ.get("PYTEST_ADDOPTS", "").split())
        return []

    def made(*_: object) -> Outcome:
        ran()
        return LINT

    monkeypatch.setattr(sys, "argv", ["run_tests.py", "--all"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run_tests, "made", made)
    monkeypatch.setattr(run_tests, "everything", ran)
    main()
    _, tests, *targets = options
    assert len(targets) == len(run_tests.LONG)
    assert not any(targets)
    limits = dict(one.split("=") for one in tests if one != "-o")
    assert {name for name, value in limits.items() if int(value) > 600} == {"timeout", "faulthandler_timeout"}
    assert os.environ["AIOTE_TEST_LONG"] == "1"


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


@pytest.mark.parametrize(("times", "choice"), [(1.0, "pairs"), (2.9, "pairs"), (3.0, "tests"), (40.0, "tests")])
def test_a_slow_machine_tries_fewer_combinations_and_says_so(times, choice, monkeypatch, capsys):
    monkeypatch.setattr(run_tests, "slowness", lambda: times)
    choices = affordable()
    assert choices["newest"][1] == choice
    assert {**choices, "newest": CHOICES["newest"]} == CHOICES
    assert ("TIMES SLOWER" in capsys.readouterr().out) is (choice == "tests")


def test_an_interruption_of_the_measurement_does_not_make_a_machine_slow(monkeypatch):
    measured = iter([1.0, 90.0, 1.2, 80.0, 1.1])
    monkeypatch.setattr(run_tests, "slowness", lambda: next(measured))
    assert affordable() == CHOICES
