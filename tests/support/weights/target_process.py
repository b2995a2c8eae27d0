"""A target of the weights of `source_process`, in a process of its own: `target_process PROVIDER WAY ADDRESS`.

It has the small tensors brought twice, compares every byte, and prints "equal".
"""

from __future__ import annotations

import sys

import anyio
import numpy as np

from aiote.weights import Controller, serve_target
from aiote.weights.convert import dtype_of
from support.engines.opening import PATIENCE_S, opened
from support.weights import source_process as sources


async def main(provider: str, way: str, address: str) -> None:
    _, layout, recipe = sources.layouts(way, sources.FEW_ROWS)
    arrays = {name: np.zeros(one.shape, dtype_of(one.dtype)) for name, one in layout.tensors.items()}
    with anyio.fail_after(2 * PATIENCE_S):
        async with opened(provider) as engine, opened(provider) as own:
            async with serve_target(engine, layout, 0, arrays, controllers="first"):
                controller = Controller(own, [address], [engine.address], recipe)
                for version in (1, 2):
                    await controller.update(version)
    for name, values in sources.tensors(sources.FEW_ROWS):
        for target, expected in sources.wanted(way, name, values).items():
            if not np.array_equal(arrays[target].reshape(-1).view(np.uint8), expected):
                sys.exit(f"{target} is not what it should be")
    print("equal")


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
