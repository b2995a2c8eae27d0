"""The records of a measurement, and their JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiote.bench.order_statistics import Spread
from aiote.bench.work import Work

__all__ = ["FORMAT", "BenchRecord", "TimedRun", "machine", "value_of", "write_json"]

FORMAT = 1
"""The version of the JSON file."""
GIB = 1 << 30
UNITS = {"write": "GiB/s", "read": "GiB/s", "pages": "GiB/s", "send": "ops/s", "rate": "ops/s", "latency": "us"}


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of one contestant: `value` in the unit of its kind of work, its duration, and each side's CPU seconds."""

    value: float
    seconds: float
    cpu_initiator: float
    cpu_target: float
    p99_us: float = 0.0
    max_us: float = 0.0

    @classmethod
    def of(cls, work: Work, initiator: dict[str, Any], target: dict[str, Any]) -> TimedRun:
        """Make a run from the answers of both sides. Raises KeyError, TypeError for other answers."""
        return cls(
            value=value_of(work, initiator),
            seconds=float(initiator["seconds"]),
            cpu_initiator=float(initiator["cpu"]),
            cpu_target=float(target["cpu"]),
            p99_us=float(initiator.get("p99_us", 0.0)),
            max_us=float(initiator.get("max_us", 0.0)),
        )


def value_of(work: Work, answer: dict[str, Any]) -> float:
    """Return GiB/s, requests a second, or the median of the round trips in microseconds."""
    if work.op == "latency":
        return float(answer["p50_us"])
    each = work.count / float(answer["seconds"])
    return each if UNITS[work.op] == "ops/s" else each * work.request_bytes / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """One line of the table: a contestant at one kind of work.

    `value` is in `unit`. `cold` is the value of the cold run, the first one after the processes connected; no other
    figure includes it. `cpu_initiator` and `cpu_target` are CPU seconds per second of the run. `ratio` is the ratio to
    the raw loops: each run is divided by the raw run next to it in time. More is better for bandwidths and rates, less
    for round trips. `disturbed` counts runs that were discarded because a spinning process did not have a core to
    itself. `memory` is the memory of the initiator and the target. `gpu_sharing` is the engines' setting, None for the
    default in host memory. `note` gives the reason for a missing figure, or the rails that staged GPU memory.
    """

    op: str
    contestant: str
    provider: str
    library: str
    loop: str
    mode: str
    rails: str
    congestion: str
    size: int
    window: int
    pages: int
    runs: int
    unit: str
    value: Spread
    cold: float
    cpu_initiator: float
    cpu_target: float
    p99_us: float | None
    max_us: float | None
    ratio: Spread | None
    disturbed: int
    note: str = ""
    memory: str = "host"
    gpu_sharing: bool | None = None

    @property
    def memory_text(self) -> str:
        """The description of the memory for people; empty for host memory."""
        if self.memory == "host":
            return ""
        return f"memory {self.memory}, GPU sharing {'off' if self.gpu_sharing is False else 'on'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return dataclasses.asdict(self)


def machine() -> dict[str, Any]:
    """Return the description of the machine that was measured."""
    model = ""
    if (info := Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        model = next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")
    return {
        "processor": model or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_json(path: Path, records: Sequence[BenchRecord]) -> None:
    """Write all records. An existing file is replaced atomically."""
    text = json.dumps(
        {"format": FORMAT, "machine": machine(), "records": [record.as_dict() for record in records]}, indent=1
    )
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text + "\n")
    beside.replace(path)
