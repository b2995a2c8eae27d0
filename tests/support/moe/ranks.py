"""Groups of ranks in one process, tokens for them, and what a round has to give, computed without any of aiote.moe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote
from aiote.moe import Batch, MoeConfig, MoeGroup, open_group
from support.engines.opening import until

Array = NDArray[Any]
SHAPES = {
    "grouped direct": MoeConfig(experts=8, top_k=3, hidden=24, tokens=9, rows=40, placement="direct"),
    "grouped packed": MoeConfig(experts=7, top_k=2, hidden=16, tokens=9, rows=60, placement="packed", scales=3),
    "contiguous direct": MoeConfig(
        experts=5, top_k=3, hidden=5, tokens=6, rows=96, layout="contiguous", align=4, placement="direct", scales=1
    ),
    "contiguous packed": MoeConfig(
        experts=9, top_k=4, hidden=3, tokens=6, rows=120, layout="contiguous", align=8, placement="packed"
    ),
    "private": MoeConfig(experts=6, top_k=4, hidden=8, tokens=7, rows=90, placement="packed", private=3),
    "by rank": MoeConfig(
        experts=9, top_k=4, hidden=8, tokens=7, rows=90, copies="rank", dtype="float8_e4m3fn", scales=2
    ),
    "mask": MoeConfig(experts=9, top_k=2, hidden=8, tokens=7, on_loss="mask", out_dtype="float32"),
    "one value": MoeConfig(experts=700, top_k=22, hidden=1, tokens=5, rows=99, dtype="float32", out_dtype="float16"),
}
"""Configs of every placement and layout."""


class Tokens:
    """What a rank dispatches in one round."""

    def __init__(self, rng: np.random.Generator, config: MoeConfig, tokens: int, *, wild: bool = True) -> None:
        shape = (tokens, config.top_k)
        self.x = rng.integers(0, 256, (tokens, config.hidden * 4), np.uint8).view(np.float32)
        if config.dtype == "float32":
            self.x = rng.standard_normal((tokens, config.hidden)).astype(np.float32)
        else:
            kind = {1: np.uint8, 2: np.uint16}[2 if "16" in config.dtype else 1]
            self.x = rng.integers(0, np.iinfo(kind).max, (tokens, config.hidden), kind)
        low, high = (-2, config.experts + 3) if wild else (0, config.experts)
        self.ids = rng.integers(low, high, shape).astype(rng.choice([np.int32, np.int64]))
        self.weights = rng.standard_normal(shape).astype(np.float32)
        self.scales = None
        if config.scales:
            self.scales = rng.standard_normal((tokens, config.scales)).astype(np.float32)


def expert(config: MoeConfig, number: int, x: Array) -> Array:
    """Return what an expert makes of rows, as `out_dtype` in raw numbers or floats: any function of both does."""
    raw = (
        x.astype(np.float32)
        if x.dtype.kind == "f"
        else x.view(np.uint8)[..., :1].astype(np.float32) + np.arange(config.hidden, dtype=np.float32)
    )
    value = raw[..., : config.hidden] * np.float32(number % 7 - 3) + np.float32(number)
    return stored(value, config.out_dtype)


def stored(values: Array, dtype: str) -> Array:
    """Return float32 as elements of a type: bfloat16 as raw numbers, rounded to the nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def loaded(values: Array, dtype: str) -> Array:
    """Return elements of a type as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def reference(config: MoeConfig, one: Tokens, dropped: Array | None = None) -> Array:
    """Return what `combine` has to give: term after term in float32, in the order of k, rounded once."""
    total = np.zeros((len(one.ids), config.hidden), np.float32)
    for token in range(len(one.ids)):
        for slot, number in enumerate(one.ids[token].tolist()):
            if 0 <= number < config.experts and not (dropped is not None and dropped[token, slot]):
                y = loaded(expert(config, number, one.x[token : token + 1]), config.out_dtype)[0]
                total[token] += one.weights[token, slot] * y
    return stored(total, config.out_dtype)


def compute(group: MoeGroup, batch: Batch, into: Array | None = None) -> Array:
    """Return what a rank's experts make of a batch, in layout "grouped" or "contiguous"."""
    config, first = group.config, group.sizes.first_expert_of(group.rank)
    y = np.zeros(batch.y.shape, batch.y.dtype) if into is None else into
    for number, count in enumerate(batch.expert_num_tokens.tolist()):
        rows = (number,) if config.layout == "grouped" else ()
        start = 0 if config.layout == "grouped" else int(batch.offsets[number])
        place = (*rows, slice(start, start + count))
        y[place] = expert(config, first + number, batch.x[place])
    return y


