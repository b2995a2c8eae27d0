"""The plan of a weight update: what every source rank reads, makes and writes, computed once for all updates.

    plan = plan_update(sources, targets, recipe)

**Units.** Each target tensor falls into cells (`cells`), and the planner assigns them to the source ranks that hold
them (`assign_cells`). The result is a list of units: a box of a target tensor, and the one rank that sends it.
Everything else follows from the units and the layouts, so each rank computes only its own copies (`UpdatePlan.tasks`).

**Gathering.** With `gather="auto"` a source rank sends what it holds. It reads from other ranks only if a quantization
block crosses an edge between them, and then only that block. With `gather="always"` all ranks that share a tensor get
the whole of it and divide the target ranks among themselves: the schedule of frameworks that call `full_tensor`.

**Groups.** The ranks of a gathering unit form a mesh. Collectives of two meshes with a common rank must not interleave,
so meshes are coloured: the meshes of one group share no rank. All ranks take the groups in the same order, and also the
units of a mesh.

**Order.** Turns spread writes over the target ranks: the source rank in place s of S begins its list of units that do
not gather at the share s / S of the list, and its lists of target ranks at place s. So ranks that send the same tensors
to the same target ranks are at different places of these lists at any time. Units that are far larger than the others
come first.

This module computes; it knows neither memory nor time. All arithmetic is on integers and in a fixed order, so ranks
that plan from the same input get the same plan; they compare `UpdatePlan.digest`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from ..errors import UsageError
from .assignment import Unit, assign_cells, assign_tensors, split_unit
from .dtypes import ITEMSIZE
from .entries import Entry, bytes_needed, entries_of, part_of
from .layout import Layout
from .recipe import Recipe
from .tasks import Task, fetches, task_of

__all__ = ["Traffic", "UpdatePlan", "in_turn", "plan_update"]

T = TypeVar("T")
LARGE = 32
"""A unit with more than this many times its rank's average size must not come last: Kimi-K2's embedding is 57 % of the
bytes that a rank of the first stage sends. A simulated update takes 0.88 s with such units first, and 1.17 s without
(docs/weights.md)."""
VERSION = b"aiote weight plan 1"


class Traffic(NamedTuple):
    """Bytes by rank: `sent` and `gathered` (read from other source ranks) by source rank, `received` by target rank."""

    sent: dict[int, int]
    received: dict[int, int]
    gathered: dict[int, int]


class UpdatePlan:
    """What every rank does in an update. Immutable. Made by `plan_update`."""

    def __init__(
        self, sources: Layout, targets: Layout, entries: Sequence[Entry], units: Sequence[Unit], gather: str
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.entries = tuple(entries)
        self.units = tuple(units)
        self.gather = gather

    def __repr__(self) -> str:
        return f"<UpdatePlan of {len(self.entries)} tensors in {len(self.units)} units, {self.digest.hex()[:16]}>"

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of 32 bytes, equal on all ranks that have the same plan for the same layouts."""
        hashed = hashlib.blake2b(VERSION + self.gather.encode(), digest_size=32)
        hashed.update(self.sources.digest())
        hashed.update(self.targets.digest())
        for entry in self.entries:
            hashed.update(repr(entry[:-1]).encode())
        for unit in self.units:
            hashed.update(repr(tuple(unit)).encode())
        return hashed.digest()

    @functools.cached_property
    def meshes(self) -> dict[int, tuple[int, ...]]:
        """The mesh of each unit that gathers from other ranks, by the unit's number: these ranks and its maker."""
        found = {}
        for number, unit in enumerate(self.units):
            entry = self.entries[unit.entry]
            cell = entry.cells[unit.cell]
            if not cell.direct:
                ranks = {unit.maker, *(rank for rank, *_ in fetches(entry, cell, unit, self.sources))}
                if len(ranks) > 1:
                    found[number] = tuple(sorted(ranks))
        return found

    def gathers_from(self, source: int) -> set[int]:
        """Return the other source ranks that a source rank reads from to gather its units."""
        found = {rank for number in self._by_maker.get(source, []) for rank in self.meshes.get(number, ())}
        return found - {source}

    @functools.cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The meshes, coloured: meshes of the same group share no rank and gather at the same time."""
        groups: list[list[tuple[int, ...]]] = []
        taken: list[set[int]] = []
        for mesh in dict.fromkeys(self.meshes.values()):
            number = next((n for n, ranks in enumerate(taken) if ranks.isdisjoint(mesh)), len(groups))
            if number == len(groups):
                groups.append([])
                taken.append(set())
            groups[number].append(mesh)
            taken[number].update(mesh)
        return tuple(map(tuple, groups))

    def order(self, source: int) -> list[int]:
        """Return the numbers of a source rank's units, in the order in which the rank makes them.

        Units that gather come first, group by group. For a source rank without units the list is empty.
        """
        mine = self._by_maker.get(source, [])
        group = {mesh: number for number, several in enumerate(self.groups) for mesh in several}
        gathered = sorted((group[self.meshes[n]], n) for n in mine if n in self.meshes)
        others = [n for n in mine if n not in self.meshes]
        sizes = [sum(len(ranks) * size for ranks, size in self.bytes(n)) for n in others]
        return [n for _, n in gathered] + in_turn(others, sizes, self._place.get(source, 0), len(self._place))

    def tasks(self, source: int, small: Callable[[Task], bool] | None = None) -> Iterator[Task]:
        """Yield the tasks of a source rank, in order. The copies are computed one task at a time.

        A task for which `small` returns False is halved, repeatedly, down to single elements or quantization blocks.
        """
        shift = self._place.get(source, 0)
        for number in self.order(source):
            yield from self._split_tasks(self.units[number], shift, small)

    def _split_tasks(self, unit: Unit, shift: int, small: Callable[[Task], bool] | None) -> Iterator[Task]:
        entry = self.entries[unit.entry]
        task = task_of(entry, unit, self.sources, self.targets, shift)
        several = () if small is None or small(task) else split_unit(unit, entry.size)
        for half in several:
            yield from self._split_tasks(half, shift, small)
        if not several:
            yield task

    def task(self, number: int) -> Task:
        """Return the task that the maker of a unit does for it."""
        unit = self.units[number]
        shift = self._place[unit.maker]
        return task_of(self.entries[unit.entry], unit, self.sources, self.targets, shift)

    @functools.cached_property
    def senders(self) -> dict[int, tuple[int, ...]]:
        """The source ranks that write to each target rank. A target rank expects one commit from each of them."""
        wants: dict[int, list[int]] = {rank: [] for rank in self.targets.ranks}
        for number, (ranks, _) in enumerate(self._written):
            for rank in ranks:
                wants[rank].append(number)
        # Target ranks that need the same units have the same senders, so these are computed once.
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for numbers in {tuple(several) for several in wants.values()}:
            known[numbers] = tuple(sorted({maker for number in numbers for maker in self._written[number][1]}))
        return {rank: known[tuple(several)] for rank, several in wants.items()}

    def written(self, target: int) -> dict[int, list[str]]:
        """Return the tensors of a target rank that each of its `senders` writes to, including tensors of scales."""
        found: dict[int, dict[int, None]] = {source: {} for source in self.senders.get(target, ())}
        for ranks, makers in self._written:
            if target in ranks:
                for source, entries in makers.items():
                    found[source].update(entries)
        several = {source: [self.entries[number] for number in sorted(numbers)] for source, numbers in found.items()}
        return {
            source: [name for entry in mine for name in (entry.target, entry.scale) if name]
            for source, mine in several.items()
        }

    @functools.cached_property
    def _written(self) -> list[tuple[tuple[int, ...], dict[int, dict[int, None]]]]:
        """The entries that each source rank writes, for each tuple of target ranks that need the same.

        Layouts share these tuples, so identity distinguishes them: hashing thousands of ranks for each of 400,000 units
        took longer than everything else.
        """
        found: dict[object, tuple[tuple[int, ...], dict[int, dict[int, None]]]] = {}
        for unit in self.units:
            for ranks in self._wanting_ranks(self.entries[unit.entry], unit):
                key = unit.ranks or id(ranks)
                found.setdefault(key, (ranks, {}))[1].setdefault(unit.maker, {})[unit.entry] = None
        return list(found.values())

    @functools.cached_property
    def traffic(self) -> Traffic:
        """The bytes that every rank sends, receives and gathers in one update."""
        traffic = Traffic(*(dict.fromkeys(side.ranks, 0) for side in (self.sources, self.targets, self.sources)))
        received: dict[int, tuple[tuple[int, ...], int]] = {}
        for number, unit in enumerate(self.units):
            entry = self.entries[unit.entry]
            cell = entry.cells[unit.cell]
            for ranks, size in self.bytes(number):
                traffic.sent[unit.maker] += size * len(ranks)
                received[id(ranks)] = ranks, received.get(id(ranks), (ranks, 0))[1] + size
            if number in self.meshes:
                size = ITEMSIZE[entry.dtype]
                for rank, _, start, stop in fetches(entry, cell, unit, self.sources):
                    if rank != unit.maker:
                        traffic.gathered[unit.maker] += size * math.prod(map(int.__sub__, stop, start))
        for ranks, size in received.values():
            for rank in ranks:
                traffic.received[rank] += size
        return traffic

    @functools.cached_property
    def _by_maker(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, unit in enumerate(self.units):
            found.setdefault(unit.maker, []).append(number)
        return found

    @functools.cached_property
    def _place(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.sources.ranks)}

    def _wanting_ranks(self, entry: Entry, unit: Unit) -> list[tuple[int, ...]]:
        """Return the target ranks of a unit, in one tuple for each group of ranks that hold the same."""
        if unit.ranks is not None:
            return [unit.ranks]
        target = self.targets.tensors[entry.target]
        return [target.ranks[need.held] for need in entry.cells[unit.cell].needs]

    def bytes(self, number: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the target ranks of a unit, grouped by what they hold, and the bytes that each rank gets."""
        unit = self.units[number]
        entry = self.entries[unit.entry]
        cell = entry.cells[unit.cell]
        if (unit.start, unit.stop) != (cell.start, cell.stop):
            cell = part_of(entry, cell, unit.start, unit.stop)
        for ranks, size in bytes_needed(entry, cell, self.targets):
            if unit.ranks is None:
                yield ranks, size
            elif chosen := tuple(rank for rank in ranks if rank in unit.ranks):
                yield chosen, size


