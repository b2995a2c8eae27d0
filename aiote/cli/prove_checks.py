"""The checks of `aiote prove` that need no checkout: they test the promises between two engines on this machine.

A check takes an `EnginePair`, raises `Broken` if a promise is broken, and returns what it observed, with figures. A
check assumes no speed: it waits for conditions, and the caller limits the time of each check.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np

import aiote
from aiote.cli.prove_memory import ArrayMemory

__all__ = ["CHECKS", "Broken", "Check", "EnginePair", "NotHere"]

SIZES = (0, 1, 7, 64, 4096, 65_537, 1_000_003)
GUARD = 64
BIG = 8 << 20
FENCE = 0x5E771ED
QUIET_S = 2.0
BUSY = 0.5
"""The share of a core: an engine that spins uses the whole core, one at rest hardly any."""


class Broken(Exception):
    """A promise was not kept; the text says which."""


class NotHere(Exception):
    """A check cannot be run here; the text says why."""


@dataclass
class EnginePair:
    """Two connected engines, the memory to move, and the command that starts an engine like the second in a process."""

    left: aiote.Engine
    right: aiote.Engine
    memory: ArrayMemory
    child: list[str] | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def target(self, size: int) -> tuple[Any, aiote.Region, aiote.RemoteRegion]:
        """Return an array of zeros of the right engine, its region, and the region as the left engine attaches it."""
        array = self.memory.filled(np.zeros(size, np.uint8))
        region = self.right.register(array)
        return array, region, self.left.attach(region.descriptor)

    def source(self, size: int, seed: int = 1) -> tuple[Any, aiote.Region]:
        """Return random bytes of a seed for the left engine, and their region."""
        data = np.random.default_rng(seed).integers(1, 256, size, np.uint8)
        return data, self.left.register(self.memory.filled(data))

    async def settle(self, times: int = 5) -> None:
        """Exchange immediates `times` times. An effect that has not occurred by then is taken not to occur."""
        with self.left.counter(FENCE) as here, self.right.counter(FENCE) as there:
            for _ in range(times):
                await self.left.write_imm(None, self.right.address, FENCE)
                await there.wait(1)
                await self.right.write_imm(None, self.left.address, FENCE)
                await here.wait(1)


def expect(condition: object, text: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(text)


async def writes(world: EnginePair) -> str:
    data, source = world.source(max(SIZES))
    array, region, remote = world.target(max(SIZES) + 2 * GUARD)
    for size in SIZES:
        world.memory.fill(array, np.zeros(array.shape[0], np.uint8))
        await world.left.write(source[:size], remote[GUARD : GUARD + size])
        found = world.memory.bytes_of(array)
        expect((found[GUARD : GUARD + size] == data[:size]).all(), f"a write of {size} bytes did not arrive as it was")
        expect(
            not found[:GUARD].any() and not found[GUARD + size :].any(), f"a write of {size} bytes wrote beside them"
        )
    await source.aclose()
    await region.aclose()
    return f"{len(SIZES)} sizes up to {max(SIZES)} bytes"


async def counts_follow_data(world: EnginePair) -> str:
    rounds = 200
    array, region, remote = world.target(65_537)
    with world.right.counter(7) as counter:
        for number in range(1, rounds + 1):
            data, source = world.source(SIZES[1 + number % (len(SIZES) - 2)], number)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.left.write_imm, source, remote[: len(data)], 7)
                await counter.wait(1)
                found = world.memory.bytes_of(array)[: len(data)]
            expect((found == data).all(), f"round {number}: counted before the bytes were there")
            await source.aclose()
    await region.aclose()
    return f"{rounds} rounds"


async def exact_counts(world: EnginePair) -> str:
    numbers = random.Random(1).sample(range(1 << 28), 20)
    _, source = world.source(BIG)
    _, region, remote = world.target(BIG)
    counters = [world.right.counter(number) for number in numbers]
    total = 0
    for turn in range(10):
        transfers = []
        for place, number in enumerate(numbers):
            size = (1, 4096, 262_144)[(turn + place) % 3]
            transfers += [world.left.submit_write_imm(source[:size], remote[:size], number) for _ in range(place % 4)]
        for transfer in transfers:
            await transfer
        total += len(transfers)
    for place, counter in enumerate(counters):
        await counter.wait(10 * (place % 4))
    await world.settle()
    expect(not any(counter.value for counter in counters), "more was counted than was written")
    for counter in counters:
        counter.close()
    await source.aclose()
    await region.aclose()
    return f"{total} writes on {len(numbers)} immediates"


async def reads(world: EnginePair) -> str:
    data, source = world.source(max(SIZES))
    remote = world.right.attach(source.descriptor)
    for size in SIZES[1:]:
        array = world.memory.filled(np.zeros(size + GUARD, np.uint8))
        region = world.right.register(array)
        await world.right.read(remote[:size], region[:size])
        found = world.memory.bytes_of(array)
        expect((found[:size] == data[:size]).all(), f"a read of {size} bytes brought other ones")
        expect(not found[size:].any(), f"a read of {size} bytes wrote beside them")
        await region.aclose()
    await source.aclose()
    return f"{len(SIZES) - 1} sizes"


async def pages(world: EnginePair) -> str:
    page, count = 4096, 500
    data, source = world.source(page * count)
    array, region, remote = world.target(page * count)
    draw = random.Random(1)
    here, there = draw.sample(range(count), count), draw.sample(range(count), count)
    with world.right.counter(9) as counter:
        await world.left.write_pages(aiote.Pages(source, here, page), aiote.Pages(remote, there, page), 9)
        await counter.wait(count)
        found = world.memory.bytes_of(array).reshape(count, page)
        expect((found[there] == data.reshape(count, page)[here]).all(), "a page is not where the list says")
        await world.settle()
        expect(counter.value == 0, "more pages were counted than there are")
    await source.aclose()
    await region.aclose()
    return f"{count} pages of {page} bytes, in any order"


async def messages(world: EnginePair) -> str:
    sizes = (0, 1, 1000, 16_384)
    for size in sizes:
        sent = random.Random(size).randbytes(size)
        for one, other in ((world.left, world.right), (world.right, world.left)):
            await one.send(other.address, sent)
            got = await other.recv()
            expect(bytes(got.data) == sent, f"a message of {size} bytes came as another one")
    return f"both ways, up to {max(sizes)} bytes"


async def no_late_writes(world: EnginePair) -> str:
    rounds = 60
    _, source = world.source(BIG)
    array, region, remote = world.target(BIG)
    ended: list[int] = []

    async def write(number: int) -> None:
        await world.left.write(source, remote)
        ended.append(number)

    for number in range(rounds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write, number)
            for _ in range(number):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        world.memory.fill(array, np.zeros(BIG, np.uint8))
        await world.settle(2)
        expect(not world.memory.bytes_of(array).any(), f"round {number}: bytes arrived after the cancelled await ended")
    await source.aclose()
    await region.aclose()
    return f"{rounds} cancellations, {rounds - len(ended)} of them before the end"


async def leases(world: EnginePair) -> str:
    rounds = 20
    _, source = world.source(BIG)
    array = world.memory.filled(np.zeros(BIG, np.uint8))
    region = world.right.register(array)
    for number in range(rounds):
        lease = region.lease(slice(0, BIG), world.left.address)
        remote = world.left.attach(lease.descriptor)
        transfers = [world.left.submit_write(source, remote) for _ in range(3)]
        for _ in range(number):
            await anyio.lowlevel.checkpoint()
        await lease.revoke()
        world.memory.fill(array, np.zeros(BIG, np.uint8))
        for transfer in transfers:
            try:
                await transfer
            except aiote.AioteError:
                pass
        await world.settle(2)
        expect(
            not world.memory.bytes_of(array).any(), f"round {number}: bytes arrived through a lease that was revoked"
        )
    await source.aclose()
    await region.aclose()
    return f"{rounds} revocations"


async def _line(process: anyio.abc.Process) -> str:
    """Return the first line of a process's output. Raises Broken if the process ends before it."""
    said = b""
    assert process.stdout is not None
    async for piece in process.stdout:
        said += piece
        if b"\n" in said:
            return said.decode()
    raise Broken("the second process ended before it was ready")


