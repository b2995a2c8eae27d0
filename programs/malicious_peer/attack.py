"""A peer that has the key and means harm, against an engine that serves an honest one meanwhile.

    python programs/malicious_peer/attack.py --seconds 3600 --seed 7
    python programs/malicious_peer/attack.py --what local --seed 7 --case 123

A case is one connection: it comes to some stage, does things drawn at random (frames with any fields in any order over
the control connection and the data connection; lies in rings, gates and wake-up pages), and ends somehow. After each
the honest peer is served, memory that was not granted is as it was, and memory and descriptors are bounded; now and
then all is quiet once the hostile ones are gone.

Of a service it is an engine that calls the members (of a KV cache's cluster and its registry, of weight updates, of a
MoE group) with arguments that are right or not, and counts on what they wait for. After each case, and during one, they
do their work, with the right bytes. What breaks a promise is printed with what repeats it; with --pauses, for how long
the event loop, which a service's attackers share, let a timer wait, and how much of that its thread worked. The first
depends on what else runs on the machine; the second is this process's own, and its most is what one turn of the loop
takes, the attackers' part included. Exit status: 0, or 1 after a promise was broken.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from aiote.aio import run_background_tasks
from groups import moe_group, update_ranks
from kv_member import cluster
from peer import HostilePeer
from victim import Broken, Victim, victim

SERVICES = {"kvcache": cluster, "weights": update_ranks, "moe": moe_group}
WHAT = ("socket", "local", *SERVICES)
CASE_S = 20
IDLE_EVERY = 40
TICK_S = 0.001
STANDING = 8
"""Hostile connections that are left as they are while others come; the oldest is closed for a new one."""


class Run:
    """Cases of one kind, one after the other, and what was seen in them."""

    def __init__(self, what: str, seed: int, *, only: int | None = None) -> None:
        self.what = what
        self.seed = seed
        self.tally: Counter[str] = Counter()
        self.pauses: list[float] = []
        self.held: list[float] = []
        self._ended = False
        self._only = only
        self._mishaps: list[str] = []
        self._log: list[str] = []
        self._case = 0

    async def go(self, seconds: float) -> None:
        """Run for so long. Raises Broken."""
        # What happens in a task or callback of ours that nobody awaits is told to the hook.
        sys.excepthook = self._unexpected
        sys.unraisablehook = lambda told: self._mishaps.append(f"unraisable: {told.exc_value!r} in {told.object!r}")
        try:
            await (self._attack_service(seconds) if self.what in SERVICES else self._attack_engine(seconds))
        except Broken as error:
            again = f"programs/malicious_peer/attack.py --what {self.what} --seed {self.seed} --case {self._case}"
            raise Broken(f"{error}\n  in: {', '.join(self._log)}\n  again: python {again}") from error
        finally:
            sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__

    async def _watch(self) -> None:
        """While there are cases, note how late a timer of `TICK_S` comes: for so long the loop served nobody.

        Note also how much processor time the loop's thread has used until then: in turns of the loop that began before
        the timer was due, and in the one that kept it.
        """
        while not self._ended:
            before, worked = time.perf_counter(), time.thread_time()
            await anyio.sleep(TICK_S)
            self.pauses.append(time.perf_counter() - before - TICK_S)
            self.held.append(time.thread_time() - worked)

    def _unexpected(self, kind: Any, error: BaseException, _trace: Any) -> None:
        self._mishaps.append(f"{kind.__name__}: {error}")

    def _cases(self, seconds: float) -> Any:
        """Yield the random source of each case while there is time."""
        until = time.monotonic() + seconds
        self._case = -1 if self._only is None else self._only - 1
        while time.monotonic() < until:
            self._case += 1
            yield random.Random(f"{self.what} {self.seed} {self._case}")
            self.tally["cases"] += 1
            if self._mishaps:
                raise Broken(f"it failed by itself: {self._mishaps}")
            if self._only is not None:
                return

    async def _attack_engine(self, seconds: float) -> None:
        standing: list[HostilePeer] = []
        async with victim(self.what) as attacked:
            try:
                for rng in self._cases(seconds):
                    hostile = HostilePeer(rng, self.what, attacked)
                    self._log = hostile.log
                    standing.append(hostile)
                    with anyio.move_on_after(CASE_S):
                        await hostile.attack()
                    self.tally.update(hostile.log)
                    if len(standing) > STANDING:
                        standing.pop(0).close()
                    await self._see(attacked, standing)
            finally:
                for hostile in standing:
                    hostile.close()
            await attacked.check(idle=True)

    async def _see(self, attacked: Victim, standing: list[HostilePeer]) -> None:
        idle = self.tally["cases"] % IDLE_EVERY == IDLE_EVERY - 1
        while idle and standing:
            standing.pop().close()
        await attacked.check(idle=idle)

    async def _attack_service(self, seconds: float) -> None:
        async with SERVICES[self.what]("socket") as attacked:
            async with run_background_tasks(self._watch):
                for rng in self._cases(seconds):
                    self._log = []
                    await attacked.attack(rng, self._log)
                    await attacked.check(rng, self._log)
                    self.tally.update(entry.rpartition(" ")[0] for entry in self._log)
                self._ended = True
            await attacked.at_rest()


def run(what: str, seconds: float, seed: int, backend: str = "asyncio", only: int | None = None) -> Run:
    """Run cases of one kind on an event loop of its own. Raises Broken."""
    cases = Run(what, seed, only=only)
    options = {"use_uvloop": True} if backend == "uvloop" else {}
    anyio.run(cases.go, seconds, backend=backend.replace("uvloop", "asyncio"), backend_options=options)
    return cases


def spread(seconds: list[float]) -> str:
    """Return what is to be said of some durations."""
    found = sorted(1e3 * one for one in seconds)
    half, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
    return f"{half:.1f} ms, p99 {p99:.1f}, at most {found[-1]:.1f}; {sum(one > 50 for one in found)} times above 50 ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--what", choices=WHAT, default=None, help="all in turn by default")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "trio"), default="asyncio")
    parser.add_argument("--case", type=int, default=None, help="that one alone")
    parser.add_argument("--pauses", action="store_true", help="tell how long the event loop stood still")
    given = parser.parse_args()
    for what in WHAT if given.what is None else (given.what,):
        print(f"{what}: seed {given.seed}", flush=True)
        try:
            done = run(what, given.seconds, given.seed, given.loop, given.case)
        except Broken as error:
            print(f"BROKEN: {error}", flush=True)
            return 1
        print("  " + ", ".join(f"{count} {name}" for name, count in done.tally.most_common()), flush=True)
        if given.pauses and done.pauses:
            print(f"  a timer was late by {spread(done.pauses)}")
            print(f"  the loop's thread worked meanwhile for {spread(done.held)}")
    print("no promise was broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
