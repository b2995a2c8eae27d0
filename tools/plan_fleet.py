"""Plan for 10,000 GPUs, and find the first limit: weights for 10,240 ranks, caches of 500 x 500 members, experts.

The services' own code runs on this machine: the tables show how long planning takes, how large its tables and messages
are, and what a connection holds. Times are CPU seconds of one process on this machine; the rest is the same on any.

`weights` plans every rank; descriptions are sampled. `kvcache` simulates one pair of groups with all its connections,
and multiplies. `moe` computes every write of every rank by arithmetic (`aiote.plan.moe_arithmetic`); no engine runs.

    python tools/plan_fleet.py weights
    python tools/plan_fleet.py kvcache
    python tools/plan_fleet.py moe
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import numpy as np

from aiote.cli import published_models
from aiote.discovery import EmbeddedRegistry, Member, RegistryServer
from aiote.errors import UsageError
from aiote.kvcache import Consumer, Producer
from aiote.kvcache.mapping import CacheMap, assign
from aiote.kvcache.routing import Router
from aiote.moe.config import Sizes
from aiote.plan import KV_SHAPES, MOE_SHAPES, nics_of
from aiote.plan.kvcache import Computation, KvScenario, ParallelLayout, plan_kvcache
from aiote.plan.moe import MoeScenario, plan_moe
from aiote.plan.weights import Costs, bound, count_writes
from aiote.testing import Fabric, run
from aiote.weights import UpdatePlan, plan_update
from aiote.weights.protocol import packed_layout

T = TypeVar("T")
SAMPLE = 16
PLACE_BYTES = 16
PROMPTS = 2000
JOINS = 200
PROMPT_TOKENS, PAGE_TOKENS = 4096, 128
HOLD_S = 10.0
GROUP_RANKS = 4
EP_NICS = (("connectx-7", 1), ("connectx-7", 2), ("efa-200g", 2), ("efa-200g", 4))


def timed(what: str, body: Callable[[], T]) -> T:
    """Do something, and print a row of how long it took and the most memory so far."""
    began = time.process_time()
    found = body()
    took, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"| {what} | {took:.1f} s | {peak:.2f} GB |", flush=True)
    return found


def row(*cells: object) -> None:
    """Print a row."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*cells: str) -> None:
    """Print a table's head."""
    row(*cells)
    row(*["---"] * len(cells))


