"""Run the checks, all of them even if one fails: lint, every test, and the libfabric tests once more.

With the newest libfabric here all tests run, in two halves; what needs RDMA devices runs in a guest that has them in
software (tools/guest); what meets the library runs once more with the system's, the oldest that must work. All four run
at a time, because much of a test is waiting; what the others say comes after what the first half says.
A test that is for every event loop is on one of them, with another library on another; `ARGS="--loops all"` runs it on
all.
A missing library is a failure. Arguments are handed to pytest; a run may be left without a test by them, but not all
runs. The last line counts the tests of all runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NEEDS_GUEST = "needs_rdma or needs_netem"
# Connecting over `verbs;ofi_rxm` alone can hold up a process there for seconds.
GUEST_HEARTBEAT_LIMIT_S = 15
LANES = 4  # one for each run, so that none waits for another
# The folders of the first half, which takes about as long as all others together.
FIRST_HALF = {"bench", "control", "core", "demo", "docs", "engine", "guest"}
NOTHING_CHOSEN = 5  # pytest's status where the arguments leave it no test
SYSTEM = ["/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"]


@dataclass
class Outcome:
    """What became of one step."""

    name: str
    passed: bool
    detail: str
    seconds: float = 0.0
    counts: tuple[int, int, int] = (0, 0, 0)  # tests passed, failed, skipped


def version(library: Path) -> tuple[int, int]:
    """Return the interface version that a libfabric speaks."""
    number = int(ctypes.CDLL(str(library)).fi_version())
    return number >> 16, number & 0xFFFF


def system_library() -> Path | None:
    folders = (folder for pattern in SYSTEM for folder in sorted(Path("/").glob(pattern[1:])))
    return next((path for folder in folders if (path := folder / "libfabric.so.1").exists()), None)


def wheel_library() -> Path | None:
    path = Path(sys.prefix) / "lib" / "mpich" / "libfabric.so.1"
    return path if path.exists() else None


def banner(text: str) -> None:
    print(f"\n{'=' * 100}\n== {text}\n{'=' * 100}", flush=True)


def lint() -> Outcome:
    banner("lint")
    started = time.monotonic()
    status = subprocess.run([os.environ.get("MAKE", "make"), "--no-print-directory", "lint"], cwd=ROOT).returncode
    return Outcome("lint", status == 0, "" if status == 0 else f"status {status}", time.monotonic() - started)


def counted(report: Path) -> tuple[int, int, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def passes(status: int, arguments: Sequence[str]) -> bool:
    """Judge a run by pytest's status; arguments may leave it without a test."""
    return status == 0 or (status == NOTHING_CHOSEN and bool(arguments))


def checked(name: str, library: Path | None, missing: str, *arguments: str, aside: IO[str] | None = None) -> Outcome:
    """Run pytest with one libfabric; what it says goes to `aside` where that is given."""
    if library is None:
        return Outcome(name, False, f"NO LIBRARY: {missing}")
    spoken = "{}.{}".format(*version(library))
    report = ROOT / "build" / "test-reports" / f"{name.replace(',', '').replace(' ', '-')}.xml"
    report.unlink(missing_ok=True)
    started = time.monotonic()
    title = f"{name}: libfabric {spoken}, {library}"
    if aside is None:
        banner(title)
    else:
        aside.write(f"\n{'=' * 100}\n== {title}\n{'=' * 100}\n")
        aside.flush()
    status = subprocess.run(
        [sys.executable, "-m", "pytest", f"--junit-xml={report}", *arguments, *sys.argv[1:]],
        cwd=ROOT,
        env={**os.environ, "AIOTE_LIBFABRIC": str(library)},
        stdin=subprocess.DEVNULL,
        stdout=aside,
        stderr=subprocess.STDOUT if aside else None,
    ).returncode
    counts = counted(report)
    detail = "libfabric {}: {} passed, {} failed, {} skipped".format(spoken, *counts)
    return Outcome(name, passes(status, sys.argv[1:]), detail, time.monotonic() - started, counts)


