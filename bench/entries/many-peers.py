"""Measure one engine with many connected peers: `make peers`.

One engine is measured; its peers are engines in a few processes of their own. In this order: how long it takes until
all are connected; what each takes of memory; what the process uses while nothing happens, heartbeats included; how
long the first write to a peer takes after that; what an awaited write to one of them costs, beside what it cost with
this one alone; how soon the death of a peer is noticed, beside alone; and 64 that write to the engine at once, from all
the processes, beside one that does. CPU is the process's own time as the kernel accounts it, so that the figures mean
something on a machine where others compute, too; what the peers use is theirs. The first write and a death are wall
times: there the machine has to be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiote

PAGE = resource.getpagesize()
SETTLE_S = 3.0
"""How long what was connected is left alone before it is looked at: first heartbeats, pages that are given back."""
BYTES = 1 << 20
WRITES = 2000
ROUNDS = 5
DONE = 7
FIRST_WRITES = 16
"""To how many peers of each process a first write is timed."""
PAUSE_S = 0.05
"""Between two first writes: the engine sleeps again."""
DEATHS = 5
AT_ONCE = 64
"""How many of a process dial at a time: an engine holds at most 256 connections that have not authenticated."""


async def be_peers(provider: str, address: str, count: int) -> None:
    """Connect so many engines, then obey: `write COUNT BYTES` has each write so often, an end of input ends."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(aiote.open_engine(provider)) for _ in range(count)]
        regions = [engine.register(bytearray(BYTES)) for engine in engines]
        few = asyncio.Semaphore(AT_ONCE)

        async def connect(engine: aiote.Engine) -> None:
            async with few:
                await engine.connect(address)

        await asyncio.gather(*map(connect, engines))
        print("connected", *(region.descriptor.hex() for region in regions[:FIRST_WRITES]), flush=True)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode():
            writers, times, descriptor = line.split()

            async def write(engine: aiote.Engine, source: aiote.Region, times: int, descriptor: str) -> None:
                target = engine.attach(bytes.fromhex(descriptor))
                for _ in range(times):
                    await engine.write_imm(source, target, DONE)

            pairs = list(zip(engines, regions, strict=True))[: int(writers)]
            await asyncio.gather(*(write(*pair, int(times), descriptor) for pair in pairs))


