"""Weights from one GPU's memory into another rank's, in place.

    python examples/gpu/weights.py

Trainer and inference rank would normally be processes of their own. What has to travel beforehand is their addresses.
"""

from __future__ import annotations

import asyncio

import numpy as np
from with_cupy import needed

import aiote
from aiote.weights import Controller, Layout, Shard, serve_source, serve_target

LAYOUT = Layout.over([0], {"up": ((1024, 256), "U8", Shard(0)), "down": ((256, 1024), "U8", Shard(0))})


async def main() -> None:
    cupy = needed()
    shapes = {name: tensor.shape for name, tensor in LAYOUT.tensors.items()}
    trained = {name: cupy.zeros(shape, cupy.uint8) for name, shape in shapes.items()}
    used = {name: cupy.zeros(shape, cupy.uint8) for name, shape in shapes.items()}
    async with (
        aiote.open_engine("local") as trainer,
        aiote.open_engine("local") as inference,
        aiote.open_engine("local") as own,
        serve_source(trainer, LAYOUT, 0, trained, controllers=[own.address]),
        serve_target(inference, LAYOUT, 0, used, versions="inplace", controllers=[own.address]),
    ):
        controller = Controller(own, [trainer.address], [inference.address])
        for step in (1, 2):
            for number, array in enumerate(trained.values()):
                array[...] = 10 * step + number  # a step of training, on the default stream: the update is behind it
            await controller.update(step)
            values = [np.unique(cupy.asnumpy(array)).tolist() for array in used.values()]
            print(f"version {step}: {values}")


if __name__ == "__main__":
    asyncio.run(main())
