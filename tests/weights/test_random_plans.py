"""Random plans, carried out: every element arrives once, from where NumPy says, and senders share the work evenly."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import machine
from aiote.weights import UpdatePlan, plan_update
from aiote.weights.dtypes import ITEMSIZE
from weight_plans import carry_out, hold
from weight_worlds import World, bound, subsets, worlds

CASES = 100_000 if machine.LONG else 1000


@pytest.mark.timeout(7200 if machine.LONG else 180)
@settings(max_examples=CASES)
@given(world=worlds(), gather=st.sampled_from(["auto", "always"]))
def test_every_element_is_written_once_and_right(world, gather):
    sources, targets, recipe = world.plan_of
    plan = plan_update(sources, targets, recipe, gather=gather)
    memory, count = carry_out(plan, hold(sources, world.values()))
    values, times = world.expected()
    expected, written = hold(targets, values), hold(targets, times)
    for rank in targets.ranks:
        for name, flat in memory[rank].items():
            assert np.array_equal(count[rank][name], written[rank][name]), (rank, name)
            assert np.array_equal(flat, expected[rank][name]), (rank, name)


def granules(plan: UpdatePlan) -> Iterator[tuple[int, float, int]]:
    """Yield who could send the smallest pieces into which a plan could divide a cell, their bytes, and how many.

    What could be sent by whom is `World.weights`' matter; this only tells how coarse the pieces are.
    """
    for entry in plan.entries:
        target = plan.targets.tensors[entry.target]
        for cell in entry.cells:
            owners = [
                {r for part, held, _ in holders for r in plan.sources.tensors[entry.parts[part].source].ranks[held]}
                for holders in ([cell.holders] if cell.direct else [atom.holders for atom in cell.atoms])
            ]
            mask = sum(1 << rank for rank in set.intersection(*owners) or set.union(*owners))
            size, scale = ITEMSIZE[target.dtype], ITEMSIZE["F32"] if entry.scale else 0
            weight = sum(len(target.ranks[n.held]) * (n.elements * size + n.blocks * scale) for n in cell.needs)
            steps = zip(cell.start, cell.stop, entry.size, strict=True)
            count = max((-(-(stop - start) // step) for start, stop, step in steps), default=1)
            yield mask, weight / count, count


def packed(pieces: list[tuple[int, float, int]]) -> float:
    """Return what one of some ranks must send because pieces are whole: of k * n + 1 pieces, k + 1 go to one of n."""
    most = 0.0
    for subset in subsets(pieces[0][0] if len(pieces) == 1 else int(np.bitwise_or.reduce([p[0] for p in pieces]))):
        inside = sorted(
            (size for mask, size, count in pieces if mask & ~subset == 0 for _ in range(count)), reverse=True
        )
        ranks = subset.bit_count()
        most = max(
            [most, *(sum(inside[k * ranks - k : k * ranks + 1]) for k in range(1, (len(inside) - 1) // ranks + 1))]
        )
    return most


def check_load(world: World) -> None:
    plan = plan_update(*world.plan_of)
    weights = world.weights()
    sent, received, _ = plan.traffic
    assert sum(sent.values()) == sum(received.values()) == sum(weights.values())
    pieces = list(granules(plan))
    if not pieces:
        return
    busiest, least, coarsest = max(sent.values()), bound(weights), max(size for _, size, _ in pieces)
    assert busiest >= least
    if coarsest <= least / 20:
        assert busiest <= 1.05 * least
    if coarsest <= least / 2:
        assert busiest <= 1.5 * least
    else:
        assert busiest <= 1.5 * max(least, coarsest, packed(pieces))


@pytest.mark.timeout(7200 if machine.LONG else 180)
@settings(max_examples=CASES // 2)
@given(world=worlds(largest=8))
def test_small_tensors_are_shared_as_evenly_as_their_pieces_allow(world):
    check_load(world)


@pytest.mark.timeout(7200 if machine.LONG else 180)
@settings(max_examples=CASES // 4)
@given(world=worlds(largest=60))
def test_larger_tensors_are_shared_to_five_in_a_hundred(world):
    check_load(world)