async def _until_refused(engine: aiote.Engine, source: aiote.Region, remote: aiote.RemoteRegion) -> None:
    """Write until a write fails."""
    while True:
        try:
            await engine.write(source, remote)
        except aiote.AioteError:
            return


async def killed_peer(world: EnginePair) -> str:
    if world.child is None:
        raise NotHere("the simulated network exists in one process only")
    async with await anyio.open_process(world.child, stderr=None) as process:
        killed = 0.0
        try:
            remote = world.left.attach(bytes.fromhex(await _line(process)))
            _, source = world.source(remote.nbytes)
            await world.left.write(source, remote)
            process.kill()
            killed = time.monotonic()
            await _until_refused(world.left, source, remote)
            world.figures["seconds until the error"] = time.monotonic() - killed
            await source.aclose()
        finally:
            # Not after the kill above: reading `returncode` reaps an ended process, and the code that waits for it
            # would miss its status.
            if not killed and process.returncode is None:
                process.kill()
    await world.settle()
    return "the await ended with an error, and the other peer is served"


async def idle(world: EnginePair) -> str:
    await world.settle()
    spent, started = time.process_time(), time.monotonic()
    await anyio.sleep(QUIET_S)
    used = (time.process_time() - spent) / (time.monotonic() - started)
    world.figures["percent of a core"] = 100 * used
    expect(used < BUSY, f"two engines at rest use {100 * used:.0f} % of a core")
    return f"two connected engines, {QUIET_S:g} s"


async def registration(world: EnginePair) -> str:
    size = 64 << 20  # a small guest has no more to give
    array = world.memory.filled(np.zeros(size, np.uint8))
    started = time.perf_counter()
    region = world.left.register(array)
    world.figures["ms to register"] = 1000 * (time.perf_counter() - started)
    started = time.perf_counter()
    await region.aclose()
    world.figures["ms to give back"] = 1000 * (time.perf_counter() - started)
    return f"{size >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name in the report, the claim in one sentence, and the function that tests it."""

    name: str
    claim: str
    run: Callable[[EnginePair], Awaitable[str]]


CHECKS = (
    Check("writes", "a write arrives exactly, and nowhere else", writes),
    Check("counts-follow-data", "who is told of a count finds the bytes in place", counts_follow_data),
    Check("exact-counts", "as many counts as writes", exact_counts),
    Check("reads", "a read fetches exactly", reads),
    Check("pages", "pages go where the lists say", pages),
    Check("messages", "messages arrive whole", messages),
    Check("no-late-writes", "nothing is written once a cancelled await has ended", no_late_writes),
    Check("leases", "nothing is written once a lease is revoked", leases),
    Check("killed-peer", "a killed peer ends what depends on it", killed_peer),
    Check("idle", "engines at rest use no CPU", idle),
    Check("registration", "memory can be registered and given back", registration),
)
