"""A producer in a process of its own, to be stopped and killed: `producer_process PROVIDER PAUSE REQUESTS`.

It prints its engine's address, offers so many requests at once, named by their numbers, and serves until its input
ends. PAUSE is the seconds that a layer of a chunk takes; a request is computed when somebody asks for it.
"""

from __future__ import annotations

import sys

import anyio
import anyio.to_thread
import numpy as np

from aiote.kvcache.mapping import PageRow
from aiote.kvcache.producer import Producer
from support.engines.opening import LOST_SOON, PATIENCE_S, opened, until
from support.kv.caches import Model, Side, built, fill

MODEL = Model(layers=3, item=64)
TOKENS, CHUNK, PAGES = 37, 8, 10


async def serve(producer: Producer, side: Side, number: int, pause: float) -> None:
    pages = np.random.default_rng(number).permutation(PAGES) + number * PAGES
    rows = {0: PageRow(pages)}
    fill(side, rows, PAGES * side.tokens, number)
    async with producer.offer(str(number), tokens=TOKENS, rows=rows) as offer:
        await until(lambda: offer.active)
        for end in [*range(CHUNK, TOKENS, CHUNK), TOKENS]:
            for layer in range(MODEL.layers):
                await anyio.sleep(pause)
                offer.computed(layer, end)


async def main(provider: str, pause: float, requests: int) -> None:
    side = built(MODEL, Side(pages=PAGES * requests), "prefill")
    async with (
        opened(provider, **LOST_SOON) as engine,
        Producer(engine, side.caches[0], match_timeout=PATIENCE_S) as producer,
        anyio.create_task_group() as group,
    ):
        for number in range(requests):
            group.start_soon(serve, producer, side, number, pause)
        print(engine.address, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
