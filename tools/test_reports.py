"""What became of the steps of `make test`: read from pytest's reports, and told so that the end says what is needed."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Self, TypeAlias
from xml.etree import ElementTree

LOAD_EVERY_S = 2.0


Failure: TypeAlias = dict[str, str]
"""What tests/support/plugins/failure_reports.py says of a failed test."""


@dataclass
class Report:
    """What a run of pytest wrote of itself; the defaults are those of a run that wrote nothing."""

    counts: tuple[int, int, int] = (0, 0, 0)  # tests passed, failed, skipped
    combinations: tuple[int, int] = (0, 0)  # of parameters: those that ran, and all that there are
    failures: list[Failure] = field(default_factory=list)
    not_run: Counter[str] = field(default_factory=Counter)  # how many tests were skipped, by reason


@dataclass
class Outcome:
    """What became of one step."""

    name: str
    passed: bool
    detail: str
    seconds: float = 0.0
    report: Report = field(default_factory=Report)
    cpu_s: float = 0.0  # of all its processes
    only_tests_failed: bool = False  # whether pytest itself came to its end


@dataclass
class Verdict:
    """What became of the tests that ran again: those that are unsteady, and why none ran where that is so."""

    unsteady: list[Failure] = field(default_factory=list)
    said: str = ""


def _properties(element: ElementTree.Element) -> dict[str, str]:
    return {one.get("name", ""): one.get("value", "") for one in element.iterfind("properties/property")}


def read(path: Path) -> Report:
    """Read a JUnit report; a file that is not there, or was cut off, is a run that wrote nothing."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return Report()
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    chosen = [_properties(suite) for suite in suites]
    run, there_are = (sum(int(one.get(name, 0)) for one in chosen) for name in ("combinations", "all_combinations"))
    failed, not_run = list[Failure](), Counter[str]()
    for suite in suites:
        for case in suite.iter("testcase"):
            if (found := case.find("skipped")) is not None:
                not_run[found.get("message", "").removeprefix("Skipped: ")] += 1
            if (found := case.find("failure")) is not None or (found := case.find("error")) is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                failed.append({"nodeid": name, "assertion": found.get("message", ""), **_properties(case)})
    return Report((total - failures - errors - skipped, failures + errors, skipped), (run, there_are), failed, not_run)


class Load:
    """The machine's load while a block runs, in processes that run or would."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="load")

    def __enter__(self) -> Self:
        self._watching.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._over.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._over.wait(LOAD_EVERY_S):
            # The fourth field of /proc/loadavg is what runs now, and of how many: finer than an average of a minute.
            running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
            self._seen.append(float(running) - 1)  # without this thread

    def __str__(self) -> str:
        processors = f"{os.cpu_count()} processors"
        if not self._seen:
            return f"not looked at, {processors}"
        mean = sum(self._seen) / len(self._seen)
        return f"{mean:.1f} processes ran or would on average, {max(self._seen):.0f} at most, on {processors}"


def _told(failure: Failure, verdict: str = "FAILED") -> list[str]:
    """Return the lines on one test that failed."""
    lines = ["", f"{verdict} {failure['nodeid']}", *(f"    {line}" for line in failure["assertion"].splitlines())]
    if then := failure.get("repeated"):
        lines += ["  alone: it failed again:", *(f"    {line}" for line in then.splitlines())]
    return lines + [f"  {name + ':':6} {failure[name]}" for name in ("seed", "load", "again") if failure.get(name)]


def running_on() -> str:
    """Return one line on the interpreter, and on the packages that a test depends on most."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "anyio", "msgspec"))
    return f"Python {platform.python_version()} in {sys.prefix}: {packages}"


def _tell_skipped(reports: Sequence[Report]) -> None:
    """Say loudly what this machine could not run."""
    reasons = sum((report.not_run for report in reports), Counter[str]())
    if reasons:
        print(f"\n!!! NOT RUN ON THIS MACHINE: {reasons.total()}")
        for reason, count in reasons.most_common():
            print(f"  {count:5} x  {reason}")
        print()


def concluded(
    outcomes: Sequence[Outcome], load: Load | None = None, verdict: Verdict | None = None, on: str = ""
) -> int:
    """Tell what became of all steps, of every test that failed, and return the exit status.

    on: what they ran on, unless that is this interpreter.
    """
    reports = [outcome.report for outcome in outcomes]
    total = [sum(numbers) for numbers in zip(*(report.counts for report in reports), strict=True)]
    run, there_are = (sum(numbers) for numbers in zip(*(report.combinations for report in reports), strict=True))
    passed = any(total) and all(outcome.passed for outcome in outcomes)
    banner("passed" if passed else "FAILED")
    for outcome in outcomes:
        mark = "ok" if outcome.passed else "FAILED"
        print(f"  {mark:6}  {outcome.name:23} {outcome.seconds:5.0f} s {outcome.cpu_s:5.0f} cpu-s  {outcome.detail}")
    _tell_skipped(reports)
    print(f"  combinations of parameters: {run} of {there_are} ran; make test-all runs all")
    print(f"  processor time: {sum(outcome.cpu_s for outcome in outcomes):.0f} s")
    if load is not None:
        print(f"  load: {load}")
    for failure in (failure for report in reports for failure in report.failures):
        print(*_told(failure), sep="\n")
    verdict = verdict or Verdict()
    for failure in verdict.unsteady:
        print(*_told(failure, "UNSTEADY, passed twice when it ran alone:"), sep="\n")
    if verdict.said:
        print(f"\n{verdict.said}")
    if not any(total):
        print("NOT ONE TEST WAS RUN: the arguments leave none in any of the runs")
    count = f", {len(verdict.unsteady)} unsteady" if verdict.unsteady else ""
    print(f"  {on or running_on()}")
    print("total: {} passed, {} failed{}, {} skipped".format(*total[:2], count, total[2]), flush=True)
    return 0 if passed else 1


def banner(text: str) -> None:
    print(f"\n{'=' * 100}\n== {text}\n{'=' * 100}", flush=True)
