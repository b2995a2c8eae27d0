"""The command `aiote plan moe`: predict the time of a round of experts, before there are NICs to run it over."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from aiote.cli.plan_output import (
    NIC_COUNTS,
    NICS_HELP,
    console,
    drawn,
    facts,
    pays_off,
    print_json,
    refusing,
    size_of,
    table,
)
from aiote.errors import UsageError
from aiote.plan import MOE_SHAPES, moe_shape, nics_of
from aiote.plan.moe import MAX_RANKS, MAX_SIMULATED, MoePlan, MoeScenario, Phase, plan_moe, with_nics
from aiote.plan.plot import Panel, draw, require

__all__ = ["moe"]

MOST_ROWS = 16
HOW_HELP = f"Run every rank, or compute times by arithmetic; auto: run up to {MAX_SIMULATED} ranks."


class How(StrEnum):
    """The ways of finding a round's times."""

    AUTO = "auto"
    ENGINES = "engines"
    ARITHMETIC = "arithmetic"


def moe(
    model: Annotated[str, typer.Option(help=f"A published shape: {', '.join(MOE_SHAPES)}.")] = "",
    experts: Annotated[int, typer.Option(help="Experts, instead of the model's.")] = 0,
    top_k: Annotated[int, typer.Option(help="Experts that each token goes to.")] = 0,
    hidden: Annotated[int, typer.Option(help="Elements of a token's hidden state.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank in a round.")] = 128,
    ranks: Annotated[list[int] | None, typer.Option(help=f"Of the group, at most {MAX_RANKS}; several times.")] = None,
    node: Annotated[int, typer.Option(help="Ranks that share NVLink, whose traffic is not planned; 1: none.")] = 8,
    dtype: Annotated[str, typer.Option(help="Type of the dispatched elements.")] = "float8_e4m3fn",
    out_dtype: Annotated[str, typer.Option(help="Type of the elements that experts return.")] = "bfloat16",
    private: Annotated[int, typer.Option(help="Rows that are sent before routes are known; 0: all.")] = 0,
    zipf: Annotated[float, typer.Option(help="How unevenly tokens choose experts; 0: evenly.")] = 0.0,
    constant_us: Annotated[
        str,
        typer.Option(metavar="US,US", help="Time of kernels and host: dispatch, combine.", show_default="calibrated"),
    ] = "",
    how: Annotated[How, typer.Option(help=HOW_HELP)] = How.AUTO,
    nics: Annotated[str, typer.Option(metavar="NAME|FILE", help=NICS_HELP)] = "connectx-7",
    nics_per_rank: Annotated[int, typer.Option(help="NICs of a rank; 0: as many as a GPU has.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, every rank by itself.")] = False,
) -> None:
    """Plan rounds of an expert-parallel group: times, bytes by rank and NIC, memory, NICs that pay off.

    Every rank runs aiote.moe itself, on the simulated network. Large groups follow by arithmetic (docs/planner.md).
    """
    with refusing():
        if plot:
            require()
        base = MoeScenario(
            shape=moe_shape(model, experts=experts, top_k=top_k, hidden=hidden), nics=nics_of(nics, nics_per_rank),
            ranks=max(2, node * 2), tokens=tokens, node=node, dtype=dtype, out_dtype=out_dtype, private=private or None,
            zipf=zipf, how=how.value,
        )  # fmt: skip
        constant = _constant(constant_us)
        scenarios = [dataclasses.replace(base, ranks=count) for count in ranks or [base.ranks]]
        plans = [plan_moe(each, constant) for each in scenarios]
        several = list(with_nics(scenarios[0], NIC_COUNTS, constant))
        drawn(plot, lambda path: draw(path, _title(scenarios[0]), _panels(plans, several)))
    if as_json:
        print_json(_described(scenarios, plans, several))
    else:
        _print(scenarios, plans, several)


def _constant(text: str) -> dict[Phase, float] | None:
    """Return the microseconds to add to each phase, or None to add the calibrated ones. Raises UsageError."""
    if not text:
        return None
    try:
        dispatch, combine = (float(part) for part in text.split(","))
    except ValueError:
        dispatch = combine = -1.0
    if not (0 <= dispatch <= 1e6 and 0 <= combine <= 1e6):
        raise UsageError(f"constant-us={text!r}: expected two numbers of microseconds from 0 to 1e+06, as 17,14")
    return {"dispatch": dispatch, "combine": combine}


def _title(scenario: MoeScenario) -> str:
    return f"experts of {scenario.shape.name or 'the given shape'}, {scenario.tokens} tokens a rank"


