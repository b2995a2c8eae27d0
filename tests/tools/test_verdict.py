"""Which failed tests run again, and what becomes of them: a wait that ran out may be the machine's, nothing else is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import aiote
from support.plugins.failure_reports import ran_out

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import run_tests
from run_tests import Kind, Outcome, Run, concluded
from test_again import MOST_UNSTEADY, judged
from test_reports import Failure, Report, Verdict

PLUGINS = "pytest_plugins = ['support.plugins.combinations', 'support.plugins.failure_reports']"
LINT = Outcome("lint", True, "")
SILENT = aiote.PeerLostError("192.0.2.1:5", "it has been silent for 3 s")
DEAD = aiote.PeerLostError("192.0.2.1:5", "it has closed the connection")


@pytest.mark.parametrize(
    ("error", "excused"),
    [
        (TimeoutError("nobody came"), True),
        (subprocess.TimeoutExpired("sleep", 3), True),
        (aiote.ConnectTimeoutError("192.0.2.1:5", "no connection within 60 s"), True),
        (SILENT, True),
        (aiote.TransferError(None, SILENT, message="not done"), True),
        (BaseExceptionGroup("two", [TimeoutError(), SILENT]), True),
        (pytest.fail.Exception("Timeout (>180.0s) from pytest-timeout."), True),
        (pytest.fail.Exception("left behind by the test: thread 3"), False),
        (pytest.fail.Exception("the event loop was blocked:\n  by a Timeout (>"), False),
        (AssertionError("a count is wrong"), False),
        (DEAD, False),
        (aiote.TransferError(None, DEAD, message="not done"), False),
        (BaseExceptionGroup("two", [TimeoutError(), AssertionError("a late byte")]), False),
        (BaseExceptionGroup("one", [BaseExceptionGroup("two", [TimeoutError(), DEAD])]), False),
        (None, False),
    ],
    ids=repr,
)
def test_a_wait_that_ran_out_is_told_from_all_else(error, excused):
    assert ran_out(error) is excused


def failure(name: str, excused: bool = True) -> Failure:
    return {"nodeid": f"tests/test_it.py::{name}", "assertion": name, "ran_out": "yes" if excused else ""}


def step(failures: list[Failure], *, whole: bool = True) -> Outcome:
    report = Report((3, len(failures), 0), failures=list(failures))
    return Outcome("newest 1", False, "", report=report, only_tests_failed=whole)


class Repeats:
    """What the repeats of tests say, one after the other; nothing more may be asked."""

    def __init__(self, said: Iterable[list[Failure] | None] = ()) -> None:
        self._said: Iterator[list[Failure] | None] = iter(said)
        self.asked: list[str] = []

    def __call__(self, _outcome: Outcome, failure: Failure) -> list[Failure] | None:
        self.asked.append(failure["assertion"])
        return next(self._said)


def test_what_passes_twice_alone_is_unsteady(capsys):
    repeats, outcome = Repeats([[], []]), step([failure("a wait")])
    verdict = judged([LINT, outcome], repeats)
    assert [one["assertion"] for one in verdict.unsteady] == repeats.asked[:1] == ["a wait"]
    assert len(repeats.asked) == 2
    assert concluded([LINT, outcome], verdict=verdict) == 0
    said = capsys.readouterr().out
    assert "UNSTEADY, passed twice when it ran alone: tests/test_it.py::a wait" in said
    assert said.splitlines()[-1] == "total: 3 passed, 0 failed, 1 unsteady, 0 skipped"


@pytest.mark.parametrize("said", [[[failure("then")]], [[], [failure("then")]], [None], [[], None]])
def test_what_does_not_pass_twice_has_failed(said, capsys):
    repeats, outcome = Repeats(said), step([failure("a wait")])
    verdict = judged([outcome], repeats)
    assert len(repeats.asked) == len(said)
    assert not verdict.unsteady
    assert concluded([outcome], verdict=verdict) == 1
    printed = capsys.readouterr().out
    assert "it failed again" in printed
    assert ("it ended without a report" in printed) is (said[-1] is None)


@pytest.mark.parametrize(
    "outcome",
    [
        step([failure("wrong", excused=False)]),
        step([failure("both"), failure("both", excused=False)]),  # a wait in the test, and a leak after it
        Outcome("newest 1", False, "NO REPORT"),
    ],
    ids=["a broken promise", "a wait and a leak", "a crash"],
)
def test_all_else_fails_at_once(outcome):
    verdict = judged([outcome], Repeats())
    assert concluded([outcome], verdict=verdict) == 1


@pytest.mark.parametrize(
    "other", [step([failure("a wait"), failure("wrong", excused=False)]), step([failure("a wait")], whole=False)]
)
def test_an_unsteady_test_excuses_nothing_beside_it(other):
    verdict = judged([other], Repeats([[], []]))
    assert len(verdict.unsteady) == 1
    assert concluded([other], verdict=verdict) == 1


@pytest.mark.parametrize("count", [MOST_UNSTEADY, MOST_UNSTEADY + 1])
def test_many_waits_that_ran_out_are_no_luck(count, capsys):
    repeats, outcome = Repeats([[]] * 2 * MOST_UNSTEADY), step([failure(str(number)) for number in range(count)])
    verdict = judged([outcome], repeats)
    many = count > MOST_UNSTEADY
    assert len(repeats.asked) == (0 if many else 2 * count)
    assert concluded([outcome], verdict=verdict) == int(many)
    assert ("more than 5" in capsys.readouterr().out) is many


SOURCE = """
import os
from pathlib import Path
import pytest

