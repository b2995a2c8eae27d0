"""`make land` moves main to a commit that has passed `.ci/run` in a clean clone, and in no other case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LAND = Path(__file__).parents[2] / "tools" / "land.py"
GREEN = "echo all is well\n"
PATIENCE_S = 60.0


class Toy:
    """A repository with a `.ci/run`, on a branch that is one commit ahead of main."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder.with_name("temporary")
        self.temporary.mkdir()
        self.git("init", "--quiet", "--initial-branch=main", str(folder))
        self.commit(GREEN)
        self.git("switch", "--quiet", "--create", "work")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@invalid"]
        where = [] if arguments[0] == "init" else ["-C", str(self.folder)]
        return subprocess.run(
            ["git", *identity, *where, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, run: str) -> str:
        """Commit what `.ci/run` is to do."""
        (self.folder / ".ci").mkdir(exist_ok=True)
        (self.folder / ".ci" / "run").write_text(run)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "ci: do something else")
        return self.git("rev-parse", "HEAD")

    @property
    def main(self) -> str:
        return self.git("rev-parse", "main")

    def start(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(LAND), *arguments],
            cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.temporary), **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def land(self, *arguments: str, **settings: str) -> tuple[int, str]:
        """Land, and return the status and what was said; nothing is left behind, whatever happened."""
        landing = self.start(*arguments, **settings)
        said, _ = landing.communicate(timeout=PATIENCE_S)
        assert not list(self.temporary.iterdir())
        return landing.returncode, said


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path / "toy")


def test_what_passes_lands(toy):
    head = toy.commit('test -z "$(cat)" && test "$CI" = true && test -d .git && echo "1 passed"\n')
    status, said = toy.land()
    assert status == 0, said
    assert toy.main == head
    assert "landing 1 commit, " in said
    assert "ci: do something else" in said
    assert "1 file changed" in said
    assert "1 passed" in said
    assert "passed in 0 min" in said
    status, said = toy.land("--check")
    assert (status, "yes:" in said) == (0, True), said


def test_the_reports_of_what_landed_come_back(toy):
    toy.commit("mkdir -p build/test-reports; echo new > build/test-reports/one.xml\n")
    reports = toy.folder / "build" / "test-reports"
    (toy.folder / ".git" / "info" / "exclude").write_text("build/\n")
    reports.mkdir(parents=True)
    (reports / "old.xml").touch()
    assert toy.land()[0] == 0
    assert [report.name for report in reports.iterdir()] == ["one.xml"]


def test_what_fails_stays_where_it_was(toy):
    before = toy.main
    toy.commit("echo FAILED tests/test_it.py::test_one; echo much more; exit 2\n")
    status, said = toy.land()
    assert status == 1
    assert toy.main == before
    assert said.index("NOT LANDED") < said.rindex("FAILED tests/test_it.py::test_one")
    assert toy.land("--check")[0] == 3  # a red run leaves no record


def test_a_step_that_is_no_test_is_named_beside_the_tests_that_failed(toy):
    toy.commit("echo '  FAILED  lint  5 s'; seq 100; echo FAILED tests/test_it.py::test_one; exit 2\n")
    said = toy.land()[1].partition("NOT LANDED")[2]
    assert "FAILED  lint  5 s\nFAILED tests/test_it.py::test_one\nmain stays" in said


def test_a_run_that_names_no_test_shows_what_it_said_last(toy):
    toy.commit("for line in $(seq 100); do echo line $line; done; exit 1\n")
    said = toy.land()[1].partition("NOT LANDED")[2]
    assert "line 100" in said
    assert "line 50\n" not in said


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda toy: (toy.folder / "new").write_text(""), "?? new"),
        (lambda toy: (toy.folder / ".ci" / "run").write_text("exit 0\n"), "M .ci/run"),
        (lambda toy: toy.git("switch", "--quiet", "main"), "git switch --create"),
        (lambda toy: toy.git("switch", "--quiet", "--detach"), "git switch --create"),
        (lambda toy: toy.git("branch", "--quiet", "--force", "main", "work"), "nothing to land"),
        (lambda toy: toy.git("worktree", "add", "--quiet", "../elsewhere", "main"), "elsewhere"),
    ],
    ids=["untracked", "changed", "on main", "detached", "nothing new", "checked out elsewhere"],
)
def test_what_cannot_land_is_refused_with_what_to_do(toy, spoil: Callable[[Toy], object], reason):
    toy.commit("touch ran; false\n")
    spoil(toy)
    before = toy.main
    status, said = toy.land()
    assert status == 1
    assert said.startswith("refused: ")
    assert reason in said
    assert toy.main == before


def test_a_main_that_has_other_commits_is_refused_at_once(toy):
    toy.commit(GREEN)
    toy.git("branch", "--quiet", "--force", "main", toy.git("commit-tree", "-m", "another", "HEAD^{tree}"))
    status, said = toy.land()
    assert (status, "git rebase main" in said) == (1, True), said


def test_a_main_that_moves_meanwhile_stays_where_it_went(toy):
    other = toy.git("commit-tree", "-p", "main", "-m", "another", "HEAD^{tree}")
    toy.commit(f"git -C {toy.folder} update-ref refs/heads/main {other}\n")
    status, said = toy.land()
    assert (status, "moved during the tests" in said) == (1, True), said
    assert toy.main == other


def test_a_commit_that_is_made_meanwhile_does_not_land(toy):
    head = toy.commit(f"git -C {toy.folder} -c user.name=n -c user.email=n@n commit --allow-empty -qm later\n")
    assert toy.land()[0] == 0
    assert toy.main == head != toy.git("rev-parse", "HEAD")


