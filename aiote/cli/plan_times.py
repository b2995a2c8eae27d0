"""The duration of the update of `aiote plan weights`, by NICs of a rank, and its lower bounds."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from aiote.cli.plan_output import NIC_COUNTS, facts, pays_off, size_of, table
from aiote.plan import Nics
from aiote.plan.nics import MAX_NICS, in_range
from aiote.plan.plot import Panel
from aiote.plan.weights import Bound, Costs, Times, bound, count_writes, jobs_of, simulate
from aiote.testing import NicModel
from aiote.weights import UpdatePlan

if TYPE_CHECKING:
    from aiote.cli.plan import PlanSummary

__all__ = ["Calls", "UpdateTimes", "panels", "plain_nics", "show_times", "times_of"]

MOST_WRITES = 4_000_000
"""The limit on writes that are simulated one by one. For more writes only the bound is shown."""


class Calls(StrEnum):
    """The cost model of a trainer's calls."""

    PUBLISHED = "published"
    FREE = "free"

    @property
    def costs(self) -> Costs:
        """The costs in microseconds by call."""
        return Costs() if self is Calls.PUBLISHED else Costs(0, 0, 0, 0, 0, 0)


class UpdateTimes(NamedTuple):
    """Times by the number of NICs of a rank (empty if there are too many writes), and the bounds of the update."""

    calls: Calls
    writes: int
    most_writes: int
    bound: Bound
    by_nics: dict[int, Times]
    staging: int
    """Bytes of a second copy of the tensors that a target rank receives, for versions="shadow"."""

    def described(self) -> dict[str, Any]:
        """Return the times for JSON, in milliseconds."""
        limits = {name: {"ms": time, "rank": rank} for name, (time, rank) in self.bound._asdict().items()}
        return {
            "calls": str(self.calls), "writes": self.writes, "most_writes_of_a_rank": self.most_writes,
            "limits": limits, "update_ms": {count: times._asdict() for count, times in self.by_nics.items()},
            "nics_that_pay_off": pays_off({count: times.total for count, times in self.by_nics.items()})
            if self.by_nics else None, "shadow_bytes": self.staging,
        }  # fmt: skip


def plain_nics(gbits: float, count: int) -> Nics:
    """Return NICs of the given bandwidth without latency. Raises UsageError."""
    in_range("gbits", gbits, 0.001)
    in_range("nics per rank", count, 1, MAX_NICS)
    name = f"{gbits:g} Gbit/s"
    return Nics(name, NicModel(name=name, gbps=gbits, latency_us=0, answer_us=0), count, "the command line")


def times_of(plan: UpdatePlan, nics: Nics, calls: Calls) -> UpdateTimes:
    """Simulate a plan over the given number of NICs of a rank, and over other numbers."""
    writes = count_writes(plan)
    total, costs = sum(writes.values()), calls.costs
    by_nics = {}
    if total <= MOST_WRITES:
        jobs = jobs_of(plan)
        for count in sorted({nics.per_rank, *NIC_COUNTS}):
            by_nics[count] = simulate(jobs, nics.of(count).as_one(), costs)
    limits = bound(plan, nics.as_one(), costs, writes)
    most = max(plan.traffic.received.values(), default=0)
    return UpdateTimes(calls, total, max(writes.values(), default=0), limits, by_nics, most)


def show_times(times: UpdateTimes, nics: Nics, out: Console) -> None:
    """Print the tables."""
    limits = times.bound
    costs = (
        "as published for Kimi-K2 (arXiv 2510.27656, docs/weights.md)" if times.calls is Calls.PUBLISHED else "nothing"
    )
    out.print(facts("time", [
        ("NICs", f"{nics.per_rank} x {nics.model.name} a rank, {nics.gbps:.4g} Gbit/s together ({nics.source})"),
        ("a trainer's calls", f"cost {costs}"),
        ("writes", f"{times.writes}, {times.most_writes} of the busiest trainer"),
        ("posting bound", f"{limits.posting[0]:.1f} ms of source {limits.posting[1]}"),
        ("sending bound", f"{limits.sending[0]:.1f} ms of source {limits.sending[1]}"),
        ("receiving bound", f"{limits.receiving[0]:.1f} ms of target {limits.receiving[1]}"),
        ("memory of a target", f"{size_of(times.staging)} more while versions are shadowed"),
    ]))  # fmt: skip
    if not times.by_nics:
        out.print(f"  More than {MOST_WRITES} writes are not followed one by one: no order beats the largest bound.\n")
        return
    paying = pays_off({count: one.total for count, one in times.by_nics.items()})
    out.print(table(f"update by NICs of a rank: {paying} pay off", ("NICs", "calls over, ms", "update, ms"), [
        (str(count), f"{one.hosts:.1f}", f"{one.total:.1f}") for count, one in times.by_nics.items()
    ]))  # fmt: skip


def panels(summary: PlanSummary, times: UpdateTimes) -> list[Panel]:
    """Return the panels of a picture of the plan."""
    limits = {name: time for name, (time, _) in times.bound._asdict().items()}
    found = [
        Panel("bytes by source rank", "GB", {
            "sent": {str(rank): size / 1e9 for rank, size in summary.sent.items()},
            "gathered": {str(rank): size / 1e9 for rank, size in summary.gathered.items()},
        }, stacked=True),
        Panel("bytes by target rank", "GB", {
            "received": {str(rank): size / 1e9 for rank, size in summary.received.items()}
        }),
        Panel("what no order can beat", "ms", {"bound": limits}),
    ]  # fmt: skip
    if times.by_nics:
        by_nics = {str(count): one.total for count, one in times.by_nics.items()}
        found.append(Panel("update by NICs of a rank", "ms", {"update": by_nics}))
    return found
