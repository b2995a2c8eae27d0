"""Places in a range of memory: never two at one place, first fit, and all found again."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aiote.core.allocator import ALIGNMENT, Allocator

LARGE = 16 << 20
actions = st.lists(st.one_of(st.integers(1, 5000), st.integers(-50, -1)), max_size=200)


@given(actions, st.integers(1, 100))
def test_allocated_places_never_overlap_and_merge_when_freed(actions, units):
    allocator = Allocator(units * ALIGNMENT)
    taken: list[tuple[int, int]] = []
    for action in actions:
        if action > 0:
            offset = allocator.take(action)
            if offset is None:
                gaps = free_stretches(units * ALIGNMENT, taken)
                assert all(gap < action for gap in gaps)
                continue
            assert offset % ALIGNMENT == 0
            assert offset + action <= units * ALIGNMENT
            assert all(offset + action <= start or start + length <= offset for start, length in taken)
            taken.append((offset, action))
        elif taken:
            allocator.give(*taken.pop(action % len(taken)))
    for place in taken:
        allocator.give(*place)
    assert allocator.take(units * ALIGNMENT) == 0


def free_stretches(nbytes: int, taken: list[tuple[int, int]]) -> list[int]:
    end, gaps = 0, []
    for start, length in sorted(taken):
        gaps.append(start - end)
        end = start + -(-length // ALIGNMENT) * ALIGNMENT
    return [*gaps, nbytes - end]


def test_random_places_of_a_large_segment_are_all_found_again():
    rng, allocator = random.Random(5), Allocator(LARGE)
    taken = []
    for _ in range(5000):
        if taken and rng.random() < 0.5:
            allocator.give(*taken.pop(rng.randrange(len(taken))))
        elif (offset := allocator.take(nbytes := rng.randrange(1, 300_000))) is not None:
            taken.append((offset, nbytes))
    for place in taken:
        allocator.give(*place)
    assert (allocator._starts, allocator._lengths) == ([0], [LARGE])
