"""Simulate the published weight update of Kimi-K2 out of what its calls cost, and predict one from shard to shard.

The paper says how long one trainer of the first pipeline stage was in each kind of call, and that it waited 357 ms of
1233. Here that trainer's costs of one call are given to all trainers, with the calls that a plan has for each, and what
they write goes over simulated NICs. Total and waiting are what comes out; nothing is fitted.

**Host.** Each trainer makes its calls one after the other. A write is posted when its call returns. The next mesh group
begins once all trainers have gathered the last one (a barrier that itself takes no time: that was not published).

**NICs.** Those of `aiote.testing`, with their rules: a NIC sends its writes one after the other, and a NIC receives
them one after the other; both take `bytes / gbps`, and `operation_us` at least. Memory is not bounded.

Stages between the first and the last are alike, so one of them is planned and stands for all (`Stages.spread`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiote.cli import published_models
from aiote.testing import EFA_400G, NicModel
from aiote.weights import UpdatePlan, plan_update
from aiote.weights.deal import Unit
from aiote.weights.dtypes import ITEMSIZE
from aiote.weights.entries import part_of
from aiote.weights.plan import in_turn

Floats = NDArray[np.float64]
Order = Literal["plan", "parameters"]
STAGES, STAGE_RANKS = 16, 16
PLANNED_LAYERS = 9
"""Layers of the first stage, of one between, and the one layer of the last stage."""
PUBLISHED_MS, PUBLISHED_WAITING_MS = 1233.0, 357.0
SLOWER = 1.1
AT_ONCE = NicModel(name="any amount at once", latency_us=0, answer_us=0)
LAST = 1 << 30


class Costs(NamedTuple):
    """Microseconds of a call, from a table of the paper; `rest` is its "rest" (42 ms) by parameter."""

    copy: float = 378
    full_tensor: float = 2 * 532
    fuse: float = 37
    quantize: float = 137
    submit: float = 23
    rest: float = 42_000 / 487


class Job(NamedTuple):
    """What a trainer does for one unit: calls, and writes as (target ranks, bytes of a weight, bytes of its scales).

    `group` is that of its mesh; LAST where nothing is gathered. `parameters` are those that no job before had.
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
    """Milliseconds: when the first trainer's calls are over, when all are, when the last byte is there; its waiting."""

    first: float
    hosts: float
    total: float
    waiting: float


@dataclass
class Stages:
    """The jobs of trainers, by rank, in the order in which they do them."""

    jobs: dict[int, list[Job]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: UpdatePlan, order: Order) -> Stages:
        """Return what a plan has for each trainer."""
        groups = {mesh: number for number, several in enumerate(plan.groups) for mesh in several}
        place = {name: number for number, name in enumerate(plan.sources.tensors)}
        found: dict[int, list[tuple[tuple[int, int], Unit, list[str], int]]] = {r: [] for r in plan.sources.ranks}
        for number, unit in enumerate(plan.units):
            names = list(parameters_of(plan, unit))
            mesh = plan.meshes.get(number)
            group = LAST if mesh is None else groups[mesh]
            at = min(place[name] for name in names) if order == "parameters" else number
            found[unit.maker].append(((group, at), unit, names, group))
        made = cls()
        for rank, several in found.items():
            seen: set[str] = set()
            several.sort(key=lambda item: item[0])
            made.jobs[rank] = []
            for _, unit, names, group in several:
                new = len(set(names) - seen)
                seen.update(names)
                outputs = 1 + bool(plan.entries[unit.entry].scale)
                gathers = 0 if group == LAST else len(names)
                made.jobs[rank].append(Job(group, gathers, new, outputs, tuple(writes_of(plan, unit))))
        return made

    def spread(self) -> Stages:
        """Return all stages of one that has three: the second one stands for all but the first and the last."""
        made = Stages()
        for stage in range(STAGES):
            like = 0 if stage == 0 else 2 if stage == STAGES - 1 else 1
            for rank in range(STAGE_RANKS):
                made.jobs[stage * STAGE_RANKS + rank] = self.jobs[like * STAGE_RANKS + rank]
        return made


def parameters_of(plan: UpdatePlan, unit: Unit) -> Iterator[str]:
    """Yield the source tensors of a unit."""
    entry = plan.entries[unit.entry]
    cell = entry.cells[unit.cell]
    parts = {cell.holders[0][0]} if cell.direct else {atom.holders[0][0] for atom in cell.atoms}
    yield from dict.fromkeys(entry.parts[part].source for part in sorted(parts))


