"""Ray starts trainers and inference ranks as actors, on as many hosts as it has; aiote carries the weights.

    pip install ray && python examples/weights/on_ray.py --trainers 4 --inference 2

Ray places the actors, gives them names, and tells the driver their engines' addresses: text that any channel can carry.
From then on no weight goes through Ray. An actor whose process dies is named by both: its `run` fails for Ray, and the
update for the controller.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import model
import ray

import aiote
from aiote import weights

# Other hosts need not have this folder: the actors bring the module along.
ray.cloudpickle.register_pickle_by_value(model)


class Rank:
    """One rank, whose engine lives as long as `run`. Both kinds of actors are one."""

    def __init__(self, rank: int, layout: weights.Layout, settings: dict[str, Any]) -> None:
        self.rank, self.layout, self.settings = rank, layout, settings
        self.arrays = model.arrays(layout, rank)
        self._address = ""
        self._ready, self._over = asyncio.Event(), asyncio.Event()

    def serving(self, engine: aiote.Engine) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    async def run(self) -> None:
        """Take part in updates until `stop`. One task enters and leaves: cancel scopes belong to a task."""
        async with aiote.open_engine(**self.settings) as engine, self.serving(engine):
            self._address = str(engine.address)
            self._ready.set()
            await self._over.wait()

    async def where(self) -> tuple[str, str]:
        """Return the engine's address, once there is one, and host and process."""
        await self._ready.wait()
        return self._address, f"{socket.gethostname()}, process {os.getpid()}"

    async def stop(self) -> None:
        self._over.set()


@ray.remote
class Trainer(Rank):
    def serving(self, engine: aiote.Engine) -> AbstractAsyncContextManager[Any]:
        # Only who runs this program has the key.
        return weights.serve_source(engine, self.layout, self.rank, self.arrays, model.RECIPE, controllers="first")

    async def step(self) -> None:
        for array in self.arrays.values():
            array += 1.0  # a step of the optimizer


@ray.remote
class Inference(Rank):
    def serving(self, engine: aiote.Engine) -> AbstractAsyncContextManager[Any]:
        return weights.serve_target(engine, self.layout, self.rank, self.arrays, replica="a", controllers="first")

    async def answer(self) -> dict[str, float]:
        return {name: float(array.mean()) for name, array in self.arrays.items()}


async def main(args: argparse.Namespace) -> None:
    settings: dict[str, Any] = {"provider": args.provider}
    if len(ray.nodes()) > 1 and not os.environ.get("AIOTE_CLUSTER_KEY"):
        # Without a key engines listen on loopback only. Ray's own channel is as secret as the cluster's network.
        settings["cluster_key"] = secrets.token_bytes(16)
    sides = {"trainer": model.training(args.trainers), "inference": model.inference(args.inference)}
    actors = {
        f"{role}-{rank}": kind.options(name=f"{role}-{rank}", scheduling_strategy="SPREAD").remote(
            rank, sides[role], settings
        )
        for role, kind in (("trainer", Trainer), ("inference", Inference))
        for rank in sides[role].ranks
    }
    lives = {asyncio.ensure_future(wait(actor.run.remote())): name for name, actor in actors.items()}
    working = asyncio.ensure_future(train(args, actors, settings))
    done, _ = await asyncio.wait([*lives, working], return_when=asyncio.FIRST_COMPLETED)
    for life in done - {working}:
        working.cancel()
        raise SystemExit(f"on_ray.py: {lives[life]} ended: {life.exception()}")
    working.result()
    await asyncio.gather(*(wait(actor.stop.remote()) for actor in actors.values()), *lives)


async def train(args: argparse.Namespace, actors: dict[str, Any], settings: dict[str, Any]) -> None:
    """Train, and after each step bring the weights over."""
    places = {name: await actor.where.remote() for name, actor in actors.items()}
    for name, (address, where) in places.items():
        print(f"{name} on {where}: {address}", flush=True)
    addresses = {role: [at for name, (at, _) in places.items() if name.startswith(role)] for role in ROLES}
    trainers, inference = ([actors[name] for name in actors if name.startswith(role)] for role in ROLES)
    async with aiote.open_engine(**settings) as engine:
        controller = weights.Controller(engine, addresses["trainer"], addresses["inference"], model.RECIPE)
        for version in range(1, args.steps + 1):
            await asyncio.gather(*(wait(trainer.step.remote()) for trainer in trainers))
            report = await controller.update(version)
            written = sum(sent.written for sent in report.sent.values())
            answers = await asyncio.gather(*(wait(rank.answer.remote()) for rank in inference))
            print(f"version {version}: {written} bytes in {report.seconds * 1e3:.1f} ms, {answers}", flush=True)


ROLES = ("trainer", "inference")


async def wait(reference: Any) -> Any:
    return await reference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have Ray start trainers and inference ranks, and update weights.")
    parser.add_argument("--trainers", type=int, default=4, help="training ranks (default: 4)")
    parser.add_argument("--inference", type=int, default=2, help="inference ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="steps of the optimizer (default: 5)")
    parser.add_argument("--provider", default="auto", help="auto (the default), local, socket, tcp or shm")
    parser.add_argument("--address", help="of a Ray cluster; without one RAY_ADDRESS, or a cluster of this host alone")
    given = parser.parse_args()
    # Ray's workers import from the driver's folder, and a checkout's root has aiote's source, which is not compiled.
    os.chdir(Path(__file__).parent)
    ray.init(address=given.address, logging_level="warning", include_dashboard=False if not given.address else None)
    try:
        asyncio.run(main(given))
    except (aiote.AioteError, ValueError) as error:
        raise SystemExit(f"on_ray.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("on_ray.py: interrupted") from None
    finally:
        ray.shutdown()
