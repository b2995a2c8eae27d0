"""Own a decode rank's links: its sessions with the prefill ranks of each group.

Memory is registered once, and every prefill rank gets the same descriptor. The connection keeps late writes out: when
`Peer.disconnect` returns, no byte of that peer moves any more, on any rail (docs/cancellation.md). A session belongs to
its connection and does not write over the next one.

A *link* begins with the handshake and is kept while its peer behaves. It ends when the peer is lost. The decode rank
also ends it, by disconnecting the peer, when the *quarantine* (the pages whose writes the peer has not confirmed to
have stopped) is too large or too old. All requests over the link then fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import anyio

import aiote

from .. import service
from ..aio import TaskScope
from ..service.endpoint import CallEndpoint
from .mapping import CacheMap, assign
from .protocol import MOST_NAMED, TransferRefused, Transfers
from .tensors import FEW_TENSORS, CacheSpec

__all__ = ["Links", "Place", "PrefillSession"]

Place = aiote.Address | aiote.Peer | str


class Reader(Protocol):
    """A request that relies on a link. `record_stop` is called once the peer has stopped writing, with any failure."""

    @property
    def request(self) -> str: ...
    def record_stop(self, link: PrefillSession, failure: str = "") -> None: ...
    def record_progress(self) -> None: ...


class PrefillSession:
    """A session with one prefill rank. `memories`: the prefill rank's, if this rank reads. `quarantine`: the number of
    pages of each request for which the peer has not confirmed its stop. `forgotten`: the prefill rank has said that it
    dropped the session.
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
        """Disconnect the peer, which ends its writes, and tell the readers that rely on the link. Idempotent."""
        self.peer.disconnect(reason)
        for reader in tuple(self.readers):
            self.readers.discard(reader)
            reader.record_stop(self, self.peer.reason)

    @property
    def is_over(self) -> bool:
        """Whether the next request needs a new link."""
        return self.peer.lost or self.forgotten

    async def end_when_lost(self) -> None:
        """Wait until the peer is lost, then end the link."""
        self.end(await self.peer.wait_closed())

    async def hear_progress(self, interval: float) -> None:
        """Tell readers that the rank says are not stuck: one message every `interval` seconds for all of them."""
        # An error of the rank ends only this listening; it must not end the requests of other ranks.
        with suppress(aiote.AioteError):
            async for requests in self.client.moving(self.session, interval):
                named = set(requests)
                for reader in [reader for reader in self.readers if reader.request in named]:
                    reader.record_progress()


class Links:
    """The links of a decode rank, by group of prefill ranks and by whether this rank reads."""

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
        self._groups: dict[tuple[tuple[str, ...], bool], list[PrefillSession]] = {}
        self._locks: dict[tuple[tuple[str, ...], bool], anyio.Lock] = {}

    async def group(self, places: Sequence[Place], *, reads: bool) -> list[PrefillSession]:
        """Return a link to each rank of a group; make the links the first time, and again after one has ended.

        Raises MappingError, CallError, PeerError, TransferRefused.
        """
        key = tuple(str(place.address if isinstance(place, aiote.Peer) else place) for place in places), reads
        if (known := self._groups.get(key)) and not any(link.is_over for link in known):
            return known
        with anyio.move_on_after(self._limit):
            async with self._locks.setdefault(key, anyio.Lock()):
                links = self._groups.get(key, [])
                if not links or any(link.is_over for link in links):
                    self._forget()
                    links = self._groups[key] = await self._open(places, reads)
            return links
        raise TransferRefused(f"the handshake with {', '.join(key[0])} did not end within {self._limit} s")

    def _forget(self) -> None:
        """Drop the groups with a link that is over: if their ranks were replaced, they are not asked for again."""
        for key in [key for key, links in self._groups.items() if any(link.is_over for link in links)]:
            del self._groups[key]
            if not self._locks[key].locked():
                del self._locks[key]

    async def _open(self, places: Sequence[Place], reads: bool) -> list[PrefillSession]:
        peers = [await self._peer(place) for place in places]
        clients = [service.client(self._engine, peer, Transfers) for peer in peers]
        specs = [await client.describe() for client in clients]
        # Open a session also with ranks whose part is empty: an offer ends when all ranks of the decode group came.
        if sum(len(spec.tensors) for spec in specs) > FEW_TENSORS:
            maps = await CallEndpoint.of(self._engine).in_thread(self._mapped, specs)
        else:
            maps = self._mapped(specs)
        links = [
            await self._link(peer, client, cache_map, reads)
            for peer, client, cache_map in zip(peers, clients, maps, strict=True)
        ]
        # Start the tasks only when all ranks have agreed, so that a refusal leaves no task to end.
        for link in links:
            self._scope.start(link.end_when_lost)
            if self._limit < math.inf:
                self._scope.start(link.hear_progress, self._limit / 4)
        return links

    def _mapped(self, specs: Sequence[CacheSpec]) -> list[CacheMap]:
        """Map the caches of a group's ranks onto parts of the own cache. Raises MappingError, TransferRefused."""
        try:
            for spec in specs:
                spec.check()
        except aiote.UsageError as error:
            raise TransferRefused(f"a prefill rank describes an impossible cache: {error}") from None
        parts = assign(specs, self._spec, self._turn)
        return [CacheMap(spec, part) for spec, part in zip(specs, parts, strict=True)]

    async def renew(self, place: Place, requests: Sequence[str]) -> None:
        """Tell a prefill rank that requests are still wanted. Raises PeerError, CallError."""
        client = service.client(self._engine, await self._peer(place), Transfers)
        for start in range(0, len(requests), MOST_NAMED):
            await client.renew(list(requests[start : start + MOST_NAMED]))

    async def _peer(self, place: Place) -> aiote.Peer:
        """Return the peer at a place; connect again if it is lost, because a lost Peer never comes back."""
        if isinstance(place, aiote.Peer):
            return await self._engine.connect(place.address) if place.lost else place
        return await self._engine.connect(place)

    async def _link(self, peer: aiote.Peer, client: Transfers, cache_map: CacheMap, reads: bool) -> PrefillSession:
        """Open a session. If the prefill rank writes, send it the memories of its part; else get its memories."""
        used = {tensor.memory for tensor in cache_map.part.tensors}
        memories = [region.descriptor if number in used else b"" for number, region in enumerate(self._regions)]
        places = [self._spec.layers.index(layer) for layer in cache_map.layers]
        opened = await client.open(cache_map.part, places, [] if reads else memories)
        # Each pull holds a slot of the service until it is finished, and the call `finish` takes another slot.
        link = PrefillSession(peer, client, cache_map, max(1, CallEndpoint.of(self._engine).limits.slots // 2))
        link.session = opened.session
        link.memories = self._to_read(peer, cache_map.source, opened.memories) if reads else []
        return link

    def _to_read(self, peer: aiote.Peer, spec: CacheSpec, descriptors: list[bytes]) -> list[aiote.RemoteRegion]:
        """Return a prefill rank's memories. Raises TransferRefused if one is not its own, not readable or too short."""
        if len(descriptors) != len(spec.memories):
            raise TransferRefused(
                f"{spec.name} lends {len(descriptors)} memories of its cache, expected {len(spec.memories)}"
            )
        try:
            return [
                self._engine.attach(descriptor, owner=peer, access="read", nbytes=nbytes)
                for descriptor, nbytes in zip(descriptors, spec.memories, strict=True)
            ]
        except aiote.UsageError as error:
            raise TransferRefused(f"{spec.name} lends no memory of its cache to read: {error}") from None
