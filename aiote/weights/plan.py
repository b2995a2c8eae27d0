"""The plan of a weight update: what every source rank reads, makes and writes, computed once for all updates.

    plan = plan_update(sources, targets, recipe)

**Units.** Each target tensor falls into cells (`cells`), which are dealt among the source ranks that hold them
(`deal`). What comes out are units: a box of a target tensor and the one rank that sends it. Everything else follows
from them and the layouts, so each rank computes its own copies (`UpdatePlan.tasks`), and no other's.

**Gathering.** With `gather="auto"` a source rank sends out of what it has. It reads from other ranks only where a
quantization block crosses an edge between them, and then only that block. With `gather="always"` the ranks that share
a tensor all get the whole of it, and share the target ranks: the schedule of frameworks that call `full_tensor`.

**Groups.** The ranks of a gathering unit are a mesh. Collectives of two meshes that have a rank in common must not
interleave, so meshes are coloured: those of one group share no rank. The groups follow one another in one order on all
ranks, and so do the units of a mesh.

**Order.** Writes are spread over time by turns: the source rank in place s of S begins its list of units that gather
nothing at the share s / S of it, and its lists of target ranks at place s. So ranks that send the same tensors to the
same target ranks are at different places of them at any time. Units that are far larger than the others come before.

This module computes; it knows neither memory nor time. All arithmetic is on integers and in a fixed order, so ranks
that plan the same get the same; `UpdatePlan.digest` is what they compare.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from ..errors import UsageError
from .deal import Unit, deal, deal_whole, halves
from .dtypes import ITEMSIZE
from .entries import Entry, bytes_needed, entries_of, part_of
from .layout import Layout
from .recipe import Recipe
from .tasks import Task, fetches, task_of

__all__ = ["Traffic", "UpdatePlan", "in_turn", "plan_update"]

T = TypeVar("T")
LARGE = 32
"""A unit of so many times its rank's average must not come last: in Kimi-K2's embedding are 57 % of what a rank of the
first stage sends. Simulated, an update takes 0.88 s with such units first and 1.17 s without (docs/weights.md)."""
VERSION = b"aiote weight plan 1"


class Traffic(NamedTuple):
    """Bytes by rank: what source ranks send to targets, what target ranks receive, what source ranks get to gather."""

    sent: dict[int, int]
    received: dict[int, int]
    gathered: dict[int, int]


class UpdatePlan:
    """What an update does on every rank. It is not changed after it was made; `plan_update` makes it."""

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
        """32 bytes that are the same on all ranks that have the same plan, of the same layouts."""
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
        """The ranks that gather a unit together, its maker among them, by the unit's number; others are not there."""
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
        """Return the other source ranks from which one reads to gather."""
        found = {rank for number in self._by_maker.get(source, []) for rank in self.meshes.get(number, ())}
        return found - {source}

    @functools.cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The meshes, coloured: those of a group share no rank and gather at the same time."""
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
        """Return the numbers of the units of a source rank in the order in which it takes them.

        What is gathered comes first, group by group. A source rank without units gets an empty list.
        """
        mine = self._by_maker.get(source, [])
        group = {mesh: number for number, several in enumerate(self.groups) for mesh in several}
        gathered = sorted((group[self.meshes[n]], n) for n in mine if n in self.meshes)
        others = [n for n in mine if n not in self.meshes]
        sizes = [sum(len(ranks) * size for ranks, size in self.bytes(n)) for n in others]
        return [n for _, n in gathered] + in_turn(others, sizes, self._place.get(source, 0), len(self._place))

    def tasks(self, source: int, small: Callable[[Task], bool] | None = None) -> Iterator[Task]:
        """Yield what a source rank does, in order; copies are computed one task at a time.

        A task for which `small` is false is halved, again and again down to single elements or quantization blocks.
        """
        turn = self._place.get(source, 0)
        for number in self.order(source):
            yield from self._halved(self.units[number], turn, small)

    def _halved(self, unit: Unit, turn: int, small: Callable[[Task], bool] | None) -> Iterator[Task]:
        entry = self.entries[unit.entry]
        task = task_of(entry, unit, self.sources, self.targets, turn)
        several = () if small is None or small(task) else halves(unit, entry.size)
        for half in several:
            yield from self._halved(half, turn, small)
        if not several:
            yield task

    def task(self, number: int) -> Task:
        """Return what the maker of a unit does for it."""
        unit = self.units[number]
        turn = self._place[unit.maker]
        return task_of(self.entries[unit.entry], unit, self.sources, self.targets, turn)

    @functools.cached_property
    def senders(self) -> dict[int, tuple[int, ...]]:
        """The source ranks that write to each target rank: as many commits it has to expect."""
        wants: dict[int, list[int]] = {rank: [] for rank in self.targets.ranks}
        for number, (ranks, _) in enumerate(self._written):
            for rank in ranks:
                wants[rank].append(number)
        # Ranks that want the same have the same senders, computed once.
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for numbers in {tuple(several) for several in wants.values()}:
            known[numbers] = tuple(sorted({maker for number in numbers for maker in self._written[number][1]}))
        return {rank: known[tuple(several)] for rank, several in wants.items()}

    def written(self, target: int) -> dict[int, list[str]]:
        """Return the tensors of a target rank that each of its `senders` writes to, those of scales among them."""
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
        """The entries that each source rank writes, by the target ranks that want the same.

        Layouts share these tuples, so they are told apart by what they are: to hash thousands of ranks for each of
        400,000 units took longer than all else.
        """
        found: dict[object, tuple[tuple[int, ...], dict[int, dict[int, None]]]] = {}
        for unit in self.units:
            for ranks in self._wanted(self.entries[unit.entry], unit):
                key = unit.ranks or id(ranks)
                found.setdefault(key, (ranks, {}))[1].setdefault(unit.maker, {})[unit.entry] = None
        return list(found.values())

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Bytes that every rank sends, receives and gathers in one update."""
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

    def _wanted(self, entry: Entry, unit: Unit) -> list[tuple[int, ...]]:
        """Return the target ranks of a unit, those that hold the same together."""
        if unit.ranks is not None:
            return [unit.ranks]
        target = self.targets.tensors[entry.target]
        return [target.ranks[need.held] for need in entry.cells[unit.cell].needs]

    def bytes(self, number: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the target ranks of a unit, those that hold the same together, and the bytes that each gets."""
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
    """Return units that gather nothing in the order in which the rank in one of several places takes them.

    Those of more than `LARGE` times the average size come first, the others from the share place / places of them on.
    """
    most = LARGE * sum(sizes)
    large = [unit for unit, size in zip(units, sizes, strict=True) if size * len(sizes) > most]
    others = [unit for unit, size in zip(units, sizes, strict=True) if size * len(sizes) <= most]
    first = place * len(others) // max(1, places)
    return large + others[first:] + others[:first]


def plan_update(
    sources: Layout, targets: Layout, recipe: Recipe | None = None, *, gather: Literal["auto", "always"] = "auto"
) -> UpdatePlan:
    """Plan how source ranks write the tensors of `targets` out of those of `sources`, as the recipe says.

    Every element of every target rank that is not padding is written exactly once. Without a recipe all tensors keep
    their names. Raises UsageError, which names the tensor, for names that are missing on one side and were not
    listed, for shapes and types that do not fit, for what no source rank holds, and for quantization blocks that a
    target rank has only in part.
    """
    if gather not in ("auto", "always"):
        raise UsageError(f'gather is {gather!r}, expected "auto" or "always"')
    whole = gather == "always"
    entries = entries_of(sources, targets, recipe or Recipe(), whole)
    return UpdatePlan(sources, targets, entries, (deal_whole if whole else deal)(entries, sources, targets), gather)
