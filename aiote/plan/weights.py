"""Simulate how long a weight update takes, by the plan that `aiote.weights` makes for it.

The plan says what each trainer gathers, makes and writes, and in which order. In the simulation each call has a cost,
and writes go over NICs.

**Host.** Each trainer makes its calls one after the other, and posts a write when the write's call returns. The next
mesh group begins once all trainers have gathered the last one (a barrier, which itself takes no time, because its time
was not published).

**NICs.** They are those of `aiote.testing`, with their rules: a NIC sends its writes one after the other, and receives
writes one after the other. Both take `bytes / gbps`; sending takes at least `operation_us`. Memory is not bounded.
Millions of writes are computed as arrays (`delivered`); a test compares this with engines on the simulated network.

If a plan has too many writes even for this, `bound` gives a time that no order can beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiote.weights import UpdatePlan
from aiote.weights.assignment import Unit
from aiote.weights.dtypes import ITEMSIZE
from aiote.weights.entries import part_of
from aiote.weights.plan import in_turn

from ..testing import NicModel

__all__ = ["LAST", "Bound", "Costs", "Job", "Jobs", "Order", "Posts", "Times", "bound", "count_writes", "delivered",
           "jobs_of", "simulate", "spent_in_calls"]  # fmt: skip

Floats = NDArray[np.float64]
Order = Literal["plan", "parameters"]
LAST = 1 << 30


class Costs(NamedTuple):
    """Microseconds of each kind of call, from a table of the paper; `rest` is its "rest" (42 ms) for each parameter."""

    copy: float = 378
    full_tensor: float = 2 * 532
    fuse: float = 37
    quantize: float = 137
    submit: float = 23
    rest: float = 42_000 / 487


class Job(NamedTuple):
    """A trainer's work for one unit: calls, and writes as (target ranks, bytes of a weight, bytes of its scales).

    `group` is the group of the unit's mesh, or LAST if the unit does not gather. `parameters` counts the parameters
    that no earlier job of the trainer had.
    """

    group: int
    gathers: int
    parameters: int
    outputs: int
    writes: tuple[tuple[tuple[int, ...], int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all writes."""
        return sum(len(ranks) * (size + scales) for ranks, size, scales in self.writes)


class Times(NamedTuple):
    """Milliseconds of an update.

    first: how long the first trainer is in calls. hosts: when the calls of all trainers are over. total: when also the
    last write is confirmed. waiting: total less first.
    """

    first: float
    hosts: float
    total: float
    waiting: float


Jobs: TypeAlias = dict[int, list[Job]]
"""The jobs of each trainer, by rank, in the order in which the trainer does them."""


def jobs_of(plan: UpdatePlan, order: Order = "plan") -> Jobs:
    """Return each trainer's jobs of a plan: in the plan's order, or in the order of the trainers' parameters."""
    groups = {mesh: number for number, several in enumerate(plan.groups) for mesh in several}
    place = {name: number for number, name in enumerate(plan.sources.tensors)}
    found: dict[int, list[tuple[tuple[int, int], Unit, list[str], int]]] = {r: [] for r in plan.sources.ranks}
    for number, unit in enumerate(plan.units):
        names = list(parameters_of(plan, unit))
        mesh = plan.meshes.get(number)
        group = LAST if mesh is None else groups[mesh]
        at = min(place[name] for name in names) if order == "parameters" else number
        found[unit.maker].append(((group, at), unit, names, group))
    made: Jobs = {}
    for rank, several in found.items():
        seen: set[str] = set()
        several.sort(key=lambda item: item[0])
        made[rank] = []
        for _, unit, names, group in several:
            new = len(set(names) - seen)
            seen.update(names)
            outputs = 1 + bool(plan.entries[unit.entry].scale)
            gathers = 0 if group == LAST else len(names)
            made[rank].append(Job(group, gathers, new, outputs, tuple(writes_of(plan, unit))))
    return made


