"""The limit: as many processes as there are sources copy, each within its memory, what the targets receive."""

from __future__ import annotations

import asyncio

import numpy as np

from weights import SOURCES, Model, Ranks, RankSession, be_rank, model_of, parse, serve


class Copier:
    """A process's share of the bytes, twice."""

    def __init__(self, made: Model) -> None:
        self.here = np.zeros(made.nbytes // SOURCES, np.uint8)
        self.there = np.ones_like(self.here)

    def fill(self, version: int) -> None:
        self.here[:] = version % 256

    def check(self, version: int) -> bool:
        return bool((self.there == version % 256).all())

    def update(self) -> None:
        np.copyto(self.there, self.here)


class Session(RankSession):
    library = f"numpy {np.__version__}"

    async def check(self, version: int) -> bool:
        return all(await asyncio.to_thread(self.ranks.ask, "check", version))


async def main() -> None:
    arguments = parse()
    if arguments.side:
        copier = Copier(model_of(arguments))
        be_rank(copier, copier.update)
        return
    ranks = Ranks(arguments, {"source": SOURCES})
    try:
        await asyncio.to_thread(ranks.answers)
        await serve(Session(ranks))
    finally:
        ranks.close()


if __name__ == "__main__":
    asyncio.run(main())
