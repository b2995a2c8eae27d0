"""Measure a KV-cache service in several libraries, with alternating runs, and compare ours with the best of the others.

The workers are those of `bench/peers/kvcache_*.py`; `bench/peers/kvcache.py` describes their task. The decode side is
the initiator of a pair, and its clock counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiote.bench.measure import RunPlan
from aiote.bench.order_statistics import Spread, paired_ratio
from aiote.bench.record_table import size_text
from aiote.bench.records import GIB
from aiote.bench.sides import BenchError, Pair, Unsupported
from aiote.bench.work import HUGE_BYTES

__all__ = [
    "OURS",
    "WORKLOADS",
    "Line",
    "ServiceEntry",
    "ServiceRun",
    "Workload",
    "best_of",
    "do",
    "measure_service",
    "round_to_windows",
]

OURS = "aiote"
"""Contestants whose names begin with this are the library itself; the others are its peers."""
LAYERS = 16
SEEDS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of `pages` pages of `size` bytes in each layer, `window` of them in flight."""

    size: int
    pages: int
    window: int = 1
    layers: int = LAYERS

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one prompt."""
        return self.size * self.pages

    @property
    def request_bytes(self) -> int:
        """Bytes of one prompt."""
        return self.layers * self.layer_bytes

    @property
    def arena(self) -> int:
        """Bytes of the memory of one side."""
        return -(-self.window * self.request_bytes // HUGE_BYTES) * HUGE_BYTES

    def __str__(self) -> str:
        return f"{self.pages} x {size_text(self.size)}"

    def line(self, op: str, count: int, **more: int) -> str:
        """Return the line that orders a run from a worker; each line has another seed, so other bytes."""
        values = {**dataclasses.asdict(self), "count": count, "seed": next(SEEDS), **more}
        return f"run op={op} " + " ".join(f"{name}={value}" for name, value in values.items())


WORKLOADS = tuple(Workload(size << 10, pages) for size, pages in ((16, 8), (16, 64), (16, 512), (64, 64)))


@dataclass(frozen=True, slots=True)
class ServiceRun:
    """One run: its speed, the time of a request, and CPU seconds of both sides for each second."""

    gib_s: float
    p50_us: float
    p99_us: float
    cpu_decode: float
    cpu_prefill: float
    seconds: float

    @classmethod
    def of(cls, workload: Workload, count: int, decode: dict[str, Any], prefill: dict[str, Any]) -> ServiceRun:
        """Make a run from both sides' answers. Raises KeyError, TypeError, ZeroDivisionError for other answers."""
        seconds = float(decode["seconds"])
        return cls(
            gib_s=count * workload.request_bytes / seconds / GIB,
            p50_us=float(decode["p50_us"]),
            p99_us=float(decode["p99_us"]),
            cpu_decode=float(decode["cpu"]) / seconds,
            cpu_prefill=float(prefill["cpu"]) / seconds,
            seconds=seconds,
        )


@dataclass(slots=True)
class ServiceEntry:
    """A contestant at one workload; `refusal` says why it was left out."""

    name: str
    pair: Pair
    count: int = 0
    runs: list[ServiceRun] = field(default_factory=list)
    refusal: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the contestant is the library itself."""
        return self.name.startswith(OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The result of one contestant at one workload: medians of its runs, and `value` in GiB/s.

    `ratio` is only set for the library itself: its ratio to the best peer at this workload (`best`), each run divided
    by its neighbour.
    """

    provider: str
    size: int
    pages: int
    layers: int
    window: int
    contestant: str
    library: str
    runs: int
    value: Spread
    p50_us: float
    p99_us: float
    cpu_decode: float
    cpu_prefill: float
    best: str = ""
    ratio: Spread | None = None
    note: str = ""


