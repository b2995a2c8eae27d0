"""The command `aiote plan kvcache`: predict the time to move a prompt's cache, before its NICs exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

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
from aiote.plan import KV_SHAPES, kv_shape, nics_of
from aiote.plan.kvcache import FREE, HOST_US, Computation, KvPlan, KvScenario, ParallelLayout, plan_kvcache, with_nics
from aiote.plan.plot import Panel, draw, require

__all__ = ["kvcache"]

PUBLISHED_CHUNK = 16384


def kvcache(
    model: Annotated[str, typer.Option(help=f"A published shape: {', '.join(KV_SHAPES)}.")] = "",
    layers: Annotated[int, typer.Option(help="Layers, instead of the model's.")] = 0,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads; 0: one row, which all ranks have (MLA).")] = -1,
    head_bytes: Annotated[int, typer.Option(help="Bytes of a head's key or value, or of that row.")] = 0,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt; repeat it for several.")] = None,
    prefill_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a prefill group.")] = 1,
    prefill_pp: Annotated[int, typer.Option(help="Its pipeline stages.")] = 1,
    decode_tp: Annotated[int, typer.Option(help="Tensor-parallel ranks of a decode group.")] = 1,
    decode_pp: Annotated[int, typer.Option(help="Its pipeline stages.")] = 1,
    page_tokens: Annotated[int, typer.Option(help="Tokens of a page.")] = 128,
    chunk: Annotated[int, typer.Option(help="Tokens that are computed at a time (a chunk).")] = PUBLISHED_CHUNK,
    layer_ms: Annotated[
        str, typer.Option(metavar="MS[,MS]", help="Time for a layer of a full chunk: of the first, and of the last.")
    ] = "",
    host_us: Annotated[float, typer.Option(help="Time between a computed layer and its first write.")] = HOST_US,
    nics: Annotated[str, typer.Option(metavar="NAME|FILE", help=NICS_HELP)] = "efa-200g",
    nics_per_rank: Annotated[int, typer.Option(help="NICs of a rank; 0: as many as a GPU has.")] = 0,
    rate: Annotated[float, typer.Option(help="Prompts a second for one prefill group.")] = 0.0,
    hold_s: Annotated[float, typer.Option(help="Seconds for which a prompt's pages stay after arrival.")] = 10.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw it; needs matplotlib.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, every rank by itself.")] = False,
) -> None:
    """Plan how a KV cache goes to a decode group: bytes, time to first token, memory, NICs that pay off.

    Every rank runs aiote.kvcache itself, on the simulated network. docs/planner.md describes the predictions.
    """
    with refusing():
        if plot:
            require()
        shape = kv_shape(model, layers=layers, heads=kv_heads, head_bytes=head_bytes)
        scenario = KvScenario(
            shape=shape, nics=nics_of(nics, nics_per_rank), prefill=ParallelLayout(prefill_tp, prefill_pp),
            decode=ParallelLayout(decode_tp, decode_pp), page_tokens=page_tokens, chunk=chunk, host_us=host_us,
            rate=rate, hold_s=hold_s,
        )  # fmt: skip
        plans = _plans(scenario, tokens or [PUBLISHED_CHUNK], layer_ms)
        several = list(with_nics(plans[-1].scenario, NIC_COUNTS))
        drawn(plot, lambda path: draw(path, _title(plans[-1]), _panels(plans, several)))
    if as_json:
        print_json(_described(plans, several))
    else:
        _print(plans, several)


def _plans(scenario: KvScenario, prompts: list[int], layer_ms: str) -> list[KvPlan]:
    """Plan each prompt. Raises UsageError."""
    return [
        plan_kvcache(dataclasses.replace(scenario, tokens=tokens, computation=_computed(scenario, layer_ms, tokens)))
        for tokens in prompts
    ]


def _computed(scenario: KvScenario, layer_ms: str, tokens: int) -> Computation:
    """Return the given computation times, or the published ones, or none (FREE). Raises UsageError."""
    if not layer_ms:
        published = (scenario.shape.name, scenario.chunk) == ("qwen3-235b", PUBLISHED_CHUNK)
        return Computation.published(tokens) if published and tokens > 0 else FREE
    try:
        numbers = [float(part) for part in layer_ms.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 <= number <= 1e6 for number in numbers):
        raise UsageError(f"layer-ms={layer_ms!r}: expected one or two numbers of milliseconds from 0 to 1e+06")
    return Computation(numbers[0], numbers[-1], "the command line")


def _title(plan: KvPlan) -> str:
    scenario = plan.scenario
    sides = (f"TP{one.tp}" + (f" PP{one.pp}" if one.pp > 1 else "") for one in (scenario.prefill, scenario.decode))
    return f"KV cache of {scenario.shape.name or 'the given shape'}, {' to '.join(sides)}"


def _nics(plan: KvPlan) -> str:
    nics = plan.scenario.nics
    return f"{nics.per_rank} x {nics.model.name} a rank, {nics.gbps:.4g} Gbit/s together ({nics.source})"


def _print(plans: list[KvPlan], several: list[KvPlan]) -> None:
    out, last = console(), plans[-1]
    scenario, shape = last.scenario, last.scenario.shape
    rows = [
        ("shape", f"{shape.layers} layers, {shape.token_bytes} bytes a token and layer ({shape.source})"),
        ("NICs", _nics(last)),
        ("computation", scenario.computation.source),
        ("host", f"{scenario.host_us:g} us from a computed layer to its first write (222: fitted, docs/kvcache.md)"),
    ]  # fmt: skip
    out.print(facts(_title(last), rows))
    heads = (
        "tokens",
        "bytes",
        "pieces a layer",
        "a layer, ms",
        "computed, ms",
        "first token, ms",
        "added, ms",
    )
    out.print(table("prompts", heads, [
        (f"{plan.scenario.tokens}", size_of(sum(plan.received.values())), f"{plan.pieces}", f"{plan.layer_ms:.3f}",
         f"{plan.alone_ms:.1f}", f"{plan.first_token_ms:.1f}", f"{plan.added_ms:.3f}")
        for plan in plans
    ]))  # fmt: skip
    ranks = [(f"prefill {rank}, sends", last.sent_by_nic.get(rank), size) for rank, size in last.sent.items()]
    ranks += [(f"decode {rank}, gets", last.received_by_nic.get(rank), size) for rank, size in last.received.items()]
    out.print(table(f"bytes of {scenario.tokens} tokens", ("rank", "bytes", "by NIC"), [
        (name, size_of(size), ", ".join(map(size_of, by_nic)) if by_nic else "as its stage's last ranks")
        for name, by_nic, size in ranks
    ]))  # fmt: skip
    out.print(facts("pools and rate", _pool_rows(last)))
    out.print(_nic_table(several))


def _pool_rows(plan: KvPlan) -> list[tuple[str, str]]:
    scenario, pools = plan.scenario, plan.pools
    rows = [
        ("a prefill rank", f"{size_of(pools.prefill_prompt)} a prompt, {size_of(pools.prefill)} at the rate"),
        ("a decode rank", f"{size_of(pools.decode_prompt)} a prompt, {size_of(pools.decode)} at the rate"),
    ]
    seconds = plan.hottest[1] * 8e-9 / scenario.nics.model.gbps
    busy = f"busy {plan.busiest:.1%} of the time at {scenario.rate:g} prompts a second; " if scenario.rate else ""
    name, size = plan.hottest
    return [
        *rows,
        ("hottest NIC", f"{name}: {size_of(size)} a prompt; {busy}full at {1 / seconds:.4g} prompts a second"),
    ]


def _nic_table(several: list[KvPlan]) -> Any:
    times = {plan.scenario.nics.per_rank: plan.first_token_ms for plan in several}
    layers = {plan.scenario.nics.per_rank: plan.layer_ms for plan in several}
    title = f"NICs of a rank: {pays_off(times)} pay off for the first token, {pays_off(layers)} for a layer's transfer"
    rows = [(str(count), f"{layers[count]:.3f}", f"{times[count]:.2f}") for count in times]
    return table(title, ("NICs", "a layer, ms", "first token, ms"), rows)


def _described(plans: list[KvPlan], several: list[KvPlan]) -> dict[str, Any]:
    last = plans[-1]
    times = {plan.scenario.nics.per_rank: plan.first_token_ms for plan in several}
    return {
        "shape": last.scenario.shape._asdict(),
        "nics": {"model": dataclasses.asdict(last.scenario.nics.model), "per_rank": last.scenario.nics.per_rank,
                 "source": last.scenario.nics.source},
        "prefill": last.scenario.prefill._asdict(), "decode": last.scenario.decode._asdict(),
        "prompts": [_prompt(plan) for plan in plans],
        "by_nics": {plan.scenario.nics.per_rank: {"layer_ms": plan.layer_ms, "first_token_ms": plan.first_token_ms}
                    for plan in several},
        "nics_that_pay_off": pays_off(times),
    }  # fmt: skip


def _prompt(plan: KvPlan) -> dict[str, Any]:
    found = {name: value for name, value in plan._asdict().items() if name not in ("scenario", "pools")}
    hottest = {"name": plan.hottest[0], "bytes": plan.hottest[1]}
    return {"tokens": plan.scenario.tokens, **found, "first_token_ms": plan.first_token_ms, "hottest_nic": hottest,
            "computation": plan.scenario.computation._asdict(), "pools": plan.pools._asdict()}  # fmt: skip


def _panels(plans: list[KvPlan], several: list[KvPlan]) -> list[Panel]:
    last = plans[-1]
    by_rank = {
        "sent": {f"p{rank}": size / 1e9 for rank, size in last.sent.items()},
        "received": {f"d{rank}": size / 1e9 for rank, size in last.received.items()},
    }
    return [
        Panel("added to the time to first token, by tokens", "ms", {
            "added": {str(plan.scenario.tokens): plan.added_ms for plan in plans},
        }),
        Panel(f"bytes by rank, {last.scenario.tokens} tokens", "GB", by_rank, stacked=True),
        Panel("a layer's transfer by NICs of a rank", "ms", {
            "layer": {str(plan.scenario.nics.per_rank): plan.layer_ms for plan in several}
        }),
    ]  # fmt: skip
