"""The parent's part of `aiote demo moe`: three acts. In each of them all ranks generate their texts anew.

In the first act all ranks are there. In the second act one rank is killed in the middle of a step, and the others
continue without its experts. In the third act a new process has taken its place. After each act the parent compares
every token, with a checksum of its logits, with the output of one process that uses the same experts.

A rank generates each token on request, so that an act ends at the same token for all ranks, however late the one is
killed.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc

import aiote
from aiote.aio import Condition
from aiote.demo.children import Child, how_it_ended, started
from aiote.demo.faults import DemoError
from aiote.demo.moe_model import LOCAL, RANKS, MoeSettings

__all__ = ["MoeRun", "RankState", "difference"]

_PATIENCE_S = 60.0
_EXIT_S = 1.0

Token = tuple[int, int]
"""A token and the checksum of its logits."""


@dataclass(slots=True)
class RankState:
    """The state of a rank, and its text in this act."""

    number: int
    child: Child
    state: str = "starting"
    epoch: int = 0
    tokens: list[Token] = field(default_factory=list)
    without: dict[str, int] = field(default_factory=dict)


class MoeRun:
    """A running demo. `ranks` may be read while it runs; `say` is called with a line after each step."""

    def __init__(self, settings: MoeSettings, victim: int, say: Callable[[str], object]) -> None:
        self.ranks: list[RankState] = []
        self.whole: list[list[Token]] = []
        """The texts of one process with all experts, by rank, as soon as they are known."""
        self.settings, self.victim = settings, victim
        self._say = say
        self._texts: dict[int, list[Token]] = {}
        self._changed = Condition()
        self._trouble = ""

    async def run(self) -> None:
        """Run all acts. Raises DemoError for a wrong token and for a process that ends or does not respond."""
        async with aiote.open_engine(self.settings.provider):
            pass  # report an unusable provider here, before any child is started
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._alone = await tasks.start(self._live, "alone", "one process")
            for number in range(RANKS):
                self.ranks.append(await self._start(number))
            await self._acts()
            tasks.cancel_scope.cancel()

    async def _acts(self) -> None:
        await self._open(self.ranks, self.ranks)
        self.whole = await self._texts_of_one([{}] * RANKS)
        self._say(f"{RANKS} ranks are open, each with {LOCAL} of {RANKS * LOCAL} experts")
        await self._generate()
        await self._check("four ranks", "one process")
        await self._generate(kill=self.victim)
        await self._check("three ranks", f"one process without the experts of rank {self.victim}")
        await self._replace()
        await self._generate()
        await self._check("four ranks again", "one process")

    # Processes.

    async def _start(self, number: int) -> RankState:
        return RankState(number, await self._tasks.start(self._live, str(number), f"rank {number}"))

    async def _live(self, role: str, name: str, *, task_status: anyio.abc.TaskStatus[Child]) -> None:
        """Run a process, and record the facts that it reports until it has ended; it ends with this task."""
        async with started(role, name, "aiote.demo.moe_rank", role, self.settings.to_json()) as child:
            task_status.started(child)
            async for fact in child.facts():
                self._record_fact(child, fact)
                self._changed.wake_all()
            code = await child.wait()
            if child.draining:
                return
            if code >= 0:
                await anyio.sleep(_EXIT_S)  # another process that died may be the cause, and is then reported first
            why = f": {child.complaint}" if child.complaint and code >= 0 else ""
            self._trouble = self._trouble or f"{name} (pid {child.process.pid}) ended, {how_it_ended(code)}{why}"
            self._changed.wake_all()

    def _record_fact(self, child: Child, fact: dict[str, Any]) -> None:
        match fact:
            case {"joined": epoch}:
                self._rank(child).epoch = epoch
            case {"token": token, "logits": crc, "without": without}:
                self._rank(child).tokens.append((token, crc))
                self._rank(child).without = without
            case {"rank": number, "tokens": text}:
                self._texts[number] = [(token, crc) for token, crc in text]

    @property
    def _living(self) -> list[RankState]:
        return [rank for rank in self.ranks if rank.state != "killed"]

    def _rank(self, child: Child) -> RankState:
        return next(rank for rank in self.ranks if rank.child is child)

    async def _wait_until(self, true: Callable[[], bool], doing: str) -> None:
        """Wait until the condition holds. Raises DemoError if a process ends before, or if no report comes in time."""
        while not (self._trouble or true()):
            with anyio.move_on_after(_PATIENCE_S) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                raise DemoError(f"no rank reported anything for {_PATIENCE_S:.0f} s while {doing}")
        if self._trouble:
            raise DemoError(f"{self._trouble}, while {doing}")

    # Acts.

    async def _open(self, joining: Sequence[RankState], every: Sequence[RankState]) -> None:
        """Let ranks join the group."""
        doing = f"{' and '.join(rank.child.name for rank in joining)} started"
        await self._wait_until(lambda: bool(self._alone.ready and all(rank.child.ready for rank in joining)), doing)
        for rank in joining:
            await rank.child.ask(members=[one.child.ready["ready"] for one in every])
        for rank in every:
            if rank not in joining:
                await rank.child.ask(replace=joining[0].number, address=joining[0].child.ready["ready"])
        before = [0 if rank in joining else rank.epoch for rank in every]
        await self._wait_until(
            lambda: all(rank.epoch > epoch for rank, epoch in zip(every, before, strict=True)), "ranks joined"
        )
        for rank in every:
            rank.state = "whole"

    async def _replace(self) -> None:
        """Start a new process in place of the killed rank."""
        successor = await self._start(self.victim)
        self.ranks[self.victim] = successor
        await self._open([successor], self.ranks)
        pid, epoch = successor.child.process.pid, successor.epoch
        self._say(f"rank {self.victim} is another process now, pid {pid}; the group is in epoch {epoch}")

    async def _generate(self, kill: int | None = None) -> None:
        """Let each rank generate its text; kill one half-way if asked."""
        for rank in self.ranks:
            rank.tokens, rank.without = [], {}
            await rank.child.ask(begin=True)
        took = 0.0
        for step in range(1, self.settings.tokens + 1):
            begun = time.perf_counter()
            for rank in self._living:
                await rank.child.ask(next=True)
            if kill is not None and step == self.settings.tokens // 2:
                # At a random time in the step, which takes about as long as the last one.
                await anyio.sleep(random.random() * took)
                self._kill(self.ranks[kill], step)
            await self._wait_until(
                lambda step=step: all(len(rank.tokens) >= step for rank in self._living),  # type: ignore[misc]
                f"ranks generated token {step}",
            )
            took = time.perf_counter() - begun
        if kill is not None:
            others = self._living
            if not all(rank.without for rank in others) or all(one.tokens == self.whole[one.number] for one in others):
                raise DemoError(f"rank {kill} was killed, but the others generated the same as with it")

    def _kill(self, rank: RankState, step: int) -> None:
        rank.child.draining = True  # its end is expected
        rank.child.send(signal.SIGKILL)
        rank.state = "killed"
        self._say(f"rank {rank.number} (pid {rank.child.process.pid}) was killed (SIGKILL) during step {step}")
        for one in self._living:
            one.state = f"without {rank.number}"

    async def _texts_of_one(self, without: Sequence[dict[str, int]]) -> list[list[Token]]:
        """Return the texts of one process that leaves out experts as each rank did."""
        self._texts = {}
        for number in range(RANKS):
            await self._alone.ask(rank=number, without=without[number])
        await self._wait_until(lambda: len(self._texts) == RANKS, "one process generated")
        return [self._texts[number] for number in range(RANKS)]

    async def _check(self, who: str, like: str) -> None:
        """Compare the texts of an act with those of one process. Raises DemoError for the first difference."""
        texts = self.whole
        if any(rank.without for rank in self.ranks):
            texts = await self._texts_of_one([rank.without for rank in self.ranks])
        wrong = difference(self.ranks, texts)
        if wrong:
            raise DemoError(f"{who}: {wrong} in {like}")
        count = sum(len(rank.tokens) for rank in self.ranks)
        self._say(f"{who}: {count} tokens and all bits of their logits equal those of {like}")
        for rank in self.ranks:
            for gone, first in rank.without.items():
                self._say(f"  {self._describe_missed(rank, gone, first)}")

    def _describe_missed(self, rank: RankState, gone: str, first: int) -> str:
        step, layer = divmod(first, self.settings.layers)
        others = sum(a[0] != b[0] for a, b in zip(rank.tokens, self.whole[rank.number], strict=True))
        return (
            f"rank {rank.number}: without rank {gone} from step {step + 1}, layer {layer + 1} on; {others} of its "
            "tokens differ from those with all experts"
        )


def difference(ranks: Sequence[RankState], texts: Sequence[Sequence[Token]]) -> str:
    """Describe the first token that differs from the texts in its number or its logits, or return "".

    A killed rank has only a part of its text.
    """
    for rank, text in zip(ranks, texts, strict=True):
        for place, (one, other) in enumerate(zip(rank.tokens, text, strict=False)):
            if one != other:
                said = f"token {place + 1} of rank {rank.number} is {one[0]} (logits {one[1]:08x})"
                return f"{said}, but {other[0]} ({other[1]:08x})"
    return ""
