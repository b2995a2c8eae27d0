"""A soak: processes on every event loop come, go, are killed, stopped, cancelled and cut off, while they write.

    python programs/soak/soak.py --seconds 600 --seed 7 --provider tcp
    python programs/soak/soak.py --what kvcache
    python programs/soak/soak.py --memory cuda --provider local

Every byte that arrives is compared with what its writer was told to write; counts are exact; no await outlives its
bound; what is open at the end was open at the beginning. `chaos.py` has the mishaps, `granted_slots.py` and `writer.py`
the checks; those of a KV cache's cluster are in `kv_chaos.py` and `kv_lives.py`. Exit status: 0; 1 after a violation,
which is printed with the command that repeats the run; 2 where the soak itself failed (`findings.py`), which says
nothing about aiote; 128 and its number after a signal. However it ends, no process, link or shared file of it is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import aiote
from aiote.rails import library_summary

sys.path.append(str(Path(__file__).parents[2] / "tests"))

import registered_memory
from chaos import HEARTBEATS, LOOPS, Chaos
from findings import FAILED_ITSELF, Verdict, status_of
from kv_chaos import KvChaos
from network import SHARED, enter
from support.gpu.standin_cuda import standin_path
from support.process.open_resources import SHARED_MEMORY, shared_files

BOUND_S = 2 * HEARTBEATS["heartbeat_timeout"] + HEARTBEATS["drain_timeout"] + 15
"""An await ends within the heartbeat timeout, the drain timeout, once more that for the last message, and a margin."""
PROVIDERS = ("tcp", "shm", "socket", "local")
ON_GPUS = ("socket", "local")
"""Those that reach memory of a GPU."""
WHAT: dict[str, tuple[type[Chaos], tuple[str, ...]]] = {
    "engine": (Chaos, ("verified grants", "cancelled transfers", "notes received")),
    "kvcache": (KvChaos, ("pages checked", "requests cancelled by a short deadline", "requests that failed")),
}
"""Of what, and without what a soak has tested nothing."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDS = ("no violation", "FAILED", "THE SOAK ITSELF FAILED, which says nothing about aiote")
"""The last line, by exit status."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="random by default; printed in any case")
    parser.add_argument("--provider", choices=PROVIDERS, default=None, help="all in turn by default")
    parser.add_argument(
        "--memory",
        choices=registered_memory.KINDS,
        default="host",
        help="cuda: a GPU's, on the stand-in, over socket and local",
    )
    parser.add_argument("--what", choices=tuple(WHAT), default="engine")
    parser.add_argument(
        "--share",
        type=share,
        default="0/1",
        help="K/N: only every Nth kind of mishap has to come, from the Kth on",
    )
    chosen = parser.parse_args()
    if chosen.memory == "cuda":
        if chosen.provider not in (None, *ON_GPUS):
            parser.error(f"--memory cuda takes {' or '.join(ON_GPUS)}")
        os.environ["AIOTE_LIBCUDA"] = standin_path()
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(1 << 32)
    return chosen


def share(text: str) -> slice:
    """Read K/N."""
    first, _, step = text.partition("/")
    if not 0 <= int(first) < int(step):
        raise ValueError
    return slice(int(first), None, int(step))


class Soak:
    """One provider's turn. `interrupted` is the signal that ended it, or 0."""

    def __init__(self, what: str, seed: int, provider: str, seconds: float, share: slice, memory: str) -> None:
        options = f"--what {what} --seconds {seconds:g} --seed {seed} --provider {provider} --memory {memory}"
        if share.step > 1:
            options += f" --share {share.start}/{share.step}"
        self.verdict = Verdict(f"{sys.executable} {sys.argv[0]} {options}")
        self.interrupted = 0
        self._provider = provider
        self._seconds, self._share = seconds, share
        chaos, self._needed = WHAT[what]
        if what == "engine" and share.step == 1:  # in a part of a soak there may be none
            self._needed += ("hostile peers that were let in",)
        self._chaos = chaos(seed, provider, BOUND_S, self.verdict, memory)

    async def run(self) -> None:
        """Soak; the first finding or signal ends it."""
        started = time.monotonic()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, number)
        try:
            await self._until_ended()
        except Exception as error:
            self.verdict.unexpected(error, "in the soak")
        try:
            await self._chaos.abort()
            await self._look_around()
        except Exception as error:
            self.verdict.unexpected(error, "at the end of the soak")
        self._table(time.monotonic() - started)

    def _interrupt(self, number: int) -> None:
        self.interrupted = number
        self.verdict.ended.set()

    async def _until_ended(self) -> None:
        work = asyncio.ensure_future(self._work())
        stop = asyncio.ensure_future(self.verdict.ended.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.sleep(0 if self.interrupted else 1)  # one violation seldom comes alone
            work.cancel()
        stop.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _work(self) -> None:
        await self._chaos.assemble()
        await self._chaos.run(self._seconds, self._share, self._needed)
        await self._chaos.finish()
        for name in (*self._needed, *(f"processes on {loop}" for loop in LOOPS)):
            if not self._chaos.tally[name]:
                self.verdict.failure(f"nothing was tested: {name} is 0")

    async def _look_around(self) -> None:
        """Look for processes and files that are left; what the last to be killed left goes with the next engine."""
        if left := reaped():
            self.verdict.failure(f"child processes were left: {left}")
        self._chaos.tally["files in /dev/shm that nobody had removed yet"] += len(self._files())
        try:
            if self._provider in SHARED:
                async with aiote.open_engine(self._provider):
                    pass
            if files := self._files():
                self.verdict.violation(f"left in /dev/shm by processes that have ended: {files}")
        finally:
            for name in self._files():
                (SHARED_MEMORY / name).unlink(missing_ok=True)

    def _files(self) -> list[str]:
        return [name for pid in self._chaos.pids for name in shared_files(pid)]

    def _table(self, seconds: float) -> None:
        counts: Counter[str] = self._chaos.tally
        rows: list[tuple[str, Any]] = [("seconds", round(seconds, 1)), ("violations", len(self.verdict.violations))]
        rows += sorted((name, count) for name, count in counts.items() if not name.startswith("error "))
        rows.append(("most resident memory of a process, MiB", self._chaos.most_resident >> 20))
        rows += sorted(((name, n) for name, n in counts.items() if name.startswith("error ")), key=lambda row: -row[1])
        print(f"\n--- {self._provider} ---")
        for name, value in rows:
            print(f"{value:>14}  {name}")
        sys.stdout.flush()


def reaped() -> list[int]:
    """End the child processes that are left, and return their numbers."""
    left = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return left


def turns(chosen: argparse.Namespace) -> int:
    """Soak with each provider in turn, up to a signal, and return the exit status."""
    every = PROVIDERS if chosen.memory == "host" else ON_GPUS
    providers = [chosen.provider] if chosen.provider else list(every)
    print(f"soak of {chosen.what}: seed {chosen.seed}, {chosen.seconds:g} s, {' and '.join(providers)}", flush=True)
    print(library_summary(os.environ.get("AIOTE_LIBFABRIC", "")), flush=True)
    ends = []
    for provider in providers:
        soak = Soak(chosen.what, chosen.seed, provider, chosen.seconds / len(providers), chosen.share, chosen.memory)
        asyncio.run(soak.run())
        ends.append(soak.verdict.status)
        if soak.interrupted:
            print(f"interrupted by {signal.Signals(soak.interrupted).name}", flush=True)
            return status_of(ends) or 128 + soak.interrupted
    print(ENDS[status_of(ends)], flush=True)
    return status_of(ends)


def main() -> int:
    enter()
    chosen = arguments()
    try:
        return turns(chosen)
    except Exception:
        traceback.print_exc()
        print(ENDS[FAILED_ITSELF], flush=True)
        return FAILED_ITSELF


if __name__ == "__main__":
    sys.exit(main())
