"""Put reports of `aiote prove` into the docs: `add FILE.json`; `write` remakes the tables, `check` compares them.

Reports lie in docs/reports. Two tables are made from them: "Reports" in docs/hardware.md, and "What has been run" in
README.md. A row of the README's table also names the tests on this project's own machines, which write no report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page_parts import put_between

from aiote.cli.prove_private import private
from aiote.cli.prove_report import FORMAT

ROOT = Path(__file__).parents[1]
START, END = "<!-- reports -->\n", "<!-- end of reports -->\n"


@dataclass(frozen=True, slots=True)
class Row:
    """A rail of the README's table: its cells, and the subjects whose reports are about it. `hardware` and `software`
    stand where there is no report; None: the rail has no such column.
    """

    rail: str
    subjects: tuple[str, ...]
    hardware: str | None
    software: str | None
    simulator: str
    remarks: str


ROWS = (
    Row(
        "`local` (shared memory)",
        ("local",),
        None,
        "yes",
        "",
        "ours, needs no library; the default for peers on one host",
    ),
    Row("`socket` (TCP)", ("socket",), None, "yes", "", "ours, needs no library; the default between hosts"),
    Row(
        "`verbs` (libibverbs: InfiniBand, RoCE)",
        ("verbs",),
        "never",
        "soft-RoCE in a guest",
        "",
        "[docs/verbs.md](docs/verbs.md)",
    ),
    Row("`tcp`, `shm` of libfabric 1.17 and 2.5", ("tcp",), None, "yes", "", ""),
    Row("`verbs;ofi_rxm` of libfabric", (), "never", "soft-RoCE in a guest", "", ""),
    Row(
        "`efa` of libfabric 2.4 and later",
        ("efa",),
        "never",
        None,
        "transfers and messages, on a stand-in for its provider",
        "must be named ([docs/providers.md](docs/providers.md))",
    ),
    Row("`cxi` of libfabric", ("cxi",), "never", "never", "never", "refused: it binds memory to endpoints"),
    Row(
        "GPU memory",
        ("cuda",),
        "`local`, `socket`: one H100, one H200",
        None,
        "`local`, `socket`: on a stand-in for the driver",
        "shared on one host, else staged; `verbs` asks for a DMA-BUF ([docs/gpu.md](docs/gpu.md))",
    ),
    Row(
        "several rails, failover",
        (),
        "never",
        "`socket`, `tcp`, soft-RoCE",
        "yes",
        "[docs/failover.md](docs/failover.md)",
    ),
    Row("`sim`", (), None, None, "yes", "NIC models and virtual time for [your own tests](docs/testing.md)"),
)


class ReportError(Exception):
    """A file is no report that can be published; the text says why."""


def read(path: Path) -> dict[str, Any]:
    """Read a report. Raises ReportError for another file, another format, and names or addresses in it."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        if report["format"] != FORMAT:
            raise ReportError(f"{path}: format {report['format']}, expected {FORMAT}")
        if not all(isinstance(report[name], str) for name in ("what", "started", "conclusion")):
            raise ReportError(f"{path}: no report of aiote prove")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: no report of aiote prove: {error}") from error
    if private(report, ()) != report:
        raise ReportError(f"{path}: has names or addresses; it was not written by aiote prove, or changed afterwards")
    return report


def ground(report: dict[str, Any]) -> str:
    """Return the column of a report: its device is hardware, software (also of the kernel), or only imitated."""
    what, devices = report["what"], report["machine"]["rdma devices"].split("; ")
    if what in ("cxi", "sim"):
        return "hardware" if what == "cxi" else "simulator"
    if what == "cuda":
        return "hardware" if report["machine"]["nvidia driver"] != "none" else "simulator"
    if what == "efa":
        return "hardware" if any(": efa" in device for device in devices) else "simulator"
    if what == "verbs" and any("software" not in device for device in devices if device != "none"):
        return "hardware"
    return "software"


def newest(reports: Sequence[dict[str, Any]], row: Row, column: str) -> str:
    """Return the cell of the newest whole report about a rail, or an empty string."""
    about = [each for each in reports if each["what"] in row.subjects and ground(each) == column]
    about = [each for each in about if not each["partial"] and each["exit_status"] in (0, 1)]
    if not about:
        return ""
    last = max(about, key=lambda each: str(each["started"]))
    return f"{'passed' if last['exit_status'] == 0 else 'FAILED'} {last['started'][:10]}, {engines(last)}"


def engines(report: dict[str, Any]) -> str:
    """Say where both engines of a report were."""
    if report["far"] is None:
        return "in one process"
    return "in two processes" if report["far"]["host"] == "the same" else "on two machines"


def readme_table(reports: Sequence[dict[str, Any]]) -> str:
    """Return the README's table."""
    lines = ["| Rail | On hardware | On software | On a simulator | Remarks |", "|---|---|---|---|---|"]
    for row in ROWS:
        cells = [newest(reports, row, "hardware") or row.hardware or ""]
        for text, column in ((row.software, "software"), (row.simulator, "simulator")):
            cells.append("; ".join(filter(None, (text, newest(reports, row, column)))))
        lines.append(f"| {' | '.join((row.rail, *cells, row.remarks))} |".replace("|  |", "| |"))
    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines)


def hardware_table(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return the table of reports, the newest first."""
    lines = ["| Report | aiote | Engines | Devices | Passed | Failed | Not run |", "|---|---|---|---|---|---|---|"]
    for name, report in sorted(reports, key=lambda each: str(each[1]["started"]), reverse=True):
        counts = [
            sum(part["status"] == status for part in report["outcomes"]) for status in ("passed", "failed", "not run")
        ]
        where = engines(report) + (f"; partial: {report['partial']}" if report["partial"] else "")
        devices = report["machine"]["nvidia driver" if report["what"] == "cuda" else "rdma devices"]
        devices = "a stand-in" if report["what"] != "sim" and ground(report) == "simulator" else devices
        title = f"[{report['what']}, {report['started'][:10]}](reports/{name})"
        lines.append(f"| {' | '.join((title, report['machine']['aiote'], where, devices, *map(str, counts)))} |")
    return "".join(f"{line}\n" for line in lines)


def pages() -> dict[Path, str]:
    """Return both pages as the reports have them. Raises ReportError."""
    found = [(path.name, read(path)) for path in sorted((ROOT / "docs" / "reports").glob("*.json"))]
    tables = {
        ROOT / "README.md": readme_table([report for _, report in found]),
        ROOT / "docs" / "hardware.md": hardware_table(found),
    }
    return {path: _with(path, table) for path, table in tables.items()}


def _with(path: Path, table: str) -> str:
    try:
        return put_between(path.read_text(), START, END, table)
    except ValueError as error:
        raise ReportError(f"{path}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 and say on standard error which file does not fit."""
    parser = argparse.ArgumentParser(description="Put reports of aiote prove into the docs.")
    parser.add_argument("action", choices=("add", "write", "check"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    folder = ROOT / "docs" / "reports"
    try:
        for path in options.files if options.action == "add" else ():
            report = read(path)
            folder.mkdir(exist_ok=True)
            name = f"{report['what']}-{report['started'].replace(':', '')}.json"
            (folder / name).write_text(json.dumps(report, indent=1) + "\n")
            print(f"added: docs/reports/{name}")
        stale = [path for path, text in pages().items() if path.read_text() != text]
        for path in stale if options.action != "check" else ():
            path.write_text(pages()[path])
        if stale and options.action == "check":
            raise ReportError(f"not as the reports say: {', '.join(map(str, stale))}; run tools/prove_reports.py write")
    except ReportError as error:
        print(f"prove_reports: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
