"""Rounds of several ranks in one process, each output compared with a dense reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.moe import MoeConfig
from engines import each_memory, opened
from moe_ranks import Tokens, ranks, whole_round

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


async def rounds(provider: str, config: MoeConfig, count: int, number: int = 4) -> None:
    rng = np.random.default_rng(count)
    async with ranks(lambda: opened(provider), count, config) as groups:
        for turn in range(number):
            given = [Tokens(rng, config, int(rng.integers(0, config.tokens + 1))) for _ in groups]
            await whole_round(groups, given, in_place=turn % 2 == 0)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
async def test_rounds_give_what_one_process_would(shape, count):
    await rounds("local", SHAPES[shape], count)


@pytest.mark.libfabric
@pytest.mark.anyio
@each_memory
@pytest.mark.parametrize("shape", ["grouped direct", "contiguous packed", "private"])
async def test_rounds_over_every_provider(provider, shape):
    await rounds(provider, SHAPES[shape], 3, 3)
