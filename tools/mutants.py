"""Take out one mechanism after the other, and see the tests of its promise fail.

    python tools/mutants.py [--only PART-OF-A-NAME] [--list]

The table is tests/mutants/mechanisms.toml. Each mechanism is taken out of a private copy of the sources, in
build/mutants, which is built and put before the installed package for the tests that must fail then; a crash and a hang
count as failures. Without any change the same tests must pass. Exit status: 0, or 1 where a mechanism is not missed,
where a test fails without a change, or where the table no longer fits the sources.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from run_tests import CHOICES, NEEDS_GUEST, system_library, wheel_library

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants" / "mechanisms.toml"
WORK = ROOT / "build" / "mutants"
# What is compiled, and what meson asks for the version: without a checkout's tags, that is the changelog's.
COPIED = ("aiote", "aiote_native", "bench", "meson.build", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
COPIED += ("tests/reference", "tools/version.py")
# An editable install finds its packages before any path does, in whatever process: not so where the copy is meant.
FORGET_EDITABLE = """\
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "_aiote_editable_loader"]
"""
GUEST = ("tools/guest", "--how", "uml", "--nics", "4", "--")
TEST_S = 60
RUN_S = 600
FAILED = 1  # pytest's status when tests ran and failed; others say that they could not be run


@dataclass(frozen=True)
class Mechanism:
    """What is taken out: `old`, once in `file`, becomes `new`; `tests` are pytest's arguments.

    With a `switch`, only that strictness of the stand-in for EFA finds it: without it the tests pass.
    """

    name: str
    promise: str
    file: str
    old: str
    new: str
    tests: list[str]
    library: str = "new"
    switch: str = ""

    def taken_out(self, text: str) -> str:
        """Return the text of its file without it. Raises ValueError where the table is stale."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times, expected once")
        return text.replace(self.old, self.new)


def mechanisms() -> list[Mechanism]:
    """Read the table."""
    return [Mechanism(**entry) for entry in tomllib.loads(TABLE.read_text())["mechanism"]]


def environment(library: str) -> dict[str, str]:
    """Return the environment in which the private copy is the one that is imported."""
    path = system_library() if library == "old" else wheel_library()
    if path is None:
        raise SystemExit(f"this machine has no {library} libfabric; make test says how to install it")
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(WORK / "site"),
        "AIOTE_LIBFABRIC": str(path),
    }


def copy_sources() -> None:
    """Bring the private copy up to date; what did not change keeps its time, so that it is not built again."""
    for name in COPIED:
        source, target = ROOT / name, WORK / "source" / name
        for file in [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file()):
            copy = target / file.relative_to(source) if source.is_dir() else target
            if not copy.exists() or copy.read_bytes() != file.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def build() -> None:
    """Build the private copy and put it where `environment` looks."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-build-isolation", "--no-deps", "--upgrade", "--target", str(WORK / "site")]
    command += [f"-Cbuild-dir={WORK / 'build'}", str(WORK / "source")]
    subprocess.run(command, env=environment("new"), check=True, timeout=RUN_S)
    (WORK / "site" / "sitecustomize.py").write_text(FORGET_EDITABLE)
    check = "import aiote, sys; sys.exit(0 if aiote.__file__.startswith(sys.argv[1]) else 'another aiote is imported')"
    subprocess.run([sys.executable, "-P", "-c", check, str(WORK)], env=environment("new"), check=True, timeout=RUN_S)


def run(tests: list[str], library: str, lenient: str = "") -> tuple[int | None, str]:
    """Run tests until one fails; return pytest's status, None for a hang, and what it said. `lenient`: the strictness
    that the stand-in for EFA does without.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"--timeout={TEST_S}",
        f"--override-ini=pythonpath={WORK / 'source' / 'tests'} tests",  # the references of the copy come first
        *tests,
    ]
    # What `make test` leaves out must not be what notices.
    command += CHOICES["guest" if library == "verbs" else "newest"]
    if library == "verbs":
        paths = f"PYTHONPATH={WORK / 'site'}"
        command = [sys.executable, *GUEST, "env", paths, *command, "-m", NEEDS_GUEST]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(library) | {"EFA_STANDIN_LENIENT": lenient},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
    except subprocess.TimeoutExpired:
        return None, "hangs"
    return done.returncode, done.stdout


def first_failure(said: str) -> str:
    """Return the test that failed, from what pytest said."""
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].partition(" ")[2].partition(" - ")[0] if lines else "a crash"


def missed(mechanism: Mechanism) -> str | None:
    """Take a mechanism out, run its tests, put it back; return what noticed, None where nothing did."""
    file = WORK / "source" / mechanism.file
    before = file.read_text()
    file.write_text(mechanism.taken_out(before))
    try:
        build()
        status, said = run(mechanism.tests, mechanism.library)
        if status != 0 and mechanism.switch and run(mechanism.tests, mechanism.library, mechanism.switch)[0] != 0:
            print(f"{mechanism.name}: its tests fail without the strictness {mechanism.switch!r}, too", flush=True)
            return None
    finally:
        file.write_text(before)
    if status is None or status < 0:
        return "a hang" if status is None else f"signal {-status}"
    if status not in (0, FAILED):
        raise SystemExit(f"{mechanism.name}: its tests could not run (status {status}):\n{said[-2000:]}")
    return first_failure(said) if status == FAILED else None


def control(chosen: list[Mechanism]) -> bool:
    """Run all tests of the chosen mechanisms with nothing taken out; tell whether they pass."""
    build()
    for library in sorted({mechanism.library for mechanism in chosen}):
        tests = sorted({test for mechanism in chosen if mechanism.library == library for test in mechanism.tests})
        status, said = run(tests, library)
        if status != 0:
            print(said[-4000:])
            print(f"the tests fail even without a mutation (library: {library}): mend them first", flush=True)
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mechanisms whose names contain this")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    arguments = parser.parse_args()
    chosen = [mechanism for mechanism in mechanisms() if arguments.only in mechanism.name]
    if not chosen:
        parser.error(f"no mechanism's name contains {arguments.only!r}; --list names them")
    if arguments.list:
        print(*(f"{mechanism.promise:18} {mechanism.name}" for mechanism in chosen), sep="\n")
        return 0
    copy_sources()
    if not control(chosen):
        return 1
    survivors = 0
    for mechanism in chosen:
        started = time.monotonic()
        noticed = missed(mechanism)
        survivors += noticed is None
        took = time.monotonic() - started
        print(f"{mechanism.promise:18} {mechanism.name:62} {took:4.0f} s  {noticed or 'NOT MISSED'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mechanisms were missed by a test")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