def check_rows(group: MoeGroup, batch: Batch, given: list[Tokens]) -> None:
    """Check each row of a batch against the token that it says it is, and that they lie in order."""
    config, seen = group.config, batch.source.reshape(-1, 3)
    x = batch.x.reshape(-1, config.hidden)
    real = np.flatnonzero(seen[:, 0] >= 0)
    for line in real.tolist():
        source, token, _ = seen[line].tolist()
        assert x[line].tobytes() == given[source].x[token].tobytes()
        if config.scales:
            assert batch.scales.reshape(-1, config.scales)[line].tobytes() == given[source].scales[token].tobytes()
    if config.layout != "rank":
        first = group.sizes.first_expert_of(group.rank)
        lines = batch.expert_num_tokens.tolist()
        for number, count in enumerate(lines):
            start = int(batch.offsets[number])
            rows = seen[start : start + count].tolist()
            assert rows == sorted(rows), "in the order of source, token and k"
            for source, token, slot in rows:
                assert given[source].ids[token, slot] == first + number
        assert sum(lines) == len(real)


def summed(group: Any, batch: Any) -> Any:
    """Return what a rank returns in layout "rank": of each copy the weighted sum over its own experts."""
    y = np.zeros(batch.y.shape, np.float32)
    for rank, count in enumerate(batch.source_num_tokens.tolist()):
        for token in range(count):
            for slot, number in enumerate(batch.topk_ids[rank, token].tolist()):
                if number >= 0:
                    value = expert(
                        group.config, group.sizes.first_expert_of(group.rank) + number, batch.x[rank, token][None]
                    )[0]
                    y[rank, token] += batch.topk_weights[rank, token, slot] * value
    return y


class Ranks(list[MoeGroup]):
    """The ranks of a group, each in a task of its own until the end."""

    def __init__(
        self, opened: Callable[[], Any], config: MoeConfig, tasks: Any, more: Callable[[int], dict[str, Any]]
    ) -> None:
        """`more` says what else each rank opens the group with."""
        super().__init__()
        self.opened, self.config, self.tasks, self.more = opened, config, tasks, more
        self.over = anyio.Event()

    async def start(self, addresses: list[aiote.Address | None], *ranks: int) -> None:
        """Have engines for some ranks, which join the group, and wait until they are in it."""
        self.extend([None] * (len(addresses) - len(self)))  # type: ignore[list-item]
        engines: dict[int, aiote.Engine] = {}

        async def live(rank: int) -> None:
            async with self.opened() as engine:
                engines[rank], addresses[rank] = engine, engine.address
                await until(lambda: len(engines) == len(ranks))
                async with open_group(engine, addresses, rank, self.config, **self.more(rank)) as group:
                    self[rank] = group
                    joined.append(rank)
                    await self.over.wait()

        joined: list[int] = []
        for rank in ranks:
            self.tasks.start_soon(live, rank)
        await until(lambda: len(engines) == len(ranks))
        others = [group for group in self if group is not None and group.rank not in ranks]
        await all_of(*[lambda g=g: g.replace(ranks[0], addresses[ranks[0]]) for g in others])
        await until(lambda: len(joined) == len(ranks))


@asynccontextmanager
async def ranks(opened: Callable[[], Any], count: int, config: MoeConfig, **more: Any) -> AsyncIterator[Ranks]:
    """Open so many engines and a group over them, every rank in this process."""
    async with anyio.create_task_group() as tasks:
        found = Ranks(opened, config, tasks, lambda rank: more)
        await found.start([None] * count, *range(count))
        try:
            yield found
        finally:
            found.over.set()


async def all_of(*bodies: Callable[[], Any]) -> list[Any]:
    """Run coroutine functions side by side and return what they return; one that raises ends the others."""
    results: list[Any] = [None] * len(bodies)

    async def one(number: int, body: Callable[[], Any]) -> None:
        results[number] = await body()

    async with anyio.create_task_group() as tasks:
        for number, body in enumerate(bodies):
            tasks.start_soon(one, number, body)
    return results


async def whole_round(
    groups: list[MoeGroup], given: list[Tokens], *, in_place: bool = True, lane: int = 0
) -> list[Any]:
    """Make one round on all ranks, check every row on the way, and return what each got."""

    async def one(group: MoeGroup, tokens: Tokens) -> Any:
        batch = await group.dispatch(tokens.x, tokens.ids, tokens.weights, tokens.scales, lane=lane)
        check_rows(group, batch, given)
        if in_place:
            compute(group, batch, batch.y)
            out = await group.combine(batch)
        else:
            out = await group.combine(batch, compute(group, batch))
        expected = reference(group.config, tokens, batch.dropped)
        assert out.tobytes() == expected.tobytes(), (group.rank, out, expected)
        return batch

    return await all_of(*[lambda g=g, t=t: one(g, t) for g, t in zip(groups, given, strict=True)])
