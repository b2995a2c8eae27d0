"""Rounds of several ranks in one process, each output compared with a dense reference, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiote.moe import MoeConfig
from support.engines.opening import each_memory, opened
from support.moe.ranks import SHAPES, Tokens, ranks, whole_round


async def rounds(provider: str, config: MoeConfig, count: int, number: int = 4) -> None:
    rng = np.random.default_rng(count)
    async with ranks(lambda: opened(provider), count, config) as groups:
        for turn in range(number):
            given = [Tokens(rng, config, int(rng.integers(0, config.tokens + 1))) for _ in groups]
            await whole_round(groups, given, in_place=turn % 2 == 0)


@pytest.mark.parametrize("shared", ["auto", "off"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
async def test_rounds_give_what_one_process_would(shape, count, shared):
    await rounds("local", replace(SHAPES[shape], shared_memory=shared), count)


@pytest.mark.libfabric
@pytest.mark.anyio
@each_memory
@pytest.mark.parametrize("shape", ["grouped direct", "contiguous packed", "private"])
async def test_rounds_over_every_provider(provider, shape):
    await rounds(provider, SHAPES[shape], 3, 3)
