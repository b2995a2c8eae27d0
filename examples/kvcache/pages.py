"""Caches as two engines hold them: one NHD and one HND, other page sizes; `python examples/kvcache/pages.py`."""

import asyncio

import numpy as np

import aiote
from aiote.kvcache import Cache, Consumer, PageRow, Producer

TOKENS, LAYERS, HEADS, SIZE = 100, 4, 2, 32


async def prefill(producer: Producer, pages: list[int]) -> None:
    async with producer.offer("a prompt", tokens=TOKENS, rows={0: PageRow(pages)}) as offer:
        for layer in range(LAYERS):
            offer.computed(layer)  # a model computes the layer here; its pages go while the next one is computed


async def main() -> None:
    theirs = np.random.default_rng(0).random((LAYERS, 2, 64, 16, HEADS, SIZE), np.float32)  # pages of 16 tokens, NHD
    ours = np.zeros((LAYERS, 100, 2, HEADS, 32, SIZE), np.float32)  # pages of 32 tokens, K and V in one, HND
    there, here = Cache("prefill 0"), Cache("decode 0")
    there.add(theirs, "layer field page token head item", fields=["k", "v"])
    here.add(ours, "layer page field head token item", fields=["k", "v"])
    left, right = [9, 3, 7, 1, 0, 40, 8], [5, 2, 60, 4]
    async with aiote.open_engine() as one, aiote.open_engine() as other:
        async with Producer(one, there) as producer, Consumer(other, here) as consumer:
            computing = asyncio.create_task(prefill(producer, left))
            async with consumer.receive(
                [one.address], "a prompt", tokens=TOKENS, rows={0: PageRow(right)}
            ) as reception:
                await reception.arrived()  # a count of writes, not a message
            await computing
    sent = theirs[:, :, left].transpose(0, 1, 4, 2, 3, 5).reshape(LAYERS, 2, HEADS, -1, SIZE)[:, :, :, :TOKENS]
    got = ours[:, right].transpose(0, 2, 3, 1, 4, 5).reshape(LAYERS, 2, HEADS, -1, SIZE)[:, :, :, :TOKENS]
    print(f"{TOKENS} tokens in {LAYERS} layers: {np.array_equal(sent, got)}")


asyncio.run(main())