def writes_of(plan: UpdatePlan, unit: Unit) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield the target ranks of a unit, those that hold the same together, and the bytes that each gets."""
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
    """Writes of one trainer: when each is posted (us), to which target rank, and its bytes."""

    times: Floats
    targets: NDArray[np.int64]
    sizes: Floats

    @classmethod
    def together(cls, several: Sequence[Posts]) -> Posts:
        return cls(*(np.concatenate(column) for column in zip(*several, strict=True)))


class Trainer:
    """One trainer's calls, one after the other; `slower` is by how much more each takes."""

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
    """Return when each write of all senders is confirmed (us), in their order."""
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


def simulate(stages: Stages, nic: NicModel = EFA_400G, *, slower: float = 1.0, costs: Costs | None = None) -> Times:
    """Simulate an update; one stage, the third, may be `slower`."""
    costs = costs or Costs()
    trainers = []
    for place, (rank, jobs) in enumerate(sorted(stages.jobs.items())):
        late = slower if rank // STAGE_RANKS == 2 else 1.0
        trainers.append(Trainer(place, len(stages.jobs), jobs, costs, late))
    for group in sorted({group for trainer in trainers for group in trainer.groups}):
        barrier = max(trainer.gathered for trainer in trainers) if group != LAST else 0.0
        for trainer in trainers:
            trainer.now = max(trainer.now, barrier)
            trainer.run(group)
    hosts = max(trainer.now for trainer in trainers)
    total = max(hosts, float(delivered([trainer.posts for trainer in trainers], nic).max()))
    spent = spent_in_calls(stages.jobs[0], costs)
    return Times(*(time / 1000 for time in (spent, hosts, total, total - spent)))


def spent_in_calls(jobs: Sequence[Job], costs: Costs) -> float:
    """Return how long a trainer is in calls, its waiting left out."""
    writes = sum(len(ranks) * (1 + bool(scale)) for job in jobs for ranks, _, scale in job.writes)
    return (
        sum(job.parameters for job in jobs) * (costs.copy + costs.fuse + costs.rest)
        + sum(job.gathers for job in jobs) * costs.full_tensor
        + sum(job.outputs for job in jobs) * costs.quantize
        + writes * costs.submit
    )


def planned(expert_ranks: int, gather: Any) -> UpdatePlan:
    """Return a plan of Kimi-K2 with three stages."""
    return plan_update(*published_models.kimi_k2(expert_ranks, PLANNED_LAYERS).plan_of(), gather=gather)


def gathering(plan: UpdatePlan) -> Iterator[tuple[str, Times]]:
    """Simulate what was published, of three stages."""
    by_plan, by_name = (Stages.of(plan, order).spread() for order in ("plan", "parameters"))
    yield "gather, NICs of any speed", simulate(by_name, AT_ONCE)
    yield "gather, in the plan's order", simulate(by_plan)
    yield "gather, by parameters", simulate(by_name)
    yield "gather, by parameters, one stage 10 % slower", simulate(by_name, slower=SLOWER)


def sending_directly(plan: UpdatePlan) -> Iterator[tuple[str, Times]]:
    """Predict the same from shard to shard, of three stages."""
    stages = Stages.of(plan, "plan").spread()
    yield "direct", simulate(stages)
    yield "direct, one stage 10 % slower", simulate(stages, slower=SLOWER)
    yield "direct, writes posted at no cost", simulate(stages, costs=Costs(submit=0))


WAYS = {"always": gathering, "auto": sending_directly}


def row(what: str, expert_ranks: int, times: Times) -> str:
    """Return a row of the table."""
    return f"| {what} | {expert_ranks} | " + " | ".join(f"{time:.0f}" for time in times) + " |"


def main() -> None:
    """Print the table of docs/weights.md."""
    print("| Update | EP | Calls of the first trainer | Calls of all over | Total | First trainer waits |")
    print("|---|---|---|---|---|---|")
    print(f"| published | 32 | 876 | not said | {PUBLISHED_MS:.0f} | {PUBLISHED_WAITING_MS:.0f} |")
    for expert_ranks, (gather, rows) in itertools.product((64, 32), WAYS.items()):
        for what, times in rows(planned(expert_ranks, gather)):
            print(row(what, expert_ranks, times), flush=True)


if __name__ == "__main__":
    main()
