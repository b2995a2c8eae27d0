"""The memory that sources write to while a target's weights stay whole: `versions="shadow"`.

Sources on the target's host map it and copy into it (`mapped`), so a byte is copied once on its way here. Others write
to it by leases. A lease can be revoked, a mapping cannot: whoever has mapped the memory may change it for as long as
its process lives. So the memory is replaced before an update if the last one failed, or if other sources may map it
than before. Within an update every source may write to all of the shadow, by a lease as well as by a mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import anyio
import numpy as np

import aiote

from ..aio import run_shielded
from .rank_memory import RankArrays, in_thread

__all__ = ["Shadow"]

CONNECT_S = 1.0
"""How long an update waits until it is connected to the sources of this host; others are reached by leases."""
MOST_CONNECTED = 64
"""To how many sources an update connects at most. A source that writes connects itself, so the next update knows it."""


class Shadow:
    """A second memory for all tensors of a target. It begins as a copy of the weights, because a commit also copies
    padding, which updates do not write. With `shares` the sources of this host may map it.
    """

    def __init__(self, engine: aiote.Engine, weights: RankArrays, *, shares: bool) -> None:
        self._engine, self._weights, self._shares = engine, weights, shares
        self.arrays = RankArrays.allocated(weights.layout, weights.rank, weights.tied())
        self.nbytes = self.arrays.nbytes
        self._memory: aiote.SharedMemory | None = None
        self._sharers: frozenset[aiote.Address] | None = frozenset()
        self._stale = False  # whether an update writes to it, or failed after it may have written to it
        weights.copy_to(self.arrays)

    @property
    def descriptor(self) -> bytes:
        """The descriptor for the sources that map it; empty if it is not shared."""
        return b"" if self._memory is None else self._memory.descriptor

    async def prepare(self, sources: Sequence[str]) -> None:
        """Bring it to the state of the weights for an update of these sources, and share it with those of this host.

        From then on it counts as written to, until `install`. A cancellation takes effect afterwards. Raises
        FabricError if the memory cannot be registered.
        """
        sharers = await self._on_this_host(sources) if self._shares else frozenset()
        if sharers != self._sharers or (self._stale and self._memory is not None):
            await run_shielded(functools.partial(self._replace, sharers))
        elif self._stale:
            copy = functools.partial(self._weights.copy_to, self.arrays)
            await run_shielded(functools.partial(in_thread, self.nbytes, copy))
        self._stale = True

    async def install(self, names: Iterable[str]) -> None:
        """Copy these tensors into the weights. After an interruption, call it again."""
        await in_thread(self.nbytes, functools.partial(self.arrays.copy_to, self._weights, names))
        self._stale = False

    async def close(self) -> None:
        """End the registration and release the memory. Idempotent."""
        await self.arrays.close()
        self.arrays.drop()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    async def _on_this_host(self, sources: Sequence[str]) -> frozenset[aiote.Address]:
        """Return the sources that can map this engine's memory; connect to those whose address names this host."""
        addresses = [aiote.Address.parse(source) for source in sources]

        async def connect(address: aiote.Address) -> None:
            try:
                await self._engine.connect(address)
            except aiote.AioteError:
                # The source connects itself when it writes; its part of the update succeeds or fails there.
                return

        here = self._engine.address.host
        unknown = [one for one in addresses if one.host == here and self._engine.find_peer(one) is None]
        with anyio.move_on_after(CONNECT_S):
            async with anyio.create_task_group() as group:
                for address in unknown[:MOST_CONNECTED]:
                    group.start_soon(connect, address)
        peers = map(self._engine.find_peer, addresses)
        return frozenset(one.address for one in peers if one is not None and one.shares_memory)

    async def _replace(self, sharers: frozenset[aiote.Address]) -> None:
        """Give the memory up before other memory is allocated, because there may be no room for both."""
        self._sharers = None
        await self.close()
        memory = await self._allocate(sharers)
        try:
            whole = None if memory is None else np.frombuffer(memory.view, np.uint8)
            weights = self._weights
            arrays = RankArrays.allocated(weights.layout, weights.rank, weights.tied(), whole)
            await in_thread(self.nbytes, functools.partial(self._weights.copy_to, arrays))
            await arrays.register(self._engine, "write")
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        self.arrays, self._memory, self._sharers = arrays, memory, sharers

    async def _allocate(self, sharers: frozenset[aiote.Address]) -> aiote.SharedMemory | None:
        """Return memory that these sources may map; None if there are none, or if the kernel has no such memory."""
        try:
            return await self._engine.share_memory(self.nbytes, sharers) if sharers else None
        except aiote.FabricError:
            return None
