"""Rounds in virtual time whose ranks are on GPUs, some or all, and what test_storm.py lets happen to them.

Kernels run late: after any pause, in the order of their stream. What a rank has got is checked in that order, too, so
that nobody waits for it; rows that a peer's next round overwrites too early are found there.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import aiote
from aiote.moe import MoeConfig, MoeGroup
from aiote.testing import Fabric, run
from support.gpu.emulation import Emulation
from support.gpu.virtual import VirtualGpu, idle, watched
from support.machine import LONG
from support.moe.ranks import Tokens, check_rows, compute
from support.moe.storms import KINDS, World, check_sums

SEEDS = (*range(2000 if LONG else 4), 43, 90)
"""In the last two a rank leaves while another, behind it, still writes to a third: the rows, or the route."""
PARTS = range(50 if LONG else 1)
SMALL: dict[str, Any] = {"experts": 6, "top_k": 2, "hidden": 4, "tokens": 5}
SHAPES = {
    "direct": MoeConfig(**SMALL, rows=30, placement="direct"),
    "packed": MoeConfig(**SMALL, rows=30, placement="packed", private=2),
    "lanes": MoeConfig(**SMALL, rows=30, placement="packed", lanes=2),
    "mask": MoeConfig(**SMALL, on_loss="mask"),
    "by rank": MoeConfig(**SMALL, rows=3, copies="rank", on_overflow="drop"),
}

pytestmark = pytest.mark.needs_cxx


class OnHost:
    """A batch in a GPU's memory as it is when this is made, for those who read NumPy's arrays."""

    scales = None

    def __init__(self, batch: Any) -> None:
        self.x, self.source = batch.x.memory, batch.source
        self.expert_num_tokens, self.offsets = batch.expert_num_tokens, batch.offsets


class DeviceWorld(World):
    """Ranks, of which the first is on a GPU, and each other one perhaps."""

    def __init__(self, fabric: Fabric, seed: int, config: MoeConfig, emulation: Emulation) -> None:
        super().__init__(fabric, seed, config)
        self._emulation, self._lot = emulation, random.Random(seed)
        self.gpus: list[VirtualGpu] = []
        self._kept: list[Any] = []

    def more(self, rank: int, engine: aiote.Engine) -> dict[str, Any]:
        if rank and self._lot.random() < 0.4:
            return {}
        self.gpus.append(VirtualGpu(self._emulation, self._lot))
        self.gpus[-1].engines = [engine]
        return {"device": self.gpus[-1]}

    def begin(self, group: MoeGroup, own: Tokens, lane: int) -> Any:
        if group.launcher is None:
            return super().begin(group, own, lane)
        given = [group.launcher.array(one) for one in (own.x, own.ids, own.weights)]  # type: ignore[attr-defined]
        self._kept += given
        return group.dispatch_send(*given, lane=lane)

    def computed(self, group: MoeGroup, batch: Any, given: list[Tokens]) -> Any:
        gpu: Any = group.launcher
        if gpu is None:
            return super().computed(group, batch, given)
        y = gpu.array(np.zeros(batch.y.shape, batch.y.dtype))

        def within() -> None:
            found: Any = OnHost(batch)
            check_rows(group, found, given)
            compute(group, found, y.memory)

        gpu.call(within)
        self._kept.append(y)
        return y

    def end(self, group: MoeGroup, own: Tokens, sums: Any, dropped: Any) -> None:
        gpu: Any = group.launcher
        if gpu is None:
            return super().end(group, own, sums, dropped)
        return gpu.call(lambda: check_sums(self.config, own, sums.memory, list(group.membership.masked), dropped))

    async def run(self, kind: str) -> int:
        broken = await super().run(kind)
        for gpu in self.gpus:
            await idle(gpu)
        return broken


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_round_on_gpus_is_torn_mixed_or_waited_for_in_vain(shape, part, emulation, seen):
    broken = 0
    for seed in SEEDS[part :: len(PARTS)]:
        kind = KINDS[seed % len(KINDS)]

        async def main(fabric: Fabric, seed: int = seed, kind: str = kind) -> int:
            return await DeviceWorld(fabric, seed, SHAPES[shape], emulation).run(kind)

        try:
            broken += run(main, seed, rails=2, limit=30)
        except BaseException as error:
            error.add_note(f"seed {seed}, {kind}")
            raise
    assert broken
