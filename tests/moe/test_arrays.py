"""Arrays of other kinds than NumPy's own: torch's tensors on the CPU, and types that ml_dtypes has."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiote
from aiote.moe import MoeConfig
from aiote.moe.arrays import lines, plain
from support.engines.opening import opened
from support.moe.ranks import all_of, ranks

CONFIG = MoeConfig(experts=4, top_k=2, hidden=16, tokens=6, rows=12, dtype="float8_e4m3fn", scales=2)


def local() -> Any:
    """Open an engine."""
    return opened("local")


async def test_arrays_of_ml_dtypes_come_back_as_such():
    async with ranks(local, 2, CONFIG) as groups:

        async def one(group: Any) -> None:
            rng = np.random.default_rng(group.rank)
            x = rng.standard_normal((6, 16)).astype(ml_dtypes.float8_e4m3fn)
            scales, ids = np.ones((6, 2), np.float32), rng.permuted(np.tile(np.arange(4), (6, 1)), axis=1)[:, :2]
            batch = await group.dispatch(x, ids, np.full((6, 2), 0.5, np.float32), scales)
            assert (batch.x.dtype, batch.scales.dtype, batch.y.dtype) == (x.dtype, np.float32, np.uint16)
            y = np.zeros(batch.y.shape, ml_dtypes.bfloat16)
            for expert, count in enumerate(batch.expert_num_tokens):
                y[expert, :count] = batch.x[expert, :count]
            out = await group.combine(batch, y)
            assert out.dtype == ml_dtypes.bfloat16
            assert (out.astype(np.float32) == x.astype(np.float32)).all()

        await all_of(*[lambda g=g: one(g) for g in groups])


def test_arrays_with_a_mask_are_refused():
    with pytest.raises(aiote.UsageError, match="x: it has a mask"):
        lines("x", np.ma.zeros((6, 16), np.float32), (None, 16), "float32")
    with pytest.raises(aiote.UsageError, match="ids: it has a mask"):
        plain("ids", np.ma.zeros((6, 2), np.int32), (6, 2), ("int32",))


@pytest.mark.needs_torch
async def test_tensors_come_back_as_tensors():
    import torch

    async with ranks(local, 2, CONFIG) as groups:

        async def one(group: Any) -> None:
            torch.manual_seed(group.rank)
            wide = torch.randn(6, 40).to(torch.float8_e4m3fn)
            x, scales = wide[:, 4:20], torch.rand(6, 2)
            ids = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
            inputs, beside = group.inputs(x)
            assert (inputs.dtype, beside.dtype, tuple(inputs.shape)) == (x.dtype, torch.float32, (6, 16))
            batch = await group.dispatch(x, ids, torch.full((6, 2), 0.5), scales)
            assert (batch.x.dtype, batch.scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            for expert, count in enumerate(batch.expert_num_tokens.tolist()):
                batch.y[expert, :count] = batch.x[expert, :count].to(torch.bfloat16)
            out = torch.zeros(6, 16, dtype=torch.bfloat16)
            assert await group.combine(batch, out=out) is out
            assert torch.equal(out.float(), x.float())

        await all_of(*[lambda g=g: one(g) for g in groups])


async def test_what_is_no_such_array_is_refused():
    async with ranks(local, 1, CONFIG) as (group,):
        ids, weights, scales = np.zeros((6, 2), np.int32), np.zeros((6, 2), np.float32), np.zeros((6, 2), np.float32)
        for x, why in (
            ([[0] * 16] * 6, "expected"),
            (np.zeros((6, 16), np.float64), "got float64"),
            (np.zeros((16, 6), np.uint8).T, "expected contiguous rows"),
            (np.zeros((6, 16), np.uint8)[::-1], "negative"),
        ):
            with pytest.raises(aiote.UsageError, match=why):
                group.dispatch_send(x, ids, weights, scales)
        with pytest.raises(aiote.UsageError, match="scales"):
            group.dispatch_send(np.zeros((6, 16), np.uint8), ids, weights)
