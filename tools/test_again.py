"""When a failed test is run again, and what the second and third run make of it: the verdict of `make test`.

A busy machine may be too late for a wait of a test, and for nothing else: what was asserted holds at any speed. So a
test that failed because a wait ran out (`tests/support/plugins/failure_reports.py` says which) is run again when all
else is over: alone, in a fresh process, with the same library. Passed twice it is *unsteady*: told at the end and
counted, and no failure. Anything else (a broken promise, a leak, a blocked loop, a crash, a missing report) is a
failure at once.

Many unsteady tests are a defect of ours or of the machine, and no run passes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from test_reports import Failure, Outcome, Verdict

MOST_UNSTEADY = 5
TIMES = 2

Again = Callable[[Outcome, Failure], list[Failure] | None]
"""Runs one test of a step once more: returns its failures, none if it passed, and None if it left no report."""


def by_test(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Gather what one test said: its call and its teardown may both have failed."""
    found: dict[str, list[Failure]] = {}
    for failure in failures:
        found.setdefault(failure["nodeid"], []).append(failure)
    return list(found.values())


def judged(outcomes: Sequence[Outcome], again: Again, say: Callable[[str], None] = print) -> Verdict:
    """Run again what a wait has ended, and take what passes twice out of the outcomes' failures."""
    waits = [
        (outcome, failures)
        for outcome in outcomes
        for failures in by_test(outcome.report.failures)
        if all(failure.get("ran_out") for failure in failures)
    ]
    if len(waits) > MOST_UNSTEADY:
        return Verdict(
            said=f"{len(waits)} waits timed out, more than {MOST_UNSTEADY}, so these tests were not repeated"
        )
    verdict = Verdict()
    for outcome, failures in waits:
        say(f"again, alone: {failures[0]['nodeid']} ({outcome.name})")
        if told := repeated(outcome, failures[0], again):
            failures[0]["repeated"] = told
        else:
            verdict.unsteady.append(failures[0])
            pardon(outcome, failures)
    return verdict


def repeated(outcome: Outcome, failure: Failure, again: Again) -> str:
    """Run a test until it fails again, at most twice; return what it said then, an empty string if it always passed."""
    for _ in range(TIMES):
        found = again(outcome, failure)
        if found is None:
            return "it ended without a report"
        if found:
            return found[0]["assertion"]
    return ""


def pardon(outcome: Outcome, failures: list[Failure]) -> None:
    """Take an unsteady test out of a step, which passes if nothing else was wrong with it."""
    report = outcome.report
    report.failures = [failure for failure in report.failures if failure not in failures]
    passed, failed, skipped = report.counts
    report.counts = passed, failed - len(failures), skipped
    outcome.passed = outcome.passed or (outcome.only_tests_failed and not report.failures)
