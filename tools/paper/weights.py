"""The published weight update of Kimi-K2, simulated from the costs of its calls, and an update from shard to shard.

The paper says how long one trainer of the first pipeline stage spent in each kind of call, and that it waited for 357
of 1233 ms. Here each call of every trainer has that trainer's cost, the service's plan says how many calls there are,
and the writes go over simulated NICs (`aiote.plan.weights`). Total and waiting are results; no number is fitted.

Stages between the first and the last are alike, so one of them is planned and stands for all (`Stages.spread`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiote.cli import published_models
from aiote.plan import weights as planned_update
from aiote.plan.weights import Costs, Jobs, Order, Posts, Times, delivered, jobs_of, spent_in_calls
from aiote.testing import EFA_400G, NicModel
from aiote.weights import UpdatePlan, plan_update

__all__ = ["Costs", "Posts", "Stages", "Times", "delivered", "simulate", "spent_in_calls"]

STAGES, STAGE_RANKS = 16, 16
PLANNED_LAYERS = 9
"""Layers of the first stage, of one between, and the one layer of the last stage."""
PUBLISHED_MS, PUBLISHED_WAITING_MS = 1233.0, 357.0
SLOWER = 1.1
AT_ONCE = NicModel(name="any amount at once", latency_us=0, answer_us=0)


@dataclass
class Stages:
    """The jobs of trainers, by rank, in the order in which they do them."""

    jobs: Jobs = field(default_factory=dict)

    @classmethod
    def of(cls, plan: UpdatePlan, order: Order) -> Stages:
        """Return what a plan has for each trainer."""
        return cls(jobs_of(plan, order))

    def spread(self) -> Stages:
        """Return all stages of one that has three: the second one stands for all but the first and the last."""
        made = Stages()
        for stage in range(STAGES):
            like = 0 if stage == 0 else 2 if stage == STAGES - 1 else 1
            for rank in range(STAGE_RANKS):
                made.jobs[stage * STAGE_RANKS + rank] = self.jobs[like * STAGE_RANKS + rank]
        return made


def simulate(stages: Stages, nic: NicModel = EFA_400G, *, slower: float = 1.0, costs: Costs | None = None) -> Times:
    """Simulate an update; one stage, the third, may be `slower`."""
    return planned_update.simulate(stages.jobs, nic, costs, lambda rank: slower if rank // STAGE_RANKS == 2 else 1.0)


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


def print_table() -> None:
    """Print the table of docs/weights.md."""
    print("| Update | EP | Calls of the first trainer | Calls of all over | Total | First trainer waits |")
    print("|---|---|---|---|---|---|")
    print(f"| published | 32 | 876 | not said | {PUBLISHED_MS:.0f} | {PUBLISHED_WAITING_MS:.0f} |")
    for expert_ranks, (gather, rows) in itertools.product((64, 32), WAYS.items()):
        for what, times in rows(planned(expert_ranks, gather)):
            print(row(what, expert_ranks, times), flush=True)
