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
from aiote.service.mailroom import Mailroom
from engines import opened
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
        self._seeds = kvcache_seeds()

    async def attack(self, rng: random.Random, log: list[str]) -> None:
        """Send a few messages, some of them right."""
        anything = Anything(rng)
        targets = [self.deployment.prefill[0].engine, self.deployment.decode[0].engine, self._server]
        for _ in range(rng.randint(1, 12)):
            target = rng.randrange(3)
            for data in self._messages(rng, anything, "registry" if target == 2 else "transfer", log):
                with anyio.move_on_after(1):
                    try:
                        await self.hostile.send(targets[target].address, data)
                    except aiote.AioteError as error:
                        log.append(f"{type(error).__name__} right")
                        return

    def _messages(self, rng: random.Random, anything: Anything, what: str, log: list[str]) -> list[bytes]:
        name, seed = rng.choice(sorted(self._seeds[what].items()))
        way = rng.choice(("right", "damaged", "bytes", "parts"))
        log.append(f"{what} {name} {way}")
        if way == "bytes":
            return [bytes((rng.choice((*KINDS, 0xE0, 0xE1, rng.randrange(256))),)) + anything.bytes(4096)]
        data = seed if way == "right" else anything.damaged(seed)
        if what == "registry":
            return [data]
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
        mailroom = await stack.enter_async_context(Mailroom(server))
        await stack.enter_async_context(RegistryServer(mailroom))
        honest = await stack.enter_async_context(opened(provider, **LIMITS))
        post = await stack.enter_async_context(Mailroom(honest))
        registry = await stack.enter_async_context(EmbeddedRegistry(post, [server.address]))
        hostile = await stack.enter_async_context(opened(provider, **LIMITS))
        yield Cluster(deployment, registry, server, hostile)