def do(pair: Pair, line: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let a pair execute a line. Raises BenchError if bytes are not in their places, and Unsupported."""
    decode, prefill = pair.run(line)
    for side, answer in (("decode", decode), ("prefill", prefill)):
        if answer.get("verified") is not True:
            raise BenchError(f"{pair.name}, {side} side: the data are wrong after {line!r}")
    return decode, prefill


def _run_once(entry: ServiceEntry, workload: Workload, count: int, **more: int) -> ServiceRun:
    decode, prefill = do(entry.pair, workload.line("service", count, **more))
    try:
        return ServiceRun.of(workload, count, decode, prefill)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BenchError(f"{entry.name}: not a result: {decode!r}, {prefill!r}") from error


def round_to_windows(workload: Workload, count: float) -> int:
    """Round a number of requests to a multiple of the window, at least one window."""
    return max(1, round(count / workload.window)) * workload.window


def _warm_up(entry: ServiceEntry, workload: Workload, plan: RunPlan) -> None:
    """Check every layer on arrival, and determine how many requests take as long as a run should."""
    _run_once(entry, workload, 2 * workload.window, check=1)
    count = 2 * workload.window
    run = _run_once(entry, workload, count)
    if run.seconds < plan.seconds / 4:
        # A short run says little about the speed.
        count = round_to_windows(workload, min(count * 10, count * plan.seconds / max(run.seconds, 1e-6)))
        run = _run_once(entry, workload, count)
    entry.count = round_to_windows(workload, count * plan.seconds / max(run.seconds, 1e-6))


def _attempt(entry: ServiceEntry, step: Callable[[], object]) -> None:
    """Do a step. A peer that fails is left out from then on; a failure of the library itself is raised."""
    try:
        step()
    except BenchError as error:
        if entry.is_ours and not isinstance(error, Unsupported):
            raise
        entry.refusal = str(error)


def measure_service(
    entries: Sequence[ServiceEntry],
    provider: str,
    workload: Workload,
    plan: RunPlan,
    on_step: Callable[[str], object] = lambda _: None,
) -> list[Line]:
    """Measure one workload for all, in turn. Raises BenchError if the library fails or data are wrong."""
    for entry in entries:
        on_step(f"{provider} {workload}, {workload.window} under way: {entry.name}")
        _attempt(entry, lambda entry=entry: _warm_up(entry, workload, plan))  # type: ignore[misc]
    for number in range(plan.runs):
        for entry in entries if number % 2 == 0 else reversed(entries):
            if not entry.refusal:
                _attempt(entry, lambda entry=entry: entry.runs.append(_run_once(entry, workload, entry.count)))  # type: ignore[misc]
    best = best_of([entry for entry in entries if not entry.is_ours and not entry.refusal])
    return [_line(entry, provider, workload, best) for entry in entries]


def best_of(entries: Sequence[ServiceEntry]) -> ServiceEntry | None:
    """Return the contestant with the largest median, or None without contestants."""
    return max(entries, key=lambda entry: Spread.of([run.gib_s for run in entry.runs]).median, default=None)


def _line(entry: ServiceEntry, provider: str, workload: Workload, best: ServiceEntry | None) -> Line:
    runs = [] if entry.refusal else entry.runs
    ratio = None
    if entry.is_ours and best is not None and runs:
        ratio = paired_ratio([run.gib_s for run in runs], [run.gib_s for run in best.runs])

    def median(name: str) -> float:
        return Spread.of([getattr(run, name) for run in runs] or [0.0]).median

    return Line(
        provider=provider,
        size=workload.size,
        pages=workload.pages,
        layers=workload.layers,
        window=workload.window,
        contestant=entry.name,
        library=entry.pair.library,
        runs=len(runs),
        value=Spread.of([run.gib_s for run in runs] or [0.0]),
        p50_us=median("p50_us"),
        p99_us=median("p99_us"),
        cpu_decode=median("cpu_decode"),
        cpu_prefill=median("cpu_prefill"),
        best=best.name if ratio is not None and best is not None else "",
        ratio=ratio,
        note=entry.refusal,
    )
