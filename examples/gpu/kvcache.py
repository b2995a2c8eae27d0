"""A KV cache from one GPU's memory into another cache, layer by layer while it is computed.

    python examples/gpu/kvcache.py

A layer goes as soon as the kernels that compute it are over; the program waits for none of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from with_cupy import needed

import aiote
from aiote.kvcache import Cache, Consumer, PageRow, Producer

LAYERS, PAGES, PAGE_TOKENS, TOKENS = 4, 64, 16, 100
SHAPE = (LAYERS, PAGES, 2, PAGE_TOKENS, 512)  # keys and values of 512 bytes a token in each page, of each layer
SOURCE, TARGET = [9, 3, 7, 1, 0, 40, 8], [5, 2, 60, 4, 6, 1, 0]


def cache(name: str, array: Any) -> Cache:
    described = Cache(name)  # the memory stays cupy's: nothing is copied or allocated
    described.add(array, "layer page field token item", fields=["k", "v"])
    return described


async def prefill(producer: Producer, array: Any, stream: Any) -> None:
    async with producer.offer("a prompt", tokens=TOKENS, rows={0: PageRow(SOURCE)}) as offer:
        for layer in range(LAYERS):
            with stream:
                array[layer] = layer + 1  # a model's kernels, which are launched here and run some time
            offer.computed(layer, stream=stream)


async def main() -> None:
    cupy = needed()
    theirs, ours = cupy.zeros(SHAPE, cupy.uint8), cupy.zeros(SHAPE, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    async with aiote.open_engine("local") as there, Producer(there, cache("prefill", theirs)) as producer:
        async with aiote.open_engine("local") as here, Consumer(here, cache("decode", ours)) as consumer:
            computing = asyncio.create_task(prefill(producer, theirs, stream))
            rows = {0: PageRow(TARGET)}
            async with consumer.receive([there.address], "a prompt", tokens=TOKENS, rows=rows) as reception:
                await reception.arrived()  # kernels that are launched from here on see all bytes
            await computing
    got, expected = cupy.asnumpy(ours)[:, TARGET], np.arange(1, LAYERS + 1, dtype=np.uint8)
    print(f"{len(TARGET)} pages in {LAYERS} layers: {(got == expected[:, None, None, None, None]).all()}")


if __name__ == "__main__":
    asyncio.run(main())
