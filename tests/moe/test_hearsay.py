"""What ranks tell each other beside their rounds: that one broke the group, has left, or came later than it was due."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiote import service
from aiote.moe import MoeConfig
from aiote.testing import Fabric, run
from moe_ranks import Tokens, ranks, whole_round

HEARTBEAT = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.2, "drain_timeout": 0.1}
RAISE = MoeConfig(experts=6, top_k=2, hidden=4, tokens=5, rows=30, placement="packed")


def given(count: int = 3) -> list[Tokens]:
    """Return tokens of so many ranks."""
    return [Tokens(np.random.default_rng(rank), RAISE, 5) for rank in range(count)]


def opened(fabric: Fabric) -> Any:
    """Return what opens an engine that soon notices a lost peer."""
    return lambda: fabric.open_engine(**HEARTBEAT)


def test_only_a_rank_itself_says_that_it_broke_or_left_the_group():
    async def main(fabric: Fabric) -> None:
        async with ranks(opened(fabric), 3, RAISE) as groups, opened(fabric)() as stranger:
            for engine in (stranger, groups[1].engine):
                client = service.client(engine, groups[0].engine.address, groups[0].service)
                for rank in (-5, -2, 0, 2, 3, 77):
                    await client.left(rank, 1, [0])
                    await client.broke(rank, 1, "somebody says so")
            assert not groups[0].membership.departed
            await whole_round(groups, given())
            await client.left(1, 1, [1])
            assert list(groups[0].membership.departed) == [1]
            await client.broke(1, 1, "it says so itself")
            assert "it says so itself" in str(groups[0].membership.failure)

    run(main, 1, rails=1, limit=30)
