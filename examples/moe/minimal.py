"""A layer of a mixture of experts over four ranks, in NumPy: every rank has two of the experts, and tokens of its own.

    python examples/moe/minimal.py

One rank would normally run in each process. What has to travel beforehand is every engine's address, by any way.
"""

from __future__ import annotations

import asyncio

import numpy as np

import aiote
from aiote.moe import MoeConfig, open_group

RANKS, TOKENS = 4, 16
CONFIG = MoeConfig(experts=8, top_k=2, hidden=64, tokens=TOKENS, dtype="float32", out_dtype="float32")
MATRICES = np.random.default_rng(0).standard_normal((8, 64, 64), np.float32) / 8
ROUTER = np.random.default_rng(1).standard_normal((64, 8), np.float32)


async def live(rank: int, engine: aiote.Engine, members: list[aiote.Address]) -> None:
    x = np.random.default_rng(rank + 2).standard_normal((TOKENS, 64), np.float32)
    scores = x @ ROUTER
    topk_ids = np.argsort(-scores, 1)[:, :2]
    topk_weights = np.take_along_axis(scores, topk_ids, 1)

    async with open_group(engine, members, rank, CONFIG) as moe:
        batch = await moe.dispatch(x, topk_ids, topk_weights)
        for expert, count in enumerate(batch.expert_num_tokens):
            batch.y[expert, :count] = batch.x[expert, :count] @ MATRICES[2 * rank + expert]
        out = await moe.combine(batch)

    here = np.einsum("tk,th,tkhj->tj", topk_weights, x, MATRICES[topk_ids])
    assert np.allclose(out, here, atol=1e-4)
    print(f"rank {rank}: {batch.source_num_tokens.tolist()} rows from the ranks, and the same sums as alone")


async def main() -> None:
    engines = [await aiote.open_engine() for _ in range(RANKS)]
    await asyncio.gather(*(live(rank, engine, [e.address for e in engines]) for rank, engine in enumerate(engines)))
    await asyncio.gather(*(engine.aclose() for engine in engines))


if __name__ == "__main__":
    asyncio.run(main())
