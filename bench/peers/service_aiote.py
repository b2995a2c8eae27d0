"""The service in aiote."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiote
from aiote import service
from service import Calls, digest, filled, main, over_with_input

PROVIDERS = {"local": "local", "tcp": "socket"}


class Bench(service.Service):
    """What is called."""

    @service.method
    async def empty(self) -> None:
        pass

    @service.method
    async def send(self, array: NDArray[np.uint8]) -> int:
        return digest(array)

    @service.method
    async def fetch(self, nbytes: int, value: int) -> NDArray[np.uint8]:
        return filled(nbytes, value)

    @service.method
    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item

    @service.method
    async def cpu(self) -> float:
        return time.process_time()


async def serve(transport: str) -> None:
    async with aiote.open_engine(PROVIDERS[transport]) as engine, service.serve(engine, Bench()):
        print(engine.address, flush=True)
        await over_with_input().wait()


async def call(transport: str, address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    async with aiote.open_engine(PROVIDERS[transport]) as engine:
        client: Any = service.client(engine, address, Bench)
        await body(client)


if __name__ == "__main__":
    if "uvloop" in sys.argv:
        import uvloop

        main(serve, call, uvloop.run)
    else:
        main(serve, call, asyncio.run)
