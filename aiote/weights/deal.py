"""Dealing the cells of all targets among the source ranks that could send them.

A cell's weight is the bytes that leave its sender: those of the box, once for each target rank that wants it. Cells
with the same possible senders stand in one line, and `balance.shares` says how many bytes of the line each sender
takes. So at most one cell at each boundary is divided, along its outermost dimension that is fine enough, by rows or
by whole blocks. What rounding gives one rank too much, the next lines take from it; those with the largest granules
come first, so that finer ones make up for them. Where granules are so large that a rank still has too much, single
units of its are moved as long as that helps.

With `whole` (complete tensors, as after `full_tensor`), nothing is divided: every target rank of a tensor gets one
sender, the one with the fewest bytes so far, largest tensors first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .balance import Shares, shares
from .cells import Cell, Holder
from .entries import Entry, bytes_needed, part_of
from .layout import Layout

__all__ = ["Unit", "deal", "deal_whole", "ranks_of"]

Point = tuple[int, ...]
FINE = 64
"""A line's granules are to be at most 1 / FINE of what an equal share of it would be: 1.6 %."""


class Unit(NamedTuple):
    """A box of a target that one source rank makes and sends: to `ranks`, or without them to all that want it."""

    entry: int
    cell: int
    start: Point
    stop: Point
    maker: int
    ranks: tuple[int, ...] | None


class _Item(NamedTuple):
    """A cell in a line: its weight, the dimension along which it may be divided, and into how many granules."""

    entry: int
    cell: int
    weight: int
    dim: int
    granules: int


def ranks_of(entry: Entry, holder: Holder, sources: Layout) -> tuple[int, ...]:
    """Return the source ranks that hold what one of a cell's or an atom's `holders` names."""
    return sources.tensors[entry.parts[holder[0]].source].ranks[holder[1]]


def _makers(entry: Entry, cell: Cell, sources: Layout) -> tuple[int, ...]:
    """Return the ranks that may make a cell: those that have all of it, else those that have some."""
    several = [cell.holders] if cell.direct else [atom.holders for atom in cell.atoms]
    if len(several) == len(several[0]) == 1:
        return ranks_of(entry, several[0][0], sources)
    groups = [{rank for holder in holders for rank in ranks_of(entry, holder, sources)} for holders in several]
    return tuple(sorted(set.intersection(*groups) or set.union(*groups)))


