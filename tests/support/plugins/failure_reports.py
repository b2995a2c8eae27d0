"""A pytest plugin: a run that fails ends with what its reader needs, and puts the same into its report.

For each test that failed: its name, what was asserted, the seed if it has one, the load of the machine at that moment,
whether it was a wait that ran out, and the command that repeats it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

import aiote

SEED = re.compile(r"with seed (\d+)|(@reproduce_failure\(.*\))")
"""What virtual time and hypothesis say of a failure."""
FROM_ENVIRONMENT = ("AIOTE_LIBFABRIC", "HYPOTHESIS_PROFILE", "AIOTE_TEST_LONG")
MOST_LINES = 12


def assertion(report: pytest.TestReport) -> str:
    """Return the lines that say what went wrong."""
    text = report.longreprtext
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-MOST_LINES:]
    return "\n".join(lines[:MOST_LINES])


def seed(item: pytest.Item, report: pytest.TestReport) -> str:
    """Return what the test's chance was drawn from, an empty string where there was none."""
    case = getattr(item, "callspec", None)
    if case is not None and "seed" in case.params:
        return str(case.params["seed"])
    found = SEED.search(report.longreprtext)
    return next(filter(None, found.groups())) if found else ""


def again(nodeid: str) -> str:
    """Return the command that repeats a test."""
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in FROM_ENVIRONMENT if name in os.environ]
    return " ".join([*settings, shlex.quote(sys.executable), "-P", "-m", "pytest", shlex.quote(nodeid)])


def ran_out(error: BaseException | None) -> bool:
    """Say whether a wait that ran out, and nothing else, has failed a test: what a busy machine may bring about.

    These are time-outs of a scope, a future or a program, pytest-timeout's where a test waits in Python (a hang in
    native code ends the run), and a peer that was lost because it was silent for too long.
    """
    match error:
        case TimeoutError() | subprocess.TimeoutExpired():
            return True
        case BaseExceptionGroup(exceptions=parts):
            return all(map(ran_out, parts))
        case aiote.TransferError(cause=BaseException() as cause):
            return ran_out(cause)
        case aiote.PeerError(reason=reason):
            return "silent for" in reason
        case pytest.fail.Exception():
            return str(error).startswith("Timeout (>")
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        facts = {
            "nodeid": item.nodeid,
            "assertion": assertion(report),
            "seed": seed(item, report),
            "load": "{:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg()) + f" on {os.cpu_count()} processors",
            "again": again(item.nodeid),
            "ran_out": "yes" if call.excinfo and ran_out(call.excinfo.value) else "",
        }
        item.user_properties += facts.items()
        report.user_properties = list(item.user_properties)
    return report


def told(facts: dict[str, Any]) -> list[str]:
    """Return the lines that tell of a failed test."""
    lines = ["", f"FAILED {facts['nodeid']}", *(f"    {line}" for line in facts["assertion"].splitlines())]
    if facts["seed"]:
        lines.append(f"  seed:  {facts['seed']}")
    return [*lines, f"  load:  {facts['load']} (of 1, 5 and 15 minutes)", f"  again: {facts['again']}"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    tests = [report for report in reports if isinstance(report, pytest.TestReport)]
    if tests:
        terminalreporter.section(f"what failed: {len(tests)}", sep="=", red=True, bold=True)
    for report in tests:
        for line in told(dict(report.user_properties)):
            terminalreporter.write_line(line)
