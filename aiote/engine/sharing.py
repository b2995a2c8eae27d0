"""The verbs of an engine for memory that it shares with peers of its host; a base of `Engine`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..transfers import Peer, SharedMemory

if TYPE_CHECKING:
    from ..core.address import Address
    from ..links import ConnectionTable

__all__ = ["SharingVerbs"]


class SharingVerbs:
    """Memory that engines of one host share."""

    _links: ConnectionTable

    async def share_memory(
        self, nbytes: int, peers: Iterable[Peer | Address | str], *, reserve: bool = True
    ) -> SharedMemory:
        """Allocate zeroed memory of `nbytes` bytes, which the named peers may map with `map_memory`.

        The kernel allocates all pages here, and no process can shrink or grow the memory. With `reserve=False` it
        allocates each page when a process first touches it; if no page is left then, it ends that process, as with any
        memory. Under strict overcommit (vm.overcommit_memory=2) all pages are allocated here in any case. A peer may
        map the memory at any time until it or this engine is closed, and may then change its bytes for as long as the
        peer lives. No file is left behind when the processes end, however they end. An address must have the identity
        of its engine. Cancelling leaves no memory. Raises UsageError, ClosedError, FabricError when the kernel has no
        memory.
        """
        return await self._links.sharing.share(nbytes, peers, reserve=reserve)

    async def map_memory(
        self, descriptor: bytes | bytearray | memoryview, *, owner: Peer | Address | None = None
    ) -> SharedMemory:
        """Map the shared memory that a peer of this host describes, readable and writable; connect to it if needed.

        `owner` refuses memory of any other engine. Several mappings of one memory are independent; a peer gets the same
        memory at most 16 times. Cancelling leaves no mapping. Raises UsageError for other bytes, where
        `Peer.shares_memory` is false, and beyond `max_mapped_bytes` or 1024 mappings of one peer; PeerError if the peer
        refuses, is lost, gives no descriptor within `connect_timeout`, or gives memory of another length or user, or
        memory that is not sealed; ClosedError; FabricError when the kernel refuses.
        """
        return await self._links.sharing.map(descriptor, owner)