def in_turn(units: Sequence[T], sizes: Sequence[int], place: int, places: int) -> list[T]:
    """Return units that do not gather, in the order in which the rank at `place` of `places` makes them.

    Units of more than `LARGE` times the average size come first. The others begin at the share place / places of their
    list, and wrap around.
    """
    most = LARGE * sum(sizes)
    large = [unit for unit, size in zip(units, sizes, strict=True) if size * len(sizes) > most]
    others = [unit for unit, size in zip(units, sizes, strict=True) if size * len(sizes) <= most]
    first = place * len(others) // max(1, places)
    return large + others[first:] + others[:first]


def plan_update(
    sources: Layout, targets: Layout, recipe: Recipe | None = None, *, gather: Literal["auto", "always"] = "auto"
) -> UpdatePlan:
    """Plan how source ranks write the tensors of `targets` from the tensors of `sources`, as the recipe says.

    Every element of every target rank that is not padding is written exactly once. Without a recipe every tensor is
    made from the source tensor of the same name. Raises UsageError, which names the tensor, for names that are missing
    on one side and not listed in the recipe, for shapes and types that do not fit, for elements that no source rank
    holds, and for quantization blocks that a target rank holds only in part.
    """
    if gather not in ("auto", "always"):
        raise UsageError(f'gather is {gather!r}, expected "auto" or "always"')
    whole = gather == "always"
    entries = entries_of(sources, targets, recipe or Recipe(), whole)
    return UpdatePlan(
        sources, targets, entries, (assign_tensors if whole else assign_cells)(entries, sources, targets), gather
    )
