"""A layer of a mixture of experts over four ranks, whose tokens are in a GPU's memory.

    python examples/gpu/moe.py

As examples/moe/minimal.py, but for `device=0`: kernels pack the tokens and add up the sums, cupy is the experts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from with_cupy import needed

import aiote
from aiote.moe import MoeConfig, open_group

RANKS, TOKENS = 4, 16
CONFIG = MoeConfig(
    experts=8, top_k=2, hidden=64, tokens=TOKENS, dtype="float32", out_dtype="float32", placement="packed"
)
MATRICES = np.random.default_rng(0).standard_normal((8, 64, 64), np.float32) / 8
ROUTER = np.random.default_rng(1).standard_normal((64, 8), np.float32)


async def live(cupy: Any, rank: int, engine: aiote.Engine, members: list[aiote.Address]) -> None:
    x = np.random.default_rng(rank + 2).standard_normal((TOKENS, 64), np.float32)
    scores = x @ ROUTER
    topk_ids = np.argsort(-scores, 1)[:, :2]
    topk_weights = np.take_along_axis(scores, topk_ids, 1)
    matrices = cupy.asarray(MATRICES[2 * rank : 2 * rank + 2])

    async with open_group(engine, members, rank, CONFIG, device=0) as moe:
        batch = await moe.dispatch(cupy.asarray(x), cupy.asarray(topk_ids), cupy.asarray(topk_weights))
        y = cupy.matmul(cupy.asarray(batch.x), matrices)  # rows beyond an expert's count are never sent back
        out = await moe.combine(batch, y)

    here = np.einsum("tk,th,tkhj->tj", topk_weights, x, MATRICES[topk_ids])
    print(f"rank {rank}: the same sums as alone: {np.allclose(cupy.asnumpy(cupy.asarray(out)), here, atol=1e-4)}")


async def main() -> None:
    cupy = needed()
    engines = [await aiote.open_engine("local") for _ in range(RANKS)]
    members = [engine.address for engine in engines]
    await asyncio.gather(*(live(cupy, rank, engine, members) for rank, engine in enumerate(engines)))
    await asyncio.gather(*(engine.aclose() for engine in engines))


if __name__ == "__main__":
    asyncio.run(main())
