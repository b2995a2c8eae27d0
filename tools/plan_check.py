"""Check the planner on this machine: a plan of each service for `local`, beside a measured run of the same service.

usage: plan_check.py [--nics FILES] [--runs 15] [--layers 16] [--tokens N ...] [--rows N ...] [--batch N ...]
                     [--json FILE]

`aiote bench write|latency|rate --provider local` measures the model of the NIC, unless --nics names its files. No other
number is given to the plan: the cost of the services' own Python (`host_us`, `calls`, `constant_us`) is 0 in it. So the
error also says how much of a run is Python. Each rank is a process. A figure is the median of the runs, after one run
that is not counted. Each service runs with every size that its option names: by default with one at which its own code
takes most of the time, and one at which the bytes do.

- kvcache: a prompt from one rank to another, from the request until the last layer has arrived; computed beforehand.
- weights: an update from two trainers to one inference rank, in place, by `Controller.update`.
- moe: dispatch and combine of two ranks on different nodes.

Run it on a quiet machine: all ranks need a core each, and the model of the NIC is measured just before the runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np

import aiote
from aiote import weights
from aiote.bench.records import machine
from aiote.kvcache import Consumer, PageRow, Producer
from aiote.moe import open_group
from aiote.plan import KvShape, MoeShape, Nics, nics_of
from aiote.plan.kvcache import KvScenario, plan_kvcache
from aiote.plan.moe import MoeScenario, plan_moe
from aiote.plan.weights import Costs, jobs_of, simulate

PROVIDER = "local"
BENCHED = (("write", "64K,1M,16M"), ("latency", "8"), ("rate", "8"))
FREE = Costs(0, 0, 0, 0, 0, 0)
TRAINERS = 2


class Row(NamedTuple):
    """A service's planned and measured time, in milliseconds."""

    what: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        """The error of the plan: 0.1 is ten percent longer than measured."""
        return self.planned / self.measured - 1

    def line(self) -> str:
        """Return the row of a table."""
        return f"| {self.what} | {self.planned:.3f} | {self.measured:.3f} | {self.error:+.0%} |"


class Sizes(NamedTuple):
    """The sizes of the runs.

    tokens: of a prompt, which has that many layers. rows: of an update's matrix, which has 1024 columns of float32.
    batch: the tokens of a rank in a round.
    """

    runs: int
    layers: int
    tokens: int
    rows: int
    batch: int


