"""The records as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from aiote.bench.records import BenchRecord

__all__ = ["show", "size_text"]

NOTE = 40


def size_text(size: int) -> str:
    """Return a short form of a number of bytes: 64K, 1M."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def _value(record: BenchRecord, value: float) -> str:
    if record.unit == "ops/s":
        return f"{value:,.0f}"
    return f"{value:.2f}"


def _figure(record: BenchRecord) -> str:
    if record.runs == 0:
        return "-"
    text = f"{_value(record, record.value.median)} {record.unit}"
    if record.p99_us is not None and record.max_us is not None:
        text += f", p99 {record.p99_us:.1f}, max {record.max_us:.0f}"
    return text


def _ratio(record: BenchRecord) -> str:
    if record.ratio is None:
        return record.note[:NOTE]
    return f"{record.ratio.median:.2f} ({record.ratio.least:.2f}-{record.ratio.most:.2f})"


def _work(record: BenchRecord) -> str:
    pages = f" x {record.pages}" if record.pages else ""
    return f"{record.op} {size_text(record.size)}{pages}, {record.window} out"


def show(records: Sequence[BenchRecord], console: Console) -> None:
    """Print a table for each provider, library version, mode and memory."""
    groups: dict[tuple[str, str, str, str, str], list[BenchRecord]] = {}
    for record in records:
        engine = next((r.library for r in records if r.provider == record.provider and r.loop == record.loop), "")
        library = record.library if record.contestant in ("aiote", "raw") else engine
        key = (record.provider, library, record.mode, record.congestion, record.memory_text)
        groups.setdefault(key, []).append(record)
    for (provider, library, mode, congestion, memory), group in groups.items():
        under = f", TCP congestion control {congestion}" if congestion else ""
        of = f", {memory}" if memory else ""
        table = Table(title=f"{provider}, {library}, {mode}{under}{of}", title_justify="left")
        for name in ("work", "who"):
            table.add_column(name, no_wrap=True)
        for name in ("median", "least-most", "cold", "CPU from/to", "to raw"):
            table.add_column(name, justify="right", no_wrap=True)
        for record in group:
            who = f"{record.contestant} ({record.loop})" if record.loop else record.contestant
            spread = f"{_value(record, record.value.least)}-{_value(record, record.value.most)}"
            cpu = f"{record.cpu_initiator:.2f}/{record.cpu_target:.2f}"
            if record.runs == 0:
                spread = cpu = ""
            table.add_row(_work(record), who, _figure(record), spread, _value(record, record.cold), cpu, _ratio(record))
        console.print(table)
    if disturbed := sum(record.disturbed for record in records if record.contestant == "aiote"):
        console.print(
            f"{disturbed} rounds were discarded and repeated, because another process ran on the "
            "cores of a spinning one"
        )
