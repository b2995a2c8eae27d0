"""An engine that writes to several others: what tests of prepared scatters share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import numpy as np

import aiote
from aiote import ScatterTarget
from support.engines.opening import PATIENCE_S, across, opened

SIZE = 1 << 16


@dataclass(frozen=True)
class Star:
    """An engine with a region, the engines that it writes to, and a target of the whole region at each of them."""

    hub: aiote.Engine
    others: list[aiote.Engine]
    group: aiote.PeerGroup
    source: np.ndarray
    region: aiote.Region
    memories: list[np.ndarray]
    targets: list[ScatterTarget]

    @property
    def untouched(self) -> bool:
        """Whether nothing has come anywhere."""
        return not any(memory.any() for memory in self.memories)


@asynccontextmanager
async def star(provider: str, points: int, size: int = SIZE, **settings) -> AsyncIterator[Star]:
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(PATIENCE_S))
        hub = await stack.enter_async_context(opened(provider, **settings))
        others = [await stack.enter_async_context(opened(provider, **settings)) for _ in range(points)]
        group = await hub.peer_group([other.address for other in others])
        source = np.random.default_rng(1).integers(1, 256, size, np.uint8)
        region = hub.register(source)
        memories = [np.zeros(size, np.uint8) for _ in others]
        targets = [
            ScatterTarget(region, across(hub, other, memory)) for other, memory in zip(others, memories, strict=True)
        ]
        yield Star(hub, others, group, source, region, memories, targets)
