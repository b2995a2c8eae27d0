"""A layer's weights as trainers have them (each tensor split by rows) and as inference ranks do (fused, by heads)."""

from __future__ import annotations

import numpy

from aiote import weights

HIDDEN, HEADS, KV_HEADS = 1024, 16, 4
KEYS = HIDDEN * KV_HEADS // HEADS
RECIPE = weights.Recipe({"qkv": weights.cat("q", "k", "v")})


def training(ranks: int) -> weights.Layout:
    by_rows = weights.Shard(0)
    shapes = {"q": (HIDDEN, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "out": (HIDDEN, HIDDEN)}
    return weights.Layout.over(range(ranks), {name: (shape, "F32", by_rows) for name, shape in shapes.items()})


def inference(ranks: int) -> weights.Layout:
    fused = weights.packed(0, ranks, (HIDDEN, HEADS), (KEYS, KV_HEADS), (KEYS, KV_HEADS))
    tensors = {"qkv": ((HIDDEN + 2 * KEYS, HIDDEN), "F32", fused), "out": ((HIDDEN, HIDDEN), "F32", weights.Shard(1))}
    return weights.Layout.over(range(ranks), tensors)


def arrays(layout: weights.Layout, rank: int) -> dict[str, numpy.ndarray]:
    held = {name: tensor.held_by()[rank] for name, tensor in layout.tensors.items()}
    return {name: numpy.zeros(one.shape, numpy.float32) for name, one in held.items()}
