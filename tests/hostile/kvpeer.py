"""A hostile member of a KV cache's cluster: an engine as any, but for what it tells ranks and registry."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import numpy as np
from anything import Anything
from victim import LIMITS, PATIENCE_S, Broken

import aiote
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import RegistryError
from aiote.discovery.registry_server import RegistryServer
from aiote.kvcache import Consumer, Producer
from aiote.service import frames
from aiote.service.endpoint import Endpoint
from engines import opened
from fuzz_discovery import KEEP, WATCH, arguments, calls
from fuzz_kvcache import kvcache_seeds
from kv_worlds import BEFORE, MODEL
from mapped_caches import Side, built, expected, fill, rows, same
from registries import member, until_told

TOKENS = 20
METHODS = {"part": "kvcache.Transfers/1.open", "fetch": "kvcache.Transfers/1.push"}
KINDS = (frames.MAGIC[0], 0xE0, 0xE1)


class Cluster:
    """What is attacked: a prefill and a decode rank, a registry with an honest member; and who attacks."""

    def __init__(
        self,
        producer: Producer,
        consumer: Consumer,
        left: Side,
        right: Side,
        registry: EmbeddedRegistry,
        server: aiote.Engine,
        hostile: aiote.Engine,
    ) -> None:
        self.producer, self.consumer, self.left, self.right = producer, consumer, left, right
        self.hostile = hostile
        self._registry = registry
        self._server = server
        self._turn = self._generation = 0
        self._seeds = [
            (METHODS[call], name, body) for call, found in kvcache_seeds().items() for name, body in found.items()
        ]

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        """Send a few messages, some of them right."""
        anything = Anything(rng)
        targets = [self.producer.engine, self.consumer.engine, self._server]
        for _ in range(rng.randint(1, 12)):
            target = rng.randrange(3)
            for data in (self._calls if target == 2 else self._messages)(rng, anything, log):
                with anyio.move_on_after(1):
                    try:
                        await self.hostile.send(targets[target].address, data)
                    except aiote.AioteError as error:
                        log.append(f"{type(error).__name__} right")
                        return

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
            # The numbers go on from attack to attack: a call that comes once more would only be disconnected.
            self._generation += 1
            method = WATCH if way == "watches" else KEEP
            said.append(frames.CallFrame(slot, self._generation, method.name, 0.0, body, []))
        data = frames.pack(said)
        return [anything.damaged(data) if rng.random() < 0.1 else data]

    def _messages(self, rng: random.Random, anything: Anything, log: list[str]) -> list[bytes]:
        """Say something to a prefill or a decode rank: a call, and what may belong to it."""
        method, name, seed = rng.choice(self._seeds)
        way = rng.choice(("right", "damaged", "bytes", "calls"))
        log.append(f"{method} {name} {way}")
        if way == "bytes":
            return [bytes((rng.choice((*KINDS, rng.randrange(256))),)) + anything.bytes(4096)]
        said = self._frames(rng, method, seed if way == "right" else anything.damaged(seed))
        if way == "calls":
            rng.shuffle(said)
            return [anything.damaged(frames.pack([one])) if rng.random() < 0.3 else frames.pack([one]) for one in said]
        return [frames.pack(said)]

    def _frames(self, rng: random.Random, method: str, body: bytes) -> list[frames.Frame]:
        """Return a greeting, a call, and what may belong to it."""
        self._generation += 1
        slot, generation = rng.randrange(4), self._generation
        call = frames.CallFrame(slot, generation, method, 0.0, body, [])
        more: list[frames.Frame] = [
            frames.Cancel(slot, generation),
            frames.Credit(slot, generation, rng.randrange(3)),
            frames.Items(slot, generation, 0, [body[:100]], []),
            frames.End(slot, generation, rng.randrange(8), body[:100], []),
        ]
        return [frames.HelloFrame(frames.VERSION, True, 16384, 64, 8, 4096), call, *rng.sample(more, rng.randrange(3))]

    async def check(self) -> None:
        """See that a request is served, byte by byte, and that a member comes and goes."""
        with anyio.move_on_after(PATIENCE_S) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._prefill, f"honest {self._turn}")
                await self._decode(f"honest {self._turn}")
            await self._come_and_go()
        if scope.cancelled_caught:
            raise Broken(f"the honest members were not served within {PATIENCE_S} s")

    async def _prefill(self, name: str) -> None:
        here = rows(self.left, TOKENS, np.random.default_rng(self._turn))
        fill(self.left, here, TOKENS, self._turn)
        async with self.producer.offer(name, tokens=TOKENS, rows=here) as offer:
            for layer in self.producer.spec.layers:
                offer.computed(layer)

    async def _decode(self, name: str) -> None:
        there, (cache,) = rows(self.right, TOKENS, np.random.default_rng(~self._turn & 0xFFFF)), self.right.caches
        for memory in cache.memories:
            memory[...] = BEFORE
        place = [self.producer.engine.address]
        async with self.consumer.receive(place, name, tokens=TOKENS, rows=there) as reception:
            await reception.arrived()
        if not same(cache, expected(cache, there, TOKENS, BEFORE, self._turn)):
            raise Broken("the honest decode rank has other bytes than were computed for it")

    async def _come_and_go(self) -> None:
        self._turn += 1
        name = f"honest-{self._turn}"
        try:
            events = self._registry.watch()
            async with self._registry.join(member(name)):
                await until_told(events, ("joined", name))
            await until_told(events, ("left", name))
        except RegistryError as error:
            raise Broken(f"the registry does not serve: {error}") from error

    async def at_rest(self) -> None:
        """See that nothing is kept of what the hostile one asked for, once it is gone."""
        await self.hostile.aclose()
        with anyio.move_on_after(PATIENCE_S) as scope:
            for engine in (self.producer.engine, self.consumer.engine):
                while self.hostile.address in [peer.address for peer in engine.peers]:
                    await anyio.sleep(0.01)
                while any(link.calls or link.running for link in Endpoint.of(engine)._links.values()):
                    await anyio.sleep(0.01)
            while self.producer.offers or len(self.consumer.immediates):
                await anyio.sleep(0.01)
        if scope.cancelled_caught:
            raise Broken("what a peer that has left had asked for is still held")


@asynccontextmanager
async def cluster(provider: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        left, right = built(MODEL, Side(), "prefill"), built(MODEL, Side(order="field token head"), "decode")
        one, other, server, honest, hostile = [
            await stack.enter_async_context(opened(provider, **LIMITS)) for _ in range(5)
        ]
        producer = await stack.enter_async_context(Producer(one, left.caches[0], match_timeout=PATIENCE_S))
        consumer = await stack.enter_async_context(Consumer(other, right.caches[0]))
        await stack.enter_async_context(RegistryServer(server))
        registry = await stack.enter_async_context(EmbeddedRegistry(honest, [server.address]))
        yield Cluster(producer, consumer, left, right, registry, server, hostile)
