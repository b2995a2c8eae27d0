"""Updates in virtual time, in which sources, targets and controllers are killed, cancelled and replaced at random.

What must hold: nothing hangs; a `shadow` target has one version, whole, at any time; a `gated` one is written within
its windows; no version runs backwards; nothing is written once a target has ended an update; a new rank has no version
until one was committed there; an update that failed can be made once more. Each element is a number of its own, so that
one in a wrong place is seen.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, suppress
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
from support.machine import LONG

SEEDS = range(400 if LONG else 2)
ROUNDS = 12 if LONG else 9
SOURCES = Layout.over(
    [[0, 1], [2, 3]],
    {"a": ((64, 48), "I32", (Replicate(), Shard(0))), "b": ((48, 64), "I32", (Replicate(), Shard(1)))},
)
TARGETS = Layout.over(
    [[0, 1], [2, 3]],
    {"a": ((64, 48), "I32", (Replicate(), Shard(1))), "b": ((48, 64), "I32", (Replicate(), Shard(0)))},
)


def whole(version: int) -> dict[str, Any]:
    """Return the tensors in a version, each element a number that no other has, in no other version either."""
    made, first = {}, version * 100_000
    for name, tensor in SOURCES.tensors.items():
        made[name] = np.arange(first, first + np.prod(tensor.shape), dtype=np.int32).reshape(tensor.shape)
        first += made[name].size
    return made


def part(layout: Layout, rank: int, version: int) -> dict[str, Any]:
    """Return what a rank holds in a version."""
    found, values = {}, whole(version)
    for name, tensor in layout.tensors.items():
        (piece,) = tensor.held_by()[rank].pieces
        box = tuple(slice(start, stop) for start, stop in zip(piece.start, piece.stop, strict=True))
        found[name] = values[name][box].copy()
    return found


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
                async with anyio.create_task_group() as group:
                    if self.versions == "gated":
                        group.start_soon(self.open_windows, self.target)
                    while not self.engine.closed:
                        await anyio.sleep(0.05)
                    group.cancel_scope.cancel()
            self.started = anyio.Event()

    async def open_windows(self, target: Target) -> None:
        """Open windows of any length, between which the weights do not change."""
        rng = random.Random(self.rank)
        while not target.ended:
            with suppress(aiote.ClosedError), anyio.move_on_after(rng.choice((0.002, 0.02, 0.2, 60.0))):
                async with target.window():
                    await target.wait_version(0 if target.version is None else target.version + 1)
            before = {name: array.copy() for name, array in self.arrays.items()}
            await anyio.sleep(rng.uniform(0, 0.01))
            for name, array in before.items():
                assert np.array_equal(array, self.arrays[name]), "written outside of a window"

    def check(self) -> None:
        """Check that a target has one version whole, or that it says otherwise, and that it never goes back."""
        target = self.target
        if target is None or target.engine.closed or target.version is None:
            return
        for name, array in part(TARGETS, self.rank, target.version).items():
            assert np.array_equal(self.arrays[name], array), (name, self.rank, target.version)
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
                for name, array in part(SOURCES, rank.rank, version).items():
                    rank.arrays[name][...] = array
            addresses = [[one.engine.address for one in side if one.engine] for side in (sources, targets)]
            controller = Controller(engine, *addresses, epoch=version * 10, limit=20.0)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as beside:
                    beside.start_soon(harm, rng, scope, rng.choice((*sources, *targets)))
                    for _ in range(2):
                        try:
                            await controller.update(version)
                            seen["committed"] += 1
                        except (UpdateError, PlanMismatchError, aiote.UsageError):
                            seen["failed"] += 1
                            # Once more with the same controller, when all are there again.
                            for rank in (*sources, *targets):
                                await rank.started.wait()
                            continue
                        break
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


@pytest.mark.parametrize("versions", ["shadow", "inplace", "gated"])
def test_no_update_tears_a_shadow_or_runs_backwards(versions):
    seen = {"committed": 0, "failed": 0, "cancelled": 0}
    for seed in SEEDS:

        async def main(fabric: Fabric, seed: int = seed) -> dict[str, int]:
            return await storm(fabric, seed, versions)

        for kind, count in run(main, seed).items():
            seen[kind] += count
    assert all(seen.values()), seen
