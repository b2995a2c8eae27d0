"""What a decode rank knows of prefill ranks: the session with each of a group, and what it has lent to it.

A *link* begins with the handshake. It is kept while all goes well, so that a request costs no registration. It breaks
when its peer is lost, and when what it has not confirmed to have stopped, the *quarantine*, is too large or too old:
then its leases are revoked. All requests over it fail, and once nobody can write through it they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

import aiote

from .. import service
from ..service.background import TaskScope
from .mapping import CacheMap, assign
from .protocol import Transfers
from .tensors import CacheSpec

__all__ = ["Link", "Links", "Place"]

Place = aiote.Address | aiote.Peer | str


class Reader(Protocol):
    """What a link tells those who rely on it."""

    def broken(self, reason: str) -> None: ...
    def over(self, link: Link) -> None: ...


class Link:
    """A session with one prefill rank. `memories` are its own, where this rank reads. `quarantine`: requests with so
    many pages each that it has not confirmed to have left alone.
    """

    def __init__(
        self,
        peer: aiote.Peer,
        client: Transfers,
        cache_map: CacheMap,
        leases: Sequence[aiote.Lease | None],
        start: Callable[..., None],
    ) -> None:
        self.peer, self.client, self.map = peer, client, cache_map
        self.leases = [lease for lease in leases if lease is not None]
        self.session = 0
        self.memories: list[aiote.RemoteRegion] = []
        self.reason = ""
        self.readers: set[Reader] = set()
        self.quarantine: dict[Reader, int] = {}
        self._start = start

    def end(self, reason: str) -> None:
        """Revoke the leases, and tell who relies on them. Idempotent."""
        if not self.reason:
            self.reason = reason
            for reader in tuple(self.readers):
                reader.broken(reason)
            self._start(self._revoke)

    async def _revoke(self) -> None:
        for lease in self.leases:
            lease.begin_revoking()
        for lease in self.leases:
            await lease.revoke()
        for reader in tuple(self.readers):
            reader.over(self)

    async def follow(self) -> None:
        """End it when the peer is lost."""
        self.end(await self.peer.wait_closed())


class Links:
    """The links of a decode rank, by the group of prefill ranks and by whether it reads."""

    def __init__(
        self, engine: aiote.Engine, spec: CacheSpec, regions: Sequence[aiote.Region], turn: int, scope: TaskScope
    ) -> None:
        self._engine, self._spec, self._regions, self._turn, self._scope = engine, spec, regions, turn, scope
        self._groups: dict[tuple[tuple[str, ...], bool], list[Link]] = {}
        self._locks: dict[tuple[tuple[str, ...], bool], anyio.Lock] = {}

    async def group(self, places: Sequence[Place], *, reads: bool) -> list[Link]:
        """Return a link to each of a group's ranks; made the first time, and after one has ended.

        Raises MappingError, CallError, PeerError, TransferRefused.
        """
        key = tuple(str(place.address if isinstance(place, aiote.Peer) else place) for place in places), reads
        async with self._locks.setdefault(key, anyio.Lock()):
            links = self._groups.get(key, [])
            if not links or any(link.reason or link.peer.lost for link in links):
                for link in links:
                    link.end("another link of its group has ended")
                links = self._groups[key] = await self._open(places, reads)
        return links

    async def _open(self, places: Sequence[Place], reads: bool) -> list[Link]:
        peers = [place if isinstance(place, aiote.Peer) else await self._engine.connect(place) for place in places]
        clients = [service.client(self._engine, peer, Transfers) for peer in peers]
        specs = [await client.describe() for client in clients]
        for spec in specs:
            spec.check()
        links: list[Link] = []
        try:
            # Also to those that have nothing for this rank: an offer ends when all of the decode group have come.
            parts = assign(specs, self._spec, self._turn)
            for peer, client, spec, part in zip(peers, clients, specs, parts, strict=True):
                links.append(await self._link(peer, client, CacheMap(spec, part), reads))
        except BaseException:
            for link in links:
                link.end("another rank of its group could not be opened")
            raise
        return links

    async def _link(self, peer: aiote.Peer, client: Transfers, cache_map: CacheMap, reads: bool) -> Link:
        """Lend the memories of a part to its rank, or hear of its own; and follow the peer."""
        used = set() if reads else {tensor.memory for tensor in cache_map.part.tensors}
        leases = [
            region.lease(slice(0, len(region)), peer) if number in used else None
            for number, region in enumerate(self._regions)
        ]
        link = Link(peer, client, cache_map, leases, self._scope.start)
        try:
            places = [self._spec.layers.index(layer) for layer in cache_map.layers]
            lent = [] if reads else [b"" if lease is None else lease.descriptor for lease in leases]
            opened = await client.open(cache_map.part, places, lent)
            link.session = opened.session
            link.memories = [self._engine.attach(descriptor) for descriptor in opened.memories]
        except BaseException:
            link.end("it could not be opened")
            raise
        self._scope.start(link.follow)
        return link
