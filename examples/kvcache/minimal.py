"""The smallest KV cache transfer: a decoder, a prefiller, one prompt; `python examples/kvcache/minimal.py`."""

import asyncio

import numpy as np

import aiote
from aiote.kvcache import Cache, Consumer, PageRow, Producer

LAYERS, PAGES, PAGE_TOKENS, TOKENS = 4, 64, 16, 100
SHAPE = (LAYERS, PAGES, 2, 2, PAGE_TOKENS, 32)  # keys and values of 2 heads in each page, of each layer


def cache(name: str, array: np.ndarray) -> Cache:
    described = Cache(name)  # the memory stays the program's: nothing is copied or allocated
    described.add(array, "layer page field head token item", fields=["k", "v"])
    return described


async def prefill(producer: Producer, pages: list[int]) -> None:
    async with producer.offer("a prompt", tokens=TOKENS, rows={0: PageRow(pages)}) as offer:
        for layer in range(LAYERS):
            offer.computed(layer)  # a model computes the layer here; its pages go while the next one is computed


async def main() -> None:
    theirs, ours = np.random.default_rng(0).random(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    source, target = [9, 3, 7, 1, 0, 40, 8], [5, 2, 60, 4, 6, 1, 0]
    async with aiote.open_engine() as there, Producer(there, cache("prefill", theirs)) as producer:
        async with aiote.open_engine() as here, Consumer(here, cache("decode", ours)) as consumer:
            computing = asyncio.create_task(prefill(producer, source))
            rows = {0: PageRow(target)}
            async with consumer.receive([there.address], "a prompt", tokens=TOKENS, rows=rows) as reception:
                await reception.arrived()  # a count of writes, not a message
            await computing
    print(f"{len(target)} pages in {LAYERS} layers: {np.array_equal(ours[:, target], theirs[:, source])}")


asyncio.run(main())
