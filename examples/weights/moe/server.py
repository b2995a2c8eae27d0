"""One inference rank of the demo: python server.py RANK FOLDER PROVIDER. Its parent is run.py."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import task
from anyio.to_thread import run_sync
from served import Served

import aiote
from aiote import weights
from aiote.demo import Orders, live, tell


async def main(rank: int, folder: str, provider: str, orders: Orders) -> None:
    asked = task.Asked()
    await run_sync(task.join, "inference", rank, task.SERVERS, folder)
    served = Served(rank)
    tell(started=rank)
    sources = (await asked.next())["sources"]
    tell(recording=weights.record(served.load_weights, served.parameters, sources).describe())
    recordings = (await asked.next())["recordings"]
    layout, _ = weights.Recording.merge(
        {int(one): weights.Recording.from_description(said) for one, said in recordings.items()}
    )
    async with (
        aiote.open_engine(provider) as engine,
        weights.serve_target(
            engine, layout, rank, served.parameters, replica="inference", controllers="first"
        ) as target,
    ):
        tell(ready=str(engine.address))

        async def serve() -> None:
            while True:
                letters = (await asked.next())["generate"]
                tell(version=target.version, **await run_sync(answered, served, letters))

        await orders.while_wanted(serve)


def answered(served: Served, letters: int) -> dict[str, Any]:
    """Generate, and return what shows that the weights are the trainers'."""
    logits = served.logits(task.encode(task.TEXT[: task.WINDOW])).tolist() if served.rank == 0 else None
    if logits is None:
        served.logits(task.encode(task.TEXT[: task.WINDOW]))
    return {
        "text": served.generate(task.PROMPT, letters),
        "logits": logits,
        "digests": task.digests(served.parameters),
    }


if __name__ == "__main__":
    given = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.exit(live(f"inference rank {given[0]}", partial(main, *given)))
