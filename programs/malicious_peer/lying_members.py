"""Insiders: ranks that take part as any other, for a while, and then say, count and write whatever they may."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio
import numpy as np
from anyio.abc import TaskGroup

import aiote
from aiote.aio import current_loop
from aiote.kvcache.protocol import Opened, Pinned, PushRequest, SentPageRow, TransferRefused
from aiote.kvcache.tensors import CacheSpec
from aiote.moe import GroupBrokenError, MoeConfig, MoeGroup
from aiote.moe.joining import MoeService, service_of
from aiote.moe.wire import SLOTS
from aiote.service import client
from aiote.service.definition import DirectCall
from drawn_values import DrawnValues
from support.moe.ranks import Tokens, all_of, compute, reference
from victim import PATIENCE_S, Broken

LATE = 100
"""Most turns of the loop that somebody is late by."""
MOST_ROUNDS = 3


async def late(rng: random.Random) -> None:
    """Come later than others."""
    for _ in range(rng.randrange(LATE)):
        await anyio.sleep(0)


class LyingPush(DirectCall):
    """A push that does what `body` does, in a task."""

    def __init__(self, body: Callable[[], Awaitable[None]]) -> None:
        self._body, self._ended = body, False

    def begin(self, end: Callable[[Exception | None], None]) -> None:
        self._end = end
        self._task = current_loop().spawn(self._run, name="lying push")

    async def _run(self) -> None:
        try:
            await self._body()
        except Exception as error:
            self._over(error)
        else:
            self._over(None)

    def _over(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._end(error)

    def cancel(self) -> None:
        self._task.cancel()
        self._over(None)


class LyingPrefill:
    """A prefill rank that a decode rank asks, as `protocol.PrefillRank`: of what it may answer it draws anything."""

    def __init__(self, engine: aiote.Engine, spec: CacheSpec) -> None:
        self.engine, self._spec = engine, spec
        self.rng = random.Random(0)
        self.log: list[str] = []

    def describe(self) -> CacheSpec:
        return self._spec

    async def open(self, peer: aiote.Peer, part: CacheSpec, immediates: list[int], memories: list[bytes]) -> Opened:
        await self._lie("open")
        return Opened(DrawnValues(self.rng).number((1 << 40) - 1), [])

    def push(self, peer: aiote.Peer, fetch: PushRequest) -> DirectCall:
        async def lie() -> None:
            for _ in range(self.rng.randrange(4)):
                await self.engine.write_imm(None, peer, (fetch.imm + self.rng.randrange(8)) % (1 << 28))
            await self._lie("push")

        return LyingPush(lie)

    async def pull(self, peer: aiote.Peer, session: int, request: str) -> AsyncGenerator[Pinned]:
        await self._lie("pull")
        pages = [DrawnValues(self.rng).number((1 << 63) - 1) for _ in range(self.rng.randrange(5))]
        yield Pinned(self.rng.randrange(1 << 40), {0: SentPageRow(np.array(pages, np.int64), self.rng.randrange(100))})

    async def moving(self, peer: aiote.Peer, session: int, interval: float) -> AsyncGenerator[list[str]]:
        while True:
            await self._lie("moving")
            yield ["nobody's"] * self.rng.randrange(3)

    def renew(self, requests: list[str]) -> None:
        pass

    def finish(self, peer: aiote.Peer, session: int, request: str) -> bool:
        return self.rng.random() < 0.5

    async def _lie(self, call: str) -> None:
        """Answer late, refuse, fail, or go on."""
        way = self.rng.choice(("late", "refused", "failed", "on", "on", "on"))
        self.log.append(f"liar {call} {way}")
        if way == "late":
            await late(self.rng)
        elif way == "refused":
            raise TransferRefused("x" * self.rng.choice((0, 1, 1 << 16)))
        elif way == "failed":
            raise RuntimeError("a rank that means harm")


def honest_tokens(config: MoeConfig, seed: str) -> Tokens:
    """Return tokens that name no expert of the last rank, and no expert twice."""
    rng = np.random.default_rng(random.Random(seed).getrandbits(64))
    one = Tokens(rng, config, config.tokens)
    for ids in one.ids:
        ids[...] = rng.choice(config.experts - config.experts // 4, config.top_k, replace=False)
    return one


class Insider:
    """The last of four ranks of a group in which ranks are masked. The others' rounds are right, whatever it does."""

    def __init__(self, groups: list[MoeGroup], rng: random.Random, log: list[str]) -> None:
        self.honest, self.liar = groups[:-1], groups[-1]
        self.rng, self.log, self.config = rng, log, groups[0].config
        self._done: dict[int, int] = {}

    async def run(self) -> None:
        """Have the honest ranks make rounds, of which the insider takes part in some. Raises Broken."""
        count = self.rng.randrange(MOST_ROUNDS + 1)
        with anyio.move_on_after(PATIENCE_S) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._insider, count)
                try:
                    await all_of(*[lambda group=group: self._rounds(group, MOST_ROUNDS + 2) for group in self.honest])
                except* AssertionError as errors:
                    raise Broken(f"an honest rank has other rows or sums: {errors.exceptions[0]}") from errors
        if scope.cancelled_caught:
            raise Broken(f"honest ranks' rounds were not over within {PATIENCE_S} s")

    async def _rounds(self, group: MoeGroup, count: int) -> None:
        """Make rounds; where the insider breaks them all ranks begin again without it."""
        number = 0
        while number < count or not await self._all_done(group):
            try:
                group.membership.require_whole()
                await self._round(group, number)
                number += 1
            except (GroupBrokenError, aiote.PeerError) as error:
                self.log.append(f"broken {type(error).__name__}")
                group.mask(self.liar.rank, "it means harm")
                await group.reset()
                number = 0

    async def _all_done(self, group: MoeGroup) -> bool:
        """Wait until all honest ranks have made their rounds in one epoch; False if that is broken first."""
        self._done[group.rank] = group.epoch
        while group.membership.failure is None:
            if [self._done.get(one.rank) for one in self.honest] == [group.epoch] * len(self.honest):
                return True
            await anyio.sleep(0.001)
        return False

    async def _round(self, group: MoeGroup, number: int) -> None:
        given = [honest_tokens(self.config, f"{number} {rank}") for rank in range(len(self.honest))]
        mine = given[group.rank]
        batch = await group.dispatch(mine.x, mine.ids, mine.weights)
        if not batch.active[: len(self.honest)].all():
            raise Broken(f"rank {group.rank} has masked an honest one: {group.membership.masked}")
        out = await group.combine(batch, compute(group, batch))
        if out.tobytes() != reference(self.config, mine).tobytes():
            raise Broken(f"rank {group.rank} has other sums in round {number}")

    async def _insider(self, rounds: int) -> None:
        """Take part for a while, do harm, and go: who is silent for ever is waited for, until the program masks it."""
        for _ in range(rounds):
            one = Tokens(np.random.default_rng(self.rng.getrandbits(32)), self.config, 0)
            batch = await self.liar.dispatch(one.x, one.ids, one.weights)
            await self.liar.combine(batch, compute(self.liar, batch))
        async with anyio.create_task_group() as calls:
            for _ in range(self.rng.randint(1, 12)):
                try:
                    await self._harm(self.rng.choice(self.honest), calls)
                except aiote.AioteError as error:
                    self.log.append(f"insider {type(error).__name__}")
            calls.cancel_scope.cancel()
        self.liar.engine.abort()

    async def _harm(self, victim: MoeGroup, calls: TaskGroup) -> None:
        """Do one thing to an honest rank."""
        way = self.rng.choice(("write", "write", "write", "count", "broke", "left", "meet", "wait", "wait"))
        self.log.append(f"insider {way}")
        if way == "write":
            await self._write(victim)
        elif way == "count":
            first = self.liar.posting._first_immediates[victim.rank]
            await self.liar.engine.write_imm(None, victim.engine.address, first + self.rng.randrange(SLOTS))
        elif way == "wait":
            await late(self.rng)
        else:
            calls.start_soon(self._call, victim, way)

    async def _write(self, victim: MoeGroup) -> None:
        """Write anything somewhere in what the victim has lent."""
        region = self.rng.choice(self.liar.posting._inboxes[victim.rank].regions)
        start = self.rng.randrange(region.nbytes)
        nbytes = min(region.nbytes - start, self.rng.choice((1, 4, 64, 4096)))
        async with self.liar.engine.register(bytearray(self.rng.randbytes(nbytes))) as junk:
            await self.liar.engine.write(junk, region[start : start + nbytes])

    async def _call(self, victim: MoeGroup, way: str) -> None:
        found: MoeService = client(self.liar.engine, victim.engine.address, service_of(0))
        rank, epoch = self.rng.randrange(5), self.liar.epoch + self.rng.choice((0, 0, 1, 100))
        try:
            if way == "broke":
                await found.broke(rank, epoch, "so says an insider")
            elif way == "left":
                await found.left(rank, epoch, [self.rng.randrange(4)])
            else:
                await found.meet(rank, epoch, self.liar._epochs.digest)
        except aiote.AioteError as error:
            self.log.append(f"insider {type(error).__name__}")
