"""NICs of the stand-in that fail under everything at once, a seed a storm: `storm.py FIRST COUNT`.

Never more than one NIC fails at a time. It loses packets until its peers give up, or its pairs break, or it stands
still; and what has come over it is hidden from its reader meanwhile, so that the close drops completions that the
sender was told of. All completes, and every count is exact. The end prints what was counted.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import aiote
from support.rails.standin_efa import COUNTED, break_pairs, counted, fault, still_open

SIZE = 1 << 16
PAGE = 512
IMM = 7
MESSAGES = 20
HANGS_S = 120
NICS = ("standin0-rdm", "standin1-rdm", "standin2-rdm", "standin3-rdm")
SETTINGS = {"heartbeat_interval": 0.5, "heartbeat_timeout": 20.0, "spin_us": 0}


class Storm:
    """Two engines with some NICs, what goes between them, and what befalls it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.counts = 0
        self.content = self.draw.randbytes(SIZE)
        self.target, self.back = bytearray(SIZE), bytearray(SIZE)
        self.lost: list[str] = []

    async def open(self) -> None:
        self.nics = nics = list(NICS[: self.draw.choice([2, 2, 3, 4])])
        settings = SETTINGS | {
            "message_pool": self.draw.choice([2, 4, 16]),
            "stripe_bytes": self.draw.choice([1000, 65536]),
            "progress": self.draw.choice(["adaptive", "thread"]),
        }
        self.left = await aiote.open_engine(provider="efa", rails=nics, **settings)
        self.right = await aiote.open_engine(provider="efa", rails=nics, **settings)
        for engine in (self.left, self.right):
            engine.listen_events(lambda event: self.lost.append(event.name))
        self.source, self.there = self.left.register(self.content), self.right.register(self.target)
        self.remote = self.left.attach(self.there.descriptor)
        try:
            await self.left.connect(self.right.address)
        except aiote.PeerError:
            # Peers give up early here, and on a busy machine a NIC may be silent for so long.
            await self.left.connect(self.right.address)

    async def write(self) -> None:
        """All of the memory, in pages and writes, with immediates alone between them."""
        pages = SIZE // PAGE // 2
        numbers = self.draw.sample(range(pages), pages)
        both = [aiote.Pages(region, numbers, PAGE) for region in (self.source, self.remote)]
        transfers = [self.left.submit_write_pages(*both, IMM)]
        self.counts += pages
        start = SIZE // 2
        while start < SIZE:
            part = slice(start, min(SIZE, start + self.draw.choice([100, 3000, 9000])))
            transfers.append(self.left.submit_write_imm(self.source[part], self.remote[part], IMM))
            transfers.append(self.left.submit_write_imm(None, self.remote, IMM))
            self.counts += 2
            start = part.stop
            await asyncio.sleep(self.draw.choice([0, 0, 0.001]))
        for transfer in transfers:
            await transfer
        await self.right.counter(IMM).wait(self.counts)
        assert self.target == self.content, "counted, and a byte is not there"

    async def read(self) -> None:
        there, local = self.right.attach(self.source.descriptor), self.right.register(self.back)
        for start in range(0, SIZE, 9000):
            part = slice(start, min(SIZE, start + 9000))
            await self.right.read(there[part], local[part])

    async def send(self) -> None:
        for number in range(MESSAGES):
            await self.left.send(self.right.address, number.to_bytes(2, "big") * self.draw.choice([1, 3000]))

    async def receive(self) -> None:
        got = [int.from_bytes(bytes((await self.right.recv()).data)[:2], "big") for _ in range(MESSAGES)]
        assert sorted(got) == list(range(MESSAGES)), "a message is missing, or came twice"

    async def fail(self) -> None:
        """One NIC after another fails, for a moment or until its peers give up."""
        for _ in range(self.draw.choice([1, 2])):
            nic = self.draw.randrange(len(self.nics))
            await asyncio.sleep(self.draw.random() * self.draw.choice([0.001, 0.005, 0.02]))
            fault("hide", self.draw.choice([0, 1, 1, 1]), nic)
            what, value = self.draw.choice([("lose", 1000), ("lose", 500), ("stop", 1), ("hold", 1), ("break", 0)])
            await asyncio.sleep(self.draw.choice([0, 0.002, 0.01]))
            if what == "break":
                break_pairs(nic)
            else:
                fault(what, value, nic)
            await asyncio.sleep(self.draw.choice([0.01, 0.05, 0.2]))
            for each in ("hold", "stop", "lose", "hide"):
                fault(each, 0, nic)
            while not all(self.carry()):
                await asyncio.sleep(0.01)

    def carry(self) -> list[bool]:
        links = [link for engine in (self.left, self.right) for link in engine._runtime.core.peers]
        return [link.carries(number) for link in links for number in range(len(self.nics))]

    async def run(self) -> None:
        fault("duplicate", self.draw.choice([0, 300]))
        await self.open()
        await asyncio.gather(self.write(), self.read(), self.send(), self.receive(), self.fail())
        assert self.back == self.content, "a read brought other bytes"
        assert self.right.counter(IMM).value == 0, "more was counted than was written"
        assert "peer.lost" not in self.lost
        for engine in (self.left, self.right):
            # Credits of the last messages may be on their way; a native thread makes progress beside this task.
            while engine.statistics().outstanding or engine.statistics().queued:
                await asyncio.sleep(0.01)
            assert engine.statistics().peer_wakeups == 0
            await engine.aclose()
        assert [still_open(what) for what in ("endpoints", "registrations", "addresses")] == [0, 0, 0]


def main(first: int, count: int) -> None:
    failed = 0
    for seed in range(first, first + count):
        storm = Storm(seed)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            asyncio.run(storm.run())
        except BaseException as error:
            error.add_note(f"seed {seed}, events {storm.lost}")
            raise
        failed += storm.lost.count("rail.failed")
    print({"rails failed": failed, **{what: counted(what) for what in COUNTED}})
    assert not counted("overflown"), "a completion queue overflowed"


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)
    main(int(sys.argv[1]), int(sys.argv[2]))
