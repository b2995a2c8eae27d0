"""The engine that is attacked, an honest peer of it, and what must hold after each attack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import numpy as np

import aiote
from aiote.core.descriptor import RegionDescriptor
from support.engines.opening import opened
from support.process.idleness import assert_idle
from support.process.open_resources import descriptors, resident_bytes

KEY = b"a key that the hostile one has, too"
GRANTED = 1 << 16
LIMITS = {"heartbeat_interval": 0.25, "heartbeat_timeout": 3.0, "connect_timeout": 3.0, "drain_timeout": 3.0}
BOUNDS = {"max_counters": 4096, "message_pool": 16, "message_bytes": 8192}
PATIENCE_S = 60
GROWTH_BYTES = 96 << 20
"""How much resident memory may grow over all attacks: pools of peers that are not lost yet, and what is never given
back to the system."""
MAX_DESCRIPTORS = 256


class Broken(AssertionError):
    """A promise was broken."""


class Bounds:
    """What the first look saw of this process's memory and descriptors, and how much it may grow."""

    def __init__(self) -> None:
        self._resident = self._descriptors = 0

    def check(self) -> None:
        """Look. Raises Broken for more than may be."""
        resident, count = resident_bytes(), len(descriptors())
        self._resident = self._resident or resident
        self._descriptors = self._descriptors or count
        if resident > self._resident + GROWTH_BYTES:
            raise Broken(f"resident memory has grown from {self._resident} to {resident}")
        if count > self._descriptors + MAX_DESCRIPTORS:
            raise Broken(f"from {self._descriptors} descriptors to {count}")


class Victim:
    """Its memory is in three parts: what the hostile peer was granted lies between what it was not."""

    def __init__(self, engine: aiote.Engine, honest: aiote.Engine) -> None:
        self.engine = engine
        self.honest = honest
        self._memory = np.random.default_rng(1).integers(0, 256, 3 * GRANTED, np.uint8)
        self._before = self._memory.copy()
        parts = [self._memory[i * GRANTED : (i + 1) * GRANTED] for i in range(3)]
        self._regions = [engine.register(part) for part in parts]
        # Not all of the middle one, so that bounds within a registration are tried, too.
        self.granted = RegionDescriptor.from_bytes(self._regions[1][4096 : GRANTED - 4096].descriptor)
        self._source = honest.register(b"s" * 4096)
        self._target = engine.register(bytearray(4096))
        self._remote = honest.attach(self._target.descriptor)
        self._turn = 0
        self._bounds = Bounds()

    @property
    def address(self) -> aiote.Address:
        return self.engine.address

    def known(self) -> list[int]:
        """Return numbers that mean something here."""
        return [
            self.granted.keys[0].key,
            self.granted.keys[0].base,
            self.granted.address,
            self.granted.length,
            self._regions[0].memory.address,
        ]

    async def check(self, *, idle: bool = False) -> None:
        """See that what was not granted is as it was, and that the honest peer is served."""
        changed = np.flatnonzero(self._memory != self._before)
        lowest, highest = GRANTED + 4096, 2 * GRANTED - 4096
        if len(changed) and not (lowest <= changed[0] and changed[-1] < highest):
            raise Broken(f"memory changed from {changed[0]} to {changed[-1]}; {lowest} to {highest} was granted")
        with anyio.move_on_after(PATIENCE_S) as scope:
            await self._serve()
        if scope.cancelled_caught:
            raise Broken(f"the honest peer was not served within {PATIENCE_S} s")
        if idle:
            await self.alone()
            await assert_idle(self.engine, self.honest)
        self._bounds.check()

    async def _serve(self) -> None:
        """Move bytes, a count and a message from the honest peer; take what others have sent."""
        self._turn += 1
        with self.engine.counter() as counter:
            await self.honest.write_imm(self._source, self._remote, counter.imm)
            await counter.wait(1)
        word = b"turn %d" % self._turn
        await self.honest.send(self.engine.address, word)
        while (message := await self.engine.recv()).data != word or message.source.address != self.honest.address:
            pass

    async def alone(self) -> None:
        """Wait until the honest peer is the only one."""
        with anyio.move_on_after(PATIENCE_S) as scope:
            while [peer.address for peer in self.engine.peers] != [self.honest.address]:
                await anyio.sleep(0.01)
        if scope.cancelled_caught:
            raise Broken(f"still a peer after {PATIENCE_S} s: {self.engine.peers}")


@asynccontextmanager
async def victim(provider: str) -> AsyncIterator[Victim]:
    settings = {"cluster_key": KEY, "host": "127.0.0.1", **LIMITS, **BOUNDS}
    async with opened(provider, **settings) as engine, opened(provider, **settings) as honest:
        await honest.connect(engine.address)
        yield Victim(engine, honest)
