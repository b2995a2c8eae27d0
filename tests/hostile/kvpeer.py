"""A hostile member of a KV cache's cluster: an engine as any, but for what it tells ranks and registry."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import numpy as np
from anything import Anything
from attacked import Attacked, Caller, Seed
from insiders import LyingPrefill
from victim import LIMITS, PATIENCE_S, Broken

import aiote
from aiote import service
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import RegistryError
from aiote.discovery.registry_server import RegistryServer
from aiote.kvcache import Consumer, Producer
from aiote.kvcache.protocol import Transfers
from aiote.service import frames
from aiote.service.endpoint import CallEndpoint
from engines import opened
from fuzz_discovery import KEEP, WATCH, arguments, calls
from fuzz_kvcache import kvcache_seeds
from kv_worlds import BEFORE, MODEL
from mapped_caches import Side, built, expected, fill, rows, same
from registries import member, until_told

TOKENS = 20
METHODS = {"part": "kvcache.Transfers/1.open", "fetch": "kvcache.Transfers/1.push"}


class Cluster(Attacked):
    """A prefill and a decode rank, and a registry with an honest member."""

    def __init__(
        self,
        producer: Producer,
        consumer: Consumer,
        left: Side,
        right: Side,
        registry: EmbeddedRegistry,
        server: aiote.Engine,
        caller: Caller,
        liar: LyingPrefill,
    ) -> None:
        super().__init__([producer.engine, consumer.engine], caller)
        self.liar = liar
        self.producer, self.consumer, self.left, self.right = producer, consumer, left, right
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
        for data in self._calls(rng, Anything(rng), log):
            await self.caller.send(self._server.address, data, log)

    def _calls(self, rng: random.Random, anything: Anything, log: list[str]) -> list[bytes]:
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
        """Have a request served, byte by byte, beside one to a rank that means harm, and a member come and go."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._prefill, f"honest {self.turn}")
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._ask_the_liar, f"asked of a liar {self.turn}")
                await self._decode(f"honest {self.turn}")
                beside.cancel_scope.cancel()
        await self._come_and_go()

    async def _prefill(self, name: str) -> None:
        here = rows(self.left, TOKENS, np.random.default_rng(self.turn))
        fill(self.left, here, TOKENS, self.turn)
        async with self.producer.offer(name, tokens=TOKENS, rows=here) as offer:
            for layer in self.producer.spec.layers:
                offer.computed(layer)

    async def _decode(self, name: str) -> None:
        there, (cache,) = rows(self.right, TOKENS, np.random.default_rng(~self.turn & 0xFFFF)), self.right.caches
        for memory in cache.memories:
            memory[...] = BEFORE
        place = [self.producer.engine.address]
        async with self.consumer.receive(place, name, tokens=TOKENS, rows=there) as reception:
            await reception.arrived()
        if not same(cache, expected(cache, there, TOKENS, BEFORE, self.turn)):
            raise Broken("the honest decode rank has other bytes than were computed for it")

    async def _ask_the_liar(self, name: str) -> None:
        """Ask for a request, whatever becomes of it; it is left when the honest one is there."""
        pages = rows(self.right, 1, np.random.default_rng(self.turn))
        try:
            async with self.consumer.receive([self.liar.engine.address], name, tokens=1, rows=pages) as reception:
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
            while self.producer.offers or len(self.consumer.immediates):
                await anyio.sleep(0.01)
        if scope.cancelled_caught:
            raise Broken("what a peer that has left had asked for is still held")


@asynccontextmanager
async def cluster(provider: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        left, right = built(MODEL, Side(), "prefill"), built(MODEL, Side(order="field token head"), "decode")
        one, other, server, honest, hostile, lying = [
            await stack.enter_async_context(opened(provider, **LIMITS)) for _ in range(6)
        ]
        producer = await stack.enter_async_context(Producer(one, left.caches[0], match_timeout=PATIENCE_S))
        consumer = await stack.enter_async_context(Consumer(other, right.caches[0]))
        await stack.enter_async_context(RegistryServer(server))
        registry = await stack.enter_async_context(EmbeddedRegistry(honest, [server.address]))
        liar = LyingPrefill(lying, producer.spec)
        await stack.enter_async_context(service.serve(lying, Transfers(liar)))
        yield Cluster(producer, consumer, left, right, registry, server, Caller(hostile), liar)
