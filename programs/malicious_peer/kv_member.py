"""A hostile member of a KV cache's cluster: an engine as any, but for what it tells ranks and registry."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np

import aiote
from aiote import service
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import RegistryError
from aiote.discovery.registry_server import RegistryServer
from aiote.kvcache import Consumer, Producer
from aiote.kvcache.protocol import Transfers
from aiote.service import frames
from aiote.service.endpoint import CallEndpoint
from attacked_members import Attacked, Caller, Seed
from drawn_values import DrawnValues
from lying_members import LyingPrefill
from support.engines.opening import opened
from support.fuzz.discovery import KEEP, WATCH, arguments, calls
from support.fuzz.kvcache import kvcache_seeds
from support.kv.caches import Side, built, expected, fill, rows, same
from support.kv.worlds import BEFORE, MODEL
from support.service.registries import member, until_told
from victim import LIMITS, PATIENCE_S, Broken

TOKENS = 20
METHODS = {"part": "kvcache.Transfers/1.open", "fetch": "kvcache.Transfers/1.push"}


@dataclass
class Pair:
    """An honest prefill rank and its decode rank, and their caches."""

    producer: Producer
    consumer: Consumer
    left: Side
    right: Side

    async def prefill(self, name: str, turn: int) -> None:
        here = rows(self.left, TOKENS, np.random.default_rng(turn))
        # In a thread, as the comparison below: what the loop's thread works is to be the engines' own.
        await anyio.to_thread.run_sync(fill, self.left, here, TOKENS, turn)
        async with self.producer.offer(name, tokens=TOKENS, rows=here) as offer:
            for layer in self.producer.spec.layers:
                offer.computed(layer)

    async def decode(self, name: str, turn: int) -> None:
        there, (cache,) = rows(self.right, TOKENS, np.random.default_rng(~turn & 0xFFFF)), self.right.caches
        for memory in cache.memories:
            memory[...] = BEFORE
        place = [self.producer.engine.address]
        async with self.consumer.receive(place, name, tokens=TOKENS, rows=there) as reception:
            await reception.arrived()
        if not await anyio.to_thread.run_sync(lambda: same(cache, expected(cache, there, TOKENS, BEFORE, turn))):
            raise Broken("the honest decode rank has other bytes than were computed for it")


class Cluster(Attacked):
    """Two pairs of a prefill and a decode rank, and a registry with an honest member."""

    def __init__(
        self,
        pairs: list[Pair],
        registry: EmbeddedRegistry,
        server: aiote.Engine,
        caller: Caller,
        liar: LyingPrefill,
    ) -> None:
        super().__init__([one.engine for pair in pairs for one in (pair.producer, pair.consumer)], caller)
        self.liar = liar
        self.pairs = pairs
        self._registry = registry
        self._server = server
        found = kvcache_seeds().items()
        self._seeds = [(METHODS[call], body) for call, bodies in found for body in bodies.values()]

    def seeds(self) -> list[Seed]:
        return self._seeds

    async def one(self, rng: random.Random, log: list[str]) -> None:
        if rng.random() < 0.7:
            await super().one(rng, log)
            return
        for data in self._calls(rng, DrawnValues(rng), log):
            await self.caller.send(self._server.address, data, log)

    def _calls(self, rng: random.Random, anything: DrawnValues, log: list[str]) -> list[bytes]:
        """Say something to the registry: calls whose arguments are right or not, some cancelled when the peer goes."""
        name, steps = rng.choice(sorted(calls().items()))
        way = rng.choice(("right", "damaged", "bytes", "watches"))
        log.append(f"registry {name} {way}")
        bodies = [arguments(rng.randrange(3), *one[1:]) for one in steps]
        if way == "watches":
            bodies = [b"\x90"] * rng.randint(1, 20)
        elif way != "right":
            bodies = [anything.damaged(body) if way == "damaged" else anything.bytes(1000) for body in bodies]
        said: list[frames.Frame] = [frames.HelloFrame(frames.VERSION, True, 16384, 64, 16, 1000)]
        for slot, body in enumerate(bodies):
            method = WATCH if way == "watches" else KEEP
            said.append(frames.CallFrame(slot, self.caller.next_generation(), method.name, 0.0, body, []))
        data = frames.pack(said)
        return [anything.damaged(data) if rng.random() < 0.1 else data]

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        await super().attack(rng, log)
        self.liar.rng, self.liar.log = rng, log

    async def work(self) -> None:
        """Have requests served, byte by byte, beside some to a rank that means harm, and a member come and go."""
        async with anyio.create_task_group() as group:
            for number, pair in enumerate(self.pairs):
                group.start_soon(self._serve, pair, f"honest {self.turn} {number}")
        await self._come_and_go()

    async def _serve(self, pair: Pair, name: str) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pair.prefill, name, self.turn)
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._ask_the_liar, pair, f"asked of a liar: {name}")
                await pair.decode(name, self.turn)
                beside.cancel_scope.cancel()

    async def _ask_the_liar(self, pair: Pair, name: str) -> None:
        """Ask for a request, whatever becomes of it; it is left when the honest one is there."""
        pages = rows(pair.right, 1, np.random.default_rng(self.turn))
        try:
            async with pair.consumer.receive([self.liar.engine.address], name, tokens=1, rows=pages) as reception:
                await reception.arrived()
        except (aiote.AioteError, ValueError) as error:
            self.liar.log.append(f"{type(error).__name__} asked")

    async def _come_and_go(self) -> None:
        name = f"honest-{self.turn}"
        try:
            events = self._registry.watch()
            async with self._registry.join(member(name)):
                await until_told(events, ("joined", name))
            await until_told(events, ("left", name))
        except RegistryError as error:
            raise Broken(f"the registry does not serve: {error}") from error

    async def at_rest(self) -> None:
        """See that nothing is kept of what the hostile one asked for, once it is gone."""
        await super().at_rest()
        with anyio.move_on_after(PATIENCE_S) as scope:
            for engine in self.members:
                while any(link.calls or link.running for link in CallEndpoint.of(engine)._links.values()):
                    await anyio.sleep(0.01)
            while any(pair.producer.offers or len(pair.consumer.immediates) for pair in self.pairs):
                await anyio.sleep(0.01)
        if scope.cancelled_caught:
            raise Broken("what a peer that has left had asked for is still held")


@asynccontextmanager
async def cluster(provider: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(opened(provider, **LIMITS)) for _ in range(8)]
        server, honest, hostile, lying = engines[4:]
        pairs = []
        for one, other in (engines[:2], engines[2:4]):
            left, right = built(MODEL, Side(), "prefill"), built(MODEL, Side(order="field token head"), "decode")
            producer = await stack.enter_async_context(Producer(one, left.caches[0], match_timeout=PATIENCE_S))
            consumer = await stack.enter_async_context(Consumer(other, right.caches[0]))
            pairs.append(Pair(producer, consumer, left, right))
        await stack.enter_async_context(RegistryServer(server))
        registry = await stack.enter_async_context(EmbeddedRegistry(honest, [server.address]))
        liar = LyingPrefill(lying, pairs[0].producer.spec)
        await stack.enter_async_context(service.serve(lying, Transfers(liar)))
        yield Cluster(pairs, registry, server, Caller(hostile), liar)
