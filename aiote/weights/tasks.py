"""Tasks: the reads, conversions and writes of a source rank for one unit of a plan.

| kind     | reads                                        | writes                                              |
|----------|----------------------------------------------|-----------------------------------------------------|
| `direct` | none                                         | straight out of its own part of the source tensor   |
| `make`   | its own part, into a staging array           | out of the staging array, converted to the target's |
| `gather` | parts of several ranks, into a staging array | the same                                            |

A staging array is dense and has the shape of the task's box. The reads fill it with elements of the task's `dtype`;
elements that no read covers are padding and must be zero. Then the array is converted: by a cast, or by quantization
into a dense array of the same shape and an array of scales, ceil(extent / block) along each dimension.
`Write.copy.target` names the array that a write copies from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .assignment import Unit, ranks_of
from .cells import Atom, Cell, Holder, clip
from .copies import Copy, Origin, load, relocate, store
from .entries import Entry
from .layout import Layout

__all__ = ["Read", "Task", "Write", "fetches", "task_of"]

Point = tuple[int, ...]


class Read(NamedTuple):
    """One copy out of a source rank's part into the staging array. `rank` may be the task's own rank."""

    rank: int
    copy: Copy


class Write(NamedTuple):
    """One copy to the same place on several target ranks, in the order of `ranks`."""

    ranks: tuple[int, ...]
    copy: Copy


class Task(NamedTuple):
    """A box of a target tensor, and the reads and writes of the source rank that brings it to the target ranks."""

    target: str
    start: Point
    stop: Point
    kind: Literal["direct", "make", "gather"]
    dtype: str
    scale: str
    block: tuple[int, int] | None
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]


Fetch = tuple[int, Holder, Point, Point]


def fetches(entry: Entry, cell: Cell, unit: Unit, sources: Layout) -> Iterator[Fetch]:
    """Yield the reads of a unit's maker: the rank to read from, the holder to read there, and the box of the target.

    The maker reads from itself if it holds the elements. If several other ranks hold them, it reads from the rank of
    its own replica, which is at the same place among the ranks that hold the same.
    """
    atoms = (Atom(unit.start, unit.stop, cell.holders),) if cell.direct else cell.atoms
    groups = [[(holder, ranks_of(entry, holder, sources)) for holder in atom.holders] for atom in atoms]
    place = next(ranks.index(unit.maker) for group in groups for _, ranks in group if unit.maker in ranks)
    for atom, group in zip(atoms, groups, strict=True):
        shared = clip(unit.start, unit.stop, atom.start, atom.stop)
        if shared:
            own = next((holder for holder, ranks in group if unit.maker in ranks), None)
            holder, ranks = group[0]
            yield (unit.maker, own, *shared) if own else (ranks[place % len(ranks)], holder, *shared)


def task_of(entry: Entry, unit: Unit, sources: Layout, targets: Layout, shift: int) -> Task:
    """Return the task of a unit. Its writes begin at place `shift` of the target ranks."""
    cell = entry.cells[unit.cell]
    direct = cell.direct and not entry.converted
    found = list(fetches(entry, cell, unit, sources))
    reads = []
    for rank, holder, start, stop in [] if direct else found:
        begin = origin_of(entry, holder, sources)
        reads.append(Read(rank, load(begin, entry.target, (unit.start, unit.stop), start, stop)))
    writes = []
    for need in cell.needs:
        ranks = _rotated(targets.tensors[entry.target].ranks[need.held], unit.ranks, shift)
        copies = _straight(entry, unit, found, need.held, sources, targets) if direct else None
        if ranks:
            for copy in copies or _staged(entry, unit, need.held, ranks[0], targets):
                writes.append(Write(ranks, copy))
    alone = all(rank == unit.maker for rank, *_ in found)
    kind: Literal["direct", "make", "gather"] = "direct" if direct else "make" if alone else "gather"
    common = (entry.target, unit.start, unit.stop, kind, entry.dtype, entry.scale, entry.block)
    return Task(*common, tuple(reads), tuple(writes))


def origin_of(entry: Entry, holder: Holder, sources: Layout) -> Origin:
    """Return the origin that a holder refers to."""
    part = entry.parts[holder[0]]
    held = sources.tensors[part.source].sharding.held[holder[1]]
    return Origin(part, held, held.pieces[holder[2]])


def _rotated(ranks: Sequence[int], only: tuple[int, ...] | None, shift: int) -> tuple[int, ...]:
    chosen = ranks if only is None else [rank for rank in ranks if rank in only]
    first = shift % len(chosen) if chosen else 0
    return (*chosen[first:], *chosen[:first])


def _straight(
    entry: Entry, unit: Unit, found: Sequence[Fetch], held: int, sources: Layout, targets: Layout
) -> Iterator[Copy]:
    target = targets.tensors[entry.target].sharding.held[held]
    for _, holder, start, stop in found:
        yield from relocate(origin_of(entry, holder, sources), target, entry.target, start, stop)


def _staged(entry: Entry, unit: Unit, held: int, rank: int, targets: Layout) -> Iterator[Copy]:
    target = targets.tensors[entry.target]
    yield from store(target.sharding.held[held], entry.target, unit.start, unit.stop)
    if entry.block:
        start = tuple(map(int.__floordiv__, unit.start, entry.size))
        stop = tuple(-(-end // block) for end, block in zip(unit.stop, entry.size, strict=True))
        yield from store(targets.tensors[entry.scale].held_by()[rank], entry.scale, start, stop)
