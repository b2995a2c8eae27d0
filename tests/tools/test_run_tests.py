"""What `make test` passes for: some runs may be left without a test by the arguments, but not all of them."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import run_tests
import test_queue
from run_tests import CHOICES, NOTHING_CHOSEN, TESTS_FAILED, Outcome, Run, all_files, concluded, main
from test_queue import ENTRY_S, Queue, entries
from test_reports import Report

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
    for name in ("AIOTE_TEST_LONG", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(run_tests, "made", made)
    monkeypatch.setattr(Run, "outcomes", ran)
    main()
    tests, *targets = options
    assert len(targets) == len(run_tests.LONG)
    assert not any(targets)
    limits = dict(one.split("=") for one in tests if one != "-o")
    assert {name for name, value in limits.items() if int(value) > 600} == {"timeout", "faulthandler_timeout"}
    assert os.environ["AIOTE_TEST_LONG"] == "1"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace all that runs: every pytest ends with the status of its kind, which this dictionary holds."""
    status = dict.fromkeys(CHOICES, 0)
    (tmp_path / "tests" / "engine").mkdir(parents=True)
    (tmp_path / "tests" / "engine" / "test_it.py").touch()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for name, value in {"ROOT": tmp_path, "TESTS": tmp_path / "tests", "REPORTS": tmp_path / "reports"}.items():
        monkeypatch.setattr(run_tests, name, value)
    monkeypatch.setattr(run_tests, "linted", lambda: LINT)
    monkeypatch.setattr(run_tests, "made", lambda target, _arguments: Outcome(target, True, ""))
    monkeypatch.setattr(run_tests, "version", lambda _library: (2, 5))
    monkeypatch.setattr(run_tests, "newest_library", lambda: Path("new/libfabric.so.1"))
    monkeypatch.setattr(run_tests, "system_library", lambda: Path("old/libfabric.so.1"))
    monkeypatch.setattr(run_tests, "has_rdma", lambda: False)

    def run(command: list[str], log: Path, **_environment: str) -> tuple[int, float]:
        log.parent.mkdir(exist_ok=True)
        log.write_text("what pytest said\n")
        report = next((Path(one.partition("=")[2]) for one in command if one.startswith("--junit-xml=")), None)
        if report is None:
            return 0, 0.0
        ended = status[report.stem.rpartition("-")[0]]
        if ended >= 0:
            failed, passed = int(ended == TESTS_FAILED), int(ended == 0)
            report.write_text(f'<testsuite tests="{failed + passed}" failures="{failed}"/>')
        return ended, 1.5

    monkeypatch.setattr(run_tests, "run", run)
    return status


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *arguments])
    return main()


@pytest.mark.parametrize("found", ["", "newest", "system", "guest"])
def test_arguments_that_choose_nothing_anywhere_fail(found, machine, monkeypatch, capsys):
    """Every run ends as pytest does that finds nothing; then one of them has found a test after all."""
    machine |= {kind: 0 if kind == found else NOTHING_CHOSEN for kind in machine}
    assert run_main(monkeypatch, "-k", "typo") == (0 if found else 1)
    assert ("NOT ONE TEST WAS RUN" in capsys.readouterr().out) is (not found)


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("ended", [NOTHING_CHOSEN, TESTS_FAILED, 2, 4, -11])
def test_one_kind_of_run_that_is_not_what_it_should_be_fails_all(kind, ended, machine, monkeypatch, capsys):
    """Without arguments each kind has a test; a status beside pytest's two good ones fails, as a lost report does."""
    machine[kind] = ended
    assert run_main(monkeypatch) == 1
    said = capsys.readouterr().out
    assert ("NO REPORT" in said) is (ended < 0)
    assert f"FAILED  {kind}" in said
    assert said.splitlines()[-1].startswith("total: 2 passed, ")


def test_all_that_passes_passes(machine, monkeypatch, capsys):
    assert run_main(monkeypatch) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "total: 3 passed, 0 failed, 0 skipped"
    assert said[0].startswith(f"{run_tests.running_on()}; ")
    assert said[0].startswith(f"Python {sys.version.split()[0]} ")
    assert said[-2] == f"  {run_tests.running_on()}"
    assert "  processor time: 4 s" in said


