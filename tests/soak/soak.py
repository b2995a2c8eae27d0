"""A soak: processes come and go, are killed, stopped, cancelled and cut off, while checksummed transfers run.

    python tests/soak/soak.py --seconds 600 --seed 7 --provider tcp
    python tests/soak/soak.py --what kvcache

Every byte that arrives is compared with what its writer was told to write; counts are exact; no await outlives its
bound; what is open at the end was open at the beginning. `chaos.py` has the mishaps, `lane.py` and `course.py` the
checks; those of a KV cache's cluster are in `kvchaos.py` and `kvlives.py`. Exit status: 0, or 1 after a violation,
which is printed with the command that repeats the run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiote
from aiote.rails import library_summary

sys.path.append(str(Path(__file__).parents[1] / "support"))

from chaos import HEARTBEATS, Chaos
from kvchaos import KvChaos
from leftovers import SHARED_MEMORY, shared_files
from links import SHARED, enter

BOUND_S = 2 * HEARTBEATS["heartbeat_limit"] + HEARTBEATS["drain_timeout"] + 15
"""An await ends within the heartbeat limit, the drain limit, once more the limit for the last word, and a margin."""
PROVIDERS = ("tcp", "shm", "socket", "local")
WHAT: dict[str, tuple[type[Chaos], tuple[str, ...]]] = {
    "engine": (Chaos, ("verified grants", "cancelled transfers", "notes received")),
    "kvcache": (KvChaos, ("pages checked", "requests cancelled by a short deadline", "requests that failed")),
}
"""Of what, and without what a soak has tested nothing."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="random by default; printed in any case")
    parser.add_argument("--provider", choices=PROVIDERS, default=None, help="all in turn by default")
    parser.add_argument("--what", choices=tuple(WHAT), default="engine")
    chosen = parser.parse_args()
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(1 << 32)
    return chosen


class Soak:
    """One provider's turn."""

    def __init__(self, what: str, seed: int, provider: str, seconds: float) -> None:
        self.violations: list[str] = []
        self._provider = provider
        self._seconds = seconds
        options = f"--what {what} --seconds {seconds:g} --seed {seed} --provider {provider}"
        self._repeat = f"{sys.executable} {sys.argv[0]} {options}"
        self._violated = asyncio.Event()
        chaos, self._needed = WHAT[what]
        self._chaos = chaos(seed, provider, BOUND_S, self._violation)

    def _violation(self, text: str) -> None:
        self.violations.append(text)
        self._violated.set()
        if len(self.violations) <= 20:
            print(f"\nVIOLATION: {text}\nTo repeat: {self._repeat}", flush=True)

    async def run(self) -> None:
        """Soak; the first violation ends it."""
        started = time.monotonic()
        work = asyncio.ensure_future(self._work())
        stop = asyncio.ensure_future(self._violated.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.sleep(1)  # one violation seldom comes alone
            work.cancel()
        stop.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await self._chaos.abort()
        if not work.cancelled() and work.exception() is not None:
            self._violation(f"the soak itself failed: {work.exception()!r}")
        await self._look_around()
        self._table(time.monotonic() - started)

    async def _work(self) -> None:
        await self._chaos.assemble()
        await self._chaos.run(self._seconds)
        await self._chaos.settle()
        for name in self._needed:
            if not self._chaos.tally[name]:
                self._violation(f"nothing was tested: {name} is 0")

    async def _look_around(self) -> None:
        """Look for processes and files that are left; what the last to be killed left goes with the next engine."""
        if not childless():
            self._violation("a child process is left")
        self._chaos.tally["files in /dev/shm that nobody had removed yet"] += len(self._files())
        if self._provider in SHARED:
            async with aiote.open_engine(self._provider):
                pass
        if left := self._files():
            self._violation(f"left in /dev/shm by processes that have ended: {left}")
        for name in left:
            (SHARED_MEMORY / name).unlink(missing_ok=True)

    def _files(self) -> list[str]:
        return [name for pid in self._chaos.pids for name in shared_files(pid)]

    def _table(self, seconds: float) -> None:
        counts: Counter[str] = self._chaos.tally
        rows: list[tuple[str, Any]] = [("seconds", round(seconds, 1)), ("violations", len(self.violations))]
        rows += sorted((name, count) for name, count in counts.items() if not name.startswith("error "))
        rows.append(("most resident memory of a process, MiB", self._chaos.most_resident >> 20))
        rows += sorted(((name, n) for name, n in counts.items() if name.startswith("error ")), key=lambda row: -row[1])
        print(f"\n--- {self._provider} ---")
        for name, value in rows:
            print(f"{value:>14}  {name}")
        sys.stdout.flush()


def childless() -> bool:
    """Tell whether every process that was started has ended and was waited for."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def main() -> int:
    enter()
    chosen = arguments()
    providers = [chosen.provider] if chosen.provider else list(PROVIDERS)
    print(f"soak of {chosen.what}: seed {chosen.seed}, {chosen.seconds:g} s, {' and '.join(providers)}", flush=True)
    print(library_summary(os.environ.get("AIOTE_LIBFABRIC", "")), flush=True)
    failed = False
    for provider in providers:
        soak = Soak(chosen.what, chosen.seed, provider, chosen.seconds / len(providers))
        asyncio.run(soak.run())
        failed = failed or bool(soak.violations)
    print("FAILED" if failed else "no violation", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
