"""Assign the cells of all targets to the source ranks that can send them.

A cell's weight is the number of bytes that leave its sender: the bytes of its box, once for each target rank that needs
it. A cell may be divided into granules: rows, or whole blocks. Large granules are assigned first, each as a whole
(`balance.place`). Then the remaining cells with the same possible senders form one queue, a sequence of bytes.
`balance.shares` says how many bytes of a queue each sender takes, given what the sender has already. So at most one
cell is divided at each boundary between two senders. If rounding gives a rank too many bytes, it takes fewer from the
next queues. Queues with the largest granules come first, so that finer granules make up for their rounding.

With `whole` (complete tensors, as after `full_tensor`), cells are not divided. Every target rank gets a tensor from one
sender, the sender with the fewest bytes so far; the largest tensors are assigned first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .balance import place, shares
from .cells import Cell, Holder
from .entries import Entry, bytes_needed
from .layout import Layout

__all__ = ["Unit", "assign_cells", "assign_tensors", "bytes_by_senders", "ranks_of", "split_unit"]

Point = tuple[int, ...]
Makers = tuple[int, ...]
COARSE = 3
"""A granule is large if it has more than 1 / COARSE of the bytes that a rank sends.

Queues of smaller granules follow the shares closely: in 2000 random plans the busiest rank had at most 0.83 granules
more than the bound of `balance`. With COARSE = 5 it had up to 1.4 granules more, with 64 up to 12.
"""
MANY = 256
"""A cell is divided along its outermost dimension with this many granules, even if another dimension has more."""


class Unit(NamedTuple):
    """A box of a target that one source rank makes and sends to `ranks`; if None, to all target ranks that need it."""

    entry: int
    cell: int
    start: Point
    stop: Point
    maker: int
    ranks: tuple[int, ...] | None


def split_unit(unit: Unit, size: Sequence[int]) -> tuple[Unit, ...]:
    """Return the two halves of a unit along its outermost dimension with several granules; () for a single granule."""
    for dim, (start, stop, step) in enumerate(zip(unit.start, unit.stop, size, strict=True)):
        middle = start + -(-(stop - start) // step) // 2 * step
        if middle > start:
            first, rest = (
                (*unit.stop[:dim], middle, *unit.stop[dim + 1 :]),
                (
                    *unit.start[:dim],
                    middle,
                    *unit.start[dim + 1 :],
                ),
            )
            return unit._replace(stop=first), unit._replace(start=rest)
    return ()


class _Item(NamedTuple):
    """A cell in a queue: its weight, the dimension along which it may be divided, and its granules along that."""

    entry: int
    cell: int
    weight: int
    dim: int
    granules: int


def ranks_of(entry: Entry, holder: Holder, sources: Layout) -> tuple[int, ...]:
    """Return the source ranks that one of the `holders` of a cell or an atom stands for."""
    return sources.tensors[entry.parts[holder[0]].source].ranks[holder[1]]


def _makers(entry: Entry, cell: Cell, sources: Layout) -> Makers:
    """Return the ranks that may make a cell: those that hold all of it, or if there are none, those that hold some."""
    several = [cell.holders] if cell.direct else [atom.holders for atom in cell.atoms]
    if len(several) == len(several[0]) == 1:
        return ranks_of(entry, several[0][0], sources)
    groups = [{rank for holder in holders for rank in ranks_of(entry, holder, sources)} for holders in several]
    return tuple(sorted(set.intersection(*groups) or set.union(*groups)))


def bytes_by_senders(entries: Sequence[Entry], sources: Layout, targets: Layout) -> dict[Makers, int]:
    """Return how many bytes each set of possible senders must send between them; this is the same for every plan."""
    found: dict[Makers, int] = {}
    for entry in entries:
        for cell in entry.cells:
            makers = _makers(entry, cell, sources)
            size = sum(len(ranks) * size for ranks, size in bytes_needed(entry, cell, targets))
            found[makers] = found.get(makers, 0) + size
    return found


def assign_cells(entries: Sequence[Entry], sources: Layout, targets: Layout) -> list[Unit]:
    """Return units that make every cell once, in the order of the cells, assigned as evenly as the holders allow."""
    queues: dict[Makers, list[_Item]] = {}
    for number, entry in enumerate(entries):
        for at, cell in enumerate(entry.cells):
            weight = sum(len(ranks) * size for ranks, size in bytes_needed(entry, cell, targets))
            queues.setdefault(_makers(entry, cell, sources), []).append(_item(entry, cell, number, at, weight))
    fixed = Counter({makers[0]: sum(i.weight for i in queue) for makers, queue in queues.items() if len(makers) == 1})
    units = [_unit(entries, i, 0, i.granules, m[0]) for m, queue in queues.items() if len(m) == 1 for i in queue]
    queues = {makers: queue for makers, queue in queues.items() if len(makers) > 1}
    total = sum(fixed.values()) + sum(item.weight for queue in queues.values() for item in queue)
    ranks = set(fixed).union(*queues)
    most = max([total // max(1, len(ranks)), *fixed.values()]) // COARSE
    units += _assign_coarse(entries, queues, most, fixed)
    fine = {makers: [i for i in queue if i.weight <= most * i.granules] for makers, queue in queues.items()}
    quotas = shares(
        {(rank,): weight for rank, weight in fixed.items()}
        | {makers: sum(item.weight for item in queue) for makers, queue in fine.items() if queue}
    )
    surplus: dict[int, int] = {}
    for makers in sorted(
        fine, key=lambda makers: (-max([i.weight // i.granules for i in fine[makers]] or [0]), makers)
    ):
        units += _divide(entries, fine[makers], quotas.get(makers, {}), surplus)
    return sorted(units)


def _item(entry: Entry, cell: Cell, number: int, at: int, weight: int) -> _Item:
    """Return a cell as an item that may be divided along one dimension.

    This is the outermost dimension of at least `MANY` granules, or if there is none, the dimension with the most.
    """
    counts = [-(-(b - a) // s) for a, b, s in zip(cell.start, cell.stop, entry.size, strict=True)]
    dim = next((d for d, count in enumerate(counts) if count >= MANY), None)
    if dim is None:
        dim = max(range(len(counts)), key=lambda d: (counts[d], -d), default=0)
    return _Item(number, at, weight, dim, counts[dim] if counts else 1)


def _assign_coarse(
    entries: Sequence[Entry], queues: Mapping[Makers, Sequence[_Item]], most: int, sent: Counter[int]
) -> Iterator[Unit]:
    """Yield a unit for each granule of more than `most` bytes, and add the bytes that its maker sends to `sent`."""
    coarse = [
        (item, granule, makers)
        for makers, queue in queues.items()
        for item in queue
        if item.weight > most * item.granules
        for granule in range(item.granules)
    ]
    ranks = place([(item.weight // item.granules, makers) for item, _, makers in coarse], sent)
    for (item, granule, _), rank in zip(coarse, ranks, strict=True):
        yield _unit(entries, item, granule, granule + 1, rank)


def _divide(
    entries: Sequence[Entry], items: Sequence[_Item], quotas: Mapping[int, int], surplus: dict[int, int]
) -> Iterator[Unit]:
    """Yield the units of a queue. Each rank's bytes are as close to its quota as granules allow.

    Adds to `surplus` how many bytes each rank has taken above its quota.
    """
    bounds = _bounds(quotas, surplus)
    position, at = 0, 0
    taken = dict.fromkeys(quotas, 0)
    for item in items:
        first = 0
        while first < item.granules:
            rank, end = bounds[at]
            last = item.granules
            if at + 1 < len(bounds):
                # Granules up to the boundary, rounded to the nearest. Integers make all ranks round alike.
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
    """Return (rank, end) pairs: the rank takes the queue up to byte `end`. An earlier surplus reduces its quota."""
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


def assign_tensors(entries: Sequence[Entry], sources: Layout, targets: Layout) -> list[Unit]:
    """Return units that make whole cells, in the order of the cells; each target rank gets a cell from one sender."""
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
        assigned: dict[int, list[int]] = {rank: [] for rank in senders}
        for target, size in wants:
            done, rank = heap[0]
            heapq.heapreplace(heap, (done + size, rank))
            assigned[rank].append(target)
        sent.update((rank, done) for done, rank in heap)
        units += [
            Unit(number, at, cell.start, cell.stop, rank, tuple(ranks)) for rank, ranks in assigned.items() if ranks
        ]
    return sorted(units)


def _senders(entry: Entry, cell: Cell, sources: Layout, sent: Mapping[int, int]) -> Sequence[int]:
    """Return the ranks that share the sending of a cell: all that hold it, or else one replica that gathers it."""
    makers = _makers(entry, cell, sources)
    groups = [ranks_of(entry, atom.holders[0], sources) for atom in cell.atoms]
    if cell.direct or all(makers[0] in ranks for ranks in groups):
        return makers
    replicas = max(map(len, groups))
    members = [sorted({ranks[i % len(ranks)] for ranks in groups}) for i in range(replicas)]
    return min(members, key=lambda several: (sum(sent.get(rank, 0) for rank in several), several))
