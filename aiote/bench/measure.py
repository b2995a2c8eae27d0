"""Runs that alternate between the contestants, and the records made from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from aiote.bench.congestion import congestion_control
from aiote.bench.contestants import Setting, processors
from aiote.bench.order_statistics import Spread, paired_ratio
from aiote.bench.records import UNITS, BenchRecord, TimedRun
from aiote.bench.sides import BenchError, Pair, Unsupported
from aiote.bench.work import HUGE_BYTES, Work

__all__ = ["Measurement", "RunPlan", "arena_for", "measure"]

LEAST_ARENA = 32 << 20
FIRST_BYTES = 32 << 20
FIRST_REQUESTS = 500
ALONE = 0.9
"""The share of a core below which a spinning process shares it with another process, so that its run says little."""
RETRIES = 5
SEEDS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How often and for how long: `runs` of about `seconds` each, after a cold one and one that finds the length."""

    runs: int = 5
    seconds: float = 0.3


@dataclass(slots=True)
class Measurement:
    """The measurements so far of one contestant at one kind of work. `loop` is "" for a contestant without event loop.

    `optional`: its failure is noted, and does not end the measurement of the others.
    """

    pair: Pair
    loop: str = ""
    optional: bool = False
    count: int = 0
    cold: float = 0.0
    runs: list[TimedRun] = field(default_factory=list)
    refusal: str = ""
    staged: dict[str, None] = field(default_factory=dict)


def arena_for(works: Sequence[Work]) -> int:
    """Return the bytes that an arena needs for any of these, the raw one's receives included, in huge pages."""
    most = max(LEAST_ARENA, *(work.window * work.request_bytes + 8 for work in works))
    return -(-most // HUGE_BYTES) * HUGE_BYTES


def _run_once(entry: Measurement, work: Work, count: int) -> TimedRun:
    """Do one run. Raises BenchError when the received bytes differ from the sent ones."""
    work = replace(work, count=count, seed=next(SEEDS))
    initiator, target = entry.pair.run(work.line())
    for side, answer in (("initiator", initiator), ("target", target)):
        if answer.get("verified") is not True:
            raise BenchError(f"{entry.pair.name} {side}: the data are wrong after {work.line()!r}")
        entry.staged.update(dict.fromkeys(f"{side} {text}" for text in answer.get("staged", ())))
    try:
        return TimedRun.of(work, initiator, target)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BenchError(f"{entry.pair.name}: not a result: {initiator!r}, {target!r}") from error


def _round_to_windows(work: Work, count: float) -> int:
    """Round to whole windows, so that every coroutine has the same share."""
    return max(1, round(count / work.window)) * work.window


def _warm_up(entry: Measurement, work: Work, plan: RunPlan) -> None:
    """Do the cold run, and determine how many requests take as long as a run should."""
    size = max(work.request_bytes, 1)
    count = _round_to_windows(work, min(FIRST_REQUESTS, max(work.window, FIRST_BYTES // size)))
    run = _run_once(entry, work, count)
    entry.cold = run.value
    for _ in range(8):
        wanted = _round_to_windows(work, count * plan.seconds / max(run.seconds, 1e-6))
        if run.seconds >= plan.seconds / 4:
            break
        # A short run says little about the speed, so the next one is at most ten times as long.
        count = min(wanted, count * 10)
        run = _run_once(entry, work, count)
    entry.count = _round_to_windows(work, count * plan.seconds / max(run.seconds, 1e-6))


def _shared(run: TimedRun) -> bool:
    return min(run.cpu_initiator, run.cpu_target) < ALONE * run.seconds


def _round(entries: Sequence[Measurement], work: Work) -> dict[int, TimedRun]:
    """Do one run of each. An optional contestant that fails is left out from then on."""
    found = {}
    for entry in entries:
        try:
            found[id(entry)] = _run_once(entry, work, entry.count)
        except BenchError as error:
            _note(entry, error)
    return found


def _note(entry: Measurement, error: BenchError) -> None:
    """Leave out a contestant that failed. Raises the error if the contestant is not optional."""
    if not entry.optional:
        raise error
    entry.refusal = entry.pair.broken = str(error)
    entry.runs.clear()


def _alternate(entries: Sequence[Measurement], work: Work, plan: RunPlan, *, spins: bool) -> int:
    """Do the runs, one of each contestant in turn, every other round in the opposite order. Return how many rounds were
    discarded because a spinning process of the engine or the baseline had to share its core.
    """
    disturbed = 0
    number = 0
    while number < plan.runs and (able := [entry for entry in entries if not entry.refusal]):
        found = _round(able if number % 2 == 0 else list(reversed(able)), work)
        ours = [found[id(entry)] for entry in able if entry.pair.name in ("aiote", "raw")]
        if spins and disturbed < RETRIES and any(_shared(run) for run in ours):
            disturbed += 1
            continue
        for entry in able:
            if not entry.refusal:
                entry.runs.append(found[id(entry)])
        number += 1
    return disturbed


def measure(
    entries: Sequence[Measurement],
    work: Work,
    setting: Setting,
    plan: RunPlan,
    on_step: Callable[[str], object] | None = None,
) -> list[BenchRecord]:
    """Measure one kind of work for all contestants; one that cannot do it has a record without a figure.

    Raises BenchError if a worker fails or the data are wrong.
    """
    able: list[Measurement] = []
    for entry in entries:
        if on_step is not None:
            on_step(f"{work.op} {work.size}: {entry.pair.name}")
        try:
            if entry.pair.broken:
                raise BenchError(entry.pair.broken)
            _warm_up(entry, work, plan)
            able.append(entry)
        except Unsupported as refusal:
            entry.refusal = str(refusal)
        except BenchError as error:
            _note(entry, error)
    # On a machine with one processor every run is disturbed.
    spins = setting.mode == "spin" and len(set(processors())) > 1
    disturbed = _alternate(able, work, plan, spins=spins) if able else 0
    raw = next((entry for entry in able if entry.pair.name == "raw"), None)
    return [_record(entry, work, setting, raw, disturbed) for entry in entries]


def _record(entry: Measurement, work: Work, setting: Setting, raw: Measurement | None, disturbed: int) -> BenchRecord:
    runs = entry.runs
    ratio = None
    if raw is not None and raw is not entry and runs:
        ratio = paired_ratio([run.value for run in runs], [run.value for run in raw.runs])
    timed = work.op == "latency" and bool(runs)
    return BenchRecord(
        op=work.op,
        contestant=entry.pair.name,
        provider=setting.provider,
        library=entry.pair.library,
        loop=entry.loop,
        mode=setting.mode,
        rails=setting.rails,
        congestion=congestion_control() if setting.over_tcp else "",
        size=work.size,
        window=work.window,
        pages=work.pages,
        runs=len(runs),
        unit=UNITS[work.op],
        value=Spread.of([run.value for run in runs] or [0.0]),
        cold=entry.cold,
        cpu_initiator=Spread.of([run.cpu_initiator / run.seconds for run in runs] or [0.0]).median,
        cpu_target=Spread.of([run.cpu_target / run.seconds for run in runs] or [0.0]).median,
        p99_us=Spread.of([run.p99_us for run in runs]).median if timed else None,
        max_us=max(run.max_us for run in runs) if timed else None,
        ratio=ratio,
        disturbed=disturbed,
        note=entry.refusal or "; ".join(entry.staged),
        memory=setting.memory,
        gpu_sharing=setting.gpu_sharing,
    )
