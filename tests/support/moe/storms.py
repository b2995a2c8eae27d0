"""Ranks in virtual time, one of which is killed, stopped, partitioned, cancelled or loses a rail; see test_storm.py."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from itertools import combinations
from typing import Any

import anyio
import numpy as np

import aiote
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup, open_group
from aiote.testing import Fabric
from support.moe.ranks import Tokens, check_rows, compute, reference

RANKS = 3
ROUNDS = 5
HEARTBEAT = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.2, "drain_timeout": 0.1}
LIMIT_S = 0.2 + 0.1 + 0.5
KINDS = ("kill", "cancel", "partition", "rail", "stop", "stop", "cancel", "kill", "nothing")


def tokens_of(config: MoeConfig, epoch: int, lane: int, number: int, rank: int) -> Tokens:
    """Return what a rank dispatches in a round: in each another."""
    rng = np.random.default_rng([epoch, lane, number, rank])
    return Tokens(rng, config, int(rng.integers(0, config.tokens + 1)))


def check_sums(config: MoeConfig, own: Tokens, out: Any, masked: list[int], dropped: Any) -> None:
    """Check an output; without a rank that is masked, whose answer may have come or not, and what was dropped."""
    local = -(-config.experts // RANKS)
    for count in range(len(masked) + 1):
        for gone in combinations(masked, count):
            absent = np.isin(own.ids // local, gone) | (False if dropped is None else dropped)
            if out.tobytes() == reference(config, own, absent).tobytes():
                return
    raise AssertionError(f"with {masked} masked: {out}")


class World:
    """Ranks on a fabric, what happens to one of them, and what became of the others."""

    def __init__(
        self, fabric: Fabric, seed: int, config: MoeConfig, *, rounds: int = ROUNDS, event: int | None = None
    ) -> None:
        """Something happens at an event of the rounds, by its number, or at any time."""
        self.fabric, self.config, self.count, self.event = fabric, config, rounds, event
        self.rng = random.Random(seed)
        self.groups: dict[int, MoeGroup] = {}
        self.scopes = [anyio.CancelScope() for _ in range(RANKS)]
        self.harmed_at = self.heard_at = 0.0
        self.broken: list[int] = []
        self.events = 0
        self.left: dict[MoeGroup, anyio.Event] = {}

    async def run(self, kind: str) -> int:
        """Make rounds while something happens to a rank, repair the group, and make rounds again."""
        async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(self.fabric.open_engine(**HEARTBEAT)) for _ in range(RANKS)]
            members = [engine.address for engine in engines]
            for rank, engine in enumerate(engines):
                tasks.start_soon(self.live, engine, members, rank)
            await until(lambda: len(self.groups) == RANKS)
            victim = self.rng.randrange(RANKS)
            self.events -= self.fabric.events
            async with anyio.create_task_group() as under_way:
                for rank in range(RANKS):
                    under_way.start_soon(self.first_rounds, rank, rank == victim and kind in ("kill", "partition"))
                under_way.start_soon(self.harm, kind, victim)
            self.events += self.fabric.events
            self.check(kind, victim)
            lost = kind in ("kill", "partition") or (kind == "stop" and self.parted())
            async with anyio.create_task_group() as under_way:
                if lost:
                    self.fabric.crash(engines[victim])
                    engines.append(await stack.enter_async_context(self.fabric.open_engine(**HEARTBEAT)))
                    members[victim] = engines[-1].address
                    del self.groups[victim]
                    tasks.start_soon(self.live, engines[-1], members, victim)
                for group in tuple(self.groups.values()):
                    under_way.start_soon(partial(group.replace, victim, members[victim]) if lost else group.reset)
            await until(lambda: len(self.groups) == RANKS)
            async with anyio.create_task_group() as under_way:
                for rank in range(RANKS):
                    under_way.start_soon(self.last_rounds, rank)
            for left in self.left.values():
                left.set()
        return len(self.broken)

    async def live(self, engine: aiote.Engine, members: list[Any], rank: int) -> None:
        """Be a rank of the group until its last round is over."""
        async with open_group(engine, list(members), rank, self.config, **self.more(rank, engine)) as group:
            self.groups[rank] = group
            self.left[group] = anyio.Event()
            await self.left[group].wait()
        await engine.aclose()

    def more(self, rank: int, engine: aiote.Engine) -> dict[str, Any]:
        """Return what else a rank opens the group with."""
        return {}

    async def first_rounds(self, rank: int, dies: bool) -> None:
        """Make rounds until they are over, cancelled, or the group breaks."""
        try:
            with self.scopes[rank] as scope:
                await self.rounds(self.groups[rank], self.count)
            if scope.cancelled_caught:
                # Perhaps between two steps, of which nobody could know.
                self.groups[rank].abort("it was cancelled")
                self.broken.append(rank)
        except* (GroupBrokenError, aiote.PeerError, aiote.TransferError, aiote.ClosedError):
            if not dies:
                self.broken.append(rank)
                self.heard_at = anyio.current_time()

    async def last_rounds(self, rank: int) -> None:
        """Make rounds in a group that is whole again, and leave it at once, with the engine."""
        await self.rounds(self.groups[rank], 2)
        self.left[self.groups[rank]].set()

    async def harm(self, kind: str, victim: int) -> None:
        """Do something to a rank at some moment."""
        if self.event is None:
            await anyio.sleep(self.rng.choice((self.rng.uniform(0, 1e-4), self.rng.uniform(0, 2e-3))))
        elif kind != "nothing":
            await event(self.fabric, self.fabric.events + self.event)
        engine = self.groups[victim].engine
        self.harmed_at = anyio.current_time()
        if kind == "cancel":
            self.scopes[victim].cancel()
        elif kind == "kill":
            self.fabric.crash(engine)
        elif kind == "partition":
            self.fabric.partition(engine)
            await anyio.sleep(LIMIT_S)
            self.fabric.crash(engine)
            self.fabric.heal(engine)
        elif kind == "stop":
            # Some notice, all do, or nobody does; what it was writing goes on.
            self.fabric.partition(engine)
            await anyio.sleep(self.rng.choice((0.01, self.rng.uniform(0.15, 0.3))))
            self.fabric.heal(engine)
        elif kind == "rail":
            self.fabric.kill_rail(engine, self.rng.randrange(2))

    def parted(self) -> bool:
        """Whether a rank has lost another."""
        return any(
            isinstance(group.membership.failure, aiote.PeerError) or not group.active.all()
            for group in self.groups.values()
        )

    def check(self, kind: str, victim: int) -> None:
        """Check who has heard of it, and when."""
        if kind in ("rail", "nothing") or (self.config.on_loss == "mask" and kind != "cancel"):
            assert set(self.broken) <= ({victim} if kind == "partition" else set())
        if self.broken and self.heard_at:
            assert self.heard_at - self.harmed_at < LIMIT_S

    async def rounds(self, group: MoeGroup, count: int) -> None:
        """Make so many rounds in every lane."""
        async with anyio.create_task_group() as tasks:
            for lane in range(group.config.lanes):
                tasks.start_soon(self.lane, group, lane, count)

    async def lane(self, group: MoeGroup, lane: int, count: int) -> None:
        """Make rounds in one lane, with pauses of any length in between, and check what they give."""
        config, pause = group.config, self.rng.choice
        for number in range(count):
            given = [tokens_of(config, group.epoch, lane, number, rank) for rank in range(RANKS)]
            own = given[group.rank]
            begun = self.begin(group, own, lane)
            await anyio.sleep(pause((0, 1e-5, 1e-3)))
            batch = await begun.dispatch_recv()
            begun.combine_send(self.computed(group, batch, given))
            await anyio.sleep(pause((0, 1e-5)))
            self.end(group, own, await begun.combine_recv(), batch.dropped)
            # What is still to be completed may be written once more, over another rail: from memory of the next round.
            assert not group._lanes[lane]._transfers

    def begin(self, group: MoeGroup, own: Tokens, lane: int) -> Any:
        """Dispatch a rank's tokens."""
        return group.dispatch_send(own.x, own.ids, own.weights, lane=lane)

    def computed(self, group: MoeGroup, batch: Any, given: list[Tokens]) -> Any:
        """Check what a rank has got, and return what its experts make of it."""
        check_rows(group, batch, given)
        return compute(group, batch)

    def end(self, group: MoeGroup, own: Tokens, sums: Any, dropped: Any) -> None:
        """Check the sums of a round."""
        check_sums(group.config, own, sums, list(group.membership.masked), dropped)


async def event(fabric: Fabric, number: int) -> None:
    """Wait until so many things have happened on a network."""
    loop: Any = asyncio.get_running_loop()
    selector, advance, come = loop._selector, loop._selector._advance, anyio.Event()

    def counted(timeout: float | None) -> bool:
        moved: bool = advance(timeout)
        if fabric.events >= number and not come.is_set():
            come.set()
        return moved

    selector._advance = counted
    try:
        await come.wait()
    finally:
        selector._advance = advance


async def until(condition: Any) -> None:
    """Let virtual time pass until something holds."""
    while not condition():
        await anyio.sleep(1e-4)
