"""A hostile member of a KV cache's cluster: an engine as any, but for what it tells decoder, prefiller and registry."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
from anything import Anything
from victim import LIMITS, PATIENCE_S, Broken

import aiote
from aiote.discovery.embedded import EmbeddedRegistry
from aiote.discovery.membership import RegistryError
from aiote.discovery.server import RegistryServer
from aiote.kvcache import transferwire
from aiote.service.frames import Call, Hello, pack
from engines import opened
from fuzz_discovery import KEEP, WATCH, arguments, calls
from fuzz_kvcache import kvcache_seeds
from kvcaches import Deployment, deployed, until_idle
from registries import member, until_told

TOKENS = list(range(40, 59))
KINDS = (transferwire.TO_PREFILLER, transferwire.TO_DECODER)


class Cluster:
    """What is attacked: a decoder, a prefiller, a registry with an honest member; and who attacks."""

    def __init__(self, deployment: Deployment, registry: EmbeddedRegistry, server: aiote.Engine, hostile: aiote.Engine):
        self.deployment = deployment
        self.hostile = hostile
        self._registry = registry
        self._server = server
        self._turn = 0
        self._seeds = kvcache_seeds()["transfer"]
        self._generation = 0

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        """Send a few messages, some of them right."""
        anything = Anything(rng)
        targets = [self.deployment.prefill[0].engine, self.deployment.decode[0].engine, self._server]
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
        frames: list[Call | Hello] = [Hello(1, True, 16384, 64, 16, 1000)]
        for slot, body in enumerate(bodies):
            # The numbers go on from attack to attack: a call that comes once more would only be disconnected.
            self._generation += 1
            method = WATCH if way == "watches" else KEEP
            frames.append(Call(slot, self._generation, method.name, 0.0, body, []))
        data = pack(frames)
        return [anything.damaged(data) if rng.random() < 0.1 else data]

    def _messages(self, rng: random.Random, anything: Anything, log: list[str]) -> list[bytes]:
        name, seed = rng.choice(sorted(self._seeds.items()))
        way = rng.choice(("right", "damaged", "bytes", "parts"))
        log.append(f"transfer {name} {way}")
        if way == "bytes":
            return [bytes((rng.choice((*KINDS, rng.randrange(256))),)) + anything.bytes(4096)]
        data = seed if way == "right" else anything.damaged(seed)
        try:
            frames = list(transferwire.frames(data, anything.number()))
        except Exception:  # too long for one message, which an honest sender would not make
            return [data[:4096]]
        if way == "parts":
            rng.shuffle(frames)
            frames = [anything.damaged(frame) if rng.random() < 0.3 else frame for frame in frames[: rng.randint(1, 4)]]
        return frames

    async def check(self) -> None:
        """See that a request is served, byte by byte, and that a member comes and goes."""
        with anyio.move_on_after(PATIENCE_S) as scope:
            (decode,) = self.deployment.decode
            async with decode.decoder.request(TOKENS, self.deployment.group) as slot:
                await slot.arrived()
                decode.check(slot)
            await self._come_and_go()
        if scope.cancelled_caught:
            raise Broken(f"the honest members were not served within {PATIENCE_S} s")

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
            for rank in (*self.deployment.prefill, *self.deployment.decode):
                while self.hostile.address in [peer.address for peer in rank.engine.peers]:
                    await anyio.sleep(0.01)
            await until_idle(self.deployment)
        if scope.cancelled_caught:
            raise Broken("what a peer that has left had asked for is still held")


@asynccontextmanager
async def cluster(provider: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(deployed(provider, stall_limit=PATIENCE_S))
        server = await stack.enter_async_context(opened(provider, **LIMITS))
        await stack.enter_async_context(RegistryServer(server))
        honest = await stack.enter_async_context(opened(provider, **LIMITS))
        registry = await stack.enter_async_context(EmbeddedRegistry(honest, [server.address]))
        hostile = await stack.enter_async_context(opened(provider, **LIMITS))
        yield Cluster(deployment, registry, server, hostile)
