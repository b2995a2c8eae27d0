"""Random plans, carried out: every element arrives once, from where NumPy says, and senders share the work evenly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import machine
from aiote.weights import plan_update
from weight_plans import carry_out, hold
from weight_worlds import World, worlds

CASES = 100_000 if machine.LONG else 1000


def check(world: World, gather: str) -> None:
    sources, targets, recipe = world.plan_of
    plan = plan_update(sources, targets, recipe, gather=gather)
    memory, count = carry_out(plan, hold(sources, world.values()))
    values, times = world.expected()
    expected, written = hold(targets, values), hold(targets, times)
    for rank in targets.ranks:
        for name, flat in memory[rank].items():
            assert np.array_equal(count[rank][name], written[rank][name]), (rank, name)
            assert np.array_equal(flat, expected[rank][name]), (rank, name)


@settings(max_examples=CASES)
@given(world=worlds(), gather=st.sampled_from(["auto", "always"]))
def test_every_element_is_written_once_and_right(world, gather):
    check(world, gather)
