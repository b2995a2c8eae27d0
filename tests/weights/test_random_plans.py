"""Random plans, carried out: every element arrives once, from where NumPy says, and senders share the work evenly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from aiote.weights import Task, UpdatePlan, plan_update
from aiote.weights.dtypes import ITEMSIZE
from support import machine
from support.weights.plans import carry_out, hold
from support.weights.random_layouts import World, bound, worlds

# A hundred parts of a thousand, each with a seed of its own: no test may take minutes. Else four hundred in all.
PARTS = pytest.mark.parametrize("part", range(100 if machine.LONG else 1))


def try_out(part: int, cases: int, check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
    seed(part)(settings(max_examples=cases)(given(**strategies)(check)))()


@PARTS
def test_every_element_is_written_once_and_right(part):
    ways, limits = st.sampled_from(["auto", "always"]), st.sampled_from([None, 1, 7, 40])
    try_out(part, 1000 if machine.LONG else 200, check_elements, world=worlds(), gather=ways, most=limits)


def check_elements(world: World, gather: str, most: int | None) -> None:
    sources, targets, recipe = world.plan_of
    plan = plan_update(sources, targets, recipe, gather=gather)

    def small(task: Task) -> bool:
        return math.prod(map(int.__sub__, task.stop, task.start)) <= (most or 0)

    memory, count = carry_out(plan, hold(sources, world.values()), None if most is None else small)
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


def fits(pieces: list[tuple[int, float]], limit: float, load: tuple[float, ...]) -> bool:
    """Tell whether each of some pieces can go as a whole to a rank of its mask so that none has more than a limit."""
    if not pieces:
        return True
    (mask, size), *rest = pieces
    return any(
        fits(rest, limit, (*load[:rank], load[rank] + size, *load[rank + 1 :]))
        for rank in range(mask.bit_length())
        if mask >> rank & 1 and load[rank] + size <= limit
    )


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
    if busiest > 1.5 * least:
        # Then the pieces are so large that the flow says little: with the twelve largest, nothing better is possible.
        alone = tuple(float(weights.get(1 << rank, 0)) for rank in range(8))
        shared = [(mask, size) for mask, size, n in pieces for _ in range(n) if mask & (mask - 1)]
        shared.sort(key=lambda piece: (-piece[1], piece[0]))
        assert max(alone) > busiest / 1.5 or not fits(shared[:12], busiest / 1.5 - 1e-9, alone)


@PARTS
def test_small_tensors_are_shared_as_evenly_as_their_pieces_allow(part):
    try_out(part, 250 if machine.LONG else 140, check_load, world=worlds(largest=8))


@PARTS
def test_larger_tensors_are_shared_to_five_in_a_hundred(part):
    try_out(part, 100 if machine.LONG else 60, check_load, world=worlds(largest=60))