def _print(scenarios: list[MoeScenario], plans: list[MoePlan], several: list[MoePlan]) -> None:
    out, first, scenario = console(), plans[0], scenarios[0]
    shape, nics = scenario.shape, scenario.nics
    added = ", ".join(f"{phase} {micros:g} us" for phase, micros in first.constant.items())
    source = "calibrated on published cells, docs/paper.md" if first.of_model else "of the command line, or 0"
    out.print(facts(_title(scenario), [
        ("shape", f"{shape.experts} experts, {shape.top_k} of a token, hidden {shape.hidden} ({shape.source})"),
        ("rows", f"{scenario.dtype} there, {scenario.out_dtype} back"),
        ("NICs", f"{nics.per_rank} x {nics.model.name} a rank, {nics.gbps:.4g} Gbit/s together ({nics.source})"),
        ("constant", f"{added} ({source})"),
    ]))  # fmt: skip
    heads = ("ranks", "dispatch, us", "slowest", "combine, us", "slowest", "hottest NIC", "registered, a lane", "by")
    out.print(table("rounds", heads, [
        (str(plan.ranks), f"{plan.dispatch.mean:.1f}", f"{plan.dispatch.slowest:.1f}", f"{plan.combine.mean:.1f}",
         f"{plan.combine.slowest:.1f}", f"rank {plan.hottest[0]}, NIC {plan.hottest[1]}: {size_of(plan.hottest[2])}",
         f"{size_of(plan.inbox + plan.outbox)}", "engines" if plan.simulated else "arithmetic")
        for plan in plans
    ]))  # fmt: skip
    rows = [
        (str(rank), size_of(sum(sent)), ", ".join(map(size_of, sent)), size_of(sum(got)), ", ".join(map(size_of, got)))
        for rank, (sent, got) in enumerate(zip(first.sent, first.received, strict=True))
    ]
    columns = ("rank", "sends", "by NIC", "gets", "by NIC")
    out.print(table(f"bytes of a round, {first.ranks} ranks", columns, rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        out.print(f"  and {len(rows) - MOST_ROWS} more ranks, which --json lists\n")
    out.print(_nic_table(first, several))


def _nic_table(first: MoePlan, several: list[MoePlan]) -> Table:
    times = {plan.nics.per_rank: plan.dispatch.mean + plan.combine.mean for plan in several}
    title = f"NICs of a rank, {first.ranks} ranks: {pays_off(times)} pay off"
    rows = [(str(plan.nics.per_rank), f"{plan.dispatch.mean:.1f}", f"{plan.combine.mean:.1f}") for plan in several]
    return table(title, ("NICs", "dispatch, us", "combine, us"), rows)


def _described(scenarios: list[MoeScenario], plans: list[MoePlan], several: list[MoePlan]) -> dict[str, Any]:
    scenario = scenarios[0]
    times = {plan.nics.per_rank: plan.dispatch.mean + plan.combine.mean for plan in several}
    return {
        "shape": scenario.shape._asdict(),
        "tokens": scenario.tokens, "node": scenario.node, "dtype": scenario.dtype, "out_dtype": scenario.out_dtype,
        "nics": {"model": dataclasses.asdict(scenario.nics.model), "per_rank": scenario.nics.per_rank,
                 "source": scenario.nics.source},
        "rounds": [_round(plan) for plan in plans],
        "by_nics": {plan.nics.per_rank: {"dispatch_us": plan.dispatch.mean, "combine_us": plan.combine.mean}
                    for plan in several},
        "nics_that_pay_off": pays_off(times),
    }  # fmt: skip


def _round(plan: MoePlan) -> dict[str, Any]:
    rank, nic, size = plan.hottest
    return {
        "ranks": plan.ranks, "how": "engines" if plan.simulated else "arithmetic",
        "dispatch_us": plan.dispatch._asdict(), "combine_us": plan.combine._asdict(),
        "constant_us": plan.constant, "constant_is_calibrated": plan.of_model, "sent": plan.sent,
        "received": plan.received, "inbox_bytes": plan.inbox, "outbox_bytes": plan.outbox,
        "hottest_nic": {"rank": rank, "nic": nic, "bytes": size},
    }  # fmt: skip


def _panels(plans: list[MoePlan], several: list[MoePlan]) -> list[Panel]:
    first = plans[0]
    return [
        Panel("a round, by ranks", "us", {
            "dispatch": {str(plan.ranks): plan.dispatch.mean for plan in plans},
            "combine": {str(plan.ranks): plan.combine.mean for plan in plans},
        }),
        Panel(f"bytes of a round by rank, {first.ranks} ranks", "MB", {
            "sent": {str(rank): sum(row) / 1e6 for rank, row in enumerate(first.sent)},
            "received": {str(rank): sum(row) / 1e6 for rank, row in enumerate(first.received)},
        }),
        Panel(f"a round by NICs of a rank, {first.ranks} ranks", "us", {
            "dispatch": {str(plan.nics.per_rank): plan.dispatch.mean for plan in several},
            "combine": {str(plan.nics.per_rank): plan.combine.mean for plan in several},
        }),
    ]  # fmt: skip