def deal(entries: Sequence[Entry], sources: Layout, targets: Layout) -> list[Unit]:
    """Return units that make every cell once, in the order of the cells, as evenly as the holders allow."""
    lines: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for number, entry in enumerate(entries):
        weights = [sum(len(ranks) * size for ranks, size in bytes_needed(entry, c, targets)) for c in entry.cells]
        for at, cell in enumerate(entry.cells):
            lines.setdefault(_makers(entry, cell, sources), []).append((number, at, weights[at]))
    quotas = shares({makers: sum(weight for _, _, weight in line) for makers, line in lines.items()})
    units = [
        Unit(number, at, entries[number].cells[at].start, entries[number].cells[at].stop, makers[0], None)
        for makers, line in lines.items()
        if len(makers) == 1
        for number, at, _ in line
    ]
    shared = {makers: _items(entries, line, quotas[makers]) for makers, line in lines.items() if len(makers) > 1}
    surplus: dict[int, int] = {}
    for makers in sorted(shared, key=lambda makers: (-max(i.weight // i.granules for i in shared[makers]), makers)):
        units += _divide(entries, shared[makers], quotas[makers], surplus)
    return sorted(_improved(entries, units, quotas, sources, targets))


def _improved(
    entries: Sequence[Entry], units: list[Unit], quotas: Shares, sources: Layout, targets: Layout
) -> list[Unit]:
    """Return the units with some moved away from the busiest rank, if it has more than was meant for any rank."""
    meant = Counter[int]()
    for share in quotas.values():
        meant.update(share)
    most = max(meant.values(), default=0) * (FINE + 1) // FINE
    sent, mine = Counter[int](), dict[int, list[tuple[int, int]]]()
    for number, unit in enumerate(units):
        entry = entries[unit.entry]
        cell = part_of(entry, entry.cells[unit.cell], unit.start, unit.stop)
        weight = sum(len(ranks) * size for ranks, size in bytes_needed(entry, cell, targets))
        sent[unit.maker] += weight
        mine.setdefault(unit.maker, []).append((weight, number))
    while sent and sent[busiest := max(sent, key=lambda rank: (sent[rank], rank))] > most:
        moves = [
            (max(sent[other] + weight, sent[busiest] - weight), other, weight, number)
            for weight, number in mine[busiest]
            for other in _makers(
                entries[units[number].entry], entries[units[number].entry].cells[units[number].cell], sources
            )
            if sent[other] + weight < sent[busiest]
        ]
        if not moves:
            break
        _, other, weight, number = min(moves)
        units[number] = units[number]._replace(maker=other)
        mine[busiest].remove((weight, number))
        mine.setdefault(other, []).append((weight, number))
        sent[busiest] -= weight
        sent[other] += weight
    return units


def _items(entries: Sequence[Entry], line: Sequence[tuple[int, int, int]], quotas: Mapping[int, int]) -> list[_Item]:
    """Return a line's cells with the dimension that each is divided along."""
    most = sum(quotas.values()) / (FINE * len(quotas))
    items = []
    for number, at, weight in line:
        cell = entries[number].cells[at]
        counts = [-(-(b - a) // s) for a, b, s in zip(cell.start, cell.stop, entries[number].size, strict=True)]
        dim = next((d for d, count in enumerate(counts) if weight <= most * count), None)
        if dim is None:
            dim = max(range(len(counts)), key=lambda d: (counts[d], -d), default=0)
        items.append(_Item(number, at, weight, dim, counts[dim] if counts else 1))
    return items


def _divide(
    entries: Sequence[Entry], items: Sequence[_Item], quotas: Mapping[int, int], surplus: dict[int, int]
) -> Iterator[Unit]:
    """Yield the units of a line, with the bytes that each rank takes as near to its quota as granules allow."""
    bounds = _bounds(quotas, surplus)
    position, at = 0, 0
    taken = dict.fromkeys(quotas, 0)
    for item in items:
        first = 0
        while first < item.granules:
            rank, end = bounds[at]
            last = item.granules
            if at + 1 < len(bounds):
                # Granules up to the boundary, to the nearest; integers, so that all ranks round alike.
                last = min(last, (2 * (end - position) * item.granules + item.weight) // (2 * item.weight))
            if last > first:
                yield _unit(entries, item, first, last, rank)
                taken[rank] += item.weight * last // item.granules - item.weight * first // item.granules
                first = last
            if first < item.granules:
                at += 1
        position += item.weight
    for rank, quota in quotas.items():
        surplus[rank] = surplus.get(rank, 0) + taken[rank] - quota


def _bounds(quotas: Mapping[int, int], surplus: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return who takes a line up to which byte: quotas, less what a rank has got too much before."""
    total = sum(quotas.values())
    wanted = {rank: max(0, quota - surplus.get(rank, 0)) for rank, quota in quotas.items()}
    wanted = {rank: want for rank, want in wanted.items() if want} or dict(quotas)
    whole, done, bounds = sum(wanted.values()), 0, []
    for rank, want in wanted.items():
        done += want
        bounds.append((rank, total * done // max(whole, 1)))
    return bounds


def _unit(entries: Sequence[Entry], item: _Item, first: int, last: int, rank: int) -> Unit:
    entry = entries[item.entry]
    cell = entry.cells[item.cell]
    start, stop = list(cell.start), list(cell.stop)
    if start:
        step = entry.size[item.dim]
        start[item.dim], stop[item.dim] = (
            cell.start[item.dim] + first * step,
            min(cell.start[item.dim] + last * step, cell.stop[item.dim]),
        )
    return Unit(item.entry, item.cell, tuple(start), tuple(stop), rank, None)


def deal_whole(entries: Sequence[Entry], sources: Layout, targets: Layout) -> list[Unit]:
    """Return units that make whole cells, each target rank's from one sender, in the order of the cells."""
    jobs = []
    for number, entry in enumerate(entries):
        for at, cell in enumerate(entry.cells):
            wants = [(rank, size) for ranks, size in bytes_needed(entry, cell, targets) for rank in ranks]
            jobs.append((-sum(size for _, size in wants), number, at, wants))
    sent: dict[int, int] = {}
    units = []
    for _, number, at, wants in sorted(jobs):
        entry, cell = entries[number], entries[number].cells[at]
        senders = _senders(entry, cell, sources, sent)
        heap = [(sent.get(rank, 0), rank) for rank in senders]
        heapq.heapify(heap)
        dealt: dict[int, list[int]] = {rank: [] for rank in senders}
        for target, size in wants:
            done, rank = heap[0]
            heapq.heapreplace(heap, (done + size, rank))
            dealt[rank].append(target)
        sent.update((rank, done) for done, rank in heap)
        units += [Unit(number, at, cell.start, cell.stop, rank, tuple(ranks)) for rank, ranks in dealt.items() if ranks]
    return sorted(units)


def _senders(entry: Entry, cell: Cell, sources: Layout, sent: Mapping[int, int]) -> Sequence[int]:
    """Return the ranks that share a cell: all that have it, else one replica of those that gather it."""
    makers = _makers(entry, cell, sources)
    groups = [ranks_of(entry, atom.holders[0], sources) for atom in cell.atoms]
    if cell.direct or all(makers[0] in ranks for ranks in groups):
        return makers
    replicas = max(map(len, groups))
    members = [sorted({ranks[i % len(ranks)] for ranks in groups}) for i in range(replicas)]
    return min(members, key=lambda several: (sum(sent.get(rank, 0) for rank in several), several))