HERE = Path(__file__).parent

@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize("seed", [7, 8])
def test_late(number, seed, request):
    with open(HERE / "log", "a") as log:
        print(os.getpid(), number, seed, len(request.session.items), os.environ.get("AIOTE_LIBFABRIC"), file=log)
    if (number, seed) == (4, 7) and len((HERE / "log").read_text().splitlines()) <= 4:
        raise TimeoutError("nobody came")

def test_always_late():
    raise TimeoutError("nobody comes")

def test_wrong():
    assert 3 == 4, "a count is wrong"

@pytest.fixture
def leaves_something():
    yield
    pytest.fail("left behind by the test: thread 3")

def test_late_and_leaking(leaves_something):
    raise TimeoutError("nobody came")

@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.skip(reason="no GPU")
def test_not_here(n):
    pass
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Run]:
    """Make a folder for tests, with the plugin that says what has failed, and a run over it."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(PLUGINS)
    for name, value in {"ROOT": tmp_path, "TESTS": tmp_path / "tests", "REPORTS": tmp_path / "reports"}.items():
        monkeypatch.setattr(run_tests, name, value)
    monkeypatch.setattr(run_tests, "linted", lambda: LINT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    arguments = ("-p", "no:cacheprovider", "--combinations", "all", "--turn", "0")
    return tmp_path / "tests", Run({"newest": Kind(Path("/a/libfabric.so.1"), arguments)})


def test_real_tests_run_again_alone_as_they_ran_before(ran, capsys):
    """In a process of their own, with the same library and combination of parameters, and with no other test."""
    folder, run = ran
    (folder / "test_it.py").write_text(SOURCE)
    outcomes = run.outcomes(["test_it.py"], 1)
    verdict = judged(outcomes, run.again)
    assert concluded(outcomes, verdict=verdict) == 1
    assert [one["nodeid"] for one in verdict.unsteady] == ["tests/test_it.py::test_late[7-4]"]
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    assert [line[1:] for line in lines[4:]] == [["4", "7", "1", "/a/libfabric.so.1"]] * 2
    assert len({line[0] for line in lines}) == 3
    said = capsys.readouterr().out
    end = said[said.index("== FAILED") :]
    assert "UNSTEADY, passed twice when it ran alone: tests/test_it.py::test_late[7-4]" in end
    for name in ("test_always_late", "test_wrong", "test_late_and_leaking"):
        assert f"FAILED tests/test_it.py::{name}" in end
    assert end.count("it failed again") == 1
    assert "seed:  7" in end
    assert "2 x  no GPU" in end
    assert end.splitlines()[-1].startswith("total: 3 passed, 4 failed, 1 unsteady, 2 skipped")


def test_a_real_crash_fails_at_once(ran, capsys):
    folder, run = ran
    (folder / "test_it.py").write_text(
        "import os\ndef test_late(): raise TimeoutError\ndef test_crash(): os._exit(3)\n"
    )
    outcomes = run.outcomes(["test_it.py"], 1)
    assert judged(outcomes, Repeats()) == Verdict()
    assert concluded(outcomes) == 1
    assert "NO REPORT, ended with status 3" in capsys.readouterr().out


def test_a_test_of_the_guest_runs_again_in_the_guest(ran, monkeypatch):
    """With what makes it patient there; nothing of the first run's choice but its turn."""
    commands: list[list[str]] = []

    def run(command: list[str], _log: Path, **_environment: str) -> tuple[int, float]:
        commands.append(command)
        next(Path(one.partition("=")[2]) for one in command if one.startswith("--junit-xml=")).write_text(
            '<testsuite tests="1"/>'
        )
        return 0, 0.0

    folder, _ = ran
    (folder.parent / "reports").mkdir()
    monkeypatch.setattr(run_tests, "run", run)
    kind = Kind(None, ("--combinations", "tests", "--turn", "2", "-m", run_tests.NEEDS_GUEST), guest=True)
    found = Run({"guest": kind}).again(Outcome("guest 3", False, ""), failure("test_late[verbs]"))
    assert found == []
    (command,) = commands
    in_guest = [*run_tests.guest("--nics", "4"), "--", "env", *run_tests.GUEST_LIMITS, sys.executable]
    assert command[: len(in_guest)] == in_guest
    assert command[-3:] == ["--turn", "2", "tests/test_it.py::test_late[verbs]"]
