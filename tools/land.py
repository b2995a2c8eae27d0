"""Land a branch: clone HEAD as a stranger would, run `.ci/run` there, and move main only if that passes.

main is never red, because nothing else moves it. It moves forward only, to the very commit that passed, and only if it
is still where it was when the run began. The commit that passed last is kept in the repository's git folder, which is
what `--check` reads. The tests' reports come back to this checkout's `build/`, so that `make durations` has them.

A landing that is interrupted (Ctrl-C, SIGTERM, a closed terminal) ends every process that the run has started and
removes its clone. Processes that have left its group or session are found as well, because Linux hands orphans to this
process (PR_SET_CHILD_SUBREAPER in prctl(2)).

git is asked in a folder and nowhere else. A hook or an alias may hand on variables that name a repository (GIT_DIR):
with them, the checkout of the clone would move main before a single test ran.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

MAIN = "main"
RECORD = "landed.json"
LOCK = "landing.lock"
REPORTS = "build/test-reports"  # what `make durations` reads
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 2.0
POLL_S = 0.2
MOST_SUBJECTS = 20
MOST_LINES = 40
# What `make` and an activated environment hand on: a stranger who types `bash .ci/run` has none of it.
NOT_A_STRANGERS = (
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "MAKEOVERRIDES",
    "ARGS",
    "VENV",
    "PYTHON",
    "VIRTUAL_ENV",
    "PYTHONPATH",
)


# Variables by which git works on another repository than the one of its folder: `git rev-parse --local-env-vars`.
NAME_A_REPOSITORY = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


class RefusedError(Exception):
    """The landing cannot begin, or its result cannot be kept; the text says why and what to do."""


class InterruptedLandingError(BaseException):
    """A signal ended the landing."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Repository:
    """A checkout, and the git folder that all checkouts of its repository share."""

    checkout: Path

    def git(self, *arguments: str) -> str:
        """Return what git prints. Raises RefusedError with what git says."""
        done = self._run(*arguments)
        if done.returncode:
            raise RefusedError(f"git {' '.join(arguments)}: {done.stderr.strip() or f'status {done.returncode}'}")
        return done.stdout.rstrip("\n")

    def asks(self, *arguments: str) -> bool:
        """Return git's answer to a question that it answers by its status."""
        return not self._run(*arguments).returncode

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in NAME_A_REPOSITORY}
        return subprocess.run(["git", *arguments], cwd=self.checkout, env=env, capture_output=True, text=True)

    @property
    def folder(self) -> Path:
        return Path(self.git("rev-parse", "--path-format=absolute", "--git-common-dir"))

    def commit(self, name: str) -> str:
        return self.git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")

    def passed(self) -> dict[str, str] | None:
        """Return the record of the commit that passed last; None where there is none that can be read."""
        try:
            record = json.loads((self.folder / RECORD).read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and isinstance(record.get("commit"), str) else None

    def keep(self, commit: str, seconds: float) -> None:
        """Record that a commit has passed."""
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        new = self.folder / f"{RECORD}.new"
        new.write_text(json.dumps({"commit": commit, "when": when, "seconds": f"{seconds:.0f}"}) + "\n")
        new.replace(self.folder / RECORD)


@dataclass(frozen=True)
class Landing:
    """What is to land: the commit, and where main was when that was decided."""

    head: str
    main: str


def short(commit: str) -> str:
    return commit[:12]


def lasted(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def main_is_checked_out(repository: Repository) -> str:
    """Return the other checkout that has main, or "": after a move, its files would look changed."""
    here = ""
    for line in repository.git("worktree", "list", "--porcelain").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "worktree":
            here = rest
        elif kind == "branch" and rest == f"refs/heads/{MAIN}":
            return here
    return ""


def prepare(repository: Repository) -> Landing:
    """Decide what would land. Raises RefusedError where nothing can."""
    if not repository.asks("symbolic-ref", "--quiet", "HEAD"):
        raise RefusedError("HEAD is detached, and only a branch can land: git switch --create NAME")
    branch = repository.git("symbolic-ref", "--short", "HEAD")
    if branch == MAIN:
        raise RefusedError(
            f"you are on {MAIN}, which only a landing may move: put your commits on a branch and land that: "
            f"git switch --create NAME"
        )
    if dirty := repository.git("status", "--porcelain"):
        raise RefusedError(f"uncommitted changes would not be tested: commit, stash or remove them:\n{dirty}")
    if elsewhere := main_is_checked_out(repository):
        raise RefusedError(f"{MAIN} is checked out in {elsewhere}: switch that checkout to another branch")
    landing = Landing(repository.commit("HEAD"), repository.commit(MAIN))
    if landing.head == landing.main:
        raise RefusedError(f"nothing to land: {branch} is {MAIN}, {short(landing.main)}")
    if not repository.asks("merge-base", "--is-ancestor", landing.main, landing.head):
        raise RefusedError(f"{MAIN} has commits that {branch} lacks: git rebase {MAIN}, then land again")
    return landing


def announce(repository: Repository, landing: Landing) -> None:
    """Say what would go."""
    between = f"{landing.main}..{landing.head}"
    subjects = repository.git("log", "--format=  %h %s", between).splitlines()
    print(f"landing {len(subjects)} commit{'s' * (len(subjects) != 1)}, {short(landing.main)}..{short(landing.head)}:")
    print(*subjects[:MOST_SUBJECTS], sep="\n")
    if len(subjects) > MOST_SUBJECTS:
        print(f"  and {len(subjects) - MOST_SUBJECTS} more")
    print(f" {repository.git('diff', '--shortstat', between)}", flush=True)


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment of a stranger: without this checkout, its `.venv`, and what `make` hands on."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_A_STRANGERS and not name.startswith(("GIT_", "AIOTE_", "PYTEST_"))
    }
    path = (folder for folder in kept.get("PATH", os.defpath).split(os.pathsep) if folder)
    kept["PATH"] = os.pathsep.join(folder for folder in path if not Path(folder).absolute().is_relative_to(checkout))
    return {**kept, "CI": "true"}


def children(parent: int) -> list[int]:
    """Return the processes whose parent is this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid: a name may have blanks and parentheses.
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def end_all() -> None:
    """End every descendant, politely at first; orphans become our children, so that one generation follows another."""
    polite_until = time.monotonic() + GRACE_S
    while left := children(os.getpid()):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM if time.monotonic() < polite_until else signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Yield a new folder; afterwards leave neither it nor a descendant behind.

    The signals that end a program raise InterruptedLandingError meanwhile, but for SIGHUP under nohup. The clean-up
    ignores them: it takes seconds, in which people press Ctrl-C again.
    """

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        ignore()
        raise InterruptedLandingError(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    folder = None
    try:
        for number in before:
            signal.signal(number, interrupt)
        folder = Path(tempfile.mkdtemp(prefix="landing-"))
        yield folder
    finally:
        ignore()
        end_all()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def passes(repository: Repository, landing: Landing) -> tuple[bool, list[str]]:
    """Run `.ci/run` on a fresh clone; return whether it passed, and what it said that its reader needs."""
    with workplace() as folder:
        clone = folder / "clone"
        repository.git("clone", "--quiet", "--no-checkout", str(repository.checkout), str(clone))
        Repository(clone).git("checkout", "--quiet", "-B", MAIN, landing.head)
        passed, told = watched(clone, environment(repository.checkout))
        if passed and (clone / REPORTS).is_dir():
            with contextlib.suppress(OSError):  # without them the commit has passed all the same
                shutil.rmtree(repository.checkout / REPORTS, ignore_errors=True)
                shutil.copytree(clone / REPORTS, repository.checkout / REPORTS)
        return passed, told


def watched(clone: Path, surroundings: dict[str, str]) -> tuple[bool, list[str]]:
    """Run `.ci/run` and print what it says; return whether it passed, and what names a failure or came last."""
    path = clone.with_name("said")
    # A file, because a pipe ends only when the last process that the run has left behind closes it.
    with path.open("wb") as said, path.open(errors="replace") as heard:
        run = subprocess.Popen(
            ["bash", ".ci/run"], cwd=clone, env=surroundings, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        status = None
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = run.wait(POLL_S)
            shutil.copyfileobj(heard, sys.stdout)
            sys.stdout.flush()
    lines = path.read_text(errors="replace").splitlines()
    # Tests by their names; a step that is no test, as lint, by its line in the summary.
    failed = list(dict.fromkeys(line for line in lines if line.lstrip(" ").startswith("FAILED ")))
    return status == 0, failed or lines[-MOST_LINES:]


def move(repository: Repository, landing: Landing) -> None:
    """Move main to the commit that has passed. Raises RefusedError if main is no longer where it was."""
    try:
        repository.git("update-ref", "-m", "land", f"refs/heads/{MAIN}", landing.head, landing.main)
    except RefusedError as error:
        raise RefusedError(
            f"{MAIN} moved during the tests, so nothing landed: git rebase {MAIN}, then land again ({error})"
        ) from None


def land(repository: Repository) -> int:
    """Test HEAD and move main to it; return the exit status."""
    with (repository.folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError("another landing is under way in this repository: wait for it") from None
        landing = prepare(repository)
        announce(repository, landing)
        started = time.monotonic()
        passed, told = passes(repository, landing)
        seconds = time.monotonic() - started
        if not passed:
            print(f"\nNOT LANDED: .ci/run failed on {short(landing.head)} after {lasted(seconds)}.", *told, sep="\n")
            print(f"{MAIN} stays at {short(landing.main)}")
            return 1
        repository.keep(landing.head, seconds)
        move(repository, landing)
    print(f"\nlanded: {MAIN} is {short(landing.head)}, which passed in {lasted(seconds)}")
    return 0


def check(repository: Repository) -> int:
    """Say whether main is the commit that passed last: status 0 if so, 1 if not, 3 without a record."""
    main, record = repository.commit(MAIN), repository.passed()
    if record is None:
        print(f"unknown: {MAIN} is {short(main)}, and this repository has no record of a landing")
        return 3
    passed = f"{short(record['commit'])}, {record.get('when', 'at an unknown time')}"
    if record["commit"] == main:
        print(f"yes: {MAIN} is the commit that passed last ({passed})")
        return 0
    print(f"NO: {MAIN} is {short(main)}, and the commit that passed last is another ({passed})")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="make land", description="Land this branch on main if it passes .ci/run.")
    parser.add_argument("--check", action="store_true", help="say whether main is the commit that passed last")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    repository = Repository(Path.cwd())
    try:
        return check(repository) if arguments.check else land(repository)
    except RefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    except InterruptedLandingError as error:
        print(f"\ninterrupted: {MAIN} stays as it was", file=sys.stderr)
        return 128 + error.number


if __name__ == "__main__":
    sys.exit(main())
