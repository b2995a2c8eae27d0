"""Ranks of one host: a rank writes rows and results straight into the inbox of another, which both have mapped.

With on_loss="raise" a rank's inbox lies in memory that the engine shares with the other members (`memory.RankMemory`).
With "mask" each of them maps a slot of its own. A rank copies rows and results into what it has mapped, one copy each,
and then sends an immediate without bytes, which counts as the write of all these rows would. Routes go over the rails.
Each route says whether its sender writes to the receiver in this way, so that the receiver knows how many counts to
expect. The ranks need no other agreement.

A rank trusts shared memory no more than bytes from a rail. Every rank that has mapped it may change it at any time.
So a rank derives no place, count or length from it without a copy, which it checks first. A mapping cannot be revoked
as a lease can. So each epoch has memory of its own: a rank of an earlier epoch, perhaps one that was stopped and
replaced, stores into memory that no rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import numpy as np

import aiote

from .config import Sizes
from .memory import InboxLane, LaneMap, SlotLane
from .wire import words_of_bits

__all__ = ["MappedInboxes"]


class MappedInboxes:
    """The inboxes of other ranks that this rank has mapped, in one epoch."""

    def __init__(self, sizes: Sizes, where: LaneMap) -> None:
        self._sizes, self._where = sizes, where
        self._memories: list[aiote.SharedMemory] = []
        self.lanes: list[dict[int, InboxLane | SlotLane]] = [{} for _ in range(sizes.config.lanes)]
        """For each lane, the inboxes by rank."""
        self.rank_bits = np.zeros(words_of_bits(sizes.ranks), np.uint32)
        """A bit for each rank whose inbox is mapped, as routes have it."""

    async def map(self, engine: aiote.Engine, peers: Mapping[int, aiote.Peer], lent: Mapping[int, bytes]) -> None:
        """Map the inboxes that descriptors describe, by rank; without one that cannot be mapped, rails are used.

        All are mapped at the same time, so that ranks that do not answer cost one `connect_timeout` together.
        Cancelling leaves what is mapped to `close`.
        """
        async with anyio.create_task_group() as tasks:
            for rank, descriptor in lent.items():
                if descriptor:
                    tasks.start_soon(self._map, engine, rank, peers[rank], descriptor)

    async def _map(self, engine: aiote.Engine, rank: int, owner: aiote.Peer, descriptor: bytes) -> None:
        try:
            memory = await engine.map_memory(descriptor, owner=owner)
        except aiote.AioteError:
            # The rank did not name this one or does not answer, or one of the two may map no more: rails serve as well.
            # If this engine is closed, they say so.
            return
        self._memories.append(memory)
        self._add(rank, memory)

    def _add(self, rank: int, memory: aiote.SharedMemory) -> None:
        length, inbox = self._where.mapped_bytes, np.frombuffer(memory.view, np.uint8)
        if len(inbox) != length * len(self.lanes):
            return
        kind = SlotLane if self._sizes.has_own_slots else InboxLane
        for number, lane in enumerate(self.lanes):
            lane[rank] = kind(self._sizes, self._where, inbox[number * length : (number + 1) * length])
        self.rank_bits[rank // 32] |= 1 << rank % 32

    def close(self) -> None:
        """Write to no inbox in this way any more, and unmap all of them. Idempotent."""
        self.rank_bits[...] = 0
        for lane in self.lanes:
            lane.clear()
        while self._memories:
            self._memories.pop().close()
