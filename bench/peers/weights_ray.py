"""The update through Ray's object store: every source puts its shards, every target gets them and copies what it holds.

Nothing is gathered: what targets get are views of shared memory, so a byte is copied once by its source and once by its
target. Ray starts the ranks as actors.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from weights import SOURCES, Memory, Session, model_of, overlap, parse, serve, size_of, whole, within


@ray.remote(num_cpus=0)
class Rank:
    """A rank of either side."""

    def __init__(self, arguments: Any, side: str, rank: int) -> None:
        self.memory = Memory(model_of(arguments), side, rank)

    def fill(self, version: int) -> None:
        self.memory.fill(version)

    def check(self, version: int) -> bool:
        return self.memory.check(version)

    def put(self) -> list[Any]:
        """Put this source's shards; a reference in a list is not resolved on its way."""
        return [ray.put(self.memory.arrays)]

    def get(self, references: list[Any]) -> None:
        """Copy what this target holds out of all sources' shards."""
        memory = self.memory
        for source, shards in enumerate(ray.get(references)):
            for name, theirs in memory.model.source(source).items():
                mine = memory.boxes.get(name)
                if mine and (shared := overlap(mine, theirs)):
                    memory.arrays[name][within(shared, mine)] = shards[name][within(shared, theirs)]


class Actors(Session):
    library = f"ray {ray.__version__}"

    def __init__(self, arguments: Any, targets: int) -> None:
        self.sources = [Rank.remote(arguments, "source", rank) for rank in range(SOURCES)]
        self.targets = [Rank.remote(arguments, "target", rank) for rank in range(targets)]

    async def fill(self, version: int) -> None:
        await asyncio.gather(*(one.fill.remote(version) for one in self.sources))

    async def update(self, version: int) -> None:
        put = await asyncio.gather(*(one.put.remote() for one in self.sources))
        references = [reference for several in put for reference in several]
        await asyncio.gather(*(one.get.remote(references) for one in self.targets))

    async def check(self, version: int) -> bool:
        return all(await asyncio.gather(*(one.check.remote(version) for one in self.targets)))


async def main() -> None:
    arguments = parse()
    made = model_of(arguments)
    if made.case.fp8:
        raise SystemExit("an object store quantizes nothing")
    # Room for three versions: what was put last goes when nobody has it any more.
    store = max(1 << 28, 3 * sum(2 * size_of(whole(one.shape)) for one in made.tensors))
    local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=store, **local)
    await serve(Actors(arguments, made.case.targets))
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