class Crowd:
    """Engines in one process of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input, self._output = process.stdin, process.stdout

    @classmethod
    async def start(cls, provider: str, address: aiote.Address, count: int) -> Crowd:
        command = [sys.executable, __file__, "--become", provider, str(address), str(count)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20))

    async def connected(self) -> list[bytes]:
        """Wait until all are; return the descriptors of the first ones' memory."""
        words = (await self._output.readline()).split()
        if not words:
            raise SystemExit("error: peers did not connect")
        return [bytes.fromhex(word.decode()) for word in words[1:]]

    def write(self, writers: int, times: int, descriptor: bytes) -> None:
        """Have so many of them write so often each."""
        self._input.write(f"{writers} {times} {descriptor.hex()}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self) -> None:
        self._input.close()
        await self._process.wait()


def cpu_s() -> float:
    """Return the CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory() -> tuple[int, int, int]:
    """Return the bytes of this process that are mapped, that are in memory, and how many of the latter are shared."""
    mapped, resident, shared = (int(word) * PAGE for word in Path("/proc/self/statm").read_text().split()[:3])
    return mapped, resident, shared


def descriptors() -> int:
    """Return how many descriptors this process has open, the one that lists them included."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def idle_percent(seconds: float) -> float:
    """Return the percentage of a core that this process uses while it does nothing."""
    before, since = cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (cpu_s() - before) / (time.monotonic() - since)


async def write_us(engine: aiote.Engine, descriptor: bytes) -> float:
    """Return the microseconds of CPU that one awaited write of 8 bytes takes here: the least of some rounds."""
    source, target = engine.register(bytearray(8)), engine.attach(descriptor)[:8]
    found = []
    for _ in range(ROUNDS):
        before = cpu_s()
        for _ in range(WRITES):
            await engine.write(source, target)
        found.append((cpu_s() - before) / WRITES * 1e6)
    await source.aclose()
    return min(found)


async def first_writes_ms(engine: aiote.Engine, descriptors: list[bytes]) -> list[float]:
    """Return how long each first write of 8 bytes takes, in ms, to peers that were never written to."""
    source = engine.register(bytearray(8))
    found = []
    for descriptor in descriptors:
        target = engine.attach(descriptor)[:8]
        await asyncio.sleep(PAUSE_S)
        since = time.perf_counter()
        await engine.write(source, target)
        found.append((time.perf_counter() - since) * 1e3)
    await source.aclose()
    return found


async def death_ms(engine: aiote.Engine, provider: str) -> float:
    """Return after how many ms the death of a peer's process is noticed: the median of some."""
    found = []
    for _ in range(DEATHS):
        before = set(engine.peers)
        crowd = await Crowd.start(provider, engine.address, 1)
        await crowd.connected()
        (peer,) = set(engine.peers) - before
        await asyncio.sleep(PAUSE_S)
        since = time.perf_counter()
        crowd.signal(signal.SIGKILL)
        await peer.wait_closed()
        found.append((time.perf_counter() - since) * 1e3)
        await crowd.end()
    return statistics.median(found)


async def inward(engine: aiote.Engine, crowds: list[Crowd], writers: int, writes: int) -> tuple[float, float]:
    """Have some of each process write to the engine, `writes` of 1 MiB in all; return GiB/s, and CPU seconds here for a
    GiB.
    """
    target = engine.register(bytearray(BYTES))
    counter = engine.counter(DONE)
    each = writes // writers // len(crowds)
    before, since = cpu_s(), time.monotonic()
    for crowd in crowds:
        crowd.write(writers, each, target.descriptor)
    await counter.wait(each * writers * len(crowds))
    gib = each * writers * len(crowds) * BYTES / (1 << 30)
    found = gib / (time.monotonic() - since), (cpu_s() - before) / gib
    await target.aclose()
    return found


async def fan_in(engine: aiote.Engine, crowds: list[Crowd], writers: int, writes: int) -> str:
    """Compare one that writes with many, in turns; ratios are of neighbours."""
    each = writers // len(crowds)
    pairs = [
        (await inward(engine, crowds[:1], 1, writes), await inward(engine, crowds, each, writes)) for _ in range(ROUNDS)
    ]
    rate = statistics.median(many[0] / one[0] for one, many in pairs)
    cost = statistics.median(many[1] / one[1] for one, many in pairs)
    return (
        f"{each * len(crowds)} to 1 from {len(crowds)} processes, each in turn with 1 to 1: {rate:.2f} of the rate, "
        f"{cost:.2f} of the CPU here for a GiB"
    )


@contextlib.asynccontextmanager
async def crowds(
    engine: aiote.Engine, provider: str, count: int, processes: int
) -> AsyncIterator[tuple[list[Crowd], list[bytes], float]]:
    """Have so many peers connect; yield the processes, descriptors of some peers' memory, and the seconds from the
    first connection to the last one.
    """
    counts = [count // processes + (number < count % processes) for number in range(processes)]
    before = len(engine.peers)
    started = [await Crowd.start(provider, engine.address, number) for number in counts if number]
    try:
        while len(engine.peers) == before:  # noqa: ASYNC110 - its event comes a turn after the peer
            await asyncio.sleep(0.001)
        since = time.monotonic()
        descriptors = [one for crowd in started for one in await crowd.connected()]
        yield started, descriptors, time.monotonic() - since
    finally:
        for crowd in started:
            await crowd.end()


def show_growth(before: tuple[int, int, int], opened: int, count: int) -> None:
    """Print what each of so many peers added to this process's memory and descriptors."""
    mapped, resident, shared = ((now - then) / count / 1024 for now, then in zip(memory(), before, strict=True))
    each = (descriptors() - opened) / count
    print(
        f"  each: {resident:.1f} KiB resident, {shared:.1f} of them shared, {mapped:.0f} KiB mapped, "
        f"{each:.2f} descriptors",
        flush=True,
    )


async def measure_many(engine: aiote.Engine, provider: str, arguments: argparse.Namespace, alone: bytes) -> None:
    """Measure the engine with all peers beside the one that it has, whose memory is given."""
    one_us, one_death = await write_us(engine, alone), await death_ms(engine, provider)
    await asyncio.sleep(SETTLE_S)
    before, few, opened = memory(), len(engine.peers), descriptors()
    async with crowds(engine, provider, arguments.peers, arguments.processes) as (started, others, seconds):
        await asyncio.sleep(SETTLE_S)
        assert len(engine.peers) == few + arguments.peers
        print(f"{provider}: {arguments.peers} peers, all connected within {seconds:.2f} s", flush=True)
        show_growth(before, opened, arguments.peers)
        print(f"  idle: {await idle_percent(arguments.seconds):.3f} % of a core", flush=True)
        first = await first_writes_ms(engine, others)
        print(f"  the first write to each of {len(first)}: {statistics.median(first):.2f} ms, at most {max(first):.2f}")
        many_us = await write_us(engine, alone)
        print(f"  a write to one: {many_us:.1f} us of CPU, {one_us:.1f} alone: {many_us / one_us:.2f}", flush=True)
        death = await death_ms(engine, provider)
        print(f"  a killed process is noticed after {death:.1f} ms, {one_death:.1f} alone", flush=True)
        assert len(engine.peers) == few + arguments.peers
        if arguments.fan_in and arguments.peers >= arguments.fan_in * arguments.processes:
            print("  " + await fan_in(engine, started, arguments.fan_in, arguments.writes), flush=True)


async def measure(provider: str, arguments: argparse.Namespace) -> None:
    async with aiote.open_engine(provider) as engine:
        alone = await Crowd.start(provider, engine.address, 1)
        try:
            descriptor = (await alone.connected())[0]
            await measure_many(engine, provider, arguments, descriptor)
        finally:
            await alone.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one engine with many connected peers.")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that the peers are in (default: 2)")
    parser.add_argument("--seconds", type=float, default=10, help="of idleness (default: 10)")
    parser.add_argument("--provider", nargs="*", default=["local", "socket"])
    parser.add_argument("--fan-in", type=int, default=64, help="how many write at once (default: 64; 0: none do)")
    parser.add_argument("--writes", type=int, default=1024, help="of 1 MiB that come in, in all (default: 1024)")
    parser.add_argument("--become", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.become:
        provider, address, count = arguments.become
        asyncio.run(be_peers(provider, address, int(count)))
        return 0
    if len(arguments.provider) == 1:
        asyncio.run(measure(arguments.provider[0], arguments))
        return 0
    # Each in a process of its own: memory that the first one's peers had is there for the second one's.
    rest = [word for word in sys.argv[1:] if word not in ("--provider", *arguments.provider)]
    done = [
        subprocess.run([sys.executable, __file__, *rest, "--provider", provider], check=False).returncode
        for provider in arguments.provider
    ]
    return max(done)


if __name__ == "__main__":
    sys.exit(main())
