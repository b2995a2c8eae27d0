"""The checks of the contract: they test the promises between two engines, without pytest.

The first engine is in this process; the second one is behind `EnginePair.far`, in this process or on another machine. A
check takes an `EnginePair`, raises `Broken` if a promise is broken, and returns what it observed, with figures. A check
assumes no speed: it waits for conditions, and the caller limits the time of each check.
"""

from __future__ import annotations

import random
import time

import anyio
import anyio.lowlevel
import numpy as np

import aiote

from .adversity import killed_peer, pulled_rail, stopped_peer
from .far import random_bytes
from .pair import Check, EnginePair, expect

__all__ = ["CHECKS"]

SIZES = (0, 1, 7, 64, 4096, 65_537, 1_000_003)
GUARD = 64
BIG = 8 << 20
QUIET_S = 2.0
BUSY = 0.5
"""The share of a core: an engine that spins uses the whole core, one at rest hardly any."""


async def writes(world: EnginePair) -> str:
    data, source = world.source(max(SIZES))
    whole = max(SIZES) + 2 * GUARD
    number, remote = await world.target(whole)
    for size in SIZES:
        await world.far("clear", number)
        await world.left.write(source[:size], remote[GUARD : GUARD + size])
        found = await world.content(number, whole)
        expect((found[GUARD : GUARD + size] == data[:size]).all(), f"a write of {size} bytes arrived changed")
        expect(
            not found[:GUARD].any() and not found[GUARD + size :].any(),
            f"a write of {size} bytes changed bytes outside its target",
        )
    await source.aclose()
    await world.far("release", number)
    return f"{len(SIZES)} sizes up to {max(SIZES)} bytes"


async def counts_follow_data(world: EnginePair) -> str:
    rounds = 200 * world.times
    number, remote = await world.target(65_537)
    for turn in range(1, rounds + 1):
        data, source = world.source(SIZES[1 + turn % (len(SIZES) - 2)], turn)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.left.write_imm, source, remote[: len(data)], 7)
            found = np.frombuffer(await world.far("counted", 7, 1, number, len(data)), np.uint8)
        expect((found == data).all(), f"round {turn}: the count arrived before the bytes")
        await source.aclose()
    await world.far("left_over", 7)
    await world.far("release", number)
    return f"{rounds} rounds"


async def exact_counts(world: EnginePair) -> str:
    immediates = random.Random(1).sample(range(1 << 28), 20)
    _, source = world.source(BIG)
    number, remote = await world.target(BIG)
    total = 0
    for turn in range(10 * world.times):
        transfers = []
        for place, immediate in enumerate(immediates):
            size = (1, 4096, 262_144)[(turn + place) % 3]
            transfers += [
                world.left.submit_write_imm(source[:size], remote[:size], immediate) for _ in range(place % 4)
            ]
        for transfer in transfers:
            await transfer
        total += len(transfers)
    for place, immediate in enumerate(immediates):
        await world.far("wait", immediate, 10 * world.times * (place % 4))
    await world.settle()
    more = [await world.far("left_over", immediate) for immediate in immediates]
    expect(not any(more), f"{total} writes left {sum(more)} counts more than writes")
    await source.aclose()
    await world.far("release", number)
    return f"{total} writes on {len(immediates)} immediates"


async def reads(world: EnginePair) -> str:
    data = random_bytes(max(SIZES), 2)
    number, descriptor = await world.far("source", max(SIZES), 2)
    remote = world.left.attach(descriptor)
    for size in SIZES[1:]:
        array = world.memory.filled(np.zeros(size + GUARD, np.uint8))
        region = world.left.register(array)
        await world.left.read(remote[:size], region[:size])
        found = world.memory.bytes_of(array)
        expect((found[:size] == data[:size]).all(), f"a read of {size} bytes returned other bytes")
        expect(not found[size:].any(), f"a read of {size} bytes changed bytes outside its target")
        await region.aclose()
    await world.far("release", number)
    return f"{len(SIZES) - 1} sizes"


async def pages(world: EnginePair) -> str:
    page, count = 4096, 500
    data, source = world.source(page * count)
    number, remote = await world.target(page * count)
    draw = random.Random(1)
    here, there = draw.sample(range(count), count), draw.sample(range(count), count)
    await world.left.write_pages(aiote.Pages(source, here, page), aiote.Pages(remote, there, page), 9)
    found = np.frombuffer(await world.far("counted", 9, count, number, page * count), np.uint8).reshape(count, page)
    expect((found[there] == data.reshape(count, page)[here]).all(), "a page is at another place than its list says")
    await world.settle()
    more = await world.far("left_over", 9)
    expect(more == 0, f"{count} pages left {more} counts more than pages")
    await source.aclose()
    await world.far("release", number)
    return f"{count} pages of {page} bytes, in random order"