def weights(trainers: int, targets: int) -> None:
    """Plan an update of Kimi-K2, 61 layers, by so many trainers for so many inference ranks."""
    head(f"{trainers} trainers, {targets} inference ranks", "CPU time", "Memory of the process")
    model = timed(
        "layouts and recipe",
        lambda: published_models.kimi_k2(trainers=trainers, targets=targets, trained_by=trainers // 64).plan_of(),
    )
    plan = timed("`plan_update`", lambda: plan_update(*model))
    timed("digest", lambda: plan.digest)
    traffic = timed("bytes by rank", lambda: plan.traffic)
    senders = timed("who writes to whom", lambda: plan.senders)
    writes = timed("writes by rank", lambda: count_writes(plan))
    timed("tasks of one trainer", lambda: sum(1 for _ in plan.tasks(0)))
    nics = nics_of("efa-200g")
    limits = bound(plan, nics.as_one(), writes=writes)
    print()
    head("What", "How much")
    row("units of the plan", f"{len(plan.units):,}")
    row("written in an update", f"{sum(traffic.sent.values()) / 1e12:.1f} TB")
    row("sent by the busiest trainer", f"{max(traffic.sent.values()) / 1e9:.1f} GB")
    row("received by an inference rank", f"{max(traffic.received.values()) / 1e9:.1f} GB")
    row("writes of the busiest trainer", f"{max(writes.values()):,}")
    row("trainers that write to an inference rank", f"{max(map(len, senders.values())):,}")
    row(f"posting, at {Costs().submit:g} us a write", f"{limits.posting[0] / 1e3:.2f} s of trainer {limits.posting[1]}")
    for name, (millis, rank) in (("trainer", limits.sending), ("inference rank", limits.receiving)):
        row(f"bytes over the NICs of one {name}, {nics.gbps:g} Gbit/s", f"{millis / 1e3:.2f} s of rank {rank}")
    _messages(plan)


def _messages(plan: UpdatePlan) -> None:
    """Print how much a controller sends, out of the descriptions of some ranks."""
    sizes = []
    for layout in (plan.sources, plan.targets):
        some = random.Random(1).sample(layout.ranks, min(SAMPLE, len(layout.ranks)))
        alone = [layout.only(rank) for rank in some]
        mean = sum(len(packed_layout(one)) + PLACE_BYTES * len(one.tensors) for one in alone) / len(some)
        sizes.append(mean * len(layout.ranks))
    each, sources = sum(sizes), len(plan.sources.ranks)
    row(f"descriptions of all ranks, by {SAMPLE} of each side", f"{sizes[0] / 1e6:.0f} + {sizes[1] / 1e6:.0f} MB")
    row("what a controller sends, all of that to each trainer", f"{each * sources / 1e12:.2f} TB")
    seconds = each * sources * 8e-9 / nics_of("efa-200g").gbps
    row("that over a controller's own NICs", f"{seconds:.0f} s, once for a plan")


def resident() -> float:
    """Return how many bytes of this process are in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def kvcache(prefill: int, decode: int) -> None:
    """Map caches, route prompts while members come and go, and hold connections."""
    head(f"{prefill} prefill, {decode} decode members", "CPU time", "Memory of the process")
    scenario = KvScenario(shape=KV_SHAPES["qwen3-235b"], nics=nics_of("efa-200g"))
    layers = range(scenario.shape.layers)
    specs = [scenario.cache(side, 0, layers, 1, scenario.shape.head_bytes).spec for side in ("prefill", "decode")]

    def mapped() -> list[CacheMap]:
        return [CacheMap(specs[0], *assign([specs[0]], specs[1], turn)) for turn in range(prefill)]

    timed(f"a decode member's maps of {prefill} caches of 94 layers", mapped)
    timed(f"routing {PROMPTS} prompts of {PROMPT_TOKENS} tokens, members as they are", lambda: _route(prefill, False))
    timed("the same, and at each prompt a member leaves and one joins", lambda: _route(prefill, True))
    print()
    head("Connections of one member, over 2 NICs, simulated", "A peer, CPU", "A peer, memory", "All of them, memory")
    for few in (16, 64):
        took, held = run(partial(_connections, count=few), rails=2)
        row(f"{few} prefill members", f"{took * 1e3:.1f} ms", f"{held / 1e3:.0f} kB", f"{held * prefill / 1e6:.0f} MB")

    print()
    head("A registry, simulated", f"A member of {JOINS} joins, CPU of all", "All know it after")
    for few in (4, 16):
        took, known = run(partial(_joins, watchers=few), rails=1)
        row(f"{few} engines watch", f"{took * 1e3:.1f} ms", f"{known * 1e3:.2f} ms of virtual time")

    print()
    _pages(prefill)


def _pages(groups: int) -> None:
    """Plan the pages of one prefill and one decode group at the largest rate, and multiply by the groups."""
    nics, shape, layout = nics_of("efa-200g"), KV_SHAPES["qwen3-235b"], ParallelLayout(GROUP_RANKS)
    scenario = KvScenario(
        shape=shape, nics=nics, tokens=PROMPT_TOKENS, prefill=layout, decode=layout, page_tokens=PAGE_TOKENS,
        computation=Computation.published(PROMPT_TOKENS), hold_s=HOLD_S,
    )  # fmt: skip
    rate = 0.999 * 1e3 / plan_kvcache(scenario).alone_ms
    plan = plan_kvcache(dataclasses.replace(scenario, rate=rate))
    head(f"Prompts of {PROMPT_TOKENS} tokens, groups of TP{GROUP_RANKS}, as many as prefill groups compute", "How much")
    row("prompts a second, a group and all groups", f"{rate:.2f} and {rate * groups:,.0f}")
    row("bytes between all groups", f"{rate * groups * sum(plan.sent.values()) / 1e12:.2f} TB a second")
    row(f"first token, with {plan.added_ms:.2f} ms of it added by the transfer", f"{plan.first_token_ms:.1f} ms")
    row(f"busiest NIC, {nics.per_rank} of {nics.model.gbps:g} Gbit/s a rank", f"busy {plan.busiest:.1%} of the time")
    row(f"pages of a decode rank that keeps a prompt for {HOLD_S:g} s", f"{plan.pools.decode / 1e9:.1f} GB")


def moe(several: tuple[int, int]) -> None:
    """Plan rounds of DeepSeek-V3's experts over different NICs."""
    head("Ranks", "NICs of a rank", "Dispatch, us", "Combine, us", "Operations alone, us", "Bytes alone, us",
         "Registered, a lane", "CPU time")  # fmt: skip
    for name, count in EP_NICS:
        for ranks in several:
            began, nics = time.process_time(), nics_of(name, count)
            scenario = MoeScenario(shape=MOE_SHAPES["deepseek-v3"], nics=nics, ranks=ranks, private=256)
            plan = plan_moe(dataclasses.replace(scenario, how="arithmetic"))
            one = nics.as_one()
            # A dispatch has a route to each rank, and rows to each rank of another node.
            operations = (2 * ranks - 1 - scenario.node) * one.operation_us
            rows = scenario.config.tokens * scenario.config.top_k * (1 - scenario.node / ranks)
            carried = rows * Sizes(scenario.config, ranks).row * 8e-3 / one.gbps
            row(ranks, f"{count} x {nics.model.name}", f"{plan.dispatch.mean:.0f}", f"{plan.combine.mean:.0f}",
                f"{operations:.0f}", f"{carried:.0f}", f"{(plan.inbox + plan.outbox) / 1e9:.2f} GB",
                f"{time.process_time() - began:.1f} s")  # fmt: skip


async def _joins(fabric: Fabric, watchers: int) -> tuple[float, float]:
    """Have members join a registry that so many engines watch; return CPU seconds for each, and when all know it."""
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(fabric.open_engine(message_pool=2))
        await stack.enter_async_context(RegistryServer(hub))
        found = []
        for _ in range(watchers):
            engine = await stack.enter_async_context(fabric.open_engine(message_pool=2))
            found.append(await stack.enter_async_context(EmbeddedRegistry(engine, hub.address)))
            await found[-1].ready()
        began = time.process_time()
        for number in range(JOINS):
            last = fabric.now
            await stack.enter_async_context(found[number % watchers].join(_member(number, 1)))
        async with anyio.create_task_group() as waiting:
            for registry in found:
                waiting.start_soon(_all_known, registry)
        return (time.process_time() - began) / JOINS, fabric.now - last


async def _all_known(registry: EmbeddedRegistry) -> None:
    """Wait until a registry knows all members."""
    names = set()
    async for event in registry.watch():
        names.add(event.member.name)
        if len(names) == JOINS:
            return


def _member(number: int, run_: int) -> Member:
    return Member(f"prefill-{number}", "prefill", b"address", run_)


def _route(members: int, changing: bool) -> None:
    """Route prompts, of which every fourth has a prefix that was there before."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 1 << 17, (PROMPTS // 4, PROMPT_TOKENS))
    router, here = Router(PAGE_TOKENS), {number: _member(number, 1) for number in range(members)}
    router.see(here.values())
    for number in range(PROMPTS):
        if changing:
            here[number % members] = _member(number % members, number + 2)
            router.see(here.values())
        choice = router.choose(prompts[number % len(prompts)], float(number))
        router.delivered(choice, choice.members[0], float(number))


async def _connections(fabric: Fabric, count: int) -> tuple[float, float]:
    """Connect a decode member to prefill members, and return seconds and bytes for each, of both sides together."""
    scenario = KvScenario(shape=KV_SHAPES["qwen3-235b"], nics=nics_of("efa-200g"), tokens=PAGE_TOKENS)
    layers = range(scenario.shape.layers)

    async with AsyncExitStack() as stack:
        producers = []
        for _ in range(count):
            engine = await stack.enter_async_context(fabric.open_engine(message_pool=2))
            cache = scenario.cache("prefill", 0, layers, 1, scenario.shape.head_bytes)
            producers.append(await stack.enter_async_context(Producer(engine, cache)))
        engine = await stack.enter_async_context(fabric.open_engine(message_pool=2))
        cache = scenario.cache("decode", 0, layers, 1, scenario.shape.head_bytes)
        consumer = await stack.enter_async_context(Consumer(engine, cache))
        before, began = resident(), time.process_time()
        for producer in producers:
            await consumer.connect([producer.engine.address])
        return (time.process_time() - began) / count, (resident() - before) / count


def main() -> int:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["weights", "kvcache", "moe"])
    parser.add_argument(
        "--ranks", type=int, nargs=2, metavar=("FROM", "TO"), help="instead of 4096 6144, 500 500, or (moe) 128 256"
    )
    options = parser.parse_args()
    body, usual = {"weights": (weights, (4096, 6144)), "kvcache": (kvcache, (500, 500)),
                   "moe": (lambda *several: moe(several), (128, 256))}[options.what]  # fmt: skip
    ranks = options.ranks or usual
    if min(ranks) < 1 or (options.what == "weights" and (ranks[0] % 1024 or ranks[1] % 64)):
        parser.error(
            "--ranks: expected a multiple of 1024 and one of 64 for weights, numbers of 1 and more for kvcache"
        )
    try:
        body(*ranks)
    except UsageError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
