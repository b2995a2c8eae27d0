"""Run the checks, all of them even if one fails: lint, every test, and the libfabric tests once more.

With the newest libfabric here all tests run, in three parts; what needs RDMA devices runs in a guest that has them in
software (tools/guest); what meets the library runs once more with the system's, the oldest that must work. All five run
at a time, because much of a test is waiting; what the others say comes after what the first part says.

A test of several providers, loops and the like is tried with a choice of their combinations
(tests/support/combinations.py), a smaller one where the machine is slow; `--all` tries all of them, in tests at full
length, then soaks, fuzzes and takes out each mechanism. `--check` is for between two commits: lint, types, and quick
tests that need no libfabric.

A missing library is a failure. Other arguments are handed to pytest; a run may be left without a test by them, but not
all runs. The end tells of each test that failed, and the last line counts the tests of all runs.
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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from test_reports import Load, Outcome, banner, concluded, read

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))
from machine import slowness  # noqa: E402

REPORTS = ROOT / "build" / "test-reports"
NEEDS_GUEST = "needs_rdma or needs_netem"
# Connecting over `verbs;ofi_rxm` alone can hold up a process there for seconds.
GUEST_HEARTBEAT_LIMIT_S = 15
LANES = 5  # one for each run, so that none waits for another
# The folders of the first two parts, which take about as long as each other; the third has the rest.
PARTS = (
    {"engine", "core", "docs", "lint", "native", "bridge", "connectors"},
    {"failure", "soak", "testing", "demo", "hostile", "faults"},
)
NOTHING_CHOSEN = 5  # pytest's status where the arguments leave it no test
SYSTEM = ["/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"]
# Which combinations each run tries; with another turn it tries others.
CHOICES = {
    "newest": ("--combinations", "pairs", "--turn", "0"),
    "system": ("--combinations", "tests", "--turn", "1"),
    "guest": ("--combinations", "tests", "--turn", "2"),
}
# From here on pairs would take an hour and more: what runs with the newest library too has a combination of each test.
SLOW = 3.0
# What is as much a test as the others, and too long for every day: targets of the Makefile, and their ARGS.
LONG = {
    "soak": "--seconds 120",
    "soak-kvcache": "--seconds 120",
    "soak-rails": "--runs 200",
    "hostile": "--seconds 120",
    "fuzz": "--seconds 120",
    "sanitize": "",
    "test-wheel": "",
    "test-connectors": "",
    "mutants": "",
}
# A long test may take as long as it needs: pytest ends what takes five minutes, and the whole run with it.
PATIENCE = "-o timeout=3000 -o faulthandler_timeout=3600"
# What `--check` runs: two lanes of what opens no engine on a library and needs nothing that is installed beside Python.
CHECKED = "not (libfabric or needs_gpu or needs_rdma or needs_namespaces or needs_etcd or needs_browser)"
CHECK_LANES = ("core docs lint fuzz engine control", "native kvcache discovery service testing rails demo")
# What of these takes seconds each: it starts processes, or draws many examples.
CHECK_LEAVES_OUT = """
    core/test_failover_schedules.py engine/test_engine_departed.py discovery/test_embedded_registry.py
    kvcache/test_mapping.py kvcache/test_push_pull_faults.py kvcache/test_push_pull_storm.py
    lint/test_combinations.py lint/test_detectors.py lint/test_failing.py lint/test_sparing.py lint/test_stubs.py
    native/test_interleavings.py native/test_streams.py rails/test_doctor.py rails/test_info_command.py
    testing/test_determinism.py testing/test_exploration.py testing/test_page.py testing/test_plugin.py
    testing/test_rail_faults.py testing/test_scale.py
"""


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


def made(target: str, arguments: str = "") -> Outcome:
    """Run another target of the Makefile as a step."""
    banner(f"make {target} {arguments}".strip())
    started = time.monotonic()
    command = [os.environ.get("MAKE", "make"), "--no-print-directory", target, f"ARGS={arguments}"]
    status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode
    return Outcome(target, status == 0, "" if status == 0 else f"status {status}", time.monotonic() - started)


def passes(status: int, arguments: Sequence[str]) -> bool:
    """Judge a run by pytest's status; arguments may leave it without a test."""
    return status == 0 or (status == NOTHING_CHOSEN and bool(arguments))


