"""One trainer of the demo: python trainer.py RANK FOLDER PROVIDER. Its parent is run.py."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import task
from anyio.to_thread import run_sync
from served import Served
from trained import Training

import aiote
from aiote import weights
from aiote.demo import Orders, live, tell


async def main(rank: int, folder: str, provider: str, orders: Orders) -> None:
    asked = task.Asked()
    await run_sync(task.join, "trainers", rank, task.TRAINERS, folder)
    training = await run_sync(Training, rank)
    layout = weights.Layout.of_module(training.model, rank)
    tell(layout=layout.describe())
    recordings = (await asked.next())["recordings"]
    _, recipe = weights.Recording.merge(
        {int(one): weights.Recording.from_description(said) for one, said in recordings.items()}
    )
    async with (
        aiote.open_engine(provider) as engine,
        weights.serve_source(engine, layout, rank, training.model.state_dict(), recipe, controllers="first"),
    ):
        tell(ready=str(engine.address))

        async def train() -> None:
            while True:
                steps = (await asked.next())["train"]
                tell(**await run_sync(trained, training, steps))

        await orders.while_wanted(train)


def trained(training: Training, steps: int) -> dict[str, Any]:
    """Train, and return what inference ranks must have and compute after the update."""
    loss = training.train(steps)
    logits = training.logits(task.encode(task.TEXT[: task.WINDOW]))
    whole = training.whole()
    reference = []
    for rank in range(task.SERVERS):
        # The same loader, on whole tensors that have values: no engine and no plan has a part in it.
        served = Served(rank)
        served.load_weights(whole.items())
        reference.append(task.digests(served.parameters))
    mine = {number for name in whole if ".experts." in name for number in [name.split(".experts.")[1].split(".")[0]]}
    for each in reference:
        for name in [name for name in each if "_weight[" in name and name.split("[")[1].rstrip("]") not in mine]:
            del each[name]
    return {"loss": loss, "digests": reference, "logits": logits.tolist() if training.rank == 0 else []}


if __name__ == "__main__":
    given = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.exit(live(f"trainer {given[0]}", partial(main, *given)))
