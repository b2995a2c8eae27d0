"""Run the checks, all of them even if one fails: lint, every test, and the libfabric tests once more.

With the newest libfabric here all tests run; what needs RDMA devices runs in a guest that has them in software
(tools/guest); tests of engines and rails run once more with the system's libfabric, the oldest that must work. The
files of all three are one queue (test_queue.py) over a few lanes more than there are processors, because much of a test
is waiting.

A test of several providers, loops and the like is tried with a choice of their combinations
(tests/support/plugins/combinations.py); `--all` tries all of them, in tests at full length, then soaks, fuzzes and
takes out each mechanism. `make docs` builds and checks the site once a lane is free, unless arguments for pytest are
given. `--check` is for between two commits: lint, types, and quick tests that need no libfabric.

A test that waited in vain runs again when all is over, alone (test_again.py); `--all` repeats nothing. A missing
library is a failure. `--lanes N` sets the number of lanes. Other arguments are handed to pytest, and paths among them
choose the files; a run may be left without a test by them, but not all runs. The end tells of each test that failed,
and the last line counts the tests of all runs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import test_queue
from test_again import judged
from test_queue import Entry, Queue
from test_reports import Failure, Load, Outcome, Verdict, banner, concluded, read, running_on

from aiote.rails.library import find_libfabric

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
REPORTS = ROOT / "build" / "test-reports"
NEEDS_GUEST = "needs_rdma or needs_netem"
# Connecting over `verbs;ofi_rxm` alone can hold up a process there for seconds, and with it all that others wait for.
GUEST_LIMITS = ("AIOTE_HEARTBEAT_TIMEOUT=15", "AIOTE_CONNECT_TIMEOUT=30", "AIOTE_DRAIN_TIMEOUT=10")
# With the system's library and in the guest, `make test` runs the tests of engines and rails. `tests/verbs` has some of
# services. `make test-all` runs all tests there.
OF_ENGINES = ["aio", "bridge", "engine", "link_loss", "links", "native", "process_death", "rails", "verbs"]
FOLDERS = {"system": OF_ENGINES, "guest": OF_ENGINES}
NOTHING_CHOSEN, TESTS_FAILED = 5, 1  # statuses of pytest
LANES = 2 * (os.cpu_count() or 1) + 1  # half of a test and more is waiting
GUESTS = max(1, (os.cpu_count() or 1) // 2)  # each takes a whole processor
SYSTEM = ["/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"]
NO_NEWEST = "no libfabric 2.x; the extra that brings it: pip install 'aiote[libfabric]'"
NO_SYSTEM = f"none in {', '.join(SYSTEM)}; run: make system"
NO_GUEST = "VERBS AND NETEM NOT RUN: THERE IS NO GUEST HERE, why is said above; `make test-guest` tries again"
# Which combinations each run tries; with another turn it tries others.
CHOICES = {
    "newest": ("--combinations", "values", "--turn", "0"),
    "system": ("--combinations", "tests", "--turn", "1"),
    "guest": ("--combinations", "tests", "--turn", "2"),
}
# What is as much a test as the others: targets of the Makefile. DAILY are short enough for every day.
DAILY = ["docs"]
# Of `make test-all`, with their ARGS.
LONG = {
    **dict.fromkeys(DAILY, ""),
    "soak": "--seconds 120",
    "soak-kvcache": "--seconds 120",
    "soak-rails": "--runs 200",
    "hostile": "--seconds 120",
    "fuzz": "--seconds 120",
    "sanitize": "",
    "test-wheel": "",
    "test-connectors": "",
    "test-versions": "",
    "test-order": "",
    "mutants": "",
    "paper": "",
    "bench-guard": "",
}
# A long test may take as long as it needs: pytest ends what takes five minutes, and the whole run with it.
PATIENCE = "-o timeout=3000 -o faulthandler_timeout=3600"
# What `--check` runs: what opens no engine on a library and needs nothing that is installed beside Python.
CHECKED = "not (libfabric or needs_gpu or needs_rdma or needs_namespaces or needs_etcd or needs_browser)"
CHECK_FOLDERS = """
    aio core demo diagnosis discovery docs engine kvcache links lint machine malformed_bytes native plugins rails
    service testing tools
