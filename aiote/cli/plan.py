"""The command `aiote plan weights`: predict what a weight update would move, before its ranks exist."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import rich.box
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiote.cli import published_models
from aiote.cli.layoutfile import read_layout, read_recipe
from aiote.cli.plan_output import NICS_HELP, console, drawn, print_json, refusing, size_of
from aiote.cli.plan_times import Calls, panels, plain_nics, show_times, times_of
from aiote.errors import UsageError
from aiote.plan import nics_of
from aiote.plan.nics import in_range
from aiote.plan.plot import draw, require
from aiote.weights import Layout, Recipe, UpdatePlan, plan_update
from aiote.weights.assignment import bytes_by_senders
from aiote.weights.balance import shares
from aiote.weights.dtypes import ITEMSIZE
from aiote.weights.tasks import fetches

__all__ = ["Gathering", "PlanSummary", "picture", "summary_of", "weights"]

BAR = 36
GROUPS = 12


class Preset(StrEnum):
    """Published updates, whose layouts are known."""

    QWEN3_235B = "qwen3-235b"
    KIMI_K2 = "kimi-k2"


class Gather(StrEnum):
    """The choices of `plan_update` for its argument `gather`."""

    AUTO = "auto"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Gathering:
    """A group of tensors that are gathered alike: their common name, `example` as one of them, and the reason."""

    tensors: str
    example: str
    units: int
    bytes: int
    ranks: int
    why: str


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in numbers. Sizes are bytes, by rank; `bound` is the least that the busiest source could send.

    The number of a NIC is the number of its ranks / ranks_per_nic: `source 3` or `target 0`. A NIC's load is that of
    its busier direction; `by_nic` has the bytes of both, "in" and "out". `seconds` is the time that the hottest NIC
    takes at its speed.
    """

    name: str
    gather: str
    digest: str
    source_tensors: int
    target_tensors: int
    sent: dict[int, int]
    received: dict[int, int]
    gathered: dict[int, int]
    bound: int
    by_nic: dict[str, dict[str, int]]
    hottest_nic: str
    hottest_bytes: int
    hottest_ranks: str
    seconds: float
    gathers: tuple[Gathering, ...]


def weights(
    preset: Annotated[Preset | None, typer.Option(help="A published update instead of files.")] = None,
    sources: Annotated[Path | None, typer.Option(metavar="FILE", help="The trainers' layout, TOML or JSON.")] = None,
    targets: Annotated[Path | None, typer.Option(metavar="FILE", help="The inference ranks' layout.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="How target tensors are made of source tensors.")
    ] = None,
    gather: Annotated[
        Gather, typer.Option(help="always: gather whole tensors on every trainer, as full_tensor does.")
    ] = (Gather.AUTO),
    ranks_per_nic: Annotated[int, typer.Option(help="How many ranks share a NIC.")] = 1,
    gbits: Annotated[float, typer.Option(help="A NIC's speed, in Gbit/s.")] = 400.0,
    nics: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=NICS_HELP, show_default="one of --gbits without latency")
    ] = "",
    nics_per_rank: Annotated[int, typer.Option(help="NICs of a rank; 0: as many as a GPU has.")] = 0,
    calls: Annotated[Calls, typer.Option(help="What a trainer's calls cost: as published, or nothing.")] = (
        Calls.PUBLISHED
    ),
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, every rank by itself.")] = False,
) -> None:
    """Plan a weight update, and show bytes by rank, the hottest NIC, which tensors are gathered and why, and the time.

    docs/weights.md describes the files, docs/planner.md the predictions.
    """
    with refusing():
        if plot:
            require()
        found = nics_of(nics, nics_per_rank) if nics else plain_nics(gbits, nics_per_rank or 1)
        in_range("ranks-per-nic", ranks_per_nic, 1)
        name, layouts = _chosen(preset, sources, targets, recipe)
        in_range("ranks-per-nic", ranks_per_nic, 1, len(layouts[0].ranks) + len(layouts[1].ranks))
        plan = plan_update(*layouts, gather=gather.value)
        summary = summary_of(name, plan, ranks_per_nic, found.model.gbps)
        times = times_of(plan, found, calls)
        drawn(plot, lambda path: draw(path, f"weight update: {name}", panels(summary, times)))
    if as_json:
        print_json({**asdict(summary), "nics": found.source, **times.described()})
    else:
        picture(summary, console())
        show_times(times, found, console())


