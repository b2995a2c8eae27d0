"""Plan how a prompt's cache goes from a prefill group to a decode group: run `aiote.kvcache` on the simulated network.

`aiote.kvcache.mapping` (`assign`, `CacheMap`) computes the bytes that each rank sends to each other rank, for all
layers and ranks. The simulation says how long this takes. It runs a `Producer` for each prefill rank and a `Consumer`
for each decode rank, on engines with their NICs in virtual time. These plan, post, count and answer as they always do,
but their Python code takes no time.

    transfer of a layer = from its computation until every decode rank knows that all of it has arrived
    added               = from the request until the last layer has arrived, less the computation

**Layers.** Only the last `LAYERS` layers are simulated; they belong to the last pipeline stage. A second simulation, of
half as many, shows whether the network is the bottleneck: then each layer adds to the delay, and so does every layer of
the stage that is not simulated.

**Computation.** The caller gives the time of a layer of a chunk (`Computation`), or uses the published time of
Qwen3-235B.

**Host.** The time between a layer's computation and its first write was not published. `HOST_US` was fitted to the four
published cells (docs/kvcache.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import anyio
import numpy as np

import aiote
from aiote.kvcache import Cache, Consumer, PageRow, Producer
from aiote.kvcache.mapping import CacheMap, assign
from aiote.kvcache.tensors import CacheSpec

from ..testing import Fabric, run
from .nics import Nics, in_range
from .shapes import KvShape

__all__ = [
    "HOST_US",
    "PUBLISHED_LAYER_MS",
    "Computation",
    "KvPlan",
    "KvScenario",
    "ParallelLayout",
    "Pools",
    "plan_kvcache",
    "with_nics",
]

LAYERS = 4
HOST_US = 222.0
MOST_TOKENS = 1 << 20
MOST_BYTES = 256 << 20
"""The most bytes of a simulated group's pages. Larger groups are simulated with smaller items on slower NICs."""
PUBLISHED_LAYER_MS = {4096: 2.267, 16384: 9.860, 65536: 20.344, 131072: 34.895}
"""Milliseconds of a layer of a prompt's last chunk of 16384 tokens, by the prompt's tokens, for Qwen3-235B over TP4 on
H200 (arXiv 2510.27656)."""


