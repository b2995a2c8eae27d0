"""Whole rounds of any config on any mixture of GPUs and CPUs have the bits of the same rounds on CPUs alone."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiote.moe.round
from aiote.moe import MoeConfig
from aiote.moe.config import Sizes
from aiote.moe.native_plan import NativePlan
from aiote.moe.plan import Counts, RoundPlan
from aiote.testing import Fabric, run
from support import machine
from support.gpu.virtual import VirtualGpu, watched
from support.moe.devices import Place, check, drawn, mixed, turn
from support.moe.ranks import all_of

pytestmark = pytest.mark.needs_cxx

ARRAYS = ("by_rank", "first", "before", "base", "taken", "kept", "kept_rows", "sent", "start", "returned", "answer")


class CheckedPlan(NativePlan):
    """The plan of a round, which is also computed by the reference, and compared."""

    def __init__(self, sizes: Sizes, me: int, counts: Counts) -> None:
        super().__init__(sizes, me, counts)
        twin = RoundPlan(sizes, me, counts)
        assert all(np.array_equal(getattr(self, name), getattr(twin, name)) for name in ARRAYS)
        assert (self.demand, self.overflows) == (twin.demand, twin.overflows)
        for rank in range(sizes.ranks):
            assert np.array_equal(self.runs(me, rank), twin.runs(me, rank))
            assert np.array_equal(self.received_runs(rank), twin.received_runs(rank))
            assert (self.arrivals(rank), self.replies(rank)) == (twin.arrivals(rank), twin.replies(rank))


@st.composite
def configs(draw: Any) -> MoeConfig:
    """Draw any config; where rows do not fit they are dropped."""
    by_rank, masks = draw(st.booleans()), draw(st.booleans())
    layout = draw(st.sampled_from(["grouped", "contiguous", "rank"] if by_rank else ["grouped", "contiguous"]))
    placement = "packed" if by_rank or masks else draw(st.sampled_from(["packed", "direct"]))
    align = draw(st.sampled_from([1, 4])) if layout == "contiguous" else 1
    free = not masks and layout != "rank"
    return MoeConfig(
        experts=draw(st.integers(1, 12)),
        top_k=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 9)),
        tokens=draw(st.integers(1, 7)),
        dtype=draw(st.sampled_from(["bfloat16", "float8_e4m3fn", "float32"])),
        scales=draw(st.integers(0, 3)),
        out_dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        layout=layout,
        align=align,
        rows=draw(st.none() | st.integers(1, 9).map(lambda n: n * align)) if free else None,
        on_overflow="drop",
        private=draw(st.none() | st.integers(1, 9)) if free and placement == "packed" and not by_rank else None,
        placement=placement,
        copies="rank" if by_rank else "expert",
        reduce="expert" if layout == "rank" or (by_rank and draw(st.booleans())) else "source",
        on_loss="mask" if masks else "raise",
    )


@pytest.fixture(scope="module")
def checked():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(aiote.moe.round, "NativePlan", CheckedPlan)
        watched(patched)
        yield


@settings(max_examples=2000 if machine.LONG else 25)
@given(
    config=configs(),
    on_gpus=st.lists(st.booleans(), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 32),
)
def test_whole_rounds_have_the_bits_of_rounds_on_cpus(emulation, checked, config, on_gpus, seed):
    async def main(fabric: Fabric) -> None:
        gpu, rng = VirtualGpu(emulation, random.Random(seed)), np.random.default_rng(seed)
        place = Place(gpu, gpu.array, gpu.fetch)
        async with (
            mixed(fabric.open_engine, config, place, on_gpus) as groups,
            mixed(fabric.open_engine, config, place, [False] * len(on_gpus)) as cpus,
        ):
            gpu.engines = [group.engine for group in groups]
            for how in (seed, seed + 1):
                tokens = [drawn(rng, config, int(rng.integers(0, config.tokens + 1))) for _ in groups]
                if config.on_loss == "mask":
                    # Else an expert might be named so often that the tokens are refused.
                    for one in tokens:
                        one.ids[:, 1:] = -1
                found, twins = [
                    await all_of(*[partial(turn, place, g, own, how) for g, own in zip(some, tokens, strict=True)])
                    for some in (groups, cpus)
                ]
                for one, twin, own in zip(found, twins, tokens, strict=True):
                    check(config, one, twin, own)

    run(main, seed, rails=2, limit=60)
