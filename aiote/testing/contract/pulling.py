"""Ways to lose a rail of the first engine for the check `pulled-rail`: by the engine, or by the simulated network.

`aiote prove` has a third one: it takes a network interface down.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from .far import NotHere
from .pair import EnginePair, RailPull

if TYPE_CHECKING:
    from ..fabric import Fabric

__all__ = ["pulled_by_engine", "pulled_in_fabric"]


@contextlib.asynccontextmanager
async def pulled_by_engine(world: EnginePair) -> AsyncIterator[str]:
    """Have the first engine give up its first rail as if that had broken; the engine opens it again by itself.

    Raises NotHere if the engines have no second rail, or share memory.
    """
    peer: Any = await world.left.connect(world.address)
    session, link = peer._connection.session, peer._connection.link
    if any(rail.provider == "local" for rail in world.left.rails):
        raise NotHere("shared memory is lost only with the process that shares it, as in killed-peer")
    if session.channels is None or len(world.left.rails) < 2:
        raise NotHere("a rail can be lost only if each engine has two; name two on each side")
    session.rail_failed(link, 0, "pulled by a check of the contract", -1)
    yield "the engine gave a rail up by itself, and no link was taken down"


def pulled_in_fabric(fabric: Fabric) -> RailPull:
    """Return a pull that kills the last NIC of the first engine, and restores it."""

    @contextlib.asynccontextmanager
    async def pulled(world: EnginePair) -> AsyncIterator[str]:
        rail = len(world.left.rails) - 1
        fabric.kill_rail(world.left, rail)
        try:
            yield "a simulated NIC broke"
        finally:
            fabric.restore_rail(world.left, rail)

    return pulled