def parameters_of(plan: UpdatePlan, unit: Unit) -> Iterator[str]:
    """Yield the names of the source tensors of a unit."""
    entry = plan.entries[unit.entry]
    cell = entry.cells[unit.cell]
    parts = {cell.holders[0][0]} if cell.direct else {atom.holders[0][0] for atom in cell.atoms}
    yield from dict.fromkeys(entry.parts[part].source for part in sorted(parts))


def writes_of(plan: UpdatePlan, unit: Unit) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the target ranks of a unit, grouped by what they hold, and the bytes of weights and of scales each gets."""
    entry = plan.entries[unit.entry]
    cell = entry.cells[unit.cell]
    if (unit.start, unit.stop) != (cell.start, cell.stop):
        cell = part_of(entry, cell, unit.start, unit.stop)
    target = plan.targets.tensors[entry.target]
    scale = ITEMSIZE[plan.targets.tensors[entry.scale].dtype] if entry.scale else 0
    for need in cell.needs:
        ranks = target.ranks[need.held]
        if unit.ranks is not None:
            ranks = tuple(rank for rank in ranks if rank in unit.ranks)
        if ranks:
            yield ranks, need.elements * ITEMSIZE[target.dtype], need.blocks * scale


class Posts(NamedTuple):
    """The writes of one trainer: the time at which each is posted (us), its target rank, and its bytes."""

    times: Floats
    targets: NDArray[np.int64]
    sizes: Floats

    @classmethod
    def together(cls, several: Sequence[Posts]) -> Posts:
        return cls(*(np.concatenate(column) for column in zip(*several, strict=True)))


class Trainer:
    """One trainer, which makes its calls one after the other. Each call takes `slower` times its cost."""

    def __init__(self, place: int, places: int, jobs: Sequence[Job], costs: Costs, slower: float) -> None:
        self.place, self.costs, self.slower = place, costs, slower
        self.groups = {group: list(several) for group, several in itertools.groupby(jobs, lambda job: job.group)}
        if LAST in self.groups:
            straight = self.groups[LAST]
            self.groups[LAST] = in_turn(straight, [job.nbytes for job in straight], place, places)
        self.now = self.gathered = 0.0
        self.times: list[float] = []
        self.targets: list[int] = []
        self.sizes: list[float] = []

    @property
    def posts(self) -> Posts:
        """All its writes."""
        return Posts(np.array(self.times), np.array(self.targets, np.int64), np.array(self.sizes))

    def run(self, group: int) -> None:
        """Do the jobs of a mesh group."""
        costs = self.costs
        for job in self.groups.get(group, ()):
            calls = job.parameters * (costs.copy + costs.fuse + costs.rest) + job.gathers * costs.full_tensor
            self.gathered = self.now + calls * self.slower
            self.now = self.gathered + job.outputs * costs.quantize * self.slower
            for ranks, *sizes in job.writes:
                first = self.place % len(ranks)
                for size in sizes:
                    if size:
                        self._write(ranks[first:] + ranks[:first], size)

    def _write(self, ranks: tuple[int, ...], size: int) -> None:
        first, step = self.now, self.costs.submit * self.slower
        self.times += [first + step * number for number in range(1, len(ranks) + 1)]
        self.targets += ranks
        self.sizes += [float(size)] * len(ranks)
        self.now = self.times[-1]


def delivered(several: Sequence[Posts], nic: NicModel) -> Floats:
    """Return when each write is confirmed (us): the writes of the first sender, then those of the next."""
    arrivals = []
    for posts in several:
        bytes_us = posts.sizes * 8e-3 / nic.gbps if nic.gbps else 0 * posts.sizes
        power = nic.overlap or np.inf
        busy = np.linalg.norm(np.stack([bytes_us, np.full_like(bytes_us, nic.operation_us)]), power, axis=0)
        ends = np.cumsum(busy)
        arrivals.append(ends + np.maximum.accumulate(posts.times - (ends - busy)) + nic.latency_us)
    together, arrived = Posts.together(several), np.concatenate(arrivals)
    there = arrived.copy()
    if nic.gbps:
        for target in np.unique(together.targets):
            mine = np.flatnonzero(together.targets == target)
            mine = mine[np.argsort(arrived[mine], kind="stable")]
            ends = np.cumsum(together.sizes[mine] * 8e-3 / nic.gbps)
            there[mine] = ends + np.maximum.accumulate(arrived[mine] - ends)
    return there + nic.answer_us


def simulate(
    jobs: Mapping[int, Sequence[Job]],
    nic: NicModel,
    costs: Costs | None = None,
    slower: Callable[[int], float] = lambda _rank: 1.0,
) -> Times:
    """Simulate an update. `slower` returns a rank's factor on the cost of its calls. `nic` stands for a rank's NICs."""
    costs = costs or Costs()
    trainers = [
        Trainer(place, len(jobs), several, costs, slower(rank))
        for place, (rank, several) in enumerate(sorted(jobs.items()))
    ]
    for group in sorted({group for trainer in trainers for group in trainer.groups}):
        barrier = max(trainer.gathered for trainer in trainers) if group != LAST else 0.0
        for trainer in trainers:
            trainer.now = max(trainer.now, barrier)
            trainer.run(group)
    hosts = max(trainer.now for trainer in trainers)
    total = max(hosts, float(np.max(delivered([trainer.posts for trainer in trainers], nic), initial=0.0)))
    spent = spent_in_calls(jobs[min(jobs)], costs)
    return Times(*(time / 1000 for time in (spent, hosts, total, total - spent)))


def spent_in_calls(jobs: Sequence[Job], costs: Costs) -> float:
    """Return how long a trainer is in calls (us), without its waiting."""
    writes = sum(len(ranks) * (1 + bool(scale)) for job in jobs for ranks, _, scale in job.writes)
    return (
        sum(job.parameters for job in jobs) * (costs.copy + costs.fuse + costs.rest)
        + sum(job.gathers for job in jobs) * costs.full_tensor
        + sum(job.outputs for job in jobs) * costs.quantize
        + writes * costs.submit
    )


def count_writes(plan: UpdatePlan) -> dict[int, int]:
    """Return how many writes each trainer posts, including those of scales."""
    found = dict.fromkeys(plan.sources.ranks, 0)
    for number, unit in enumerate(plan.units):
        times = 1 + bool(plan.entries[unit.entry].scale)
        found[unit.maker] += times * sum(len(ranks) for ranks, _ in plan.bytes(number))
    return found


class Bound(NamedTuple):
    """Lower bounds in milliseconds, each with its rank: posting, the NICs of trainers, the NICs of inference ranks."""

    posting: tuple[float, int]
    sending: tuple[float, int]
    receiving: tuple[float, int]

    @property
    def total(self) -> float:
        """The largest of the bounds."""
        return max(time for time, _ in self)


def bound(plan: UpdatePlan, nic: NicModel, costs: Costs | None = None, writes: dict[int, int] | None = None) -> Bound:
    """Return lower bounds of an update: a rank's calls that post writes, one after the other, and its NICs' bytes."""
    submit = (costs or Costs()).submit
    traffic = plan.traffic
    per_byte = 8e-6 / nic.gbps if nic.gbps else 0.0
    sent = {rank: max(size, traffic.gathered[rank]) for rank, size in traffic.sent.items()}
    columns = (
        {rank: count * submit / 1e3 for rank, count in (writes or count_writes(plan)).items()},
        {rank: size * per_byte for rank, size in sent.items()},
        {rank: size * per_byte for rank, size in traffic.received.items()},
    )
    most = [max(column.items(), key=lambda item: (item[1], -item[0]), default=(0, 0.0)) for column in columns]
    posting, sending, receiving = ((time, rank) for rank, time in most)
    return Bound(posting, sending, receiving)
