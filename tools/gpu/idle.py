"""Measure what an engine with memory of a GPU costs at rest: `python tools/gpu/idle.py [--standin]`.

One engine with regions in memory of the GPU and peers in processes of their own, to each of which every region was
written once, so that whatever staging needs has been made. Then nothing is done for some seconds, and the CPU time of
this process is told, heartbeats and the driver's threads included; beside it that of the process with the GPU's context
and no engine.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from device import Gpu, Report, die_with_parent, parser, say

import aiote

MOST_PERCENT = 0.5
SETTLE_S = 0.5
SIZE = 1 << 20
SECONDS = 25.0


async def be_peer(provider: str, address: str) -> None:
    """Connect, lend some memory of the host, and do nothing until standard input ends."""
    async with aiote.open_engine(provider) as engine:
        region = engine.register(bytearray(SIZE))
        await engine.connect(address)
        print(region.descriptor.hex(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def peers(engine: aiote.Engine, provider: str, count: int) -> AsyncIterator[list[aiote.RemoteRegion]]:
    """Have so many processes connect; give what they lend."""
    command = [sys.executable, __file__, "--become", provider, str(engine.address)]
    pipe = asyncio.subprocess.PIPE
    started = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        remotes = []
        for process in started:
            assert process.stdout is not None
            with anyio.fail_after(10):
                line = await process.stdout.readline()
            remotes.append(engine.attach(bytes.fromhex(line.decode())))
        yield remotes
    finally:
        for process in started:
            process.kill()
            await process.wait()


def used() -> tuple[float, int]:
    """Return this process's CPU seconds, and how often a thread of it went to sleep."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw


async def at_rest(seconds: float) -> dict[str, float]:
    """Do nothing for a while; return what that cost."""
    await asyncio.sleep(SETTLE_S)
    before, begin = used(), time.monotonic()
    await asyncio.sleep(seconds)
    after, took = used(), time.monotonic() - begin
    percent, wakes = 100 * (after[0] - before[0]) / took, (after[1] - before[1]) / took
    say(f"   {percent:.3f} % of a core, {wakes:.1f} wake-ups a second")
    return {"percent": round(percent, 3), "wake-ups/s": round(wakes, 1)}


async def one_kind(gpu: Gpu, provider: str, progress: Any, arguments: Any) -> dict[str, float]:
    config = aiote.EngineConfig(progress=progress)
    async with aiote.open_engine(provider, config=config) as engine:
        arrays = [gpu.array(SIZE) for _ in range(arguments.regions)]
        regions = [engine.register(array) for array in arrays]
        async with peers(engine, provider, arguments.peers) as remotes:
            for remote in remotes:
                for region in regions:
                    await engine.write(region, remote)
            return await at_rest(arguments.rest)


async def measured(gpu: Gpu, report: Report, arguments: Any) -> int:
    gpu.synchronize(None)
    with report.arm("no engine"):
        report.detail["no engine"] = await at_rest(1)
    kinds = [("local", "adaptive"), ("socket", "adaptive"), ("local", "thread")]
    for provider, progress in kinds:
        name = f"{provider}, {progress}"
        if report.left < arguments.rest + SETTLE_S + 1:
            say(f"-- {name}: no time is left for it")
            continue
        with report.arm(name), anyio.fail_after(arguments.rest + 12):
            report.detail[name] = await one_kind(gpu, provider, progress, arguments)
    found = {name: kind["percent"] for name, kind in report.detail.items()}
    text = ", ".join(f"{percent:.2f} % ({name})" for name, percent in found.items())
    engines = [percent for name, percent in found.items() if name != "no engine"]
    ok = len(engines) >= 2 and (not gpu.real or max(engines) < MOST_PERCENT)
    return report.end(f"{text} of a core", ok)


def main() -> int:
    options = parser("Measure what an engine with memory of a GPU costs at rest.", SECONDS)
    options.add_argument("--rest", type=float, default=5.0, help="seconds of each line (default: 5)")
    options.add_argument("--regions", type=int, default=10)
    options.add_argument("--peers", type=int, default=3)
    options.add_argument("--become", nargs=2, help="for its own peers")
    arguments = options.parse_args()
    if arguments.become:
        die_with_parent()
        asyncio.run(be_peer(*arguments.become))
        return 0
    report = Report("idle with 10 GPU regions and peers: less than 0.5 % of a core", arguments.seconds)
    return report.run(arguments.standin, measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
