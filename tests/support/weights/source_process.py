"""A source of weights in a process of its own, for its memory to be measured: `source_process PROVIDER WAY`.

It serves small tensors, so that it has its threads and its connections; after a line of input large ones. Then it
prints for each line how many bytes are resident, and how many were at most since the line before. It ends with its
input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import ml_dtypes  # noqa: F401 - so that it is not imported while memory is measured
import numpy as np

from aiote.weights import Expression, Layout, Quantized, Recipe, Replicate, quantized, serve_source, source
from aiote.weights.convert import cast, quantize
from support.engines.opening import opened
from support.machine import LONG

LIMIT = (64 if LONG else 16) << 20
"""Of staging memory."""
COLUMNS, TENSORS = 4096, 12
FEW_ROWS, ROWS = 128, (4096 if LONG else 512)
UPDATE_BYTES = TENSORS * ROWS * COLUMNS * 4
NAMES = [f"w{number}" for number in range(TENSORS)]
WAYS = ["cast", "transposed", "quantized"]


def layouts(way: str, rows: int) -> tuple[Layout, Layout, Recipe]:
    """Return sources, targets and recipe of one rank each."""
    shape, blocks = (rows, COLUMNS), (-(-rows // 128), COLUMNS // 128)
    targets: dict[str, Any] = {}
    recipe: dict[str, Expression | Quantized | str] = {}
    for name in NAMES:
        if way == "cast":
            recipe[name], targets[name] = source(name).cast("BF16"), (shape, "BF16", Replicate())
        elif way == "transposed":
            recipe[name], targets[name] = source(name).transpose(), (shape[::-1], "F32", Replicate())
        else:
            recipe[name], targets[name] = quantized(name, scale=f"{name}.s"), (shape, "F8_E4M3", Replicate())
            targets[f"{name}.s"] = (blocks, "F32", Replicate())
    sources = Layout.over([0], {name: (shape, "F32", Replicate()) for name in NAMES})
    return sources, Layout.over([0], targets), Recipe(recipe)


def tensors(rows: int) -> Iterator[tuple[str, Any]]:
    """Yield tensors with their names; none is like another."""
    for number, name in enumerate(NAMES):
        yield name, (np.arange(rows * COLUMNS, dtype=np.float32) % (8191 - number)).reshape(rows, COLUMNS)


def wanted(way: str, name: str, values: Any) -> dict[str, Any]:
    """Return what a target must have of a tensor, as bytes."""
    if way == "transposed":
        return {name: np.ascontiguousarray(values.T).reshape(-1).view(np.uint8)}
    here = values.reshape(-1).view(np.uint8)
    made, scales = np.zeros(values.size, np.uint8), np.zeros(-(-values.size // 128 // 128) * 4, np.uint8)
    if way == "cast":
        made = np.zeros(values.size * 2, np.uint8)
        cast(here, "F32", made, "BF16")
        return {name: made}
    quantize(here, "F32", values.shape, (128, 128), (made, "F8_E4M3"), (scales, "F32"))
    return {name: made, f"{name}.s": scales}


def resident(what: str) -> int:
    """Return VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


async def main(provider: str, way: str) -> None:
    async with opened(provider) as engine:
        for rows in (FEW_ROWS, ROWS):
            layout, _, recipe = layouts(way, rows)
            arrays = dict(tensors(rows))
            async with serve_source(engine, layout, 0, arrays, recipe, staging_bytes=LIMIT, controllers="first"):
                print(engine.address, flush=True)
                while await anyio.to_thread.run_sync(sys.stdin.readline) and rows == ROWS:
                    print(resident("VmRSS"), resident("VmHWM"), flush=True)
                    # From now on the most is counted anew (proc(5)).
                    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