def test_the_run_sees_nothing_of_the_checkout(toy):
    """Not its environment, not what make hands on, not files that are ignored."""
    (toy.folder / ".venv" / "bin").mkdir(parents=True)
    (toy.folder / ".gitignore").write_text("/.venv/\n")
    venv = toy.folder / ".venv"
    seen = f'case "$PATH" in *{venv}*) exit 1;; esac; test -z "$ARGS$VENV$VIRTUAL_ENV$MAKEFLAGS"'
    toy.commit(f"env; ls -a; {seen}\n")
    settings = {"ARGS": "-k x", "VENV": ".venv", "VIRTUAL_ENV": str(venv), "MAKEFLAGS": "w"}
    status, said = toy.land(**settings, PATH=f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert status == 0, said
    assert ".venv\n" not in said.partition("all is well")[0].replace("/.venv/\n", "")


def test_variables_that_name_a_repository_do_not_move_main(toy):
    """As an alias or a hook of git hands them on: the clone's checkout is not ours."""
    before = toy.main
    toy.commit("exit 1\n")
    names = {
        "GIT_DIR": toy.folder / ".git",
        "GIT_WORK_TREE": toy.folder,
        "GIT_INDEX_FILE": toy.folder / ".git" / "index",
    }
    status, said = toy.land(**{name: str(path) for name, path in names.items()})
    assert (status, "NOT LANDED" in said) == (1, True), said
    assert toy.main == before


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Let children end by SIGHUP, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def alive(mark: Path) -> list[int]:
    """Return the processes that wrote their numbers into a file and still run."""
    return [number for number in map(int, mark.read_text().split()) if Path(f"/proc/{number}").exists()]


@pytest.mark.usefixtures("without_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_landing_leaves_nothing_behind(toy, tmp_path, number):
    """Neither the clone nor a process, be it one that ignores what is polite or has a session of its own."""
    before, mark = toy.main, tmp_path / "mark"
    hidden = toy.folder / ".ci" / "hidden"
    hidden.parent.mkdir(exist_ok=True)
    hidden.write_text(f"trap '' TERM INT HUP\necho $$ >>{mark}\nwhile :; do sleep 1; done\n")
    toy.commit(f"setsid bash .ci/hidden &\necho $$ >>{mark}\nsleep 600\n")
    landing = toy.start()
    until = time.monotonic() + PATIENCE_S
    while not (mark.exists() and len(mark.read_text().split()) == 2):
        assert time.monotonic() < until
        time.sleep(0.01)
    landing.send_signal(number)
    said, _ = landing.communicate(timeout=PATIENCE_S)
    assert landing.returncode == 128 + number, said
    assert "interrupted" in said
    assert not alive(mark)
    assert not list(toy.temporary.iterdir())
    assert toy.main == before
    assert toy.land("--check")[0] == 3
    toy.commit(GREEN)
    assert toy.land()[0] == 0  # no lock is left, either


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_presses_ctrl_c_again_and_again_finds_nothing_left_behind(toy, tmp_path):
    """The clone is as large as one with an environment in it, and takes a while to go."""
    began = tmp_path / "began"
    toy.commit(f"mkdir large && (cd large && seq 2000 | xargs touch) && touch {began} && sleep 600\n")
    landing = toy.start()
    wait_for(began)
    while landing.poll() is None:
        landing.send_signal(signal.SIGINT)
        time.sleep(0.01)
    landing.communicate(timeout=PATIENCE_S)
    assert not list(toy.temporary.iterdir())


def test_a_terminal_that_closes_does_not_end_what_nohup_started(toy, tmp_path):
    began, go_on = tmp_path / "began", tmp_path / "go_on"
    toy.commit(f"touch {began}; while ! test -e {go_on}; do sleep 0.05; done\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does, and children inherit
    try:
        landing = toy.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for(began)
    landing.send_signal(signal.SIGHUP)
    go_on.touch()
    said, _ = landing.communicate(timeout=PATIENCE_S)
    assert landing.returncode == 0, said


def test_what_a_run_leaves_behind_is_ended_and_not_waited_for(toy, tmp_path):
    mark = tmp_path / "mark"
    toy.commit(f"sleep 600 & echo $! >{mark}\n")
    assert toy.land()[0] == 0
    assert not alive(mark)


def test_two_landings_at_a_time_are_one_too_many(toy, tmp_path):
    began, go_on = tmp_path / "began", tmp_path / "go_on"
    toy.commit(f"touch {began}; while ! test -e {go_on}; do sleep 0.05; done\n")
    first = toy.start()
    wait_for(began)
    second = toy.start()
    said, _ = second.communicate(timeout=PATIENCE_S)
    go_on.touch()
    assert (second.returncode, "another landing" in said) == (1, True), said
    first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 0


@pytest.mark.parametrize("record", ["", "[]", '{"commit": 3}', '{"com'])
def test_a_record_that_cannot_be_read_is_none(toy, record):
    (toy.folder / ".git" / "landed.json").write_text(record)
    status, said = toy.land("--check")
    assert (status, said.startswith("unknown: ")) == (3, True), said


def test_a_main_that_was_moved_by_hand_is_told(toy):
    toy.commit(GREEN)
    assert toy.land()[0] == 0
    passed = json.loads((toy.folder / ".git" / "landed.json").read_text())["commit"]
    toy.git("branch", "--quiet", "--force", "main", toy.commit("exit 1\n"))
    status, said = toy.land("--check")
    assert (status, said.startswith("NO: ")) == (1, True), said
    assert passed[:12] in said