@pytest.mark.parametrize(
    ("arguments", "built"),
    [([], 1), (["--check"], 0), (["-k", "it"], 0), (["tests/engine/test_it.py"], 0)],
    ids=["all tests", "check", "an option", "a file"],
)
@pytest.mark.parametrize("passes", [True, False])
def test_the_site_is_built_beside_all_tests_alone(arguments, built, passes, machine, monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.setattr(run_tests, "quick", lambda: ({"quick": run_tests.Kind(None, ())}, ["engine/test_it.py"]))
    machine["quick"] = 0

    def beside(target: str) -> Outcome:
        asked.append(target)
        return Outcome(target, passes, "")

    monkeypatch.setattr(run_tests, "beside", beside)
    assert run_main(monkeypatch, *arguments) == (0 if passes or not built else 1)
    assert asked == ["docs"] * built
    assert ("FAILED  docs" in capsys.readouterr().out) is (bool(built) and not passes)


@pytest.mark.parametrize(("arguments", "judges"), [([], True), (["-k", "it"], True), (["--all"], False)])
def test_a_long_run_repeats_no_test(arguments, judges, machine, monkeypatch):
    for name in ("AIOTE_TEST_LONG", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "")
    asked: list[object] = []
    monkeypatch.setattr(run_tests, "judged", lambda outcomes, _again: asked.append(outcomes) or run_tests.Verdict())
    assert run_main(monkeypatch, *arguments) == 0
    assert bool(asked) is judges


@pytest.mark.parametrize("kind", ["newest", "system"])
def test_a_missing_library_fails(kind, machine, monkeypatch, capsys):
    monkeypatch.setattr(run_tests, f"{kind}_library", lambda: None)
    assert run_main(monkeypatch) == 1
    assert f"FAILED  {kind} " in (said := capsys.readouterr().out)
    assert "NO LIBRARY" in said


def test_a_machine_without_a_guest_says_so_and_passes(machine, monkeypatch, capsys):
    run = run_tests.run

    def fails(command: list[str], log: Path, **environment: str) -> tuple[int, float]:
        ended = run(command, log, **environment)
        return (1, 0.0) if "tools/guest" in command else ended

    monkeypatch.setattr(run_tests, "run", fails)
    assert run_main(monkeypatch) == 0
    said = capsys.readouterr().out
    assert "VERBS AND NETEM NOT RUN" in said
    assert said.splitlines()[-1] == "total: 2 passed, 0 failed, 0 skipped"


def test_an_interrupted_run_begins_nothing_more(machine, tmp_path, monkeypatch):
    """Ctrl-C comes while the first entry runs, which ends only when the waiting ones have been given up."""
    for number in range(100):
        (tmp_path / "tests" / "engine" / f"test_{number}.py").touch()
    begun, dropped, run, drop = itertools.count(1), threading.Event(), run_tests.run, Queue.drop

    def interrupted(command: list[str], log: Path, **environment: str) -> tuple[int, float]:
        if any(one.startswith("--junit-xml=") for one in command):
            if next(begun) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            dropped.wait(30)  # without the drop the lane goes on after it, and begins more
        return run(command, log, **environment)

    def told(queue: Queue, *kinds: str) -> None:
        drop(queue, *kinds)
        dropped.set()

    monkeypatch.setattr(run_tests, "run", interrupted)
    monkeypatch.setattr(Queue, "drop", told)
    with pytest.raises(KeyboardInterrupt):
        run_main(monkeypatch, "--lanes", "1")
    assert next(begun) == 2


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], {"a/test_a.py": ["tests/a/test_a.py"], "b/test_b.py": ["tests/b/test_b.py"]}),
        (["-k", "docs"], {"a/test_a.py": ["tests/a/test_a.py"], "b/test_b.py": ["tests/b/test_b.py"]}),
        (["tests/a"], {"a/test_a.py": ["tests/a/test_a.py"], "b/test_b.py": []}),
        (["tests/b/test_b.py"], {"a/test_a.py": [], "b/test_b.py": ["tests/b/test_b.py"]}),
        (["tests/a/test_a.py::test_x[1]"], {"a/test_a.py": ["tests/a/test_a.py::test_x[1]"], "b/test_b.py": []}),
    ],
)
def test_paths_among_the_arguments_choose_files(given, asked, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()  # a word that is also the name of something outside of the tests
    for name in asked:
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).touch()
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "TESTS", tmp_path / "tests")
    run = Run({}, given)
    assert {name: run.targets(name) for name in asked} == asked


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [([], {"newest"}), (["--all"], set(CHOICES)), (["tests/moe/test_rounds.py"], set(CHOICES))],
    ids=["by default", "all", "named"],
)
def test_services_are_tried_on_every_library_and_nic_where_that_is_asked_for(arguments, kinds, machine, monkeypatch):
    """By default the guest and the system's library have the tests of engines and rails."""
    for name in ("AIOTE_TEST_LONG", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(run_tests, "made", lambda *_: LINT)
    (run_tests.TESTS / "moe").mkdir()
    (run_tests.TESTS / "moe" / "test_rounds.py").touch()
    ran: dict[str, list[str]] = {}
    run = run_tests.run

    def watched(command: list[str], log: Path, **environment: str) -> tuple[int, float]:
        report = next((one for one in command if one.startswith("--junit-xml=")), "=none-")
        ran.setdefault(Path(report.partition("=")[2]).stem.rpartition("-")[0], []).extend(command)
        return run(command, log, **environment)

    monkeypatch.setattr(run_tests, "run", watched)
    run_main(monkeypatch, *arguments)
    assert {kind for kind, said in ran.items() if "tests/moe/test_rounds.py" in said} == kinds
    if "tests/moe/test_rounds.py" not in arguments:
        assert {kind for kind, said in ran.items() if "tests/engine/test_it.py" in said} == set(CHOICES)


def test_every_file_is_in_one_entry_of_each_kind():
    recorded = test_queue.durations(test_queue.DURATIONS)
    files = all_files()
    for kind in CHOICES:
        found = entries(kind, files, recorded)
        assert sorted(name for entry in found for name in entry.files) == files
        assert all(entry.seconds <= ENTRY_S or len(entry.files) == 1 for entry in found)
        assert len({entry.name for entry in found}) == len(found)


def test_the_durations_are_of_files_that_are_there():
    recorded = test_queue.durations(test_queue.DURATIONS)
    assert set(recorded) == set(CHOICES)
    assert {name for files in recorded.values() for name in files} <= set(all_files()), "make test, then make durations"


def test_the_longest_entry_is_taken_first_and_one_that_waits_is_passed_over():
    recorded = {"newest": {"a": 20.0, "b": 109.0}, "guest": {"a": 90.0}}
    waiting = [*entries("newest", ["a", "b"], recorded), *entries("guest", ["a"], recorded)]
    queue = Queue(waiting, unready="guest")
    assert [queue.take().files for _ in range(2)] == [("b",), ("a",)]
    taken: list[object] = []
    lane = threading.Thread(target=lambda: taken.append(queue.take()))
    lane.start()
    queue.ready()
    lane.join(60)
    assert [entry.kind for entry in taken] == ["guest"]
    assert queue.take() is None


def test_so_many_of_a_kind_run_at_a_time_and_others_go_first_meanwhile():
    recorded = {"guest": {"a": 90.0, "b": 80.0}, "newest": {"a": 1.0}}
    queue = Queue([*entries("guest", ["a", "b"], recorded), *entries("newest", ["a"], recorded)], most={"guest": 1})
    first = queue.take()
    assert [first.kind, queue.take().kind] == ["guest", "newest"]
    taken: list[object] = []
    lane = threading.Thread(target=lambda: taken.append(queue.take()))
    lane.start()
    queue.ended(first)
    lane.join(60)
    assert [entry.files for entry in taken] == [("b",)]
    assert queue.take() is None


def test_entries_that_cannot_run_are_dropped():
    waiting = [*entries("newest", ["a"], {}), *entries("guest", ["a"], {})]
    queue = Queue(waiting, unready="guest")
    queue.drop("guest")
    queue.ready()
    assert queue.take().kind == "newest"
    assert queue.take() is None
