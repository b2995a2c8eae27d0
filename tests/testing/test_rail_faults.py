"""Rails that die one after another under everything at once, in virtual time: all completes, and every count is exact.

`AIOTE_TEST_SEEDS` asks for more seeds than `make test` has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random

import pytest

import aiote
from aiote.testing import UNRULY, Fabric, run

SEEDS = int(os.environ.get("AIOTE_TEST_SEEDS") or 60)
SIZE = 1 << 16
PAGE = 512
IMM = 7


class Storm:
    """Two engines with several rails, of which never more than one is dead at a time."""

    def __init__(self, fabric: Fabric, seed: int) -> None:
        self.fabric, self.draw = fabric, random.Random(seed)
        self.counts = 0
        self.over = False

    async def open(self, drain_timeout: float = 1.0) -> None:
        settings = {
            "drain_timeout": drain_timeout,
            "message_pool": self.draw.choice([2, 4, 16]),
            "stripe_bytes": self.draw.choice([1, 1000, 65536]),
            "largest_message": self.draw.choice([0, 5000, 1 << 22]),
            "heartbeat_interval": 0.1,
            "heartbeat_timeout": 0.5,
        }
        self.left = await self.fabric.open_engine(**settings)
        self.right = await self.fabric.open_engine(**settings)
        self.content = self.draw.randbytes(SIZE)
        self.target, self.back = bytearray(SIZE), bytearray(SIZE)
        self.source = self.left.register(self.content)
        self.remote = self.left.attach(self.right.register(self.target).descriptor)
        self.there = self.right.attach(self.source.descriptor)
        self.local = self.right.register(self.back)
        await self.left.connect(self.right.address)

    async def write(self) -> None:
        """All of the memory, in writes and pages; every byte once, so that a late one would show."""
        pages = SIZE // PAGE // 2
        numbers = self.draw.sample(range(pages), pages)
        transfers = [
            self.left.submit_write_pages(
                *(aiote.Pages(region, numbers, PAGE) for region in (self.source, self.remote)), IMM
            )
        ]
        self.counts += pages
        start = SIZE // 2
        while start < SIZE:
            part = slice(start, min(SIZE, start + self.draw.choice([1, 100, 3000, 20000])))
            transfers.append(self.left.submit_write_imm(self.source[part], self.remote[part], IMM))
            transfers.append(self.left.submit_write_imm(None, self.remote, IMM))
            self.counts += 2
            start = part.stop
            await asyncio.sleep(self.draw.choice([0, 0, 1e-5, 1e-3]))
        for transfer in transfers:
            await transfer
        await self.right.counter(IMM).wait(self.counts)
        # At the count every byte is there.
        assert self.target == self.content

    async def read(self) -> None:
        for start in range(0, SIZE, 5000):
            part = slice(start, min(SIZE, start + 5000))
            await self.right.read(self.there[part], self.local[part])

    async def send(self) -> None:
        for number in range(60):
            await self.left.send(self.right.address, number.to_bytes(2, "big"))

    async def receive(self) -> None:
        got = [int.from_bytes((await self.right.recv()).data, "big") for _ in range(60)]
        assert sorted(got) == list(range(60))

    async def break_rails(self) -> None:
        """One rail after another, silently or not, for a moment or so long that it is missed."""
        while not self.over:
            engine = self.draw.choice([self.left, self.right])
            rail = self.draw.randrange(len(engine.rails))
            await asyncio.sleep(self.draw.random() * self.draw.choice([1e-5, 1e-4, 1e-3]))
            self.fabric.kill_rail(engine, rail, silently=self.draw.random() < 0.5)
            await asyncio.sleep(self.draw.choice([1e-4, 1e-2, 3]))
            self.fabric.restore_rail(engine, rail)
            # Until it is back, for another one may not be missed as well.
            while not self.over and not all(self.carry()):
                await asyncio.sleep(0.05)

    def carry(self) -> list[bool]:
        links = [link for engine in (self.left, self.right) for link in engine._runtime.core.peers]
        return [link.carries(number) for link in links for number in range(len(self.left.rails))]

    async def run(self) -> None:
        await self.open()
        lost: list[str] = []
        for engine in (self.left, self.right):
            engine.listen_events(lambda event: lost.append(event.name))
        breaking = asyncio.ensure_future(self.break_rails())
        await asyncio.gather(self.write(), self.read(), self.send(), self.receive())
        self.over = True
        await breaking
        assert self.back == self.content
        await asyncio.sleep(5)
        assert self.right.counter(IMM).value == 0
        assert "peer.lost" not in lost
        for engine in (self.left, self.right):
            assert engine.statistics().outstanding == engine.statistics().queued == 0
            await engine.aclose()


@pytest.mark.timeout(600)
@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
@pytest.mark.parametrize("forgets_us", [0, 500])
def test_traffic_is_exact_while_rails_die_one_after_another(forgets_us):
    for seed in range(SEEDS):
        draw = random.Random(seed)
        model = dataclasses.replace(
            UNRULY,
            queue=draw.choice([8, 64]),
            events=draw.choice([8, 64]),
            max_sge=draw.choice([1, 2, 4]),
            forgets_us=draw.choice([20, forgets_us]) if forgets_us else 0,
        )
        try:
            run(lambda fabric, seed=seed: Storm(fabric, seed).run(), seed, rails=draw.randint(2, 4), model=model)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def cancelled_over_a_silent_rail(fabric: Fabric, what: str) -> None:
    """Cancel while a rail holds back all that it was given, let it go on afterwards, and see that nothing moves."""
    storm = Storm(fabric, 1)
    # Shorter than it takes to find out that the rail stands still: the cancelled one itself has it taken out.
    await storm.open(drain_timeout=0.05)
    lost: list[str] = []
    storm.left.listen_events(lambda event: lost.append(event.name))
    group = await storm.left.peer_group([storm.right.address])
    fabric.kill_rail(storm.left, 0, silently=True)
    pages = [aiote.Pages(region, range(SIZE // PAGE), PAGE) for region in (storm.source, storm.remote)]
    targets = [
        aiote.ScatterTarget(storm.source[i : i + PAGE], storm.remote[i : i + PAGE]) for i in range(0, SIZE, PAGE)
    ]
    verbs = {
        "write": lambda: storm.left.write_imm(storm.source, storm.remote, IMM),
        "pages": lambda: storm.left.write_pages(*pages, IMM),
        "scatter": lambda: storm.left.scatter(group, targets, IMM),
        "send": lambda: storm.left.send(storm.right.address, b"text"),
    }
    task = asyncio.ensure_future(verbs[what]())
    await asyncio.sleep(1e-5)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert storm.source.memory.in_flight == 0
    arrived, counted = bytes(storm.target), storm.right.counter(IMM).value
    fabric.restore_rail(storm.left, 0)
    await asyncio.sleep(20)
    assert storm.target == arrived, "a byte came after the await had ended"
    assert storm.right.counter(IMM).value == counted
    assert "rail.failed" in lost
    assert "peer.lost" not in lost
    for engine in (storm.left, storm.right):
        await engine.aclose()


@pytest.mark.blocking_allowed("there is no loop whose clock runs on")
@pytest.mark.parametrize("what", ["write", "pages", "scatter", "send"])
def test_no_byte_comes_late_after_a_cancel_over_a_silent_rail(what):
    run(lambda fabric: cancelled_over_a_silent_rail(fabric, what), 3, rails=2)
