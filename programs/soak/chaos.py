"""What a soak does to its workers: each mishap is drawn from the seed and runs as a task of its own, so that several
may be under way at once. `Chaos` owns the members; whoever goes is replaced by one of the same role.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

import aiote
from aiote.core.descriptor import RailKey, RegionDescriptor
from findings import Findings
from members import GoneError, Member
from network import Heal, Links
from support.process.open_resources import shared_files

sys.path.append(str(Path(__file__).parents[1] / "malicious_peer"))

from peer import HostilePeer

HEARTBEATS: dict[str, Any] = {
    "heartbeat_interval": 0.25,
    "heartbeat_timeout": 1.5,
    "connect_timeout": 1.5,
    "drain_timeout": 0.5,
}
LIMIT_S: float = HEARTBEATS["heartbeat_timeout"]
SHORT_S = (0.02, 0.6 * LIMIT_S)
LONG_S = (1.3 * LIMIT_S, 2 * LIMIT_S)
GAP_S = (0.05, 0.6)
ANSWER_S = 90.0
"""How long an answer may take; a worker stops at most for LONG_S, and its own bounds are shorter."""
COUNTED_S = 60.0
"""How much longer a soak goes on until it has seen what it needs; a busy machine may be slow to come to it."""
KILLED_WHILE_STOPPED = 0.3
LOOPS = ("asyncio", "uvloop", "trio")

VISIT_S = 5.0

Mishap = Callable[[Member], Awaitable[None]]


@dataclass
class Stranger:
    """A worker, as a hostile peer sees it that was granted nothing."""

    address: aiote.Address

    def __post_init__(self) -> None:
        self.granted = RegionDescriptor(self.address, 1, 0, 4096, True, (RailKey(1, 0),))

    def known(self) -> list[int]:
        return []


class Chaos:
    """The members and their mishaps. `findings` is told what must not be."""

    def __init__(self, seed: int, provider: str, bound: float, findings: Findings, memory: str = "host") -> None:
        self.rng = random.Random(f"{seed}/{provider}/chaos")
        self.tally: Counter[str] = Counter()
        self.most_resident = 0
        self.pids: list[int] = []
        self.links = Links(provider)
        self._seed, self._provider, self._bound, self._memory = seed, provider, bound, memory
        self._key = f"the soak of seed {seed}"
        self._findings = findings
        self._started: list[Member] = []
        self._members: list[Member] = []
        self._afflicted: set[Member] = set()
        self._lives = 0
        self._loops: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # What a soak is made of.

    def roles(self) -> list[str]:
        """Return a role for each worker that there is to be, in the order in which they go home."""
        return ["peer"] * random.Random(self._seed).randint(3, 5)

    def mishaps(self) -> list[tuple[int, Mishap, str]]:
        """Return what may happen: how often, what, and to which role ("": to any)."""
        return [
            (6, self._cancel, ""),
            (2, self._reopen, ""),
            (1, self._replace_in_order, ""),
            (3, self._attack, ""),
            *self._hardships(),
        ]

    def _hardships(self, role: str = "") -> list[tuple[int, Mishap, str]]:
        """Return what can happen to any process."""
        ever: list[tuple[int, Mishap, str]] = [
            (2, self._stop_shortly, role),
            (1, self._stop_for_long, role),
            (2, self._kill, role),
        ]
        cuts: list[tuple[int, Mishap, str]] = [(1, self._cut_shortly, role), (1, self._cut_for_long, role)]
        return ever + (cuts if self.links.inside else [])

    def settings(self, role: str) -> dict[str, Any]:
        """Return what a worker opens its engine with."""
        return {
            **HEARTBEATS,
            "progress": self.rng.choice(("adaptive", "thread")),
            "message_pool": self.rng.choice((2, 4, 16)),
            "largest_message": self.rng.choice((0, 0, 20_000, 65_536)),
        }

    # The members.

    async def assemble(self) -> None:
        """Make the network and start the members."""
        self.links.open()
        async with asyncio.TaskGroup() as group:
            for role in self.roles():
                group.create_task(self._enlist(role))

    async def _enlist(self, role: str) -> None:
        loop = self._next_loop()
        provider = self._provider + ("" if self._memory == "host" else f"+{self._memory}")
        job = (str(self._seed), provider, str(self._bound), role)
        member = await Member.start(self.links.prefix, job, loop, self._findings)
        self._started.append(member)
        self.pids.append(member.pid)
        try:
            await asyncio.wait_for(asyncio.shield(member.greeted), ANSWER_S)
            member.host = self.links.join(member.pid)
            async with member.busy:
                await self._open(member)
        except GoneError:
            return
        self._members.append(member)
        self.tally["processes started"] += 1
        self.tally[f"processes on {loop}"] += 1
        await self._introduce()

    def _next_loop(self) -> str:
        """Draw an event loop; of three workers that are started each has another."""
        if not self._loops:
            self._loops = self.rng.sample(LOOPS, len(LOOPS))
        return self._loops.pop()

    async def _open(self, member: Member) -> None:
        self._lives += 1
        number = self._lives
        settings = self.settings(member.role)
        answer = await self._ask(member, "open", life=number, host=member.host, key=self._key, settings=settings)
        if "address" not in answer:
            self._findings.violation(f"process {member.pid} could open no engine: {answer}")
            return
        member.life, member.address = number, answer["address"]
        self.links.opened(member.pid, int(member.address.partition("//")[2].partition("/")[0].rpartition(":")[2]))
        self.tally["engines opened"] += 1

    async def _ask(self, member: Member, do: str, **arguments: Any) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(member.ask(do, **arguments), ANSWER_S)
        except TimeoutError:
            self._findings.violation(f"process {member.pid} did not answer {do!r} within {ANSWER_S} s")
            raise GoneError from None

    async def _introduce(self) -> None:
        """Tell everyone who is there now, as far as they listen."""
        lives = {str(member.life): member.address for member in self._members if member.life}
        for member in self._members:
            self._spawn(self._tell_of(member, lives))

    async def _tell_of(self, member: Member, lives: dict[str, str]) -> None:
        await self._ask(member, "meet", lives=lives)

    def _spawn(self, work: Any) -> None:
        async def guarded() -> None:
            try:
                await work
            except GoneError:
                pass
            except Exception as error:
                self._findings.unexpected(error, "in a mishap")

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gone(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)
        self._afflicted.discard(member)
        self.links.forget(member.pid)

    # Mishaps.

    async def run(self, seconds: float, share: slice, needed: tuple[str, ...]) -> None:
        """Let things happen for so long, until each kind of a share of all has come once, and until what is needed was
        counted; no kind of the share comes again before the others of it.

        Whoever is hit is hit by one thing at a time, and not all are hit at once.
        """
        now = asyncio.get_running_loop().time
        deadline, end = now() + seconds, now() + seconds + COUNTED_S
        mishaps = self.mishaps()
        size, weights = len(self.roles()), [often for often, _, _ in mishaps]
        shared = mishaps[share]
        first = self.rng.sample(shared, len(shared))
        while first or now() < deadline or (now() < end and not await self._counted(needed)):
            await asyncio.sleep(self.rng.uniform(*GAP_S))
            healthy = self._healthy()
            _, mishap, role = first[-1] if first else self.rng.choices(mishaps, weights)[0]
            suited = [member for member in healthy if member.role == (role or member.role)]
            if len(healthy) * 2 > size and suited:
                victim = self.rng.choice(suited)
                self._afflicted.add(victim)
                if first:
                    first.pop()
                self._spawn(self._happen(mishap, victim))

    def _healthy(self) -> list[Member]:
        return [member for member in self._members if member not in self._afflicted]

    async def _counted(self, needed: tuple[str, ...]) -> bool:
        """Tell whether each of these has been counted, by those who can answer now."""
        if not all(self.tally[name] for name in needed):
            await asyncio.gather(*(self._report(member) for member in self._healthy()), return_exceptions=True)
        return all(self.tally[name] for name in needed)

    async def _happen(self, mishap: Mishap, victim: Member) -> None:
        try:
            await mishap(victim)
        finally:
            self._afflicted.discard(victim)

    async def _cancel(self, member: Member) -> None:
        answer = await self._ask(member, "cancel")
        self.tally["awaits cancelled from outside"] += answer.get("cancelled", 0)

    async def _reopen(self, member: Member) -> None:
        how = self.rng.choice(("aclose", "aclose", "abort"))
        async with member.busy:
            member.life = 0
            await self._report(member)
            await self._ask(member, "close", how=how)
            self.tally[f"engines closed in the middle by {how}"] += 1
            await self._open(member)
        await self._introduce()

    async def _attack(self, member: Member) -> None:
        """Have a hostile peer that has the key connect and do what no engine does; it may stay for a while, and say
        nothing more.
        """
        if not member.address:
            return
        rng = random.Random(self.rng.getrandbits(64))
        victim = Stranger(aiote.Address.parse(member.address))
        hostile = HostilePeer(rng, self._provider, victim, key=self._key.encode(), sober=True)
        try:
            with anyio.move_on_after(VISIT_S):
                await hostile.attack()
            self.tally["hostile peers"] += 1
            self.tally["hostile peers that were let in"] += hostile.let_in
            await asyncio.sleep(rng.choice((0.0, 2 * LIMIT_S)))
        finally:
            hostile.close()

    async def _replace_in_order(self, member: Member) -> None:
        async with member.busy:
            await self._ask(member, "finish")
            member.life = 0
            await self._introduce()
            await self._dismiss(member)
        self.tally["processes that left in order"] += 1
        await self._enlist(member.role)

    async def _kill(self, member: Member) -> None:
        self._members.remove(member)
        self.tally["killed, running" if not member.stopped else "killed, stopped"] += 1
        await member.kill()
        self._gone(member)
        await self._introduce()
        await self._enlist(member.role)

    async def _stop_shortly(self, member: Member) -> None:
        await self._stop(member, SHORT_S, "stopped shortly")

    async def _stop_for_long(self, member: Member) -> None:
        await self._stop(member, LONG_S, "stopped for long")

    async def _stop(self, member: Member, how_long: tuple[float, float], name: str) -> None:
        async with member.busy:
            member.stop()
            self.tally[name] += 1
            await asyncio.sleep(self.rng.uniform(*how_long))
            if self.rng.random() > KILLED_WHILE_STOPPED:
                member.resume()
                return
        await self._kill(member)

    async def _cut_shortly(self, member: Member) -> None:
        await self._cut(member, SHORT_S, "cut shortly")

    async def _cut_for_long(self, member: Member) -> None:
        await self._cut(member, LONG_S, "cut for long")

    async def _cut(self, member: Member, how_long: tuple[float, float], name: str) -> None:
        others = self._healthy()
        heal: Heal
        if not self.links.apart:
            what, heal = "control connections", self.links.silence(member.pid)
        elif others and self.rng.random() < 0.5:
            what, heal = "links to one other", self.links.drop(member.pid, self.rng.choice(others).pid)
        else:
            what, heal = "links", self.links.pull(member.pid)
        self.tally[f"{what} {name}"] += 1
        try:
            await asyncio.sleep(self.rng.uniform(*how_long))
        finally:
            heal()

    # The end.

    async def _report(self, member: Member) -> None:
        answer = await self._ask(member, "report")
        self.tally.update(answer["tally"])
        self.most_resident = max(self.most_resident, answer["resident"])

    async def _dismiss(self, member: Member) -> None:
        """Have a worker close its engine and end."""
        await self._ask(member, "close", how="aclose")
        await self._report(member)
        status = await self._left(member)
        self._gone(member)
        if status:
            self._findings.violation(f"process {member.pid} ended with status {status}")
        if left := shared_files(member.pid):
            self._findings.violation(f"process {member.pid} ended in order and left {left} in /dev/shm")

    async def _left(self, member: Member) -> int:
        try:
            return await asyncio.wait_for(member.leave(), ANSWER_S)
        except TimeoutError:
            self._findings.violation(f"process {member.pid} did not end within {ANSWER_S} s")
            raise GoneError from None

    async def finish(self) -> None:
        """Let the mishaps under way come to their end, and then all that the members do; everyone goes home."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self.tally["processes that lived to the end"] += len(self._members)
        for role in dict.fromkeys(self.roles()):
            group = [member for member in self._members if member.role == role]
            ends = await asyncio.gather(*(self._ask(member, "finish") for member in group), return_exceptions=True)
            ends += await asyncio.gather(*(self._dismiss(member) for member in group), return_exceptions=True)
            for error in ends:
                # Of one that is gone, its Member has said so.
                if isinstance(error, Exception) and not isinstance(error, GoneError):
                    self._findings.unexpected(error, "at the end")

    async def abort(self) -> None:
        """End everything at once, and leave no process and no link, whatever state it was in."""
        while tasks := tuple(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await asyncio.gather(*(member.kill() for member in self._started))
        self.links.close()
