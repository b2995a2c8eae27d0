"""Ranks that share memory: whether rows of a round went over rails, and simulated hosts whose ranks share memory."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import aiote
from aiote.moe import MoeGroup
from aiote.transfers import Peer


def pairs_mapped(groups: list[MoeGroup]) -> list[list[int]]:
    """Return for each rank whose inboxes it has mapped."""
    return [sorted(group.mapped.lanes[0]) for group in groups]


def rows_from(group: MoeGroup, source: int) -> Any:
    """Return the lines that a source writes its early rows to."""
    lane = group.memory.lanes[0]
    return lane.slots[source].received if source in lane.slots else lane.received[source * group.sizes.private :]


def bytes_over_rails(groups: list[MoeGroup], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the bytes of each write from now on, without those of routes."""
    seen: list[int] = []
    for group in groups:
        posting = group.posting
        assert posting is not None
        write, pages, route = posting.post_writes, posting.post_pages, group.memory.map.route

        def post_writes(writes: Any, slot: int, write: Any = write, route: int = route) -> Any:
            seen.extend(one.nbytes for one in writes if one.nbytes != route)
            return write(writes, slot)

        def post_pages(rank: int, to: Any, at: Any, nbytes: int, slot: int, pages: Any = pages) -> Any:
            seen.append(nbytes * len(to[1]))
            return pages(rank, to, at, nbytes, slot)

        monkeypatch.setattr(posting, "post_writes", post_writes)
        monkeypatch.setattr(posting, "post_pages", post_pages)
    return seen


class Mapping:
    """Memory of another simulated engine, as that engine sees it."""

    def __init__(self, memory: aiote.SharedMemory) -> None:
        self.view = memory.view

    def close(self) -> None:
        """Keep the view: a rank that was stopped may use it for as long as it lives."""


def simulated_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all simulated engines share memory, although each is a host of its own otherwise."""
    shared: dict[bytes, aiote.SharedMemory] = {}
    share = aiote.Engine.share_memory

    async def share_memory(engine: aiote.Engine, nbytes: int, peers: Any, **how: Any) -> aiote.SharedMemory:
        memory = await share(engine, nbytes, peers, **how)
        shared[memory.descriptor] = memory
        return memory

    async def map_memory(engine: aiote.Engine, descriptor: bytes, *, owner: Any) -> Mapping:
        await anyio.sleep(1e-6)
        if shared[descriptor].closed:
            raise aiote.PeerError(str(owner), "no such memory is shared with this engine")
        return Mapping(shared[descriptor])

    monkeypatch.setattr(aiote.Engine, "share_memory", share_memory)
    monkeypatch.setattr(aiote.Engine, "map_memory", map_memory)
    monkeypatch.setattr(Peer, "shares_memory", property(lambda peer: peer.connected))
