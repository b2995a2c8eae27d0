"""The plan by native code is the plan in NumPy, number for number."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aiote.moe import MoeConfig
from aiote.moe.config import Sizes
from aiote.moe.native_plan import NativePlan
from aiote.moe.plan import Counts, RoundPlan
from support import machine

ARRAYS = (
    "by_rank", "first", "before", "base", "taken", "kept", "kept_rows", "sent", "start", "returned", "answer",
)  # fmt: skip


@st.composite
def shapes(draw: Any) -> tuple[Sizes, Counts]:
    """Draw any config that there may be, and any counts, which no tokens need to have."""
    by_rank = draw(st.booleans())
    layout = draw(st.sampled_from(["grouped", "contiguous", "rank"] if by_rank else ["grouped", "contiguous"]))
    align = draw(st.sampled_from([1, 4, 6])) if layout == "contiguous" else 1
    rows = st.none() if layout == "rank" else st.none() | st.integers(1, 40).map(lambda n: n * align)
    placement = "packed" if by_rank else draw(st.sampled_from(["packed", "direct"]))
    config = MoeConfig(
        experts=draw(st.integers(1, 40) | st.just(513)),
        top_k=draw(st.integers(1, 6)),
        hidden=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 9)),
        layout=layout,
        align=align,
        rows=draw(rows),
        on_overflow=draw(st.sampled_from(["drop", "raise"])),
        placement=placement,
        private=draw(st.none() | st.integers(1, 9)) if placement == "packed" and not by_rank else None,
        copies="rank" if by_rank else "expert",
        reduce="expert" if layout == "rank" or (by_rank and draw(st.booleans())) else "source",
    )
    sizes = Sizes(config, draw(st.integers(1, 9)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    most = draw(st.sampled_from([0, 1, 3, 30, 1 << 40]))
    counts = random.integers(0, most + 1, (sizes.ranks, config.experts))
    counts[random.random(counts.shape) < draw(st.sampled_from([0, 0.5, 0.95]))] = 0
    return sizes, Counts(counts, random.integers(0, most + 1, (sizes.ranks, sizes.ranks)))


@settings(max_examples=10_000 if machine.LONG else 300)
@given(shapes())
def test_the_native_plan_is_the_plan(shape):
    sizes, counts = shape
    for me in range(0, sizes.ranks, 2):
        plan, native = RoundPlan(sizes, me, counts), NativePlan(sizes, me, counts)
        event("rows may overflow" if plan.overflows else "rows fit")
        for name in ARRAYS:
            one, other = getattr(plan, name), getattr(native, name)
            assert one.dtype == other.dtype
            assert (one == other).all(), name
        assert (plan.demand, plan.overflows) == (native.demand, native.overflows)
        assert (plan.offsets() == native.offsets()).all()
        for rank in range(sizes.ranks):
            for found in (RoundPlan.arrivals, RoundPlan.replies):
                assert found(plan, rank) == found(native, rank)
            assert np.array_equal(plan.received_runs(rank), native.received_runs(rank))
            for pair in ((me, rank), (rank, me)):
                assert np.array_equal(plan.runs(*pair), native.runs(*pair))
                assert not native.runs(*pair).flags.writeable
                assert np.array_equal(plan.beyond(*pair), native.beyond(*pair))
                assert plan.private(*pair) == native.private(*pair)
