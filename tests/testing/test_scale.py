"""Many engines, and up to eight rails, in one process and in virtual time.

`AIOTE_TEST_ENGINES` asks for more engines than `make test` has; 1024 take about a minute and 9000 descriptors.
"""

from __future__ import annotations

import asyncio
import os

import pytest

import aiote
from aiote.testing import CONNECTX7_400G, EFA_200G, Fabric, run
from aiote.testing.tables import single_write

ENGINES = int(os.environ.get("AIOTE_TEST_ENGINES") or 64)
SIZE = 10_000
PEERS = 256
AT_ONCE = 128
"""Who connect to the first one at a time: of more than 256 strangers an engine drops the oldest."""


async def around_and_inward(fabric: Fabric) -> None:
    """Each writes to its neighbour, and all to the first one: as many counts as writes, and every byte in place."""
    engines = [await fabric.open_engine(heartbeat_interval=10.0, heartbeat_timeout=60.0) for _ in range(ENGINES)]
    pools = [bytearray(SIZE) for _ in engines]
    descriptors = [engine.register(pool).descriptor for engine, pool in zip(engines, pools, strict=True)]
    middle = bytearray(SIZE * ENGINES)
    shared = engines[0].register(middle).descriptor

    few = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        engine, following = engines[number], (number + 1) % ENGINES
        source = engine.register(bytes([number % 250 + 1]) * SIZE)
        await engine.write_imm(source, engine.attach(descriptors[following]), 1)
        if number:
            place = slice(number * SIZE, (number + 1) * SIZE)
            async with few:
                await engine.connect(engines[0].address)
            await asyncio.gather(*(engine.write_imm(source, engine.attach(shared)[place], 2) for _ in range(3)))
        await engine.counter(1).wait(1)

    await asyncio.gather(*(one(number) for number in range(ENGINES)))
    await engines[0].counter(2).wait(3 * (ENGINES - 1))
    for number, pool in enumerate(pools):
        assert pool == bytes([(number - 1) % ENGINES % 250 + 1]) * SIZE
    assert middle == b"".join(bytes([n % 250 + 1 if n else 0]) * SIZE for n in range(ENGINES))
    await asyncio.gather(*(engine.aclose() for engine in engines))


@pytest.mark.timeout(600)
def test_many_engines_in_one_process_write_around_and_inward():
    run(around_and_inward, 3, rails=2)


@pytest.mark.parametrize("model", [CONNECTX7_400G, EFA_200G], ids=lambda model: model.name)
def test_a_write_over_several_rails_is_nearly_as_many_times_as_fast(model):
    """A large write over n rails is nearly n times as fast: what is missing is the one way there and back."""
    one = single_write(model, 1, 32 << 20)
    for rails in (2, 4, 8):
        there_and_back = (model.latency_us + model.answer_us) * 1e-6
        best = (32 << 23) / (there_and_back + (32 << 23) / (model.gbps * 1e9 * rails)) / 1e9
        assert single_write(model, rails, 32 << 20) == pytest.approx(best, rel=0.05)
        assert best > one * rails * 0.5


@pytest.mark.timeout(600)
@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
def test_a_scatter_to_256_peers_is_one_request():
    """Each of them gets bytes of its own and one count."""

    async def main(fabric: Fabric) -> None:
        hub = await fabric.open_engine(message_pool=2)
        others = [await fabric.open_engine(message_pool=2) for _ in range(PEERS)]
        group = await hub.peer_group([other.address for other in others])
        memories = [bytearray(64) for _ in others]
        remotes = [
            hub.attach(other.register(memory).descriptor) for other, memory in zip(others, memories, strict=True)
        ]
        content = bytes(range(256)) * 64
        source = hub.register(content)
        targets = [
            aiote.ScatterTarget(source[number * 64 : number * 64 + 64], remote) for number, remote in enumerate(remotes)
        ]
        posted = hub.statistics().posted
        await hub.scatter(group, targets, 3)
        assert hub.statistics().posted == posted + PEERS
        for number, (other, memory) in enumerate(zip(others, memories, strict=True)):
            await other.counter(3).wait(1)
            assert memory == content[number * 64 : number * 64 + 64]
        for engine in (hub, *others):
            await engine.aclose()

    run(main, 1)
