"""Two engines over the stand-in, in a process whose first look at libfabric finds it: `child.py CASE`."""

from __future__ import annotations

import asyncio
import sys
import warnings

import numpy as np

import aiote
from aiote.rails import contract

IMM = 7
LENGTHS = (0, 1, 1000, 8176, 8177, 16000, 16384)


async def transfers() -> None:
    """Writes over the limit, reads, messages over the MTU, and more immediates than there are receives."""
    async with aiote.open_engine(provider="efa") as left, aiote.open_engine(provider="efa") as right:
        content = np.random.default_rng(1).integers(0, 255, 3_000_001, dtype=np.uint8)
        pool, back = np.zeros_like(content), np.zeros_like(content)
        source, target = left.register(content), left.attach(right.register(pool).descriptor)
        await left.connect(right.address)
        await left.write_imm(source, target, IMM)
        await right.counter(IMM).wait(1)
        assert (pool == content).all()
        await left.read(target, left.register(back))
        assert (back == content).all()
        for length in LENGTHS:
            await left.send(right.address, content[:length].tobytes())
            assert bytes((await right.recv()).data) == content[:length].tobytes()
        parts = [slice(at * 64, at * 64 + 64) for at in range(2000)]
        await asyncio.gather(*(left.write_imm(source[part], target[part], IMM) for part in parts))
        await right.counter(IMM).wait(len(parts))
        assert right.counter(IMM).value == 0
        assert left.statistics().carried[-1] == 0, "the socket is for peers that find no NIC"


async def messages() -> None:
    """Messages of several pieces that are on their way at once, each of one byte's value."""
    async with aiote.open_engine(provider="efa") as left, aiote.open_engine(provider="efa") as right:
        await left.connect(right.address)
        for _ in range(20):
            sent = [bytes([number]) * 16384 for number in range(8)]
            await asyncio.gather(*(left.send(right.address, each) for each in sent))
            assert sorted([bytes((await right.recv()).data) for _ in sent]) == sent


async def unreadable() -> None:
    """The NIC lets peers read whatever is registered; the engine does not read what may only be written."""
    async with aiote.open_engine(provider="efa") as left, aiote.open_engine(provider="efa") as right:
        back = bytearray(1000)
        remote = left.attach(right.register(bytearray(b"\1" * 1000), access="write").descriptor)
        await left.connect(right.address)
        try:
            await left.read(remote, left.register(back))
        except aiote.AioteError as error:
            print(type(error).__name__)
        assert back == bytes(1000)


async def refused() -> None:
    """What a machine says whose EFA cannot be used; `auto` takes another."""
    try:
        async with aiote.open_engine(provider="efa"):
            pass
    except aiote.AioteError as error:
        print(error)
    async with aiote.open_engine() as engine:
        print("auto:", engine.rails[0].provider)


async def crowded() -> None:
    """A NIC with one queue pair for two engines: a socket carries them, and both are told."""
    async with aiote.open_engine(provider="efa") as left, aiote.open_engine(provider="efa") as right:
        for engine in (left, right):
            engine.listen_events(lambda event: event.name == "rail.full" and print(event.details["reason"]))
        memory = bytearray(1000)
        await left.write_imm(left.register(b"\1" * 1000), left.attach(right.register(memory).descriptor), IMM)
        await right.counter(IMM).wait(1)
        assert memory == b"\1" * 1000
        print(*(rail.provider for rail in left.rails), left.statistics().carried)


async def without_fallback() -> None:
    """As `crowded`, and no socket beside the NIC: the peer is refused by an error that says why."""
    both = {"provider": "efa", "fallback": False, "connect_timeout": 20.0}
    async with aiote.open_engine(**both) as left, aiote.open_engine(**both) as right:
        print("rails:", *(rail.provider for rail in left.rails + right.rails))
        for initiator, target in ((left, right), (right, left)):
            try:
                await initiator.connect(target.address)
            except aiote.AioteError as error:
                print(type(error).__name__, error)


async def proven() -> None:
    """As if EFA were among the proven kinds: what `auto` opens, and what joins two engines of this host."""
    contract.PROVEN |= {"efa"}
    async with aiote.open_engine(rails=["127.0.0.1"]) as engine:
        print("named:", *(rail.provider for rail in engine.rails))
    async with aiote.open_engine() as left, aiote.open_engine() as right:
        print("auto:", *(rail.provider for rail in left.rails))
        memory = bytearray(1000)
        await left.write_imm(left.register(b"\1" * 1000), left.attach(right.register(memory).descriptor), IMM)
        await right.counter(IMM).wait(1)
        assert memory == b"\1" * 1000
        print("carried:", *left.statistics().carried)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    cases = (transfers, messages, unreadable, refused, crowded, without_fallback, proven)
    asyncio.run({case.__name__: case for case in cases}[sys.argv[1]]())
