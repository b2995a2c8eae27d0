"""Idle or not: what a process that has nothing to do still does, by the kernel's count and that of its engines.

Several windows are looked at, and one that is quiet in every measure is enough. What spins, or has a timer for each
peer, is seen in all of them; the time that a host takes from its guest is charged to whoever runs there, now and then.

The bounds are generous: a descriptor that spins takes all of a core and does thousands of rounds, a timer for each of
ten peers or a tick that never ends is well above.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

import aiote
from engines import PATIENCE_S

WINDOW_S = 1.0
WINDOWS = 5
MOST_CPU_S = 0.15
MOST_ROUNDS = 8
MOST_SLEEPS = 60


@dataclass(frozen=True)
class Used:
    """What was used until now: rounds of the engines, sleeps and CPU seconds of the process."""

    rounds: int
    sleeps: int
    cpu: float

    @classmethod
    def by(cls, engines: Sequence[aiote.Engine]) -> Used:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(sum(engine.statistics().rounds for engine in engines), usage.ru_nvcsw, time.process_time())

    def since(self, before: Used) -> Used:
        return Used(self.rounds - before.rounds, self.sleeps - before.sleeps, round(self.cpu - before.cpu, 3))

    def within(self, most: Used) -> bool:
        return self.rounds <= most.rounds and self.sleeps <= most.sleeps and self.cpu <= most.cpu


async def settle(*engines: aiote.Engine) -> None:
    """Wait until no engine does a round any more: what was under way is over, and what spins never gets here."""
    with anyio.fail_after(PATIENCE_S):
        before = None
        while before != (before := [engine.statistics().rounds for engine in engines]):
            await anyio.sleep(0.15)


async def assert_idle(*engines: aiote.Engine, rounds: int = MOST_ROUNDS, windows: int = WINDOWS) -> None:
    """Find one window in which nothing was done, but for heartbeats; each engine may do so many rounds in it."""
    await settle(*engines)
    most = Used(rounds * len(engines), MOST_SLEEPS, MOST_CPU_S)
    seen: list[Used] = []
    for _ in range(windows):
        before = Used.by(engines)
        await anyio.sleep(WINDOW_S)
        seen.append(Used.by(engines).since(before))
        if seen[-1].within(most):
            return
    raise AssertionError(f"none of {windows} windows of {WINDOW_S} s was quiet, which is {most} at most: {seen}")
