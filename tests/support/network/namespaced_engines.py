"""Two engines in network namespaces that cables join: cable 0 carries the control connection, the others are rails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from support.engines.opening import LOST_SOON, PATIENCE_S
from support.machine import SLOWER
from support.network.namespaces import Network, end_of
from support.process.children import Child

SIZE = 8 << 20
PIECE = 1 << 18
ONCE = SIZE // PIECE
WRITES = 3 * ONCE
RAILS = 3
CONFIG = {"cluster_key": b"a secret of sixteen", **LOST_SOON}
Ends = tuple[Network, Child, Child]


@asynccontextmanager
async def opened(
    network: Network, processes: tuple[Child, Child], rails: int = RAILS, provider: str = "tcp"
) -> AsyncIterator[Ends]:
    """Open an engine on each side, with a rail for each of the cables 1 to `rails`."""
    with anyio.fail_after(PATIENCE_S * SLOWER):
        await network.heal()
        for side, child in enumerate(processes):
            names = [end_of(1 + number, side) for number in range(rails)]
            await child.open(provider, SIZE, rails=names, host=end_of(0, side), **CONFIG)
        await processes[0].ask("connect", address=str(processes[1].address))
        yield network, *processes


async def pour(near: Child, far: Child, imm: int, writes: int = WRITES) -> None:
    """Write everything, and see that it is there and was counted exactly."""
    near.tell("pour", descriptor=far.descriptor.hex(), imm=imm, size=PIECE, count=writes, window=8)
    far.tell("poured", imm=imm, count=writes)
    there = await far.answer()
    sent = await near.answer()
    assert there == {"digest": sent["digest"], "left": 0}
