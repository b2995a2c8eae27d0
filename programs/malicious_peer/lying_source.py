"""An insider of weight updates: a source that a controller names, and that says, counts and writes anything."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
import numpy as np

import aiote
from aiote import service
from aiote.weights import Controller, Layout, Recipe, Replicate, serve_source, serve_target
from aiote.weights.protocol import (
    Descriptors,
    PlanMismatchError,
    Sent,
    SourceService,
    SourceState,
    StaleUpdateError,
    TargetService,
    TargetState,
    Update,
    WriteTarget,
    packed_layout,
)
from aiote.weights.sending import UpdateSender
from aiote.weights.source import Source
from drawn_values import DrawnValues
from lying_members import late
from victim import Broken

MINE, ITS = ((64, 16), "F32", Replicate()), ((64,), "F32", Replicate())
BOTH = Layout.over([0], {"mine": MINE, "its": ITS})
LIMIT_S = 2.0
"""How long a controller waits for a source that says nothing."""
STAGING = 1 << 20
Arrays = dict[str, np.ndarray]


def arrays() -> Arrays:
    """Return arrays that do not lie next to each other, so that each is a region of its own."""
    memory = np.zeros(4096, np.float32)
    return {"mine": memory[:1024].reshape(64, 16), "its": memory[2048:2112]}


class LyingSource(SourceService):
    """A source of "its" that does what an honest one does up to some point, and then anything."""

    name = SourceService.name

    def __init__(self, source: Source) -> None:
        self.source, self.engine = source, source.engine
        self.rng = random.Random(0)
        self.log: list[str] = []
        self.claims = False
        self._former: list[WriteTarget] = []

    @service.method(idempotent=True)
    async def describe(self) -> SourceState:
        await self._lie("describe")
        told, anything = self.source.describe(), DrawnValues(self.rng)
        way = self.rng.choice(("right",) * 5 + ("damaged", "claim", "places", "regions", "rank", "address"))
        self.log.append(f"liar describes {way}")
        # What it says that it holds it may send; else the honest source sends "mine".
        self.claims = way == "claim"
        others: dict[str, Any] = {
            "right": {},
            "damaged": {"layout": np.frombuffer(anything.damaged(told.layout.tobytes()), np.uint8)},
            "claim": {"layout": packed_layout(Layout.over([1], {"mine": MINE, "its": ITS}))},
            "places": {"places": told.places + np.uint64(anything.number())},
            "regions": {"regions": Descriptors.of([anything.bytes(100)] * self.rng.randrange(3))},
            "rank": {"rank": self.rng.randrange(3)},
            "address": {"address": str(anything.number())},
        }
        return msgspec.structs.replace(told, **others[way])

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def prepare(self, sources: list[SourceState], targets: list[TargetState], gather: str) -> bytes:
        await self._lie("prepare")
        await self._harm(self._former)
        digest = await self.source.prepare(sources, targets, gather)
        return DrawnValues(self.rng).bytes(64) if self.rng.random() < 0.1 else digest

    @service.method(raises=[StaleUpdateError, PlanMismatchError])
    async def send(self, update: Update, digest: bytes, destinations: list[WriteTarget]) -> Sent:
        await self._harm([*destinations, *self._former])
        self._former = [*destinations, *self._former][:4]
        await self._lie("send")
        if self.rng.random() < 0.5 and self.source.plan is not None:
            self.log.append("liar sends right")
            await UpdateSender(self.source, self.source.plan, destinations).run()
            await self._harm(destinations)
        number = DrawnValues(self.rng).number((1 << 63) - 1)
        failed = {self.rng.randrange(3): "so it says"} if self.rng.random() < 0.2 else {}
        lost = {self.rng.randrange(3): "so it says"} if self.rng.random() < 0.2 else {}
        return Sent(number, number, number, failed, lost)

    async def _lie(self, call: str) -> None:
        """Answer late or never, refuse, fail, or go on."""
        way = self.rng.choice(("late", "stale", "misuse", "failed", *("on",) * 12))
        way = "silent" if self.rng.random() < 0.02 else way
        self.log.append(f"liar {call} {way}")
        if way == "late":
            await late(self.rng)
        elif way == "stale":
            raise StaleUpdateError("x" * self.rng.choice((0, 1, 1 << 12)))
        elif way == "misuse":
            raise aiote.UsageError("so it says")
        elif way == "failed":
            raise RuntimeError("a source that means harm")
        elif way == "silent":
            await anyio.sleep_forever()

    async def _harm(self, targets: list[WriteTarget]) -> None:
        """Write, count and say a few things to targets that have lent it memory, now or in an earlier update."""
        for _ in range(self.rng.randrange(4) if targets else 0):
            to, way = self.rng.choice(targets), self.rng.choice(("write", "count", "commit"))
            try:
                await getattr(self, f"_{way}")(to)
                self.log.append(f"liar {way} right")
            except (aiote.AioteError, ValueError) as error:
                self.log.append(f"liar {type(error).__name__} {way}")

    async def _write(self, to: WriteTarget) -> None:
        """Write anything somewhere in what the target has lent."""
        lent = [one for one in to.regions.unpacked(to.regions.ends.size) if one]
        if not lent:
            return
        remote = self.engine.attach(self.rng.choice(lent))
        start = self.rng.randrange(remote.nbytes)
        nbytes = min(remote.nbytes - start, self.rng.choice((1, 4, 64, 4096)))
        async with self.engine.register(bytearray(self.rng.randbytes(nbytes))) as junk:
            await self.engine.write(junk, remote[start : start + nbytes])

    async def _count(self, to: WriteTarget) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            imm = to.imm + self.rng.choice((0, 0, 0, -1, 1, self.rng.randrange(1 << 28)))
            await self.engine.write_imm(None, to.address, imm % (1 << 28))

    async def _commit(self, to: WriteTarget) -> None:
        target = service.client(self.engine, aiote.Address.parse(to.address), TargetService)
        await target.commit(Update(self.rng.randrange(1 << 62), self.rng.randrange(1 << 62)))


class LiedTo:
    """A target, its honest source, its lying source, and the engine of their controllers."""

    def __init__(
        self, hub: aiote.Engine, source: aiote.Address, target: aiote.Address, liar: LyingSource, both: list[Arrays]
    ) -> None:
        self._hub, self._source, self._target, self._liar = hub, source, target, liar
        self._trained, self._served = both
        self._version = 0

    async def run(self, rng: random.Random, log: list[str]) -> None:
        """Have an update made with the lying source, then one without. Raises Broken."""
        self._liar.rng, self._liar.log, self._liar.claims = rng, log, False
        sources = [self._source, self._liar.engine.address]
        try:
            if await self._update(Controller(self._hub, sources, [self._target], limit=LIMIT_S)):
                log.append("liar's update committed")
                self._check(() if self._liar.claims else ("mine",))
        except aiote.AioteError as error:
            log.append(f"liar's update {type(error).__name__}")
        if not await self._update(Controller(self._hub, [self._source], [self._target])):
            raise Broken("an update of honest ranks was not committed after one of a liar")
        self._check(("mine", "its"))

    async def _update(self, controller: Controller) -> list[str]:
        self._version += 1
        for array in self._trained.values():
            array[...] = self._version
        return (await controller.update(self._version)).committed

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if not (self._served[name] == self._version).all():
                raise Broken(f"a target has committed other bytes of {name} than its source has")


@asynccontextmanager
async def lied_to(hub: aiote.Engine, engines: list[aiote.Engine]) -> AsyncIterator[LiedTo]:
    """Serve a target, an honest source and a lying one, on these engines in that order."""
    trained, served = arrays(), arrays()
    place, named = engines[0].address, [hub.address]
    async with AsyncExitStack() as stack:
        target = serve_target(engines[0], BOTH, 0, served, versions="inplace", controllers=named)
        await stack.enter_async_context(target)
        await stack.enter_async_context(serve_source(engines[1], BOTH, 0, trained, controllers=named))
        own = Layout.over([1], {"its": ITS})
        source = Source(engines[2], own, 1, {"its": np.full(64, -1, np.float32)}, Recipe(), STAGING)
        await source.weights.register(engines[2], "read")
        stack.push_async_callback(source.weights.close)
        stack.push_async_callback(source.staging.close)
        liar = LyingSource(source)
        await stack.enter_async_context(service.serve(engines[2], liar))
        yield LiedTo(hub, engines[1].address, place, liar, [trained, served])