def _chosen(
    preset: Preset | None, sources: Path | None, targets: Path | None, recipe: Path | None
) -> tuple[str, tuple[Layout, Layout, Recipe]]:
    if preset is not None:
        if sources or targets or recipe:
            raise UsageError("--preset has layouts and a recipe of its own: give either --preset or files")
        typer.echo(f"planning {preset.value}; this takes some seconds", err=True)
        qwen = preset is Preset.QWEN3_235B
        model = published_models.qwen3_235b() if qwen else published_models.kimi_k2()
        return preset.value, model.plan_of()
    if sources is None or targets is None:
        raise UsageError("give --preset NAME, or --sources FILE and --targets FILE, and --recipe FILE if one is needed")
    made = read_recipe(recipe) if recipe is not None else Recipe()
    return f"{sources.name} to {targets.name}", (read_layout(sources), read_layout(targets), made)


def summary_of(name: str, plan: UpdatePlan, ranks_per_nic: int = 1, gbits: float = 400.0) -> PlanSummary:
    """Return a plan in numbers."""
    load: dict[int, int] = {}
    for found in shares(bytes_by_senders(plan.entries, plan.sources, plan.targets)).values():
        for rank, size in found.items():
            load[rank] = load.get(rank, 0) + size
    gathers, read = _gathers(plan)
    by_nic = _by_nic(plan, read, ranks_per_nic)
    nic, size = max(((name, max(ways.values())) for name, ways in by_nic.items()), key=lambda item: item[1])
    side = plan.sources if nic.startswith("source") else plan.targets
    sharing = [rank for rank in side.ranks if rank // ranks_per_nic == int(nic.split()[1])]
    return PlanSummary(
        name,
        plan.gather,
        plan.digest.hex(),
        len(plan.sources.tensors),
        len(plan.targets.tensors),
        *plan.traffic,
        bound=max(load.values(), default=0),
        by_nic=by_nic,
        hottest_nic=nic,
        hottest_bytes=size,
        hottest_ranks=_ranges(sharing),
        seconds=size * 8 / gbits / 1e9,
        gathers=gathers,
    )


def _by_nic(plan: UpdatePlan, read: Mapping[int, int], ranks_per_nic: int) -> dict[str, dict[str, int]]:
    """Return the bytes that each NIC sends and receives."""
    nics: dict[str, dict[str, int]] = {}
    sizes: tuple[tuple[str, str, Mapping[int, int]], ...] = (
        ("source", "out", plan.traffic.sent),
        ("source", "out", read),
        ("source", "in", plan.traffic.gathered),
        ("target", "in", plan.traffic.received),
    )
    for side, way, by_rank in sizes:
        for rank, size in by_rank.items():
            ways = nics.setdefault(f"{side} {rank // ranks_per_nic}", {"in": 0, "out": 0})
            ways[way] += size
    return nics


def _gathers(plan: UpdatePlan) -> tuple[tuple[Gathering, ...], dict[int, int]]:
    """Return the gathered tensors in groups, most bytes first, and the bytes that gathering reads from each rank."""
    read: dict[int, int] = {}
    found: dict[tuple[str, int, str], list[Any]] = {}
    for number, mesh in plan.meshes.items():
        unit = plan.units[number]
        entry = plan.entries[unit.entry]
        size = 0
        for rank, _, start, stop in fetches(entry, entry.cells[unit.cell], unit, plan.sources):
            if rank != unit.maker:
                part = ITEMSIZE[entry.dtype] * math.prod(map(int.__sub__, stop, start))
                read[rank] = read.get(rank, 0) + part
                size += part
        key = _alike(entry.target), len(mesh), _why(plan, unit.entry)
        known = found.setdefault(key, [entry.target, 0, 0])
        known[1] += 1
        known[2] += size
    several = [
        Gathering(tensors, example, units, size, ranks, why)
        for (tensors, ranks, why), (example, units, size) in found.items()
    ]
    return tuple(sorted(several, key=lambda one: (-one.bytes, one.tensors))), read


def _why(plan: UpdatePlan, number: int) -> str:
    """Return the reason why a tensor is gathered."""
    entry = plan.entries[number]
    if plan.gather == "always" or entry.block is None:
        return "--gather always asks for whole tensors"
    split = []
    for name in dict.fromkeys(part.source for part in entry.parts):
        shapes = {held.shape for held in plan.sources.tensors[name].sharding.held}
        shape = min(shapes)
        if any(extent % block for extent, block in zip(shape[-2:], entry.block, strict=True)):
            split.append(f"{_alike(name)} has {'x'.join(map(str, shape))} on a rank")
    blocks = "x".join(map(str, entry.block))
    return (
        f"blocks of {blocks} cross edges between ranks: {', '.join(dict.fromkeys(split)) or 'parts begin within one'}"
    )


def _alike(name: str) -> str:
    """Return a name of a tensor with the numbers of layer and expert replaced by *."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# The picture.


def picture(summary: PlanSummary, console: Console) -> None:
    """Print tables and bars."""
    table = Table(box=rich.box.SIMPLE, show_header=False, title=f"weight update: {summary.name}", title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    most = max(summary.sent.values(), default=0)
    over = f"{most / summary.bound:.4f} of it" if summary.bound else "nothing is sent"
    written, gathered = (size_of(sum(sizes.values())) for sizes in (summary.sent, summary.gathered))
    for name, value in (
        ("sources", f"{len(summary.sent)} ranks, {summary.source_tensors} tensors"),
        ("targets", f"{len(summary.received)} ranks, {summary.target_tensors} tensors"),
        ("written", f"{written}; gathered before: {gathered}"),
        ("load bound", f"{size_of(summary.bound)}: the least that the busiest source could send"),
        ("busiest source", f"{size_of(most)}, {over}"),
        ("hottest NIC", f"{summary.hottest_nic}, of ranks {summary.hottest_ranks}: {size_of(summary.hottest_bytes)}, "
                        f"{summary.seconds * 1e3:.1f} ms at its speed"),
        ("digest", summary.digest[:32]),
    ):  # fmt: skip
        table.add_row(name, value)
    console.print(table)
    letter = "\N{FULL BLOCK}" if console.encoding.lower().startswith("utf") else "#"
    for title, by_rank, style in (
        ("sent by source ranks", summary.sent, "green"),
        ("received by target ranks", summary.received, "blue"),
        ("gathered by source ranks", summary.gathered, "yellow"),
    ):
        if any(by_rank.values()):
            console.print(_bars(title, by_rank, letter, style))
    console.print(_gathering_table(summary) if summary.gathers else "Nothing is gathered: all blocks lie in one rank.")


def _gathering_table(summary: PlanSummary) -> Table:
    table = Table(box=rich.box.SIMPLE, title="gathered", title_justify="left")
    for heading, justify in (("tensors", "left"), ("units", "right"), ("bytes", "right"), ("over ranks", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("why")
    for one in summary.gathers[:GROUPS]:
        table.add_row(one.tensors, str(one.units), size_of(one.bytes), str(one.ranks), one.why)
    if len(summary.gathers) > GROUPS:
        table.add_row(f"and {len(summary.gathers) - GROUPS} more, which --json lists")
    return table


def _bars(title: str, by_rank: Mapping[int, int], letter: str, style: str) -> Table:
    """Return a bar for each size, with the ranks of that size; sizes with equal text share a bar."""
    groups: dict[str, list[int]] = {}
    for rank, size in by_rank.items():
        groups.setdefault(size_of(size), []).append(rank)
    table = Table(box=None, show_header=False, title=title, title_justify="left", padding=(0, 1))
    table.add_column(justify="right", max_width=40)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(by_rank.values())
    for text, ranks in sorted(groups.items(), key=lambda item: -by_rank[item[1][0]])[:GROUPS]:
        bar = letter * round(BAR * by_rank[ranks[0]] / most)
        table.add_row(_ranges(ranks), Text(bar, style=style), text)
    if len(groups) > GROUPS:
        table.add_row(f"and {len(groups) - GROUPS} more sizes, which --json lists")
    return table


def _ranges(ranks: Iterable[int]) -> str:
    """Return ranks as "0-7, 64-71"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