def in_guest(aside: IO[str]) -> Outcome:
    """Run what needs RDMA devices or netem in a guest that has them, whose kernel is built the first time."""
    name, started = "tests in the guest", time.monotonic()
    aside.write(f"\n{'=' * 100}\n== {name}: soft-RoCE devices on a switch\n{'=' * 100}\n")
    aside.flush()
    # One processor for many processes: what else runs here comes after it, or they are late for each other.
    guest = [*(["nice", "-n", "-5"] if os.geteuid() == 0 else []), sys.executable, "tools/guest", "--how", "uml"]

    def succeeds(*command: str) -> bool:
        return not subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=aside, stderr=aside).returncode

    if not succeeds(*guest, "--", "true") and not (
        succeeds(sys.executable, "tools/guest", "--build-uml") and succeeds(*guest, "--", "true")
    ):
        detail = "VERBS AND NETEM NOT RUN: THERE IS NO GUEST HERE, why is said above; `make test-guest` tries again"
        return Outcome(name, True, detail, time.monotonic() - started)
    report = ROOT / "build" / "test-reports" / "guest.xml"
    report.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", f"--junit-xml={report}", "--loops", "3", "-m", NEEDS_GUEST, *sys.argv[1:]]
    patient = ["env", f"AIOTE_HEARTBEAT_LIMIT={GUEST_HEARTBEAT_LIMIT_S}"]
    status = subprocess.run(
        [*guest, "--nics", "4", "--", *patient, *pytest], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=aside, stderr=aside
    ).returncode
    counts = counted(report)
    detail = "verbs: {} passed, {} failed, {} skipped".format(*counts)
    return Outcome(name, passes(status, sys.argv[1:]), detail, time.monotonic() - started, counts)


def halves() -> tuple[list[str], list[str]]:
    """Return pytest's arguments for the first half of all tests, and for the second."""
    folders = sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir())
    return (
        [f"--ignore=tests/{name}" for name in folders if name not in FIRST_HALF],
        [f"--ignore=tests/{name}" for name in folders if name in FIRST_HALF],
    )


def has_rdma() -> bool:
    return any(Path("/dev/infiniband").glob("uverbs*"))


def main() -> int:
    system, wheel = system_library(), wheel_library()
    newest = max((path for path in (wheel, system) if path), key=version, default=None)
    if newest and version(newest) < (2, 0):
        newest = None
    outcomes = [lint()]
    # Where the machine itself has RDMA devices, they are tested on it.
    here = "" if has_rdma() else "not needs_rdma"
    first, second = halves()
    with contextlib.ExitStack() as stack:
        asides = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        lanes = stack.enter_context(ThreadPoolExecutor(LANES))
        runs = [] if has_rdma() else [lanes.submit(in_guest, asides[2])]
        missing = "no libfabric 2.x; the extra that brings it: pip install 'aiote[libfabric]'"
        every = ("--loops", "1", *(["-m", here] if here else []))
        runs.append(lanes.submit(checked, "every test, first half", newest, missing, *every, *first))
        runs.append(lanes.submit(checked, "every test, second half", newest, missing, *every, *second, aside=asides[0]))
        missing = f"none in {', '.join(SYSTEM)}; run: make system"
        # What runs on rails of our own, simulated ones included, knows no library.
        chosen = " and ".join(["libfabric", "not own_rails", "not one_library", *([here] if here else [])])
        old = ("tests of rails", system, missing, "-m", chosen, "--loops", "2")
        runs.append(lanes.submit(checked, *old, aside=asides[1]))
        outcomes += [run.result() for run in runs]
        for said in asides:
            said.seek(0)
            print(said.read(), flush=True)
    return concluded(outcomes)


def concluded(outcomes: Sequence[Outcome]) -> int:
    """Tell what became of all steps, and return the exit status."""
    total = [sum(numbers) for numbers in zip(*(outcome.counts for outcome in outcomes), strict=True)]
    passed = any(total) and all(outcome.passed for outcome in outcomes)
    banner("passed" if passed else "FAILED")
    for outcome in outcomes:
        mark = "ok" if outcome.passed else "FAILED"
        print(f"  {mark:6}  {outcome.name:23} {outcome.seconds:5.0f} s  {outcome.detail}")
    if not any(total):
        print("NOT ONE TEST WAS RUN: the arguments leave none in any of the runs")
    print("total: {} passed, {} failed, {} skipped".format(*total), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