"""
# What of these takes seconds each: it starts processes, or draws many examples.
CHECK_LEAVES_OUT = """
    core/test_failover_schedules.py diagnosis/test_doctor.py discovery/test_embedded_registry.py
    engine/test_closing_mid_transfer.py engine/test_departed_peers.py kvcache/test_mapping.py
    kvcache/test_push_pull_faults.py kvcache/test_push_pull_storm.py links/test_busy_loop.py lint/test_stubs.py
    native/test_interleavings.py native/test_streams.py plugins/test_combinations.py plugins/test_detectors.py
    plugins/test_failure_reports.py plugins/test_guest_cases.py rails/test_info_command.py
    testing/test_determinism.py testing/test_exploration.py testing/test_page.py testing/test_plugin.py
    testing/test_rail_faults.py testing/test_scale.py tools/test_guest.py tools/test_land.py tools/test_verdict.py
"""


@dataclass(frozen=True)
class Kind:
    """One kind of run: the library that it is on, what pytest is told, and whether that is in the guest."""

    library: Path | None
    arguments: tuple[str, ...]
    guest: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {"AIOTE_LIBFABRIC": str(self.library)} if self.library else {}

    def command(self, report: Path, *arguments: str) -> list[str]:
        """Return the command that runs pytest."""
        pytest = [sys.executable, "-P", "-m", "pytest", f"--junit-xml={report}", *arguments]
        if not self.guest:
            return pytest
        return [*guest("--nics", "4"), "--", "env", *GUEST_LIMITS, *pytest]


def version(library: Path) -> tuple[int, int]:
    """Return the interface version that a libfabric speaks."""
    # Not by ctypes: aiote keeps what Debian's libfabric links from taking over SIGINT when it is opened.
    return find_libfabric(str(library)).version


def system_library() -> Path | None:
    folders = (folder for pattern in SYSTEM for folder in sorted(Path("/").glob(pattern[1:])))
    return next((path for folder in folders if (path := folder / "libfabric.so.1").exists()), None)


def wheel_library() -> Path | None:
    path = Path(sys.prefix) / "lib" / "mpich" / "libfabric.so.1"
    return path if path.exists() else None


def newest_library() -> Path | None:
    """Return the newest libfabric here, if it is a 2.x."""
    newest = max((path for path in (wheel_library(), system_library()) if path), key=version, default=None)
    return newest if newest and version(newest) >= (2, 0) else None


def has_rdma() -> bool:
    return any(Path("/dev/infiniband").glob("uverbs*"))


def guest(*options: str) -> list[str]:
    """Return the command that runs another in the guest."""
    # One processor for many processes: what else runs here comes after it, or they are late for each other.
    first = ["nice", "-n", "-5"] if os.geteuid() == 0 else []
    return [*first, sys.executable, "tools/guest", "--how", "uml", *options]


def ended(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a process; return its status and the processor time of it and its children."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def run(command: Sequence[str], log: Path, **environment: str) -> tuple[int, float]:
    """Run a command, its output in a file; return its status and the processor time of it and its children."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as said:
        return ended(
            subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        )


def make(target: str, arguments: str = "") -> list[str]:
    return [os.environ.get("MAKE", "make"), "--no-print-directory", target, f"ARGS={arguments}"]


def made(target: str, arguments: str = "") -> Outcome:
    """Run another target of the Makefile as a step."""
    banner(f"make {target} {arguments}".strip())
    started = time.monotonic()
    status, cpu_s = ended(subprocess.Popen(make(target, arguments), cwd=ROOT, stdin=subprocess.DEVNULL))
    detail = "" if status == 0 else f"status {status}"
    return Outcome(target, status == 0, detail, time.monotonic() - started, cpu_s=cpu_s)


def beside(target: str) -> Outcome:
    """Run another target of the Makefile beside the tests; print what it says if it fails."""
    started, log = time.monotonic(), REPORTS / f"{target}.log"
    status, cpu_s = run(make(target), log)
    if status:
        print(log.read_text(errors="replace"), flush=True)
    detail = "" if status == 0 else f"status {status}; what it said is above"
    return Outcome(target, status == 0, detail, time.monotonic() - started, cpu_s=cpu_s)


def linted() -> Outcome:
    """Run the linters beside the tests."""
    return beside("lint")