def benched(folder: Path, seconds: float, runs: int) -> Nics:
    """Measure the model of the NIC."""
    files = []
    for op, sizes in BENCHED:
        files.append(folder / f"{op}.json")
        command = [sys.executable, "-P", "-m", "aiote", "bench", op, "--provider", PROVIDER, "--sizes", sizes]
        command += ["--runs", str(runs), "--seconds", str(seconds), "--json", str(files[-1])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return nics_of(",".join(map(str, files)))


# Ranks in processes of their own.


def _started(rank: Callable[..., Awaitable[None]], pipe: Connection, *arguments: Any) -> None:
    anyio.run(rank, pipe, *arguments)


@contextmanager
def ranks(rank: Callable[..., Awaitable[None]], several: Sequence[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Start a process for each tuple of arguments. A process ends when it receives a message, or its pipe closes."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    try:
        for arguments in several:
            mine, other = context.Pipe()
            processes.append(context.Process(target=_started, args=(rank, other, *arguments), daemon=True))
            processes[-1].start()
            other.close()
            pipes.append(mine)
        yield pipes
        for pipe in pipes:
            pipe.send("end")
    finally:
        for process in processes:
            process.join(30)
            process.kill()


async def told(pipe: Connection) -> Any:
    """Wait for a message without blocking the loop."""
    return await anyio.to_thread.run_sync(pipe.recv)


def median_ms(times: Sequence[float]) -> float:
    """Return the median of all times but the first, in milliseconds."""
    return statistics.median(times[1:]) * 1e3


# KV caches.


def prompt(nics: Nics, sizes: Sizes) -> KvScenario:
    """Return the scenario of a prompt, which is both planned and run."""
    shape = KvShape("", sizes.layers, 4, 256, ("k", "v"), "this check")
    return KvScenario(shape=shape, nics=nics, tokens=sizes.tokens, page_tokens=16, host_us=0.0)


async def prefill(pipe: Connection, scenario: KvScenario, runs: int) -> None:
    """Offer computed prompts, one after the other."""
    layers, rows = range(scenario.shape.layers), {0: PageRow(range(scenario.pages))}
    cache = scenario.cache("prefill", 0, layers, scenario.pages, scenario.shape.head_bytes)
    async with aiote.open_engine(PROVIDER) as engine, Producer(engine, cache, match_timeout=60.0) as producer:
        pipe.send(str(engine.address))
        for number in range(runs):
            async with producer.offer(str(number), tokens=scenario.tokens, rows=rows) as offer:
                for layer in layers:
                    offer.computed(layer)
        await told(pipe)


def planned_kvcache(nics: Nics, sizes: Sizes) -> float:
    """Return a plan's milliseconds of a prompt."""
    return plan_kvcache(prompt(nics, sizes)).first_token_ms


async def measured_kvcache(nics: Nics, sizes: Sizes) -> float:
    """Receive prompts, and return the milliseconds of one."""
    scenario, times = prompt(nics, sizes), []
    layers, rows = range(scenario.shape.layers), {0: PageRow(range(scenario.pages)[::-1])}
    cache = scenario.cache("decode", 0, layers, scenario.pages, scenario.shape.head_bytes)
    with ranks(prefill, [(scenario, sizes.runs + 1)]) as (pipe,):
        async with aiote.open_engine(PROVIDER) as engine, Consumer(engine, cache) as consumer:
            addresses = [aiote.Address.parse(await told(pipe))]
            for number in range(sizes.runs + 1):
                began = time.perf_counter()
                async with consumer.receive(addresses, str(number), tokens=scenario.tokens, rows=rows) as reception:
                    await reception.arrived()
                times.append(time.perf_counter() - began)
    return median_ms(times)


# Weights.


def layouts(sizes: Sizes) -> tuple[weights.Layout, weights.Layout]:
    """Return the layouts of both sides."""
    shape = (sizes.rows, 1024)
    sources = weights.Layout.over(range(TRAINERS), {"w": (shape, "F32", weights.Shard(0))})
    return sources, weights.Layout.over(range(1), {"w": (shape, "F32", weights.Replicate())})


async def hold(pipe: Connection, side: str, rank: int, sizes: Sizes) -> None:
    """Serve one rank's tensor."""
    sources, targets = layouts(sizes)
    layout = (sources if side == "source" else targets).only(rank)
    arrays = {"w": np.zeros((sizes.rows // (TRAINERS if side == "source" else 1), 1024), np.float32)}
    async with aiote.open_engine(PROVIDER) as engine:
        serving: Any = (
            weights.serve_source(engine, layout, rank, arrays, weights.Recipe(), controllers="first")
            if side == "source"
            else weights.serve_target(engine, layout, rank, arrays, versions="inplace", controllers="first")
        )
        async with serving:
            pipe.send(str(engine.address))
            await told(pipe)


def planned_weights(nics: Nics, sizes: Sizes) -> float:
    """Return a plan's milliseconds of an update."""
    return simulate(jobs_of(weights.plan_update(*layouts(sizes))), nics.as_one(), FREE).total


async def measured_weights(_nics: Nics, sizes: Sizes) -> float:
    """Update the inference rank, and return the milliseconds of an update."""
    times = []
    several = [("source", rank, sizes) for rank in range(TRAINERS)] + [("target", 0, sizes)]
    with ranks(hold, several) as pipes:
        addresses = [await told(pipe) for pipe in pipes]
        async with aiote.open_engine(PROVIDER) as engine:
            controller = weights.Controller(engine, addresses[:TRAINERS], addresses[TRAINERS:], weights.Recipe())
            for version in range(1, sizes.runs + 2):
                began = time.perf_counter()
                report = await controller.update(version)
                times.append(time.perf_counter() - began)
                if report.failed:
                    raise SystemExit(f"an update failed: {report.failed}")
    return median_ms(times)


# Experts.


def group_of(nics: Nics, sizes: Sizes) -> MoeScenario:
    """Return the scenario of a round, which is both planned and run."""
    shape = MoeShape("", 16, 2, 2048, "this check")
    return MoeScenario(shape=shape, nics=nics, ranks=2, node=1, tokens=sizes.batch, dtype="bfloat16")


async def expert(pipe: Connection, scenario: MoeScenario, rank: int, runs: int) -> None:
    """Run one rank's rounds, and send their times."""
    ids, times = scenario.tokens_of(rank), []
    async with aiote.open_engine(PROVIDER) as engine:
        pipe.send(str(engine.address))
        members = await told(pipe)
        async with open_group(engine, members, rank, scenario.config) as group:
            x, scales = group.inputs()
            factors = np.ones(ids.shape, np.float32)
            for _ in range(runs):
                began = time.perf_counter()
                await group.combine(await group.dispatch(x, ids, factors, scales))
                times.append(time.perf_counter() - began)
        pipe.send(times)
        await told(pipe)


def planned_moe(nics: Nics, sizes: Sizes) -> float:
    """Return a plan's milliseconds of a dispatch and a combine."""
    found = plan_moe(group_of(nics, sizes), {"dispatch": 0.0, "combine": 0.0})
    return (found.dispatch.mean + found.combine.mean) / 1e3


async def measured_moe(nics: Nics, sizes: Sizes) -> float:
    """Run rounds of two ranks, and return the milliseconds of a dispatch and a combine."""
    scenario = group_of(nics, sizes)
    with ranks(expert, [(scenario, rank, sizes.runs + 1) for rank in range(scenario.ranks)]) as pipes:
        members = [await told(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(members)
        return statistics.mean([median_ms(await told(pipe)) for pipe in pipes])


CHECKS: tuple[tuple[str, str, Callable[[Nics, Sizes], float], Callable[[Nics, Sizes], Awaitable[float]]], ...] = (
    ("kvcache: a prompt of {} tokens", "tokens", planned_kvcache, measured_kvcache),
    ("weights: an update of {} rows", "rows", planned_weights, measured_weights),
    ("moe: a round of {} tokens", "batch", planned_moe, measured_moe),
)


def checked(nics: Nics, options: argparse.Namespace) -> Iterator[Row]:
    """Plan and run each service, once for each of its sizes."""
    first = Sizes(options.runs, options.layers, options.tokens[0], options.rows[0], options.batch[0])
    for what, field, planned, measured in CHECKS:
        for number in getattr(options, field):
            sizes = first._replace(**{field: number})
            yield Row(what.format(number), planned(nics, sizes), anyio.run(measured, nics, sizes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nics", default="", metavar="FILES", help="of `aiote bench --json`, with commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a run of `aiote bench`")
    parser.add_argument("--json", type=Path)
    for name, usual in (("runs", 15), ("layers", 16)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, several in (("tokens", [256, 8192]), ("rows", [2048, 65536]), ("batch", [128, 4096])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=several)
    options = parser.parse_args(arguments)
    least = min(options.runs, options.layers, *options.tokens, *options.rows, *options.batch)
    if least < 1 or any(rows % TRAINERS for rows in options.rows):
        parser.error(f"every number: expected 1 or more; --rows: a multiple of {TRAINERS}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            nics = nics_of(options.nics) if options.nics else benched(Path(folder), options.seconds, 5)
    except aiote.UsageError as error:
        parser.error(str(error))
    model, rows = nics.model, list(checked(nics, options))
    print(f"`{PROVIDER}` as a NIC: {model.gbps:.4g} Gbit/s, {model.operation_us:.3g} us an operation, "
          f"{model.latency_us:.3g} us one way; no number for Python\n")  # fmt: skip
    print("| Service | Planned, ms | Measured, ms | Error of the plan |\n|---|---|---|---|")
    print("\n".join(row.line() for row in rows))
    if options.json:
        found = [{**row._asdict(), "error": row.error} for row in rows]
        options.json.write_text(json.dumps({"machine": machine(), "model": vars_of(nics), "rows": found}, indent=2))
    return 0


def vars_of(nics: Nics) -> dict[str, float]:
    """Return the numbers of the NIC's model."""
    return {name: getattr(nics.model, name) for name in ("gbps", "operation_us", "latency_us", "answer_us")}


if __name__ == "__main__":
    sys.exit(main())