def reported(name: str, what: str, status: int, path: Path, started: float, given: Sequence[str]) -> Outcome:
    """Judge a run of pytest by its status and its report."""
    report = read(path)
    detail = "{}: {} passed, {} failed, {} skipped; {} of {} combinations".format(
        what, *report.counts, *report.combinations
    )
    if not path.exists():
        detail = f"{what}: NO REPORT, ended with status {status}; what it said last is above"
    return Outcome(name, passes(status, given), detail, time.monotonic() - started, report)


def fresh(name: str) -> Path:
    """Return where a run's report goes; what an earlier run left there is removed."""
    path = REPORTS / f"{name.replace(',', '').replace(' ', '-')}.xml"
    path.unlink(missing_ok=True)
    return path


def checked(
    name: str, library: Path | None, missing: str, given: Sequence[str], *arguments: str, aside: IO[str] | None = None
) -> Outcome:
    """Run pytest with one libfabric; what it says goes to `aside` where that is given."""
    if library is None:
        return Outcome(name, False, f"NO LIBRARY: {missing}")
    spoken = "{}.{}".format(*version(library))
    path, started = fresh(name), time.monotonic()
    title = f"{name}: libfabric {spoken}, {library}"
    if aside is None:
        banner(title)
    else:
        aside.write(f"\n{'=' * 100}\n== {title}\n{'=' * 100}\n")
        aside.flush()
    status = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", f"--junit-xml={path}", *arguments, *given],
        cwd=ROOT,
        env={**os.environ, "AIOTE_LIBFABRIC": str(library)},
        stdin=subprocess.DEVNULL,
        stdout=aside,
        stderr=subprocess.STDOUT if aside else None,
    ).returncode
    return reported(name, f"libfabric {spoken}", status, path, started, given)


def in_guest(aside: IO[str], given: Sequence[str], *choice: str) -> Outcome:
    """Run what needs RDMA devices or netem in a guest that has them, whose kernel is built the first time."""
    name, started = "tests in the guest", time.monotonic()
    aside.write(f"\n{'=' * 100}\n== {name}: soft-RoCE devices on a switch\n{'=' * 100}\n")
    aside.flush()
    # One processor for many processes: what else runs here comes after it, or they are late for each other; and this
    # lane has the kernel to build first, or would go on when all others have ended.
    first = [*(["nice", "-n", "-5"] if os.geteuid() == 0 else []), sys.executable, "tools/guest"]
    guest = [*first, "--how", "uml"]

    def succeeds(*command: str) -> bool:
        return not subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=aside, stderr=aside).returncode

    if not succeeds(*guest, "--", "true") and not (succeeds(*first, "--build-uml") and succeeds(*guest, "--", "true")):
        detail = "VERBS AND NETEM NOT RUN: THERE IS NO GUEST HERE, why is said above; `make test-guest` tries again"
        return Outcome(name, True, detail, time.monotonic() - started)
    path = fresh("guest")
    pytest = [sys.executable, "-P", "-m", "pytest", f"--junit-xml={path}", *choice, "-m", NEEDS_GUEST, *given]
    patient = ["env", f"AIOTE_HEARTBEAT_TIMEOUT={GUEST_HEARTBEAT_LIMIT_S}"]
    status = subprocess.run(
        [*guest, "--nics", "4", "--", *patient, *pytest], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=aside, stderr=aside
    ).returncode
    return reported(name, "verbs", status, path, started, given)


