"""The parts of `aiote prove` that run as child processes: a checkout's tests by pytest, benchmarks by `aiote bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from aiote.cli.prove_report import Outcome, Status

__all__ = ["GPU_SUITE", "SUITES", "bench", "checkout_here", "suite"]

SUITES = {
    "contract-suite": ("the contract of every rail holds", ("tests/rails",)),
    "engine-suite": ("the engine keeps its promises", ("tests/engine",)),
    "adversity-suite": ("it does so while peers and rails fail", ("tests/link_loss", "tests/process_death")),
    "gpu-suite": ("the kernels compute on a GPU what they do on the host", ("tests",)),
}
"""The claim and the folders of each suite, by its name in the report."""
GPU_SUITE = "gpu-suite"
PROVED = "PROVE_OVER"
"""The variable by which the tests add a provider to their parameters that most machines lack."""
QUIET = ("-q", "-p", "no:cacheprovider")
NO_TESTS = 5  # pytest's status
BENCHED = {"write": "64K,1M", "read": "64K", "latency": "8", "pages": "4K"}
OVER = "stopped, because the time of this run was over; --full gives more"
RUNS, RUNS_FULL = 3, 9


def checkout_here() -> Path | None:
    """Return the current folder if it is aiote's checkout, or an unpacked sdist."""
    here = Path.cwd()
    return here if (here / "tests" / "support" / "plugins" / "proving.py").exists() else None


def suite(name: str, checkout: Path | None, provider: str, limit_s: float, more: Sequence[str] = ()) -> Outcome:
    """Run the tests of one suite over a provider; if there are none to run, the outcome says why.

    After `limit_s` seconds the tests are ended, and the suite counts as not run.
    """
    claim, folders = SUITES[name]
    about = ("-m", "needs_gpu") if name == GPU_SUITE else ("--prove", provider)
    untried = f"ignore:provider={provider!r} was never run:RuntimeWarning"  # the tests make errors of warnings
    if checkout is None:
        return Outcome(
            name, claim, "not run", "the tests are in the checkout and in the sdist; name one with --checkout DIR"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = [*QUIET, "-p", "support.plugins.proving", f"--junit-xml={report}", "--combinations", "tests"]
        chosen = [*options, "-W", untried, *about, *more]
        command = [sys.executable, "-P", "-m", "pytest", *chosen, *folders]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=checkout,
                env={**os.environ, PROVED: provider, "PYTHONPATH": _before(checkout / "tests")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, claim, "not run", OVER, limit_s)
        took = time.monotonic() - started
        if done.returncode == NO_TESTS:
            return Outcome(name, claim, "not run", f"no test there matches {' '.join(about)}", took)
        if not report.exists():
            return Outcome(name, claim, "failed", f"pytest ended with {done.returncode}: {done.stdout[-2000:]}", took)
        return _judged(name, claim, report, done.returncode, took)


def _before(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _judged(name: str, claim: str, report: Path, returned: int, took: float) -> Outcome:
    root = ElementTree.parse(report).getroot()
    cases = list(root.iter("testcase"))
    failed = [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    passed = len(cases) - len(failed) - skipped
    status: Status = "failed" if failed or returned not in (0, NO_TESTS) else "passed" if passed else "not run"
    told = f"{passed} tests passed, {len(failed)} failed, {skipped} skipped"
    return Outcome(name, claim, status, "; ".join([told, *failed[:20]]), took)


def _has(case: ElementTree.Element, *names: str) -> bool:
    return any(case.find(name) is not None for name in names)


def bench(op: str, provider: str, rails: str, limit_s: float, *, full: bool = False, connect: str = "") -> Outcome:
    """Measure one kind of work by `aiote bench`: between two processes here, or with a listener at `connect`."""
    name, claim = f"bench-{op}", f"figures: {op}"
    runs = RUNS_FULL if full else RUNS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        chosen = ["--provider", provider, "--sizes", BENCHED[op], "--runs", str(runs), "--json", str(file)]
        chosen += [*(["--rails", rails] if rails else []), *(["--connect", connect] if connect else [])]
        command = [sys.executable, "-P", "-m", "aiote", "bench", op, *chosen]
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, claim, "not run", OVER, limit_s)
        took = time.monotonic() - started
        if done.returncode or not file.exists():
            return Outcome(name, claim, "failed", (done.stderr or done.stdout).strip()[-1000:], took)
        records = json.loads(file.read_text())["records"]
    figures = {f"{record['size']} B, {record['unit']}": float(record["value"]["median"]) for record in records}
    where = "two machines" if connect else "two processes"
    return Outcome(name, claim, "passed", f"{where}, medians of {runs} runs", took, figures)
