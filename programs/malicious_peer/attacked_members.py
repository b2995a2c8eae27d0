"""Engines that work together, and a holder of the key that is none of them.

It calls services by frames of its own making, and counts wherever it likes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

import aiote
from aiote.aio import plain_errors
from aiote.service import codec, frames
from aiote.service.definition import Method
from drawn_values import DrawnValues
from victim import PATIENCE_S, Bounds, Broken

KINDS = (frames.MAGIC[0], 0xE0, 0xE1)
CALL_S = 1.0
Seed = tuple[str, bytes]
"""The name of a method, and arguments as they travel."""


def seed(method: Method, *arguments: Any) -> Seed:
    """Return a call whose arguments have no long arrays."""
    return method.name, codec.encode(method.arguments(*arguments))[0]


class Caller:
    """An engine without a service's end: it takes no answers."""

    def __init__(self, engine: aiote.Engine) -> None:
        self.engine = engine
        self._generation = 0

    def next_generation(self) -> int:
        """Return a call's number: they go on from attack to attack, for one that comes once more is disconnected."""
        self._generation += 1
        return self._generation

    async def call(self, rng: random.Random, address: aiote.Address, seeds: Sequence[Seed], log: list[str]) -> None:
        """Say something that is a call, or nearly one."""
        anything = DrawnValues(rng)
        method, body = rng.choice(seeds)
        way = rng.choice(("right", "right", "damaged", "bytes", "calls"))
        log.append(f"{method} {way}")
        for data in self._said(rng, anything, method, body, way):
            await self.send(address, data, log)

    def _said(self, rng: random.Random, anything: DrawnValues, method: str, body: bytes, way: str) -> list[bytes]:
        if way == "bytes":
            return [bytes((rng.choice((*KINDS, rng.randrange(256))),)) + anything.bytes(4096)]
        said = self.frames(rng, method, body if way == "right" else anything.damaged(body))
        if way == "calls":
            rng.shuffle(said)
            return [anything.damaged(frames.pack([one])) if rng.random() < 0.3 else frames.pack([one]) for one in said]
        return [frames.pack(said)]

    def frames(self, rng: random.Random, method: str, body: bytes) -> list[frames.Frame]:
        """Return a greeting, a call, and what may belong to it."""
        slot, generation = rng.randrange(4), self.next_generation()
        call = frames.CallFrame(slot, generation, method, 0.0, body, [])
        more: list[frames.Frame] = [
            frames.Cancel(slot, generation),
            frames.Credit(slot, generation, rng.randrange(3)),
            frames.Items(slot, generation, 0, [body[:100]], []),
            frames.End(slot, generation, rng.randrange(8), body[:100], []),
        ]
        return [frames.HelloFrame(frames.VERSION, True, 16384, 64, 8, 4096), call, *rng.sample(more, rng.randrange(3))]

    async def send(self, address: aiote.Address, data: bytes, log: list[str]) -> None:
        """Send bytes, to whoever listens."""
        with anyio.move_on_after(CALL_S):
            try:
                await self.engine.send(address, data)
            except aiote.AioteError as error:
                log.append(f"{type(error).__name__} right")

    async def count(self, rng: random.Random, victim: aiote.Engine, log: list[str]) -> None:
        """Count on what the victim waits for, which a peer that lies may have been told by others."""
        blocks = list(victim._counters._grants._counts.items())
        if not blocks:
            return
        first, count = rng.choice(blocks)
        log.append("count right")
        with anyio.move_on_after(CALL_S):
            try:
                for _ in range(rng.randrange(1, 4)):
                    await self.engine.write_imm(None, victim.address, first + rng.randrange(count))
            except aiote.AioteError as error:
                log.append(f"{type(error).__name__} right")


class Attacked:
    """Engines that work together, and who attacks them."""

    def __init__(self, members: list[aiote.Engine], caller: Caller) -> None:
        self.members, self.caller = members, caller
        self.bounds = Bounds()
        self.turn = 0

    def seeds(self) -> list[Seed]:
        """Return calls that members answer, or refuse."""
        raise NotImplementedError

    async def work(self) -> None:
        """Do what the members are there for, for the `turn`th time. Raises Broken for other bytes than right ones."""
        raise NotImplementedError

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        """Say a few things, some of them right."""
        for _ in range(rng.randint(1, 12)):
            await self.one(rng, log)

    async def one(self, rng: random.Random, log: list[str]) -> None:
        """Say one thing."""
        victim = rng.choice(self.members)
        if rng.random() < 0.4:
            await self.caller.count(rng, victim, log)
        else:
            await self.caller.call(rng, victim.address, self.seeds(), log)

    async def check(self, rng: random.Random, log: list[str]) -> None:
        """See that the members do their work, also while they are attacked, and that what they keep is bounded."""
        before = self._connected()
        await self._work(lambda: self._go_on(rng, log))
        if before - self._connected():
            raise Broken(f"members have lost each other: {before - self._connected()}")
        self.bounds.check()

    def _connected(self) -> set[tuple[str, str]]:
        """Return which members are connected."""
        among = {one.address for one in self.members}
        return {
            (str(one.address), str(peer.address)) for one in self.members for peer in one.peers if peer.address in among
        }

    async def _work(self, beside: Callable[[], Awaitable[None]]) -> None:
        """Have the members do their work, and something else meanwhile."""
        self.turn += 1
        with plain_errors(), anyio.move_on_after(PATIENCE_S) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(beside)
                try:
                    await self.work()
                except aiote.AioteError as error:
                    raise Broken(f"the members do not work: {error!r}") from error
        if scope.cancelled_caught:
            raise Broken(f"the members' work was not over within {PATIENCE_S} s")

    async def _go_on(self, rng: random.Random, log: list[str]) -> None:
        for _ in range(rng.randint(0, 20)):
            await self.one(rng, log)
            await anyio.sleep(0)

    async def at_rest(self) -> None:
        """See that the members work once the hostile one is gone, and that none of them has it as a peer."""
        await self.caller.engine.aclose()
        await self._work(self._alone)

    async def _alone(self) -> None:
        hostile = self.caller.engine.address
        while any(hostile in [peer.address for peer in one.peers] for one in self.members):
            await anyio.sleep(0.01)
