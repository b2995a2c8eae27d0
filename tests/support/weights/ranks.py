"""Sources, targets and controllers of a small update, for processes of their own (`child_engine`).

Each element is a number that no other has, in no other version either: one in a wrong place is seen.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

import aiote
from aiote.weights import (
    Controller,
    Layout,
    PlanMismatchError,
    Replicate,
    Target,
    UpdateError,
    serve_source,
    serve_target,
)

SHAPE = (384, 512)
LAYOUT = Layout.over(range(2), {name: (SHAPE, "I32", Replicate()) for name in ("a", "b")})
"""Of both sides: each source has everything, and each target is a replica."""


def whole(version: int) -> dict[str, Any]:
    """Return the sources' tensors in a version."""
    size = SHAPE[0] * SHAPE[1]
    first = version * 2 * size
    return {n: np.arange(f, f + size, dtype=np.int32).reshape(SHAPE) for n, f in (("a", first), ("b", first + size))}


class Ranks:
    """What a child process is in an update."""

    def __init__(self, engine: aiote.Engine) -> None:
        self.engine = engine
        self.arrays: dict[str, Any] = {}
        self.target: Target | None = None

    async def source(self, rank: int, ready: asyncio.Event) -> None:
        self.arrays = whole(0)
        # Controllers are killed here, and the next one does not wait until all have noticed.
        async with serve_source(self.engine, LAYOUT, rank, self.arrays, controllers=lambda _: True):
            ready.set()
            await asyncio.Event().wait()

    def train(self, version: int) -> None:
        for name, array in whole(version).items():
            self.arrays[name][...] = array

    async def serve(self, rank: int, versions: Any, ready: asyncio.Event) -> None:
        self.arrays = {name: np.full(SHAPE, -1, np.int32) for name in LAYOUT.tensors}
        serving = serve_target(
            self.engine,
            LAYOUT,
            rank,
            self.arrays,
            replica=f"r{rank}",
            versions=versions,
            controllers=lambda _: True,
        )
        async with serving as self.target:
            ready.set()
            await asyncio.Event().wait()

    def look(self) -> dict[str, Any]:
        """Tell what a target has: its version, whether it is right, and a digest of all that may be written."""
        target = self.target
        assert target is not None
        right = target.version is not None and all(
            np.array_equal(self.arrays[name], values) for name, values in whole(target.version).items()
        )
        digest = hashlib.blake2b(digest_size=16)
        for memory in (target.weights, target.written):
            for name in memory.places:
                digest.update(memory.bytes_of(name))
        idle = target.current is None
        return {"version": target.version, "right": right, "idle": idle, "digest": digest.hexdigest()}

    async def update(self, sources: list[str], targets: list[str], version: int) -> dict[str, Any]:
        """Start an update, and tell which replicas have it."""
        try:
            report = await Controller(self.engine, sources, targets, limit=20.0).update(version)
        except (UpdateError, PlanMismatchError, aiote.UsageError, aiote.PeerError) as error:
            return {"committed": [], "failed": str(error)}
        return {"committed": report.committed, "failed": str(report.failed)}