class ParallelLayout(NamedTuple):
    """A group of tp * pp ranks. Heads are divided among tp ranks, or repeated; layers are divided among pp stages."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp


class Computation(NamedTuple):
    """Milliseconds of a layer of a full chunk: for a prompt's first chunk and for its last, linear between them."""

    first: float = 0.0
    last: float = 0.0
    source: str = "not given: 0 ms"

    def chunks(self, tokens: int, chunk: int) -> list[float]:
        """Return the milliseconds of a layer of each chunk of a prompt. A chunk that is not full takes its share."""
        count = -(-tokens // chunk)
        full = np.linspace(self.first, self.last, count) if count > 1 else np.array([self.first])
        shares = [min(chunk, tokens - chunk * number) / chunk for number in range(count)]
        return [float(each * share) for each, share in zip(full, shares, strict=True)]

    @classmethod
    def published(cls, tokens: int) -> Computation:
        """Return the published computation with chunks of 16384 tokens, linear between the published prompt lengths."""
        known = sorted(PUBLISHED_LAYER_MS)
        last = float(np.interp(tokens, known, [PUBLISHED_LAYER_MS[length] for length in known]))
        chunk, source = known[1], "published for Qwen3-235B, TP4, H200 (arXiv 2510.27656)"
        if tokens > chunk:
            return cls(PUBLISHED_LAYER_MS[chunk], last, source)
        full = last * chunk / max(tokens, known[0])
        return cls(full, full, source)


WHOLE, FREE = ParallelLayout(), Computation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvScenario:
    """The scenario to plan.

    rate: prompts a second for a prefill group, 0 if unknown. hold_s: seconds for which a decode group keeps a prompt's
    pages after they have arrived.
    """

    shape: KvShape
    nics: Nics
    tokens: int = 16384
    prefill: ParallelLayout = WHOLE
    decode: ParallelLayout = WHOLE
    page_tokens: int = 128
    chunk: int = 16384
    computation: Computation = FREE
    host_us: float = HOST_US
    rate: float = 0.0
    hold_s: float = 10.0

    def __post_init__(self) -> None:
        """Check the numbers. Raises UsageError."""
        in_range("tokens", self.tokens, 1, MOST_TOKENS)
        in_range("page-tokens", self.page_tokens, 1, 4096)
        in_range("chunk", self.chunk, 1, MOST_TOKENS)
        in_range("host-us", self.host_us, 0, 1e6)
        in_range("rate", self.rate, 0, 1e6)
        in_range("hold-s", self.hold_s, 0, 1e6)
        for side, layout in (("prefill", self.prefill), ("decode", self.decode)):
            in_range(f"{side}-tp", layout.tp, 1, 64)
            in_range(f"{side}-pp", layout.pp, 1, min(64, self.shape.layers))
            heads = self.shape.heads
            if heads and max(heads, layout.tp) % min(heads, layout.tp):
                raise aiote.UsageError(
                    f"{side}-tp={layout.tp}: expected a divisor or a multiple of the {heads} key-value heads"
                )
        if self.chunk % self.page_tokens:
            raise aiote.UsageError(f"chunk={self.chunk}: expected a multiple of page-tokens={self.page_tokens}")

    @property
    def pages(self) -> int:
        """The number of pages of a prompt."""
        return -(-self.tokens // self.page_tokens)

    def layers_of(self, layout: ParallelLayout, rank: int) -> range:
        """Return the layers of a rank: the layers of its stage, which is rank // tp."""
        layers, stage = self.shape.layers, rank // layout.tp
        return range(stage * layers // layout.pp, (stage + 1) * layers // layout.pp)

    def heads_of(self, layout: ParallelLayout, rank: int) -> tuple[int, int]:
        """Return the first head of a rank, and how many it has."""
        heads, place = self.shape.heads, rank % layout.tp
        if heads == 0:
            return 0, 1
        each = max(1, heads // layout.tp)
        return place * heads // layout.tp, each

    def cache(self, side: str, rank: int, layers: range, pages: int, head_bytes: int) -> Cache:
        """Return the cache of a rank. Its layers share the same memory, because the bytes in it do not matter."""
        layout = self.prefill if side == "prefill" else self.decode
        first, count = self.heads_of(layout, rank)
        made = Cache(f"{side} {rank}", ranks=layout.ranks)
        array = np.zeros((pages, len(self.shape.fields), count, self.page_tokens, head_bytes), np.uint8)
        for layer in layers:
            made.add(array, "page field head token item", layer=layer, first_head=first, fields=self.shape.fields)
        return made


class Pools(NamedTuple):
    """Bytes of pages for each rank of a group: for one prompt, and for all prompts that it holds at the rate."""

    prefill_prompt: int
    decode_prompt: int
    prefill: int
    decode: int


class KvPlan(NamedTuple):
    """The plan of a prompt's transfer.

    Bytes are for one prompt with all its layers: by rank, and by NIC of each rank (simulated layers, scaled to all
    layers). `layer_ms` is the mean transfer of a layer and `alone_ms` the computation; the first token is there
    `added_ms` later. `pieces` is the number of pieces of a layer at the decode rank with the most. `busiest` is the
    share of time that the hottest NIC is busy at the rate.
    """

    scenario: KvScenario
    sent: dict[int, int]
    received: dict[int, int]
    sent_by_nic: dict[int, list[int]]
    received_by_nic: dict[int, list[int]]
    pieces: int
    layer_ms: float
    added_ms: float
    alone_ms: float
    pools: Pools
    busiest: float

    @property
    def first_token_ms(self) -> float:
        """Milliseconds from the request until all of a prompt is at the decode group."""
        return self.alone_ms + self.added_ms

    @property
    def hottest(self) -> tuple[str, int]:
        """The NIC that carries the most bytes of a prompt in one direction, and these bytes."""
        sides = (("prefill", self.sent_by_nic), ("decode", self.received_by_nic))
        return max(
            ((f"{side} rank {rank}, NIC {nic}", size)
             for side, by_rank in sides for rank, row in by_rank.items() for nic, size in enumerate(row)),
            key=lambda one: one[1],
        )  # fmt: skip


def bytes_by_rank(scenario: KvScenario) -> tuple[dict[int, int], dict[int, int], int]:
    """Return a prompt's bytes that each prefill rank sends and each decode rank gets, and the most pieces of a layer.

    The numbers come from the service's own mapping of all layers and ranks. Raises MappingError.
    """
    sides = {"prefill": scenario.prefill, "decode": scenario.decode}
    specs: dict[str, list[CacheSpec]] = {
        side: [
            scenario.cache(side, rank, scenario.layers_of(layout, rank), 1, scenario.shape.head_bytes).spec
            for rank in range(layout.ranks)
        ]
        for side, layout in sides.items()
    }
    sent, received = Counter(dict.fromkeys(range(scenario.prefill.ranks), 0)), Counter[int]()
    rows, most = {0: PageRow(np.arange(scenario.pages))}, 0
    for rank, spec in enumerate(specs["decode"]):
        pieces: Counter[int] = Counter()
        for source, part in enumerate(assign(specs["prefill"], spec, rank)):
            if not part.tensors:
                continue
            made = CacheMap(specs["prefill"][source], part)
            spans = dict(zip(made.units, made.spans(rows, scenario.tokens), strict=True))
            for layer, moves in made.moves.items():
                for move in moves:
                    count = len(spans[move.pattern.group]) * math.prod(axis.times for axis in move.pattern.axes)
                    sent[source] += count * move.pattern.nbytes
                    received[rank] += count * move.pattern.nbytes
                    pieces[layer] += count
        most = max(most, *pieces.values())
    return dict(sent), dict(received), most


def plan_kvcache(scenario: KvScenario) -> KvPlan:
    """Plan a prompt's transfer. Raises UsageError; MappingError is a subclass of it."""
    sent, received, pieces = bytes_by_rank(scenario)
    found = _Transfer(scenario, LAYERS)
    found.run()
    shape = scenario.shape
    alone = shape.layers * sum(scenario.computation.chunks(scenario.tokens, scenario.chunk))
    added = found.late[-1] * 1e3
    if beyond := found.stage_layers - len(found.layers):
        fewer = _Transfer(scenario, LAYERS // 2)
        fewer.run()
        behind = (found.late[-1] - fewer.late[-1]) / (len(found.layers) - len(fewer.layers))
        added += max(0.0, behind) * beyond * 1e3
    plan = KvPlan(
        scenario, sent, received, found.by_nic(found.sent, sent), found.by_nic(found.received, received), pieces,
        float(np.mean(found.took)) * 1e3, added, alone, _pools(scenario, (alone + added) / 1e3), 0.0,
    )  # fmt: skip
    seconds = plan.hottest[1] * 8e-9 / scenario.nics.model.gbps
    if scenario.rate * alone > 1000:
        raise aiote.UsageError(
            f"rate={scenario.rate:g}: a prefill group computes a prompt in {alone / 1e3:.4g} s: expected 0 to "
            f"{1e3 / alone:.4g} prompts a second for a group"
        )
    if scenario.rate * seconds > 1:
        raise aiote.UsageError(
            f"rate={scenario.rate:g}: the NIC of {plan.hottest[0]} needs {seconds * 1e3:.3g} ms for a prompt; "
            f"expected from 0 to {1 / seconds:.4g} prompts a second, or more NICs"
        )
    return plan._replace(busiest=scenario.rate * seconds)


def _pools(scenario: KvScenario, first_token_s: float) -> Pools:
    """Return the bytes that pools need for the prompts they hold at the same time (Little's law), at least one."""
    prompts = {
        "prefill": max(1, math.ceil(scenario.rate * first_token_s)),
        "decode": max(1, math.ceil(scenario.rate * (first_token_s + scenario.hold_s))),
    }
    one = {}
    for side, layout in (("prefill", scenario.prefill), ("decode", scenario.decode)):
        layers = max(len(scenario.layers_of(layout, rank)) for rank in range(layout.ranks))
        heads = scenario.heads_of(layout, 0)[1]
        token = len(scenario.shape.fields) * heads * scenario.shape.head_bytes
        one[side] = layers * scenario.pages * scenario.page_tokens * token
    return Pools(one["prefill"], one["decode"], one["prefill"] * prompts["prefill"], one["decode"] * prompts["decode"])


class _Transfer:
    """One simulated prompt, with those ranks of both groups that have the last layers."""

    def __init__(self, scenario: KvScenario, simulated: int) -> None:
        self.scenario = scenario
        layers = scenario.shape.layers
        prefill = scenario.layers_of(scenario.prefill, scenario.prefill.ranks - 1)
        self.stage_layers = len(prefill)
        self.layers = range(max(prefill.start, layers - simulated), layers)
        self.ranks = {
            side: [rank for rank in range(layout.ranks) if set(scenario.layers_of(layout, rank)) & set(self.layers)]
            for side, layout in (("prefill", scenario.prefill), ("decode", scenario.decode))
        }
        self.computed: dict[int, float] = {}
        self.there: dict[int, float] = {}
        self.began = 0.0
        self.sent: list[list[int]] = []
        self.received: list[list[int]] = []
        self.shrink = self._shrink()

    def _shrink(self) -> int:
        """Return the divisor of items and rates with which the pages take at most `MOST_BYTES`, if possible."""
        scenario, shrink = self.scenario, 1
        pages = scenario.pages * scenario.page_tokens * scenario.shape.token_bytes
        while pages // shrink > MOST_BYTES and scenario.shape.head_bytes % (2 * shrink) == 0:
            shrink *= 2
        return shrink

    @property
    def took(self) -> list[float]:
        """Seconds from each layer's computation until the layer had arrived."""
        return [self.there[layer] - self.computed[layer] for layer in self.layers]

    @property
    def late(self) -> list[float]:
        """Seconds from the request until each layer had arrived, less the computation of all layers until then."""
        each = sum(self.scenario.computation.chunks(self.scenario.tokens, self.scenario.chunk)) / 1e3
        # All chunks before the last one have computed all layers before the last chunk computes its first layer.
        before = sum(self.scenario.computation.chunks(self.scenario.tokens, self.scenario.chunk)[:-1]) / 1e3
        last = each - before
        return [
            self.there[layer] - self.began - before * len(self.layers) - last * number
            for number, layer in enumerate(self.layers, 1)
        ]

    def run(self) -> None:
        """Simulate the prompt's transfer."""
        nics = self.scenario.nics
        model = dataclasses.replace(nics.model, gbps=nics.model.gbps / self.shrink)
        run(self._main, rails=nics.per_rank, model=model, remembered=1 << 22)

    async def _main(self, fabric: Fabric) -> None:
        scenario, item = self.scenario, self.scenario.shape.head_bytes // self.shrink
        async with anyio.create_task_group() as work, _Sides(self, fabric, item) as sides:
            # Connect before the request begins, because an earlier request would have made the handshake.
            for consumer in sides.consumers:
                await consumer.connect(sides.addresses)
            self.began = fabric.now
            seen = len(fabric.trace())
            before = [engine.statistics().carried for engine in sides.senders]
            offers = [
                producer.offer("r", tokens=scenario.tokens, rows=self._rows(0), readers=len(sides.consumers))
                for producer in sides.producers
            ]
            work.start_soon(self._compute, fabric, offers)
            async with anyio.create_task_group() as readers:
                for consumer in sides.consumers:
                    readers.start_soon(self._read, fabric, consumer, sides.addresses)
            self.sent = [
                [now - then for now, then in zip(engine.statistics().carried, old, strict=True)]
                for engine, old in zip(sides.senders, before, strict=True)
            ]
            self.received = [[0] * scenario.nics.per_rank for _ in sides.consumers]
            for event in fabric.trace()[seen:]:
                if event.what == "place" and event.engine >= len(sides.senders):
                    self.received[event.engine - len(sides.senders)][event.rail] += event.length

    def _rows(self, side: int) -> dict[int, PageRow]:
        return {0: PageRow(np.random.default_rng(side).permutation(self.scenario.pages))}

    async def _compute(self, fabric: Fabric, offers: list[aiote.kvcache.Offer]) -> None:
        scenario = self.scenario
        async with anyio.create_task_group() as ranks:
            for offer in offers:
                ranks.start_soon(self._offer, fabric, offer, scenario)

    async def _offer(self, fabric: Fabric, offer: aiote.kvcache.Offer, scenario: KvScenario) -> None:
        async with offer, anyio.create_task_group() as host:

            async def tell(layer: int, tokens: int) -> None:
                await anyio.sleep(scenario.host_us / 1e6)
                offer.computed(layer, tokens)

            for number, millis in enumerate(scenario.computation.chunks(scenario.tokens, scenario.chunk), 1):
                for layer in self.layers:
                    await anyio.sleep(millis / 1e3)
                    self.computed[layer] = fabric.now
                    host.start_soon(tell, layer, min(scenario.tokens, scenario.chunk * number))

    async def _read(self, fabric: Fabric, consumer: Consumer, addresses: list[aiote.Address]) -> None:
        async with consumer.receive(addresses, "r", tokens=self.scenario.tokens, rows=self._rows(1)) as reception:
            for count, layer in enumerate(consumer.layers, 1):
                await reception.arrived(count)
                self.there[layer] = max(self.there.get(layer, 0.0), fabric.now)

    def by_nic(self, found: list[list[int]], whole: dict[int, int]) -> dict[int, list[int]]:
        """Return the simulated ranks' bytes by NIC, scaled from the simulated layers to all layers (`whole`)."""
        side = "prefill" if found is self.sent else "decode"
        made = {}
        for rank, row in zip(self.ranks[side], found, strict=True):
            total = sum(row)
            made[rank] = [round(whole[rank] * size / total) if total else 0 for size in row]
        return made


class _Sides:
    """The engines, producers and consumers of one simulated prompt."""

    def __init__(self, transfer: _Transfer, fabric: Fabric, item: int) -> None:
        self._transfer, self._fabric, self._item = transfer, fabric, item
        self._stack = contextlib.AsyncExitStack()
        self.senders: list[aiote.Engine] = []
        self.producers: list[Producer] = []
        self.consumers: list[Consumer] = []

    @property
    def addresses(self) -> list[aiote.Address]:
        """The addresses of the prefill ranks."""
        return [engine.address for engine in self.senders]

    async def __aenter__(self) -> _Sides:
        async with contextlib.AsyncExitStack() as stack:
            for rank in self._transfer.ranks["prefill"]:
                engine = await stack.enter_async_context(self._fabric.open_engine())
                self.senders.append(engine)
                self.producers.append(await stack.enter_async_context(Producer(engine, self._cache("prefill", rank))))
            for rank in self._transfer.ranks["decode"]:
                engine = await stack.enter_async_context(self._fabric.open_engine())
                made = Consumer(engine, self._cache("decode", rank), turn=rank)
                self.consumers.append(await stack.enter_async_context(made))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _cache(self, side: str, rank: int) -> Cache:
        scenario = self._transfer.scenario
        layout = scenario.prefill if side == "prefill" else scenario.decode
        layers = [layer for layer in scenario.layers_of(layout, rank) if layer in self._transfer.layers]
        return scenario.cache(side, rank, range(layers[0], layers[-1] + 1), scenario.pages, self._item)


def with_nics(scenario: KvScenario, counts: Iterable[int]) -> Iterator[KvPlan]:
    """Yield plans with other numbers of NICs for each rank, without a rate, because fewer NICs might not reach it."""
    for count in counts:
        yield plan_kvcache(dataclasses.replace(scenario, nics=scenario.nics.of(count), rate=0.0))
