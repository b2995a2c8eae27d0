"""A limit of staging memory far below the largest unit: every byte is right, and the limit holds."""

from __future__ import annotations

import tracemalloc
from contextlib import AsyncExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiote
from aiote.weights import (
    Controller,
    Layout,
    Recipe,
    Shard,
    TensorBuffer,
    convert,
    quantized,
    serve_source,
    serve_target,
    source,
)
from aiote.weights.convert import cast, quantize, temporary_bytes
from support.engines.opening import opened
from support.machine import LONG

# What is tried is the same on every loop.
pytestmark = [pytest.mark.anyio] if LONG else []

ROWS, COLUMNS = 96, 160
WHOLE = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


async def updated(
    held: list[dict[str, Any]], sources: Layout, targets: Layout, arrays: dict[str, Any], recipe: Recipe, limit: int
) -> list[int]:
    """Update one target; return each source's peak of staging memory."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened("sim")) for _ in range(len(held) + 2)]
        for rank, one in enumerate(held):
            serving = serve_source(engines[rank], sources, rank, one, recipe, staging_bytes=limit)
            await stack.enter_async_context(serving)
        await stack.enter_async_context(serve_target(engines[-2], targets, 0, arrays))
        addresses = [engine.address for engine in engines]
        report = await Controller(engines[-1], addresses[:-2], addresses[-2:-1], recipe).update(1)
        return [sent.peak for sent in report.sent.values()]


@pytest.mark.parametrize("limit", [4096, 5000, 20_000, 1 << 20] if LONG else [4096, 20_000])
@pytest.mark.parametrize("way", ["transposed", "transposed there", "cast", "in columns"])
async def test_every_byte_is_right_within_the_limit(way, limit):
    shape = (ROWS, COLUMNS)
    sources, recipe, kind = Layout.over([0, 1], {"a": (shape, "F32", Shard(1))}), Recipe(), np.dtype(np.float32)
    target = TensorBuffer(shape, "F32")
    wanted = WHOLE
    if way == "transposed":
        recipe, target, wanted = Recipe({"a": source("a").transpose(0, 1)}), TensorBuffer(shape[::-1], "F32"), WHOLE.T
    elif way == "transposed there":
        target = TensorBuffer(shape, "F32", strides=(1, ROWS))
    elif way == "cast":
        recipe, target, kind = Recipe({"a": source("a").cast("F16")}), TensorBuffer(shape, "F16"), np.dtype(np.float16)
    order = "F" if way == "transposed there" else "C"
    arrays = {"a": np.zeros(target.shape, kind, order=order)}
    held = [{"a": np.ascontiguousarray(WHOLE[:, rank * 80 : rank * 80 + 80])} for rank in range(2)]
    peaks = await updated(held, sources, Layout.of_buffers(0, {"a": target}), arrays, recipe, limit)
    np.testing.assert_array_equal(arrays["a"], wanted.astype(kind))
    assert 0 < max(peaks) <= limit


BLOCK = (32, 32)


@pytest.mark.parametrize("limit", [24_000, 1 << 20])
async def test_blocks_that_cross_an_edge_are_gathered_within_the_limit(limit):
    shape = (ROWS, COLUMNS)
    # Rows 0 to 39 and 40 to 95: the blocks of rows 32 to 63 lie in both.
    sources = Layout.merge(
        Layout.of_buffers(rank, {"a": TensorBuffer(shape, "F32", (low, 0), (high, COLUMNS))})
        for rank, (low, high) in enumerate([(0, 40), (40, ROWS)])
    )
    layout = {"w": (shape, "F8_E4M3", Shard(0)), "s": ((3, 5), "F32", Shard(0))}
    recipe = Recipe({"w": quantized("a", scale="s", block=BLOCK)})
    arrays = {"w": np.zeros(shape, ml_dtypes.float8_e4m3fn), "s": np.zeros((3, 5), np.float32)}
    held = [{"a": WHOLE[:40].copy()}, {"a": WHOLE[40:].copy()}]
    peaks = await updated(held, sources, Layout.over([0], layout), arrays, recipe, limit)
    weights, scales = np.zeros(WHOLE.size, np.uint8), np.zeros(15 * 4, np.uint8)
    quantize(WHOLE.reshape(-1).view(np.uint8), "F32", shape, BLOCK, (weights, "F8_E4M3"), (scales, "F32"))
    np.testing.assert_array_equal(arrays["w"].view(np.uint8).reshape(-1), weights)
    np.testing.assert_array_equal(arrays["s"].view(np.uint8).reshape(-1), scales)
    assert 0 < max(peaks) <= limit


async def test_a_limit_below_one_block_is_an_error_of_the_plan():
    layout = {"w": (WHOLE.shape, "F8_E4M3", Shard(0)), "s": ((3, 5), "F32", Shard(0))}
    recipe = Recipe({"w": quantized("a", scale="s", block=BLOCK)})
    arrays = {"w": np.zeros(WHOLE.shape, ml_dtypes.float8_e4m3fn), "s": np.zeros((3, 5), np.float32)}
    sources = Layout.over([0], {"a": (WHOLE.shape, "F32", Shard(0))})
    with pytest.raises(aiote.UsageError, match=r"w: a block of \(32, 32\) takes \d+ bytes .* staging_bytes=8192"):
        await updated([{"a": WHOLE}], sources, Layout.over([0], layout), arrays, recipe, 8192)
    async with opened("sim") as engine:
        with pytest.raises(aiote.UsageError, match="staging_bytes is 4095"):
            async with serve_source(engine, sources, 0, {"a": WHOLE}, staging_bytes=4095):
                pass


@pytest.mark.parametrize(
    ("shape", "block"), [((300, 7168), (128, 128)), ((3, 130, 200), (128, 128)), ((400, 900), None)]
)
def test_a_conversion_takes_no_more_than_is_counted(shape, block, monkeypatch):
    # Without torch, whose memory is not seen here.
    monkeypatch.setattr(convert, "_torch", lambda *names: None)
    count = int(np.prod(shape))
    values, out = np.ones(count, np.float32).view(np.uint8), np.zeros(count, np.uint8)
    scales = np.zeros(count, np.float32).view(np.uint8)
    scales = scales[: 4 * int(np.prod(shape[:-2])) * -(-shape[-2] // 128) * -(-shape[-1] // 128)]
    tracemalloc.start()
    try:
        if block:
            quantize(values, "F32", shape, block, (out, "F8_E4M3"), (scales, "F32"))
        else:
            cast(values, "F32", out, "F8_E4M3")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= temporary_bytes(shape, block) + (64 << 10)
