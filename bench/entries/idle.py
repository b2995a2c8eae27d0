"""Measure what an engine with nothing to do costs: `make idle`.

One engine with regions and connected peers, each peer an engine in a process of its own, on each provider; first with
nothing outstanding, then with a wait on a counter that nobody adds to, then with a wait for a message. The clock is the
process's CPU time as the kernel accounts it, the heartbeats included; what the peers use is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import aiote

MARK_PERCENT = 1.0
SETTLE_S = 0.5


async def be_peer(provider: str, address: str) -> None:
    """Connect and do nothing until standard input ends."""
    async with aiote.open_engine(provider) as engine:
        peer = await engine.connect(address)
        print("connected", flush=True)
        await asyncio.wait(
            [asyncio.ensure_future(asyncio.to_thread(sys.stdin.read)), asyncio.ensure_future(peer.wait_closed())],
            return_when=asyncio.FIRST_COMPLETED,
        )


@contextlib.asynccontextmanager
async def peers(engine: aiote.Engine, provider: str, count: int) -> AsyncIterator[None]:
    """Have so many processes connect to an engine."""
    command = [sys.executable, __file__, "--become", provider, str(engine.address)]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    started = [await asyncio.create_subprocess_exec(*command, **pipes) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            if not await process.stdout.readline():
                raise SystemExit("error: a peer did not connect")
        yield
    finally:
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def used() -> tuple[float, int]:
    """Return this process's CPU seconds and how often a thread of it went to sleep."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw


async def measure(engine: aiote.Engine, seconds: float) -> tuple[float, str]:
    """Sleep; return the percentage of a core that was used meanwhile, and a line that says what happened."""
    before, counted = used(), engine.statistics()
    await asyncio.sleep(seconds)
    after, counts = used(), engine.statistics()
    percent = 100 * (after[0] - before[0]) / seconds
    wakes, rounds = ((after[1] - before[1]) / seconds, (counts.rounds - counted.rounds) / seconds)
    return percent, f"{percent:6.3f} % of a core, {wakes:6.1f} wake-ups/s, {rounds:6.1f} rounds of progress/s"


async def one_kind(provider: str, progress: str, arguments: argparse.Namespace) -> float:
    """Measure one provider; return the largest percentage."""
    worst = 0.0
    config = aiote.EngineConfig(progress=progress)  # type: ignore[arg-type]
    async with aiote.open_engine(provider, config=config) as engine:
        memory = bytearray(1 << 20)
        regions = [engine.register(memory) for _ in range(arguments.regions)]
        async with peers(engine, provider, arguments.peers):
            await asyncio.sleep(SETTLE_S)
            waits: dict[str, Callable[[], Awaitable[object]]] = {
                "idle": asyncio.Event().wait,
                "waiting for a count": lambda: engine.counter(5).wait(1),
                "waiting for a message": engine.recv,
            }
            for name, wait in waits.items():
                task = asyncio.ensure_future(wait())
                await asyncio.sleep(SETTLE_S)
                percent, line = await measure(engine, arguments.seconds)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                worst = max(worst, percent)
                print(f"{provider:4} {progress:8}  {name:22} {line}", flush=True)
        assert len(regions) == arguments.regions
    return worst


async def measure_all(arguments: argparse.Namespace) -> int:
    print(
        f"{arguments.regions} regions, {arguments.peers} connected peers, {arguments.seconds:.0f} s each; "
        f"the mark is {MARK_PERCENT} % of a core"
    )
    found = [
        await one_kind(provider, progress, arguments)
        for provider in arguments.provider
        for progress in arguments.progress
    ]
    print("ok" if max(found) < MARK_PERCENT else f"OVER THE MARK: {max(found):.2f} %")
    return 0 if max(found) < MARK_PERCENT else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what an idle engine costs.")
    parser.add_argument("--seconds", type=float, default=10, help="for each line (default: 10, two minutes in all)")
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--regions", type=int, default=10)
    parser.add_argument("--provider", nargs="*", default=["tcp", "shm"])
    parser.add_argument("--progress", nargs="*", default=["adaptive", "thread"])
    parser.add_argument("--become", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.become:
        asyncio.run(be_peer(*arguments.become))
        return 0
    return asyncio.run(measure_all(arguments))


if __name__ == "__main__":
    sys.exit(main())
