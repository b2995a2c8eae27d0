"""Ranks that share memory: rounds of every shape, whether rows went over rails, and simulated hosts that share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest

import aiote
from aiote.moe import MoeConfig, MoeGroup
from aiote.transfers import Peer
from support.moe.ranks import SHAPES, Tokens, all_of, compute, reference, summed, whole_round

CONFIG = SHAPES["grouped direct"]
RNG = np.random.default_rng(46)
each_shape = pytest.mark.parametrize("shape", [*SHAPES, "layout rank", "summed"])
"""Those of `shaped`."""


def shaped(shape: str) -> MoeConfig:
    """Return a config."""
    if shape in SHAPES:
        return SHAPES[shape]
    one = MoeConfig(
        experts=9, top_k=4, hidden=8, tokens=7, dtype="float32", out_dtype="float32", copies="rank", reduce="expert",
        rows=90,
    )  # fmt: skip
    return one if shape == "summed" else replace(one, layout="rank", rows=None)


def given(config: MoeConfig, count: int) -> list[Tokens]:
    """Return tokens of so many ranks."""
    return [Tokens(RNG, config, config.tokens) for _ in range(count)]


async def rounds(groups: list[MoeGroup], number: int = 3) -> None:
    """Make rounds whose rows and sums are checked."""
    config = groups[0].config
    for turn in range(number):
        tokens = given(config, len(groups))
        if config.reduce == "source":
            await whole_round(groups, tokens, in_place=turn % 2 == 0)
            continue

        async def one(group: MoeGroup, own: Tokens) -> None:
            batch = await group.dispatch(own.x, own.ids, own.weights)
            out = await group.combine(batch, (summed if config.layout == "rank" else compute)(group, batch))
            assert np.allclose(out, reference(config, own), rtol=1e-4, atol=1e-4)

        await all_of(*[lambda g=g, t=t: one(g, t) for g, t in zip(groups, tokens, strict=True)])


def pairs_mapped(groups: list[MoeGroup]) -> list[list[int]]:
    """Return for each rank whose inboxes it has mapped."""
    return [sorted(group.mapped_inboxes.lanes[0]) for group in groups]


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
        await anyio.lowlevel.checkpoint()
        if shared[descriptor].closed:
            raise aiote.PeerError(str(owner), "no such memory is shared with this engine")
        return Mapping(shared[descriptor])

    monkeypatch.setattr(aiote.Engine, "share_memory", share_memory)
    monkeypatch.setattr(aiote.Engine, "map_memory", map_memory)
    monkeypatch.setattr(Peer, "shares_memory", property(lambda peer: peer.connected))
