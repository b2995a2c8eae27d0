"""Updates in virtual time, in which sources, targets and controllers are killed, cancelled and replaced at random.

What must hold: nothing hangs; a `shadow` target has one version, whole, at any time; no version runs backwards; nothing
is written once a target has ended an update; a new rank has no version until one was committed there.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import pytest

import aiote
from aiote.testing import Fabric, run
from aiote.weights import (
    Controller,
    Layout,
    PlanMismatchError,
    Replicate,
    Shard,
    Target,
    UpdateError,
    serve_source,
    serve_target,
)
from machine import LONG

SEEDS = range(400 if LONG else 20)
ROUNDS = 12
SOURCES = Layout.over(
    [[0, 1], [2, 3]],
    {"a": ((64, 48), "F32", (Replicate(), Shard(0))), "b": ((48, 64), "F32", (Replicate(), Shard(1)))},
)
TARGETS = Layout.over(
    [[0, 1], [2, 3]],
    {"a": ((64, 48), "F32", (Replicate(), Shard(1))), "b": ((48, 64), "F32", (Replicate(), Shard(0)))},
)


def part(layout: Layout, rank: int, value: float) -> dict[str, Any]:
    """Return what a rank holds when every element has a value."""
    return {name: np.full(tensor.held_by()[rank].shape, value, np.float32) for name, tensor in layout.tensors.items()}


class Rank:
    """A source or a target with an engine of its own, which can be killed and started anew."""

    def __init__(self, fabric: Fabric, rank: int, versions: str) -> None:
        self.fabric, self.rank, self.versions = fabric, rank, versions
        self.arrays: dict[str, Any] = {}
        self.engine: aiote.Engine | None = None
        self.target: Target | None = None
        self.started = anyio.Event()
        self.last = -1

    async def live(self) -> None:
        """Be there until killed, then again."""
        while True:
            async with AsyncExitStack() as stack:
                self.engine = await stack.enter_async_context(self.fabric.open_engine())
                if self.versions:
                    self.arrays = part(TARGETS, self.rank, -1)
                    replica = f"r{self.rank // 2}"
                    serving = serve_target(
                        self.engine,
                        TARGETS,
                        self.rank,
                        self.arrays,
                        replica=replica,
                        versions=self.versions,  # type: ignore[arg-type]
                    )
                    self.target = await stack.enter_async_context(serving)
                    assert self.target.version is None
                else:
                    self.arrays = part(SOURCES, self.rank, 0)
                    await stack.enter_async_context(serve_source(self.engine, SOURCES, self.rank, self.arrays))
                self.last = -1
                self.started.set()
                while not self.engine.closed:
                    await anyio.sleep(0.05)
            self.started = anyio.Event()

    def check(self) -> None:
        """Check that a target has one version whole, or that it says otherwise, and that it never goes back."""
        target = self.target
        if target is None or target.engine.closed or target.version is None:
            return
        for name, array in self.arrays.items():
            assert (array == target.version).all(), (name, target.version, array.min(), array.max())
        assert target.version >= self.last
        self.last = target.version


async def storm(fabric: Fabric, seed: int, versions: str) -> dict[str, int]:
    rng = random.Random(seed)
    sources = [Rank(fabric, rank, "") for rank in range(4)]
    targets = [Rank(fabric, rank, versions) for rank in range(4)]
    seen = {"committed": 0, "failed": 0, "cancelled": 0}
    async with anyio.create_task_group() as group, fabric.open_engine() as engine:
        for rank in (*sources, *targets):
            group.start_soon(rank.live)
        for version in range(1, ROUNDS + 1):
            for rank in (*sources, *targets):
                await rank.started.wait()
            for rank in sources:
                for array in rank.arrays.values():
                    array[...] = version
            addresses = [[one.engine.address for one in side if one.engine] for side in (sources, targets)]
            controller = Controller(engine, *addresses, epoch=version * 10, limit=20.0)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as beside:
                    beside.start_soon(harm, rng, scope, rng.choice((*sources, *targets)))
                    try:
                        await controller.update(version)
                        seen["committed"] += 1
                    except (UpdateError, PlanMismatchError, aiote.UsageError):
                        seen["failed"] += 1
                    beside.cancel_scope.cancel()
            seen["cancelled"] += scope.cancelled_caught
            for rank in targets:
                rank.check()
                if rank.target is not None and not rank.target.engine.closed:
                    assert rank.target.current is None, rank.target.current
            await anyio.sleep(rng.choice((0.0, 5.0)))
            for rank in targets:
                rank.check()
        group.cancel_scope.cancel()
    return seen


async def harm(rng: random.Random, scope: anyio.CancelScope, victim: Rank) -> None:
    """After a while kill a rank, or cancel the update, or nothing."""
    await anyio.sleep(rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02))))
    kind = rng.choice(("kill", "kill", "cancel", "nothing"))
    if kind == "kill" and victim.engine is not None:
        victim.engine.abort()
    elif kind == "cancel":
        scope.cancel()


@pytest.mark.parametrize("versions", ["shadow", "inplace"])
def test_no_update_tears_a_shadow_or_runs_backwards(versions):
    seen = {"committed": 0, "failed": 0, "cancelled": 0}
    for seed in SEEDS:

        async def main(fabric: Fabric, seed: int = seed) -> dict[str, int]:
            return await storm(fabric, seed, versions)

        for kind, count in run(main, seed).items():
            seen[kind] += count
    assert all(seen.values()), seen
