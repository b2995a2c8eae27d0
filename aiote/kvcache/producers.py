"""What a decode rank knows of prefill ranks: the session with each of a group.

Memory is registered once, and every prefill rank gets the same descriptor. What keeps late writes out is the
connection: when `Peer.disconnect` returns, no byte of that peer's moves any more, on any rail (docs/cancellation.md),
and a session, which is the connection's, writes nothing over the next one.

A *link* begins with the handshake and is kept while all goes well. It ends when its peer is lost, and when what that
has not confirmed to have stopped, the *quarantine*, is too large or too old: then it is disconnected. All requests over
it fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import anyio

import aiote

from .. import service
from ..service.background import TaskScope
from ..service.endpoint import Endpoint
from .mapping import CacheMap, assign
from .protocol import MOST_RENEWED, TransferRefused, Transfers
from .tensors import CacheSpec

__all__ = ["Link", "Links", "Place"]

Place = aiote.Address | aiote.Peer | str


class Reader(Protocol):
    """Who relies on a link, and hears once that nothing is written over it any more, and why if that is a failure."""

    @property
    def request(self) -> str: ...
    def over(self, link: Link, failure: str = "") -> None: ...
    def heard(self) -> None: ...


class Link:
    """A session with one prefill rank. `memories` are its own, where this rank reads. `quarantine`: requests with so
    many pages each that it has not confirmed to have left alone. `forgotten`: the rank has said that it has no such
    session any more.
    """

    def __init__(self, peer: aiote.Peer, client: Transfers, cache_map: CacheMap, most_pulls: int) -> None:
        self.peer, self.client, self.map = peer, client, cache_map
        self.session = 0
        self.forgotten = False
        self.memories: list[aiote.RemoteRegion] = []
        self.readers: set[Reader] = set()
        self.quarantine: dict[Reader, int] = {}
        self.pulls = anyio.Semaphore(most_pulls)

    def end(self, reason: str) -> None:
        """Disconnect the peer, which then writes nothing more, and tell who relies on it. Idempotent."""
        self.peer.disconnect(reason)
        for reader in tuple(self.readers):
            self.readers.discard(reader)
            reader.over(self, self.peer.reason)

    @property
    def over(self) -> bool:
        """Whether the next request needs another one."""
        return self.peer.lost or self.forgotten

    async def follow(self) -> None:
        """End it when the peer is lost."""
        self.end(await self.peer.wait_closed())

    async def listen(self, interval: float) -> None:
        """Pass on which requests the rank says are not stuck: one message every so many seconds, for all of them."""
        # Whatever the rank says or does: it ends what is heard of it, and nobody else's requests.
        with suppress(aiote.AioteError):
            async for requests in self.client.moving(self.session, interval):
                named = set(requests)
                for reader in [reader for reader in self.readers if reader.request in named]:
                    reader.heard()


class Links:
    """The links of a decode rank, by the group of prefill ranks and by whether it reads."""

    def __init__(
        self,
        engine: aiote.Engine,
        spec: CacheSpec,
        regions: Sequence[aiote.Region],
        turn: int,
        scope: TaskScope,
        limit: float,
    ) -> None:
        self._limit = limit
        self._engine, self._spec, self._regions, self._turn, self._scope = engine, spec, regions, turn, scope
        self._groups: dict[tuple[tuple[str, ...], bool], list[Link]] = {}
        self._locks: dict[tuple[tuple[str, ...], bool], anyio.Lock] = {}

    async def group(self, places: Sequence[Place], *, reads: bool) -> list[Link]:
        """Return a link to each of a group's ranks; made the first time, and after one has ended.

        Raises MappingError, CallError, PeerError, TransferRefused.
        """
        key = tuple(str(place.address if isinstance(place, aiote.Peer) else place) for place in places), reads
        if (known := self._groups.get(key)) and not any(link.over for link in known):
            return known
        with anyio.move_on_after(self._limit):
            async with self._locks.setdefault(key, anyio.Lock()):
                links = self._groups.get(key, [])
                if not links or any(link.over for link in links):
                    self._forget()
                    links = self._groups[key] = await self._open(places, reads)
            return links
        raise TransferRefused(f"the handshake with {', '.join(key[0])} has not ended within {self._limit} s")

    def _forget(self) -> None:
        """Drop the groups of which a link is over: of ranks that were replaced nobody asks again."""
        for key in [key for key, links in self._groups.items() if any(link.over for link in links)]:
            del self._groups[key]
            if not self._locks[key].locked():
                del self._locks[key]

    async def _open(self, places: Sequence[Place], reads: bool) -> list[Link]:
        peers = [await self._peer(place) for place in places]
        clients = [service.client(self._engine, peer, Transfers) for peer in peers]
        specs = [await client.describe() for client in clients]
        try:
            for spec in specs:
                spec.check()
        except aiote.UsageError as error:
            raise TransferRefused(f"a prefill rank describes a cache that cannot be: {error}") from None
        # Also to those that have nothing for this rank: an offer ends when all of the decode group have come.
        parts = assign(specs, self._spec, self._turn)
        links = [
            await self._link(peer, client, CacheMap(spec, part), reads)
            for peer, client, spec, part in zip(peers, clients, specs, parts, strict=True)
        ]
        # Only when all ranks have agreed: a refusal by one leaves no task to end.
        for link in links:
            self._scope.start(link.follow)
            if self._limit < math.inf:
                self._scope.start(link.listen, self._limit / 4)
        return links

    async def renew(self, place: Place, requests: Sequence[str]) -> None:
        """Tell a rank that requests are still wanted. Raises PeerError, CallError."""
        client = service.client(self._engine, await self._peer(place), Transfers)
        for start in range(0, len(requests), MOST_RENEWED):
            await client.renew(list(requests[start : start + MOST_RENEWED]))

    async def _peer(self, place: Place) -> aiote.Peer:
        """Return the peer at a place: a lost one never comes back, another takes its place."""
        if isinstance(place, aiote.Peer):
            return await self._engine.connect(place.address) if place.lost else place
        return await self._engine.connect(place)

    async def _link(self, peer: aiote.Peer, client: Transfers, cache_map: CacheMap, reads: bool) -> Link:
        """Open a session: the rank hears of the memories that its part lies in, or this one of the rank's."""
        used = {tensor.memory for tensor in cache_map.part.tensors}
        memories = [region.descriptor if number in used else b"" for number, region in enumerate(self._regions)]
        places = [self._spec.layers.index(layer) for layer in cache_map.layers]
        opened = await client.open(cache_map.part, places, [] if reads else memories)
        # Each holds a slot of the service until it is finished, which takes one more.
        link = Link(peer, client, cache_map, max(1, Endpoint.of(self._engine).limits.slots // 2))
        link.session = opened.session
        link.memories = self._to_read(peer, cache_map.source, opened.memories) if reads else []
        return link

    def _to_read(self, peer: aiote.Peer, spec: CacheSpec, descriptors: list[bytes]) -> list[aiote.RemoteRegion]:
        """Return a prefill rank's memories. Raises TransferRefused for what is none of its own."""
        if len(descriptors) != len(spec.memories):
            raise TransferRefused(f"{spec.name} gives {len(descriptors)} memories of its cache to read")
        try:
            return [
                self._engine.attach(descriptor, owner=peer, access="read", nbytes=nbytes)
                for descriptor, nbytes in zip(descriptors, spec.memories, strict=True)
            ]
        except aiote.UsageError as error:
            raise TransferRefused(f"{spec.name} gives no memory of its cache to read: {error}") from None