class Run:
    """One run of the queue: its kinds, and what the command line has for pytest."""

    def __init__(
        self, kinds: Mapping[str, Kind], given: Sequence[str] = (), folders: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Tell the arguments that name files, or tests in them, from those that are pytest's.

        Of a kind that is in `folders` the files in these run, unless files are named.
        """
        paths = {argument: (ROOT / argument.partition("::")[0]).resolve() for argument in given}
        named = [argument for argument, path in paths.items() if path.is_relative_to(TESTS) and path.exists()]
        self._kinds, self._folders = kinds, folders or {}
        self._given = [argument for argument in given if argument not in named]
        self._named = [(paths[argument], argument.partition("::")[2]) for argument in named]
        self._ended = self._number = 0
        self._given_up = False
        self._one_at_a_time = threading.Lock()

    def outcomes(self, files: Sequence[str], lanes: int, last: Sequence[Callable[[], Outcome]] = ()) -> list[Outcome]:
        """Run lint and all files in all kinds of runs, and what is `last` from when a lane is free; return all that."""
        recorded = test_queue.durations(test_queue.DURATIONS)
        entries = [
            entry
            for kind in self._kinds
            for entry in test_queue.entries(kind, [name for name in files if self._runs(kind, name)], recorded)
        ]
        for report in REPORTS.glob("*-[0-9]*.xml"):
            report.unlink()
        self._number = len(entries)
        queue = Queue(entries, unready="guest", most={"guest": GUESTS})
        with ThreadPoolExecutor(lanes + 2) as pool:
            try:
                preparing, lint = pool.submit(self._prepare_guest, queue), pool.submit(linted)
                running = [pool.submit(self._lane, queue) for _ in range(lanes)]
                wait(running, return_when=FIRST_COMPLETED)
                others = [pool.submit(one) for one in last]
                found = [one for lane in running for one in lane.result()]
            except BaseException:
                # Ctrl-C ends the runs of pytest that there are; the lanes must not begin others.
                self._given_up = True
                queue.drop(*self._kinds)
                raise
        kinds = list(self._kinds)
        found.sort(key=lambda one: (kinds.index(one.name.split()[0]), int(one.name.split()[1])))
        return [lint.result(), *preparing.result(), *found, *(one.result() for one in others)]

    def again(self, outcome: Outcome, failure: Failure) -> list[Failure] | None:
        """Run one test alone, in a fresh process; return what fails, None if there is no report."""
        kind, report = self._kinds[outcome.name.split()[0]], REPORTS / "again.xml"
        report.unlink(missing_ok=True)
        # The test's name says which of its combinations it is; the turn is what is left of the choice.
        turn = [one for pair in itertools.pairwise(kind.arguments) if pair[0] == "--turn" for one in pair]
        run(kind.command(report, *turn, failure["nodeid"]), REPORTS / "again.log", **kind.environment)
        found = read(report)
        return found.failures if any(found.counts[:2]) else None

    def _runs(self, kind: str, name: str) -> bool:
        folder = name.partition("/")[0]
        return bool(self.targets(name)) and (bool(self._named) or folder in self._folders.get(kind, [folder]))

    def targets(self, name: str) -> list[str]:
        """Return what pytest is asked for of a file: all of it, the tests that the command line names, or nothing."""
        path = TESTS / name
        if not self._named or any(not test and path.is_relative_to(folder) for folder, test in self._named):
            return [f"tests/{name}"]
        return [f"tests/{name}::{test}" for file, test in self._named if file == path]

    def _prepare_guest(self, queue: Queue) -> list[Outcome]:
        """Build the guest's kernel if that was never done; without a guest, drop its entries and say so."""
        if "guest" not in self._kinds:
            return []
        started, log, boots = time.monotonic(), REPORTS / "guest.log", guest("--", "true")
        build = [sys.executable, "tools/guest", "--build-uml"]
        try:
            # After Ctrl-C the guest has not booted, either, and is not to be built.
            if run(boots, log)[0] and not self._given_up and (run(build, log)[0] or run(boots, log)[0]):
                queue.drop("guest")
                print(log.read_text(errors="replace"), flush=True)
                return [Outcome("guest", True, NO_GUEST, time.monotonic() - started)]
        finally:
            queue.ready()
        return []

    def _lane(self, queue: Queue) -> list[Outcome]:
        found = []
        while (entry := queue.take()) is not None:
            found.append(self._ran(entry))
            queue.ended(entry)
        return found

    def _ran(self, entry: Entry) -> Outcome:
        """Run one entry; print a line on it, and before it all that it said if it failed."""
        kind, started = self._kinds[entry.kind], time.monotonic()
        report, log = (REPORTS / f"{entry.kind}-{entry.number:02}.{end}" for end in ("xml", "log"))
        targets = [target for name in entry.files for target in self.targets(name)]
        command = kind.command(report, *kind.arguments, *targets, *self._given)
        status, cpu_s = run(command, log, **kind.environment)
        found, seconds = read(report), time.monotonic() - started
        detail = "{} passed, {} failed, {} skipped".format(*found.counts)
        if not report.exists():
            detail = f"NO REPORT, ended with status {status}; what it said last is above"
        passed = report.exists() and status in (0, NOTHING_CHOSEN)
        whole = report.exists() and status == TESTS_FAILED
        detail = f"{detail}: {entry}"
        with self._one_at_a_time:
            self._ended += 1
            if not passed:
                print(log.read_text(errors="replace"))
            print(f"[{self._ended}/{self._number}] {entry.name}, {seconds:.0f} s: {detail}", flush=True)
        return Outcome(entry.name, passed, detail, seconds, found, cpu_s, whole)


def all_files() -> list[str]:
    """Return every file of tests that `make test` runs."""
    return sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))


