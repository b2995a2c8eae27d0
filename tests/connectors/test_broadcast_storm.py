"""Updates in virtual time, in which ranks are killed, cancelled and stopped at random.

What must hold: nothing hangs; a receiver that returns has every tensor of this update and no other; when a receiver's
part has ended, however it did, nothing is written into its slots any more.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

import aiote
from aiote.testing import Fabric, run
from support.connectors.broadcasts import Rollout, Trainer, assert_same, tensors_of
from support.machine import LONG

SEEDS = range(300 if LONG else 25)
ROUNDS = 6
BUCKET = 2048
TRAINERS, ROLLOUTS = 2, 3
SHAPES = [(300,), (0,), (9, 9), (1500,), (), (511,)] * 4


class Rank:
    """A trainer or a rollout with an engine of its own, which may be killed and is started anew."""

    def __init__(self, fabric: Fabric, trains: bool) -> None:
        self.fabric, self.trains = fabric, trains
        self.stack = AsyncExitStack()
        self.engine: aiote.Engine
        self.part: Any = None

    async def start(self, group: Any) -> None:
        self.engine = await self.stack.enter_async_context(self.fabric.open_engine())
        if self.trains:
            self.part = Trainer(self.engine, BUCKET)
            group.start_soon(self.serve, self.part)
            await self.part.served.wait()
        else:
            self.part = Rollout(self.engine, 2 * TRAINERS, BUCKET)

    async def serve(self, part: Trainer) -> None:
        try:
            await part.serve()
        except aiote.ClosedError:
            pass

    async def renew(self, group: Any) -> None:
        if self.engine.closed:
            await self.stack.aclose()
            self.stack = AsyncExitStack()
            await self.start(group)


class Storm:
    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.rng = fabric, random.Random(seed)
        self.ranks = [Rank(fabric, index < TRAINERS) for index in range(TRAINERS + ROLLOUTS)]
        self.seen = {"whole": 0, "failed": 0, "cancelled": 0}

    async def run(self) -> dict[str, int]:
        async with anyio.create_task_group() as group:
            for rank in self.ranks:
                await rank.start(group)
            for version in range(ROUNDS):
                await self.update(version)
                for rank in self.ranks:
                    await rank.renew(group)
            group.cancel_scope.cancel()
        for rank in self.ranks:
            await rank.stack.aclose()
        return self.seen

    async def update(self, version: int) -> None:
        tensors, name = tensors_of(version, SHAPES), str(version)
        trainers, rollouts = self.ranks[:TRAINERS], self.ranks[TRAINERS:]
        senders = [str(rank.engine.address) for rank in trainers]
        addresses = [str(rank.engine.address) for rank in rollouts]
        announced = [
            rank.part.announce(name, ROLLOUTS, index=index, senders=TRAINERS, addresses=addresses)
            for index, rank in enumerate(trainers)
        ]
        scopes = [anyio.CancelScope() for _ in self.ranks]
        async with anyio.create_task_group() as group:
            for index, rank in enumerate(trainers):
                group.start_soon(self.live, scopes[index], rank, rank.part.send, announced[index], tensors)
            for index, rank in enumerate(rollouts, TRAINERS):
                group.start_soon(self.live, scopes[index], rank, self.receive, rank, name, senders, tensors)
            group.start_soon(self.harm, scopes)

    async def receive(self, rank: Rank, name: str, senders: list[str], tensors: dict[str, Any]) -> None:
        part = rank.part
        try:
            assert_same(await part.receive(name, senders), tensors)
            self.seen["whole"] += 1
        finally:
            if not rank.engine.closed:
                part.memory[:] = 77
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(self.rng.choice((0.0, 0.01, 8.0)))
                assert (part.memory == 77).all(), "written after the receiver's part had ended"

    async def live(self, scope: anyio.CancelScope, rank: Rank, function: Any, *arguments: Any) -> None:
        with scope:
            try:
                await function(*arguments)
            except aiote.AioteError:
                self.seen["failed"] += 1
        self.seen["cancelled"] += scope.cancelled_caught

    async def harm(self, scopes: list[anyio.CancelScope]) -> None:
        await anyio.sleep(self.rng.choice((0.0, self.rng.uniform(0, 0.002), self.rng.uniform(0, 0.01))))
        victim = self.rng.randrange(len(self.ranks))
        match self.rng.choice(("kill", "crash", "cancel", "nothing")):
            case "kill":
                self.ranks[victim].engine.abort()
            case "crash":
                self.fabric.crash(self.ranks[victim].engine)
            case "cancel":
                scopes[victim].cancel()


@pytest.mark.parametrize("part", range(5))
def test_no_update_is_torn_late_or_endless(part):
    seen = {"whole": 0, "failed": 0, "cancelled": 0}
    for seed in SEEDS[part::5]:
        for what, times in run(lambda fabric, seed=seed: Storm(fabric, seed).run(), seed=seed).items():
            seen[what] += times
    assert all(seen.values()), seen
