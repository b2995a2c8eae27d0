"""Draw plans as pictures. Only this module imports matplotlib (the `plot` extra)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError

__all__ = ["Panel", "draw", "require"]

MOST_LABELS = 16


class Panel(NamedTuple):
    """A bar chart: each series has a value by label. The bars of a label are beside each other, or `stacked`."""

    title: str
    unit: str
    series: Mapping[str, Mapping[str, float]]
    stacked: bool = False


def require() -> None:
    """Raise UsageError if matplotlib is missing. Callers check this before they compute a plan."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('a plot needs matplotlib; install with: pip install "aiote[plot]"')


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw panels below each other into a file; its suffix selects the format.

    Raises UsageError if matplotlib is missing, or if the file cannot be written.
    """
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(panels) + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        labels = list(dict.fromkeys(label for values in panel.series.values() for label in values))
        width = 0.8 if panel.stacked else 0.8 / max(1, len(panel.series))
        below = dict.fromkeys(labels, 0.0)
        for number, (name, values) in enumerate(panel.series.items()):
            places = [labels.index(label) + (0 if panel.stacked else number * width) for label in values]
            bottom = [below[label] for label in values] if panel.stacked else None
            axis.bar(places, list(values.values()), width, bottom=bottom, label=name)
            for label, value in values.items():
                below[label] += value
        middle = 0 if panel.stacked else 0.4 - width / 2
        every = -(-len(labels) // MOST_LABELS) or 1
        axis.set_xticks([place + middle for place in range(0, len(labels), every)], labels[::every])
        axis.set_title(panel.title, fontsize="medium")
        axis.set_ylabel(panel.unit)
        if len(panel.series) > 1:
            axis.legend(fontsize="x-small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the plot cannot be written there: {error}") from None