def every_kind(choices: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Kind], list[Outcome]]:
    """Return the kinds of runs that can be made here, and a failure for each library that is missing."""
    # Where the machine itself has RDMA devices, they are tested on it.
    here = () if has_rdma() else ("not needs_rdma",)
    # What runs on rails of our own, simulated ones included, knows no library.
    chosen = " and ".join(["libfabric", "not own_rails", "not one_library", *here])
    newest, system = newest_library(), system_library()
    kinds = {
        "newest": Kind(newest, (*choices.get("newest", ()), *(("-m", *here) if here else ()))),
        "system": Kind(system, (*choices.get("system", ()), "-m", chosen)),
    }
    missing = [
        Outcome(name, False, f"NO LIBRARY: {why}")
        for name, library, why in (("newest", newest, NO_NEWEST), ("system", system, NO_SYSTEM))
        if library is None
    ]
    for outcome in missing:
        del kinds[outcome.name]
    if not has_rdma():
        kinds["guest"] = Kind(None, (*choices.get("guest", ()), "-m", NEEDS_GUEST), guest=True)
    return kinds, missing


def unasked(outcomes: Sequence[Outcome], kinds: Iterable[str]) -> list[Outcome]:
    """Return a failure for each kind of run that had no test at all, which only arguments may bring about."""
    there = {one.name.split()[0] for one in outcomes}
    ran = {one.name.split()[0] for one in outcomes if any(one.report.counts) or one.detail == NO_GUEST}
    return [Outcome(kind, False, "NOT ONE TEST WAS RUN") for kind in kinds if kind in there - ran]


def quick() -> tuple[dict[str, Kind], list[str]]:
    """Return the run of `make check`, and its files."""
    os.environ.setdefault("HYPOTHESIS_PROFILE", "brief")
    library = newest_library() or system_library()
    folders, left_out = set(CHECK_FOLDERS.split()), set(CHECK_LEAVES_OUT.split())
    files = [name for name in all_files() if name.partition("/")[0] in folders and name not in left_out]
    return {"quick": Kind(library, ("-q", "--combinations", "tests", "-m", CHECKED))}, files


def main() -> int:
    parser = argparse.ArgumentParser(description="Run lint and the tests.", allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="every combination, at full length, and the long targets")
    parser.add_argument("--check", action="store_true", help="what is quick and needs no library")
    parser.add_argument("--lanes", type=int, default=LANES, help="how many runs of pytest there are at a time")
    chosen, given = parser.parse_known_args()
    if chosen.all:
        os.environ |= {"AIOTE_TEST_LONG": "1", "PYTEST_ADDOPTS": PATIENCE}
    # Without it each pytest, and each process that a test starts, compiles what another has compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(f"{running_on()}; {chosen.lanes} lanes on {os.cpu_count()} processors", flush=True)
    with Load() as load:
        missing, files = list[Outcome](), all_files()
        if chosen.check:
            kinds, files = quick()
        else:
            kinds, missing = every_kind({} if chosen.all else CHOICES)
        tests = Run(kinds, given, {} if chosen.all else FOLDERS)
        daily = () if given or chosen.check or chosen.all else [partial(beside, target) for target in DAILY]
        outcomes = [*tests.outcomes(files, chosen.lanes, daily), *missing]
        if not given:
            outcomes += unasked(outcomes, kinds)
        verdict = Verdict() if chosen.all else judged(outcomes, tests.again)
        if chosen.all and not given:
            # Mutants hang, which the usual limit has to end.
            del os.environ["PYTEST_ADDOPTS"]
            outcomes += [made(target, arguments) for target, arguments in LONG.items()]
    return concluded(outcomes, load, verdict)


if __name__ == "__main__":
    sys.exit(main())