async def messages(world: EnginePair) -> str:
    sizes = (0, 1, 1000, 16_384)
    for size in sizes:
        sent = random.Random(size).randbytes(size)
        await world.left.send(world.address, sent)
        expect(await world.far("receive") == sent, f"a message of {size} bytes arrived changed")
        await world.far("send", str(world.left.address), sent)
        got = await world.left.recv()
        expect(bytes(got.data) == sent, f"a message of {size} bytes to the first engine arrived changed")
    return f"both ways, up to {max(sizes)} bytes"


async def no_late_writes(world: EnginePair) -> str:
    rounds = 60 * world.times
    _, source = world.source(BIG)
    number, remote = await world.target(BIG)
    ended: list[int] = []

    async def write(turn: int) -> None:
        await world.left.write(source, remote)
        ended.append(turn)

    for turn in range(rounds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write, turn)
            for _ in range(turn):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await world.far("clear", number)
        await world.settle(2)
        late = await world.far("written", number)
        expect(not late, f"round {turn}: bytes arrived after the cancelled await had ended")
    await source.aclose()
    await world.far("release", number)
    return f"{rounds} cancellations, {rounds - len(ended)} of them before the write was complete"


async def leases(world: EnginePair) -> str:
    rounds = 20 * world.times
    _, source = world.source(BIG)
    number, _ = await world.target(BIG)
    for turn in range(rounds):
        lease, descriptor = await world.far("lease", number, str(world.left.address))
        remote = world.left.attach(descriptor)
        transfers = [world.left.submit_write(source, remote) for _ in range(3)]
        for _ in range(turn):
            await anyio.lowlevel.checkpoint()
        await world.far("revoke", lease)
        await world.far("clear", number)
        for transfer in transfers:
            try:
                await transfer
            except aiote.AioteError:
                pass
        await world.settle(2)
        late = await world.far("written", number)
        expect(not late, f"round {turn}: bytes arrived through a lease after it was revoked")
    await source.aclose()
    await world.far("release", number)
    return f"{rounds} revocations"


async def idle(world: EnginePair) -> str:
    await world.settle()
    spent, far, started = time.process_time(), await world.far("cpu"), time.monotonic()
    await anyio.sleep(QUIET_S)
    took = time.monotonic() - started
    used = max(time.process_time() - spent, await world.far("cpu") - far) / took
    world.figures["percent of a core"] = 100 * used
    expect(used < BUSY, f"two engines at rest use {100 * used:.0f} % of a core")
    return f"two connected engines, {QUIET_S:g} s"


async def registration(world: EnginePair) -> str:
    size = 64 << 20  # a small guest has not much more
    array = world.memory.filled(np.zeros(size, np.uint8))
    started = time.perf_counter()
    region = world.left.register(array)
    world.figures["ms to register"] = 1000 * (time.perf_counter() - started)
    started = time.perf_counter()
    await region.aclose()
    world.figures["ms to release"] = 1000 * (time.perf_counter() - started)
    return f"{size >> 20} MiB"


CHECKS = (
    Check("writes", "a write changes only its target", writes),
    Check("counts-follow-data", "a count arrives only after its bytes", counts_follow_data),
    Check("exact-counts", "the receiver counts each write exactly once", exact_counts),
    Check("reads", "a read returns the bytes that are there", reads),
    Check("pages", "each page arrives at the place in its list", pages),
    Check("messages", "messages arrive whole", messages),
    Check("no-late-writes", "no byte arrives after a cancelled await has ended", no_late_writes),
    Check("leases", "no byte arrives through a lease after it is revoked", leases),
    Check("killed-peer", "a write to a killed peer ends with an error", killed_peer),
    Check("stopped-peer", "a stopped peer delays no other peer", stopped_peer),
    Check(
        "pulled-rail",
        "a rail that is lost during writes loses no byte and no count, and comes back",
        pulled_rail,
        rails=2,
    ),
    Check("idle", "engines at rest use hardly any CPU", idle),
    Check("registration", "memory can be registered and released", registration),
)
"""Every check, in the order in which `aiote prove` runs them."""
