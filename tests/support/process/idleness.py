"""Idle or not: what a process that has nothing to do still does, by the kernel's count and that of its engines.

Several windows are looked at, and one that is quiet in every measure is enough. What spins, or has a timer for each
peer, is seen in all of them; the time that a host takes from its guest is charged to whoever runs there, now and then.

The bounds are generous: a descriptor that spins takes all of a core and does thousands of rounds, a timer for each of
ten peers or a tick that never ends is well above.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

import aiote
from support.engines.opening import PATIENCE_S
from support.machine import SLOWER

WINDOW_S = 1.0
WINDOWS = 5
MOST_CPU_S = 0.15 * SLOWER**0.5
MOST_WANTED_S = 0.8
"""CPU time together with the time in which a core was waited for: on a busy machine what spins gets little, and wants
all that there is.
"""
MOST_ROUNDS = 8
MOST_SLEEPS = 60


@dataclass(frozen=True)
class Used:
    """What was used until now: rounds of the engines, sleeps and CPU seconds of the process, and those it wanted."""

    rounds: int
    sleeps: int
    cpu: float
    wanted: float

    @classmethod
    def by(cls, engines: Sequence[aiote.Engine]) -> Used:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        rounds, cpu = sum(engine.statistics().rounds for engine in engines), time.process_time()
        return cls(rounds, usage.ru_nvcsw, cpu, cpu + waited_for_a_core())

    def since(self, before: Used) -> Used:
        cpu, wanted = round(self.cpu - before.cpu, 3), round(self.wanted - before.wanted, 3)
        return Used(self.rounds - before.rounds, self.sleeps - before.sleeps, cpu, wanted)

    def within(self, most: Used) -> bool:
        few = self.rounds <= most.rounds and self.sleeps <= most.sleeps
        return few and self.cpu <= most.cpu and self.wanted <= most.wanted


def waited_for_a_core() -> float:
    """Return the seconds that this process's threads were ready to run and did not; 0 where the kernel counts none."""
    waited = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            waited += int(path.read_text().split()[1]) / 1e9  # time run, time waited for a core (both ns), slices
    return waited


async def come_to_rest(*engines: aiote.Engine) -> None:
    """Wait until no engine does a round any more: what was under way is over, and what spins never gets here."""
    with anyio.fail_after(PATIENCE_S):
        before = None
        while before != (before := [engine.statistics().rounds for engine in engines]):
            await anyio.sleep(0.15)


async def assert_idle(*engines: aiote.Engine, rounds: int = MOST_ROUNDS, windows: int = WINDOWS) -> None:
    """Find one window in which nothing was done, but for heartbeats; each engine may do so many rounds in it."""
    await come_to_rest(*engines)
    most = Used(rounds * len(engines), MOST_SLEEPS, MOST_CPU_S, MOST_WANTED_S)
    seen: list[Used] = []
    for _ in range(windows):
        before = Used.by(engines)
        await anyio.sleep(WINDOW_S)
        seen.append(Used.by(engines).since(before))
        if seen[-1].within(most):
            return
    raise AssertionError(f"none of {windows} windows of {WINDOW_S} s was quiet, which is {most} at most: {seen}")