def parts() -> list[list[str]]:
    """Return pytest's arguments for each part of all tests: a folder that nobody has named is in the last."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    chosen = [*PARTS, folders.difference(*PARTS)]
    return [[f"--ignore=tests/{name}" for name in sorted(folders - part)] for part in chosen]


def has_rdma() -> bool:
    return any(Path("/dev/infiniband").glob("uverbs*"))


def newest_library() -> Path | None:
    """Return the newest libfabric here, if it is a 2.x."""
    newest = max((path for path in (wheel_library(), system_library()) if path), key=version, default=None)
    return newest if newest and version(newest) >= (2, 0) else None


def say(asides: Sequence[IO[str]]) -> None:
    """Print what the runs said meanwhile, one after the other."""
    for said in asides:
        said.seek(0)
        print(said.read(), flush=True)


def everything(choices: dict[str, tuple[str, ...]], given: Sequence[str]) -> list[Outcome]:
    """Make all five runs at a time, and print what they said one after the other."""
    # Where the machine itself has RDMA devices, they are tested on it.
    here = "" if has_rdma() else "not needs_rdma"
    with contextlib.ExitStack() as stack:
        asides = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(4)]
        lanes = stack.enter_context(ThreadPoolExecutor(LANES))
        runs: list[Future[Outcome]] = []
        if not has_rdma():
            runs.append(lanes.submit(in_guest, asides[3], given, *choices.get("guest", ())))
        missing = "no libfabric 2.x; the extra that brings it: pip install 'aiote[libfabric]'"
        newest = (newest_library(), missing, given, *choices.get("newest", ()), *(["-m", here] if here else []))
        for number, part in enumerate(parts()):
            name, aside = f"every test, part {number + 1}", asides[number - 1] if number else None
            runs.append(lanes.submit(checked, name, *newest, *part, aside=aside))
        missing = f"none in {', '.join(SYSTEM)}; run: make system"
        # What runs on rails of our own, simulated ones included, knows no library.
        chosen = " and ".join(["libfabric", "not own_rails", "not one_library", *([here] if here else [])])
        system = (system_library(), missing, given, *choices.get("system", ()), "-m", chosen)
        runs.append(lanes.submit(checked, "tests of rails", *system, aside=asides[2]))
        outcomes = [run.result() for run in runs]
        say(asides)
    return outcomes


def affordable() -> dict[str, tuple[str, ...]]:
    """Return which combinations each run tries on this machine, and say so where they are fewer than elsewhere."""
    measured = sorted(slowness() for _ in range(5))[2]
    if measured < SLOW:
        return CHOICES
    print(
        f"THIS MACHINE IS {measured:.0f} TIMES SLOWER than an undisturbed core: each test runs with one combination of "
        'its parameters; ARGS="--combinations pairs" has each two values meet.',
        flush=True,
    )
    return {**CHOICES, "newest": ("--combinations", "tests", "--turn", "0")}


def quick(given: Sequence[str]) -> list[Outcome]:
    """Run lint, and beside it what is quick and needs no library."""
    library = newest_library() or system_library()
    os.environ.setdefault("HYPOTHESIS_PROFILE", "brief")
    left_out = [f"--ignore=tests/{name}" for name in CHECK_LEAVES_OUT.split()]
    chosen = ("-q", "--combinations", "tests", "-m", CHECKED, *left_out)
    with contextlib.ExitStack() as stack:
        asides = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in CHECK_LANES]
        lanes = stack.enter_context(ThreadPoolExecutor(len(CHECK_LANES)))
        runs = []
        for number, (folders, aside) in enumerate(zip(CHECK_LANES, asides, strict=True), start=1):
            paths = [f"tests/{name}" for name in folders.split()]
            name = f"quick tests, part {number}"
            runs.append(lanes.submit(checked, name, library, "make venv", given, *chosen, *paths, aside=aside))
        outcomes = [made("lint"), *(run.result() for run in runs)]
        say(asides)
    return outcomes


def main() -> int:
    long, check = "--all" in sys.argv[1:], "--check" in sys.argv[1:]
    given = [argument for argument in sys.argv[1:] if argument not in ("--all", "--check")]
    if long:
        os.environ |= {"AIOTE_TEST_LONG": "1", "PYTEST_ADDOPTS": PATIENCE}
    with Load() as load:
        outcomes = quick(given) if check else [made("lint"), *everything({} if long else affordable(), given)]
        if long and not given:
            # Mutants hang, which the usual limit has to end.
            del os.environ["PYTEST_ADDOPTS"]
            outcomes += [made(target, arguments) for target, arguments in LONG.items()]
    return concluded(outcomes, load)


if __name__ == "__main__":
    sys.exit(main())
