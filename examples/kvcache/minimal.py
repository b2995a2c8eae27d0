"""The smallest KV cache transfer: a decoder, a prefiller, one prompt; `python examples/kvcache/minimal.py`."""

import asyncio

import numpy as np

import aiote
from aiote.kvcache import CacheLayout, Decoder, Prefiller

LAYOUT = CacheLayout(layers=4, kv_heads=2, head_size=32, page_tokens=16, dtype="float32")
SHAPE = (LAYOUT.layers, 64, *LAYOUT.page_shape(1))  # a cache of 64 pages a layer, for a group of one rank


async def prefill(prefiller: Prefiller) -> None:
    async for job in prefiller.jobs():
        async with job:  # left once every write is over; cancelled where the decoder does not want it any more
            chunk = job.chunk(0, len(job.tokens), source=range(LAYOUT.pages_for(len(job.tokens))))
            for layer in range(LAYOUT.layers):
                await chunk.done(layer)  # a model computes the layer here; its pages go while the next one is computed


async def main() -> None:
    theirs, ours = np.random.default_rng(0).random(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    async with aiote.open_engine() as there, Prefiller(there, LAYOUT, theirs) as prefiller:
        async with aiote.open_engine() as here, Decoder(here, LAYOUT, ours) as decoder:
            serving = asyncio.create_task(prefill(prefiller))
            async with decoder.request(tokens=range(100), prefillers=[there.address]) as slot:
                await slot.arrived()  # a count of writes, not a message
                wanted = theirs[:, : len(slot.pages)]
                print(
                    f"{len(slot.pages)} pages in {LAYOUT.layers} layers: {np.array_equal(ours[:, slot.pages], wanted)}"
                )
            serving.cancel()


asyncio.run(main())
