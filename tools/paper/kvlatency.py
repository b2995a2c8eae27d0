"""When a cancelled request's pages are free, and how much a transfer adds to the first token, simulated.

A `Producer` and a `Consumer` run on the simulated network in virtual time. Messages, drains and bytes take time; Python
takes none. On a machine `make bench-kvcache ARGS="--parts first-token,cancel"` measures the same.

*From cancelled to free*: from the cancellation of the task in `async with consumer.receive(...)`, at a random moment of
a request of 64 pages of 64 KiB in 16 layers, to the end of that block.

*The first token*: 16 layers of 5 ms each are computed. The figure is the time until the last layer has arrived, less
the computation alone. The bound is the part that the computation cannot hide: a round trip of a prompt of one page, the
last layer, and the lag of a wire that is slower than the computation.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import anyio
import numpy as np

from aiote import Address
from aiote.bench.order_statistics import percentile
from aiote.kvcache import Cache, Consumer, PageRow, Producer
from aiote.testing import CONNECTX7_400G, EFA_200G, Fabric, NicModel, run

MODELS = {"EFA, 200 Gbit/s": EFA_200G, "ConnectX-7, 400 Gbit/s": CONNECTX7_400G}
LAYERS = 16
LAYER_S = 0.005
CANCELLED = 64, 64 << 10
"""Pages of a request, and their bytes."""
COMPUTED = (64, 16 << 10), (512, 16 << 10)
TOKENS = 16
"""Of a page."""
COUNT = 400
AT_ONCE = 4
"""Requests under way where the bandwidth is measured, as in the benchmark."""


class Pair:
    """Both sides, and requests between them."""

    def __init__(self, fabric: Fabric, producer: Producer, consumer: Consumer, address: Address) -> None:
        self.fabric, self._producer, self._consumer, self._address = fabric, producer, consumer, address
        self._number = 0

    async def request(
        self, pages: int, *, reads: bool = False, layer_s: float = 0, after: float | None = None
    ) -> float:
        """Receive a prompt and return the seconds that this took, or cancel it and return those since then."""
        self._number += 1
        name, tokens, row = str(self._number), pages * TOKENS, {0: PageRow(range(pages))}
        since, scope = self.fabric.now, anyio.CancelScope()

        async def offer() -> None:
            async with self._producer.offer(name, tokens=tokens, rows=row) as offered:
                for layer in range(LAYERS):
                    await anyio.sleep(layer_s)
                    offered.computed(layer)

        async def cancel(after: float) -> None:
            nonlocal since
            await anyio.sleep(after)
            since = self.fabric.now
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offer)
            if after is not None:
                tasks.start_soon(cancel, after)
            with scope:
                async with self._consumer.receive([self._address], name, tokens=tokens, rows=row, reads=reads) as got:
                    await got.arrived()
            took = self.fabric.now - since
        assert scope.cancelled_caught == (after is not None)
        return took


def with_pair(model: NicModel, pages: int, size: int, body: Callable[[Pair], Awaitable[list[float]]]) -> list[float]:
    """Run something with two sides whose caches have so many pages of so many bytes."""

    def cache(name: str) -> Cache:
        made, array = Cache(name), np.zeros((pages, TOKENS, size // TOKENS), np.uint8)
        for layer in range(LAYERS):
            made.add(array, "page token item", layer=layer)
        return made

    async def main(fabric: Fabric) -> list[float]:
        async with (
            fabric.open_engine() as left,
            fabric.open_engine() as right,
            Producer(left, cache("prefill")) as producer,
            Consumer(right, cache("decode")) as consumer,
        ):
            pair = Pair(fabric, producer, consumer, left.address)
            await pair.request(1)  # the first one connects
            return await body(pair)

    return run(main, 1, model=model)


def cancelled(model: NicModel, reads: bool, count: int = COUNT) -> list[float]:
    """Cancel so many requests; return the seconds until the pages of each were free."""
    pages, size = CANCELLED

    async def body(pair: Pair) -> list[float]:
        rng, whole = random.Random(1), await pair.request(pages, reads=reads)
        return [await pair.request(pages, reads=reads, after=rng.uniform(0, 0.95 * whole)) for _ in range(count)]

    return with_pair(model, pages, size, body)


def first_token(model: NicModel, pages: int, size: int) -> tuple[float, float]:
    """Return the seconds that a transfer adds to a computation, and the bound."""

    async def body(pair: Pair) -> list[float]:
        trip, began = await pair.request(1), pair.fabric.now
        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(pair.request, pages)
        layer = (pair.fabric.now - began) / AT_ONCE / LAYERS
        bound = trip + layer + (LAYERS - 1) * max(0.0, layer - LAYER_S)
        return [await pair.request(pages, layer_s=LAYER_S) - LAYERS * LAYER_S, bound]

    added, bound = with_pair(model, pages, size, body)
    return added, bound


def cancelled_line(name: str, reads: bool) -> str:
    """Return a row of the first table of docs/kvcache.md."""
    took = [1e3 * one for one in cancelled(MODELS[name], reads)]
    figures = " | ".join(f"{percentile(took, percent):.2f}" for percent in (50, 99, 100))
    return f"| {name} | {'read' if reads else 'pushed'} | {figures} |"


def first_token_line(name: str, pages: int, size: int) -> str:
    """Return a row of the second one."""
    added, bound = first_token(MODELS[name], pages, size)
    return f"| {name} | {pages} x {size >> 10}K | {1e3 * added:.2f} | {1e3 * bound:.2f} | {added / bound:.2f} |"


def print_tables() -> None:
    """Print both tables of docs/kvcache.md."""
    print("| NIC | Pages are | p50, ms | p99, ms | longest, ms |\n|---|---|---|---|---|")
    for name in MODELS:
        for reads in (False, True):
            print(cancelled_line(name, reads), flush=True)
    print("\n| NIC | Pages | added, ms | bound, ms | added / bound |\n|---|---|---|---|---|")
    for name in MODELS:
        for shape in COMPUTED:
            print(first_token_line(name, *shape), flush=True)
