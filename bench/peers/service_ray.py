"""The service as a Ray actor: arrays go by its object store. Ray starts the server's process itself."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import ray

from service import CONCURRENT, Calls, digest, filled, main, over_with_input


@ray.remote(max_concurrency=CONCURRENT)
class Bench:
    """What is called."""

    async def empty(self) -> None:
        return None

    async def send(self, array: Any) -> int:
        return digest(array)

    async def fetch(self, nbytes: int, value: int) -> Any:
        return filled(nbytes, value)

    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item

    async def cpu(self) -> float:
        return time.process_time()


async def serve(_transport: str) -> None:
    print("ray", flush=True)
    await over_with_input().wait()


class Client(Calls):
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def empty(self) -> None:
        await self.actor.empty.remote()

    async def send(self, array: Any) -> int:
        return int(await self.actor.send.remote(array))

    async def fetch(self, nbytes: int, value: int) -> Any:
        return await self.actor.fetch.remote(nbytes, value)

    async def count(self, items: int) -> AsyncIterator[int]:
        async for item in self.actor.count.remote(items):
            yield await item

    async def cpu(self) -> float:
        return float(await self.actor.cpu.remote())


async def call(_transport: str, _address: str, body: Callable[[Calls], Awaitable[None]]) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    await body(Client(Bench.remote()))
    ray.shutdown()


if __name__ == "__main__":
    main(serve, call)
