"""The NICs of a rank in a plan: published models, or a model fitted to measurements of `aiote bench`.

The published models are those of `aiote.testing`, which were fitted to tables of TransferEngine (arXiv 2510.27656).
Files of `aiote bench --json` give a model of a single NIC that stands for all NICs of the measured process:

| of the model   | from the files                                                       |
|----------------|----------------------------------------------------------------------|
| `gbps`         | the largest median of `write` and `pages`                            |
| `operation_us` | one operation of `rate`, or else a page of the smallest `pages` line |
| `latency_us`   | half a round trip of `latency`, less the operation                   |
| `answer_us`    | the same as `latency_us`: a completion's way back is not measured    |
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..testing import CONNECTX7_400G, EFA_100G, EFA_200G, EFA_400G, NicModel

__all__ = ["MAX_NICS", "PUBLISHED_NICS", "Nics", "in_range", "nics_of"]

MAX_NICS = 8
"""The most NICs of a simulated engine."""
GIB = 1 << 30
PAPER = "arXiv 2510.27656, tables of single and paged writes"
PUBLISHED_NICS = {"efa-100g": (EFA_100G, 4), "efa-200g": (EFA_200G, 2), "efa-400g": (EFA_400G, 1),
                  "connectx-7": (CONNECTX7_400G, 1)}  # fmt: skip
"""Models by name, and how many such NICs each GPU has: p5 has four of 100 Gbit/s, p5en two of 200 Gbit/s."""


class Nics(NamedTuple):
    """The NICs of each rank: `per_rank` NICs of one model, and the source of the model's numbers."""

    name: str
    model: NicModel
    per_rank: int
    source: str

    @property
    def gbps(self) -> float:
        """The rate of all NICs of a rank together in one direction, in Gbit/s."""
        return self.model.gbps * self.per_rank

    def of(self, count: int) -> Nics:
        """Return the same NICs with `count` of them for each rank."""
        return self._replace(per_rank=count)

    def as_one(self) -> NicModel:
        """Return one NIC that carries as many bytes and operations as all NICs of a rank together."""
        model, count = self.model, self.per_rank
        return dataclasses.replace(model, gbps=model.gbps * count, operation_us=model.operation_us / count)


def in_range(name: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise UsageError, which states the accepted range, if a number is outside of it."""
    if not least <= value <= most:
        accepted = f"from {least:g} to {most:g}" if math.isfinite(most) else f"{least:g} or more"
        raise UsageError(f"{name}={value:g}: expected {accepted}")


def nics_of(name: str, count: int = 0) -> Nics:
    """Return NICs by a published name, or by paths of files of `aiote bench --json`, separated by commas.

    `count` is the number of NICs for each rank; 0 means as many as a GPU has, and for a file one. Raises UsageError for
    other names, for other files, and for a count above `MAX_NICS`.
    """
    if name in PUBLISHED_NICS:
        model, usual = PUBLISHED_NICS[name]
        found = Nics(name, model, count or usual, PAPER)
    else:
        found = Nics(name, _measured(_files(name)), count or 1, f"measured, {name}")
    in_range("nics per rank", found.per_rank, 1, MAX_NICS)
    return found


def _files(name: str) -> list[Path]:
    """Return the paths in a name. Raises UsageError if one is no file."""
    paths = [Path(part.strip()) for part in name.split(",")]
    missing = [path for path in paths if not path.is_file()]
    if len(paths) > 1 and missing and missing != paths:
        raise UsageError(f"nics={name!r}: there is no file {missing[0]}; write it with `aiote bench --json`")
    if missing:
        raise UsageError(
            f"nics={name!r}: expected one of {', '.join(PUBLISHED_NICS)}, or files of `aiote bench --json` with commas"
        )
    return paths


def _records(path: Path) -> list[_Record]:
    try:
        return [_Record.of(one) for one in json.loads(path.read_text())["records"] if one["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a file of `aiote bench --json`: {type(error).__name__}: {error}") from None


def _measured(paths: Sequence[Path]) -> NicModel:
    """Return a model fitted to the records of files. Raises UsageError, which names missing records."""
    records = [record for path in paths for record in _records(path)]
    path = ", ".join(map(str, paths))
    lines = sorted({one.line for one in records if one.contestant == "aiote"})
    if len(lines) != 1:
        raise UsageError(
            f"{path} has aiote's figures of {len(lines)} providers and libraries, expected of one; "
            "measure one of them with --provider"
        )
    mine = [one for one in records if one.line == lines[0] and one.contestant == "aiote"]
    carried = [one.value * GIB * 8 / 1e9 for one in mine if one.op in ("write", "pages")]
    trips = [one.value for one in mine if one.op == "latency"]
    if not carried or not trips:
        raise UsageError(
            f"{path} needs records of `latency`, and of `write` or `pages`: add a file of "
            "`aiote bench latency --json`, or of `aiote bench write --json`, after a comma"
        )
    operation = _operation(mine)
    one_way = max(0.0, min(trips) / 2 - operation)
    return NicModel(
        name=paths[0].stem, gbps=max(carried), latency_us=one_way, answer_us=one_way, operation_us=operation
    )


class _Record(NamedTuple):
    op: str
    contestant: str
    line: tuple[str, str]
    size: int
    value: float

    @classmethod
    def of(cls, one: Mapping[str, Any]) -> _Record:
        value, size = float(one["value"]["median"]), int(one["size"])
        if not 0 < value < math.inf or size < 0:
            raise ValueError(f"a median of {value} for {size} bytes")
        line = str(one["provider"]), str(one["library"])
        return cls(str(one["op"]), str(one["contestant"]), line, size, value)


def _operation(records: Sequence[_Record]) -> float:
    """Return how many microseconds an operation takes apart from its bytes."""
    rates = [one.value for one in records if one.op == "rate"]
    if rates:
        return 1e6 / max(rates)
    pages = [one for one in records if one.op == "pages"]
    if not pages:
        return 0.0
    least = min(pages, key=lambda one: one.size)
    return least.size / (least.value * GIB) * 1e6
