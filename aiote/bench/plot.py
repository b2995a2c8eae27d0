"""The records as a picture. It needs matplotlib (the `plot` extra), which only this module imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from aiote.bench.record_table import size_text
from aiote.bench.records import BenchRecord
from aiote.bench.sides import BenchError

__all__ = ["draw", "require"]


def require() -> None:
    """Raise BenchError if matplotlib is missing. Call it before measuring for a plot."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError('a plot needs matplotlib; install with: pip install "aiote[plot]"')


def draw(path: Path, records: Sequence[BenchRecord]) -> None:
    """Draw a panel for each provider and unit: a group of bars for each kind of work, a bar for each contestant.

    The line on a bar goes from the least to the largest of its runs. Raises BenchError, OSError.
    """
    require()
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[BenchRecord]] = {}
    for record in records:
        if record.runs:
            panels.setdefault((record.provider, record.unit, record.memory_text), []).append(record)
    if not panels:
        raise BenchError("no records can be drawn; measure more sizes")
    figure = Figure(figsize=(max(6.0, 4.5 * len(panels)), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((provider, unit, memory), group) in zip(axes, panels.items(), strict=True):
        works = list(dict.fromkeys((record.op, record.size) for record in group))
        names = list(dict.fromkeys((record.contestant, record.loop, record.library, record.mode) for record in group))
        width = 0.8 / len(names)
        for at, name in enumerate(names):
            mine = [r for r in group if (r.contestant, r.loop, r.library, r.mode) == name]
            places = [works.index((record.op, record.size)) + at * width for record in mine]
            middle = [record.value.median for record in mine]
            below = [record.value.median - record.value.least for record in mine]
            above = [record.value.most - record.value.median for record in mine]
            label = " ".join(part for part in name if part)
            axis.bar(places, middle, width, label=label, yerr=[below, above], capsize=2)
        axis.set_xticks([at + 0.4 - width / 2 for at in range(len(works))])
        axis.set_xticklabels([f"{op}\n{size_text(size)}" for op, size in works])
        axis.set_ylabel(unit)
        axis.set_title(f"{provider}, {memory}" if memory else provider)
        axis.legend(fontsize="x-small")
    figure.savefig(path)
