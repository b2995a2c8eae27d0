"""A pytest plugin: the run ends by saying, loudly, what this machine could not run and which libfabric it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

# marker -> (is it here, what is missing)
HARDWARE: dict[str, tuple[Callable[[], bool], str]] = {
    "needs_gpu": (Path("/dev/nvidiactl").exists, "no NVIDIA GPU (/dev/nvidiactl)"),
    "needs_rdma": (lambda: any(Path("/dev/infiniband").glob("uverbs*")), "no RDMA device (/dev/infiniband/uverbs*)"),
}


def library() -> str:
    """Return one line on the libfabric in use, or why there is none."""
    try:
        from aiote.rails import library_summary

        return library_summary()
    except Exception as error:
        return f"none: {type(error).__name__}: {error}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {marker: reason for marker, (present, reason) in HARDWARE.items() if not present()}
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _reasons(reports: list[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    reasons = Counter[str]()
    for report in reports:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    return reasons


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = _reasons(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.section(f"NOT RUN ON THIS MACHINE: {skipped.total()}", sep="!", yellow=True, bold=True)
        for reason, count in skipped.most_common():
            terminalreporter.write_line(f"{count:5} x  {reason}", yellow=True)
    else:
        terminalreporter.section("nothing was skipped on this machine", sep="-")
    terminalreporter.write_line(f"libfabric: {library()}")
