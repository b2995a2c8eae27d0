"""Rounds of `aiote.moe` on GPUs, emulated or real, and on CPUs, with the same bits on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import numpy as np

from aiote.moe import MoeConfig, MoeGroup, device
from support.moe.ranks import Array, Ranks, Tokens, all_of, expert, loaded, ranks, reference, stored


class Place(NamedTuple):
    """A GPU, and how arrays get there and back."""

    launcher: Any
    there: Any
    back: Any


def on_a_gpu() -> Place:
    import cupy

    return Place(device.CudaLauncher(0), cupy.asarray, cupy.asnumpy)


@asynccontextmanager
async def mixed(
    opened: Callable[[], Any],
    config: MoeConfig,
    place: Place,
    on_gpus: Sequence[bool],
    later: Sequence[bool] = (),
    **more: Any,
) -> AsyncIterator[Ranks]:
    """Open a group of which some ranks are on GPUs, and the others on CPUs; so are those that come `later`, in turn."""
    first, following = dict(enumerate(on_gpus)), iter(later)

    def of_rank(rank: int) -> dict[str, Any]:
        on_gpu = first.pop(rank) if rank in first else next(following)
        return {**more, "device": place.launcher if on_gpu else None}

    async with anyio.create_task_group() as tasks:
        groups = Ranks(opened, config, tasks, of_rank)
        await groups.start([None] * len(on_gpus), *range(len(on_gpus)))
        try:
            yield groups
        finally:
            groups.over.set()


def drawn(rng: np.random.Generator, config: MoeConfig, tokens: int, **more: Any) -> Tokens:
    one = Tokens(rng, config, tokens, **more)
    if config.dtype == "float16":
        # NumPy has that type: raw bits of it would be other numbers.
        one.x = rng.standard_normal((tokens, config.hidden)).astype(np.float16)
    return one


def moved(place: Place, one: Tokens) -> list[Any]:
    """Return the tokens as arrays of the GPU's, rows of which lie at any stride and at multiples of their elements."""
    x, scales = (
        None if rows is None else place.there(np.pad(rows, ((0, 0), (1, 2))))[:, 1:-2] for rows in (one.x, one.scales)
    )
    return [x, place.there(one.ids), place.there(one.weights), scales]


def filled(place: Place, group: MoeGroup, batch: Any) -> Array:
    """Return what a rank's experts make of a batch, computed by the host, in any layout."""
    config, first, x = group.config, group.sizes.first_expert_of(group.rank), fetched(place, batch.x)
    y = np.zeros((*x.shape[:-1], config.hidden), stored(np.zeros(1), config.out_dtype).dtype)
    if config.layout == "rank":
        ids, weights = fetched(place, batch.topk_ids), fetched(place, batch.topk_weights)
        for rank, count in enumerate(batch.source_num_tokens.tolist()):
            for token in range(count):
                y[rank, token] = summed(config, first, x[rank, token][None], ids[rank, token], weights[rank, token])
        return y
    for number, count in enumerate(batch.expert_num_tokens.tolist()):
        start = 0 if config.layout == "grouped" else int(batch.offsets[number])
        at = (*((number,) if config.layout == "grouped" else ()), slice(start, start + count))
        y[at] = expert(config, first + number, x[at])
    return y


def summed(config: MoeConfig, first: int, x: Array, ids: Array, weights: Array) -> Array:
    """Return the weighted sum of what a rank's own experts make of one copy."""
    total = np.zeros(config.hidden, np.float32)
    for number, weight in zip(ids.tolist(), weights, strict=True):
        if number >= 0:
            total += weight * loaded(expert(config, first + number, x), config.out_dtype)[0]
    return stored(total, config.out_dtype)


def fetched(place: Place, array: Any) -> Any:
    """Return an array of the GPU's, or one of NumPy's, as one of NumPy's."""
    return array if isinstance(array, np.ndarray) else place.back(array)


class Turn(NamedTuple):
    """What a rank had in a round."""

    experts: Any
    source: Array
    rows: list[Any]
    sums: Array
    dropped: Any


async def turn(place: Place, group: MoeGroup, tokens: Tokens, how: int, lane: int = 0) -> Turn:
    """Make a round on one rank, and return what it had, all of it as NumPy's arrays."""
    on_gpu = group.launcher is not None
    given = moved(place, tokens) if on_gpu else [tokens.x, tokens.ids, tokens.weights, tokens.scales]
    batch = await group.dispatch(*given, lane=lane)
    where = batch.source
    real = where[..., 0] >= 0
    rows = [fetched(place, one)[real] for one in (batch.x, batch.topk_weights)]
    if group.config.scales:
        rows.append(fetched(place, batch.scales)[real])
    if group.config.layout == "rank":
        rows.append(fetched(place, batch.topk_ids)[real])
    y = filled(place, group, batch)
    found = Turn(batch.expert_num_tokens, where, rows, y, batch.dropped)
    out = stored(np.ones((len(tokens.ids), group.config.hidden), np.float32), group.config.out_dtype)
    if how % 3 == 0:
        sums = await group.combine(batch, place.there(y) if on_gpu else y)
    elif how % 3 == 1:
        sums = await group.combine(batch, place.there(y) if on_gpu else y, out=place.there(out) if on_gpu else out)
    else:
        batch.y[...] = place.there(y) if on_gpu else y
        sums = await group.combine(batch)
    return found._replace(sums=fetched(place, sums))


def check(config: MoeConfig, one: Turn, twin: Turn, tokens: Tokens) -> None:
    """Check that a rank has the bits of its twin on a CPU, and its tokens the sums that one process would give."""
    assert one.experts.tolist() == twin.experts.tolist()
    assert one.source.tolist() == twin.source.tolist()
    assert [rows.tobytes() for rows in one.rows] == [rows.tobytes() for rows in twin.rows]
    assert one.sums.tobytes() == twin.sums.tobytes()
    assert (one.dropped is None) == (twin.dropped is None)
    if one.dropped is not None:
        assert one.dropped.tolist() == twin.dropped.tolist()
    if config.reduce == "source":
        assert one.sums.tobytes() == reference(config, tokens, one.dropped).tobytes()


async def rounds(
    opened: Callable[[], Any], place: Place, config: MoeConfig, on_gpus: Sequence[bool], number: int, seed: int = 0
) -> None:
    """Make rounds, and the same on CPUs alone: rows, scales, sources and sums have the same bits on each rank."""
    rng = np.random.default_rng([seed, len(on_gpus)])
    async with (
        mixed(opened, config, place, on_gpus) as groups,
        ranks(opened, len(on_gpus), config) as cpus,
    ):
        for how in range(number):
            given = [drawn(rng, config, int(rng.integers(0, config.tokens + 1))) for _ in groups]
            found, twins = [
                await all_of(*[lambda g=g, t=t, h=how: turn(place, g, t, h) for g, t in zip(some, given, strict=True)])
                for some in (groups, cpus)
            ]
            for one, twin, tokens in zip(found, twins, given, strict=True):
                check(config, one, twin, tokens)
