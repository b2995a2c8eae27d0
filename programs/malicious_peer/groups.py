"""The members of a weight update, and of a MoE group: a whole update, and a whole round, after each attack on them."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import numpy as np

import aiote
from aiote.aio import plain_errors
from aiote.moe import MoeConfig
from aiote.moe.joining import service_of
from aiote.service.definition import methods_of
from aiote.weights import Controller, Layout, Replicate, serve_source, serve_target
from aiote.weights.protocol import (
    Descriptors,
    SourceService,
    TargetService,
    Update,
    UpdateOrder,
    WriteTarget,
)
from attacked_members import Attacked, Caller, Seed, seed
from lying_members import Insider
from lying_source import LiedTo, lied_to
from support.engines.opening import opened
from support.moe.ranks import Ranks, Tokens, ranks, whole_round
from victim import KEY, LIMITS, Broken

SETTINGS = {"cluster_key": KEY, "host": "127.0.0.1", **LIMITS}
LAYOUT = Layout.over([0, 1], {"a": ((256, 16), "F32", Replicate()), "b": ((64,), "F16", Replicate())})
CONFIG = MoeConfig(experts=6, top_k=2, hidden=8, tokens=6, dtype="float32", out_dtype="float32")
MASKING = MoeConfig(experts=8, top_k=2, hidden=8, tokens=6, dtype="float32", out_dtype="float32", on_loss="mask")
RANKS = 3
INSIDER_SHARE = 0.3
"""Of the attacks: each opens a group of its own."""
Arrays = dict[str, np.ndarray]


class UpdateRanks(Attacked):
    """Two sources and two targets of weights, which take orders of their controller; and others beside a liar."""

    def __init__(
        self,
        members: list[aiote.Engine],
        caller: Caller,
        controller: Controller,
        trained: list[Arrays],
        served: list[Arrays],
        insider: LiedTo,
    ) -> None:
        super().__init__(members, caller)
        self._controller, self._trained, self._served = controller, trained, served
        self._insider = insider
        self._case: tuple[random.Random, list[str]] = random.Random(0), []

    def seeds(self) -> list[Seed]:
        at = Update(time.time_ns(), self.turn + 1)
        target = {one.attribute: one for one in methods_of(TargetService)}
        source = {one.attribute: one for one in methods_of(SourceService)}
        nothing, address = np.zeros(1, np.uint64), str(self.caller.engine.address)
        order = UpdateOrder(at, [address], [nothing])
        destination = WriteTarget(0, str(self.members[-1].address), 5 << 24, Descriptors.of([]), b"", None)
        return [
            seed(target["describe"]),
            seed(target["update"], order),
            seed(target["commit"], at),
            seed(source["describe"]),
            seed(source["prepare"], [], [], "auto"),
            seed(source["send"], at, b"d" * 16, [destination]),
        ]

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        await super().attack(rng, log)
        self._case = rng, log

    async def work(self) -> None:
        """Make an update, and beside it one of which a source is an insider."""
        with plain_errors():
            async with anyio.create_task_group() as both:
                if self._case[0].random() < INSIDER_SHARE:
                    both.start_soon(self._insider.run, *self._case)
                await self._update()

    async def _update(self) -> None:
        for rank in self._trained:
            rank["a"][...] = self.turn
            rank["b"][...] = self.turn % 2048
        report = await self._controller.update(self.turn)
        if report.committed != [""]:
            raise Broken(f"an update was not committed: {report}")
        for rank in self._served:
            if not (rank["a"] == self.turn).all() or not (rank["b"] == self.turn % 2048).all():
                raise Broken("a target has other weights than its sources")


class MoeRanks(Attacked):
    """The ranks of a group; and of another one, of which one rank is an insider."""

    def __init__(self, groups: Ranks, caller: Caller, provider: str) -> None:
        super().__init__([group.engine for group in groups], caller)
        self._groups, self._provider = groups, provider

    def seeds(self) -> list[Seed]:
        methods = {one.attribute: one for one in methods_of(service_of(0))}
        rank, epoch = self.turn % (RANKS + 1), self._groups[0].epoch
        return [
            seed(methods["meet"], rank, epoch, self._groups[0]._epochs.digest),
            seed(methods["meet"], rank, epoch + 1, b"another config"),
            seed(methods["broke"], rank, epoch, "so says somebody"),
            seed(methods["left"], rank, epoch, [0]),
        ]

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        await super().attack(rng, log)
        if rng.random() < INSIDER_SHARE:
            async with ranks(lambda: opened(self._provider, **SETTINGS), len(self._groups) + 1, MASKING) as groups:
                await Insider(groups, rng, log).run()

    async def work(self) -> None:
        try:
            await whole_round(self._groups, [Tokens(np.random.default_rng(self.turn), CONFIG, 5) for _ in self._groups])
        except* AssertionError as errors:
            raise Broken(f"a rank has other sums: {errors.exceptions[0]}") from errors


def weights_of(value: int) -> dict[str, np.ndarray]:
    return {"a": np.full((256, 16), value, np.float32), "b": np.full(64, value, np.float16)}


@asynccontextmanager
async def update_ranks(provider: str) -> AsyncIterator[UpdateRanks]:
    trained, served = [weights_of(0), weights_of(0)], [weights_of(1), weights_of(1)]
    async with AsyncExitStack() as stack:
        hub, hostile, *members = [await stack.enter_async_context(opened(provider, **SETTINGS)) for _ in range(9)]
        named = [hub.address]
        members, others = members[:4], members[4:]
        insider = await stack.enter_async_context(lied_to(hub, others))
        for rank in range(2):
            source = serve_source(members[rank], LAYOUT, rank, trained[rank], controllers=named)
            target = serve_target(members[2 + rank], LAYOUT, rank, served[rank], controllers=named)
            await stack.enter_async_context(source)
            await stack.enter_async_context(target)
        addresses = [one.address for one in members]
        controller = Controller(hub, addresses[:2], addresses[2:])
        yield UpdateRanks(members, Caller(hostile), controller, trained, served, insider)


@asynccontextmanager
async def moe_group(provider: str) -> AsyncIterator[MoeRanks]:
    async with (
        opened(provider, **SETTINGS) as hostile,
        ranks(lambda: opened(provider, **SETTINGS), RANKS, CONFIG) as groups,
    ):
        yield MoeRanks(groups, Caller(hostile), provider)
