"""Pairs of rails: the same ones seen from both sides, with every rail that has anyone to talk to."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiote.core.pairing import MAX_PAIRS, pair_rails

WIRES = ["tcp", "verbs/rc", "efa", "shm"]
rails = st.lists(st.sampled_from(WIRES), max_size=8)
many_rails = st.lists(st.sampled_from(WIRES), max_size=16)


def seen_from(side: int, ours: list[str], theirs: list[str]) -> set[tuple[int, int]]:
    """The (own rail, other's rail) pairs of one side, 0 the initiator, 1 the acceptor; it has the two offers alone."""
    offers = (ours, theirs) if side == 0 else (theirs, ours)
    return {(pair[side], pair[1 - side]) for pair in pair_rails(*offers)}


@given(many_rails, many_rails)
def test_both_sides_see_the_same_pairs_mirrored(initiator: list[str], acceptor: list[str]) -> None:
    near, far = seen_from(0, initiator, acceptor), seen_from(1, acceptor, initiator)
    assert near == {(mine, remote) for remote, mine in far}
    assert len(near) == len(pair_rails(initiator, acceptor)), "a pair came twice"


@given(many_rails, many_rails)
def test_the_roles_do_not_change_what_is_joined(initiator: list[str], acceptor: list[str]) -> None:
    """Who connects to whom is chance, the cut at the limit aside: that follows the initiator's order of formats."""
    forward, backward = pair_rails(initiator, acceptor), pair_rails(acceptor, initiator)
    assert len(forward) == len(backward)
    if len(forward) < MAX_PAIRS:
        assert set(forward) == {pair[::-1] for pair in backward}


@given(many_rails, many_rails)
def test_pairs_are_of_rails_that_exist_and_speak_the_same(initiator: list[str], acceptor: list[str]) -> None:
    for left, right in pair_rails(initiator, acceptor):
        assert min(left, right) >= 0
        assert initiator[left] == acceptor[right]


@given(many_rails, many_rails)
def test_every_rail_of_a_common_format_is_used_and_evenly(initiator: list[str], acceptor: list[str]) -> None:
    common = set(initiator) & set(acceptor)
    wanted = {wire: max(initiator.count(wire), acceptor.count(wire)) for wire in common}
    assume(sum(wanted.values()) <= MAX_PAIRS)
    pairs = pair_rails(initiator, acceptor)
    assert Counter(initiator[left] for left, _ in pairs) == Counter(wanted)
    for side, offered in enumerate((initiator, acceptor)):
        used = Counter(pair[side] for pair in pairs)
        assert set(used) == {rail for rail, wire in enumerate(offered) if wire in common}
        for wire in common:
            times = [count for rail, count in used.items() if offered[rail] == wire]
            assert max(times) - min(times) <= 1


@given(rails, rails)
def test_what_an_engine_can_have_always_fits(initiator: list[str], acceptor: list[str]) -> None:
    """Eight rails on each side never meet the limit, so none of them is left out."""
    common = set(initiator) & set(acceptor)
    pairs = pair_rails(initiator, acceptor)
    assert {left for left, _ in pairs} == {rail for rail, wire in enumerate(initiator) if wire in common}
    assert {right for _, right in pairs} == {rail for rail, wire in enumerate(acceptor) if wire in common}


@given(many_rails, many_rails)
def test_there_are_pairs_exactly_where_there_is_a_common_format(initiator: list[str], acceptor: list[str]) -> None:
    pairs = pair_rails(initiator, acceptor)
    assert len(pairs) <= MAX_PAIRS
    assert bool(pairs) == bool(set(initiator) & set(acceptor))


@pytest.mark.parametrize(
    ("initiator", "acceptor", "pairs"),
    [
        ([], [], []),
        (["tcp"], [], []),
        ([], ["tcp"], []),
        (["tcp"], ["efa"], []),
        (["tcp"], ["tcp"], [(0, 0)]),
        (["efa", "efa"], ["efa", "efa"], [(0, 0), (1, 1)]),
        (["efa", "efa"], ["efa"], [(0, 0), (1, 0)]),
        (["efa"], ["efa", "efa", "efa"], [(0, 0), (0, 1), (0, 2)]),
        (["efa", "efa"], ["efa"] * 3, [(0, 0), (1, 1), (0, 2)]),
        (["tcp", "efa", "shm"], ["efa", "tcp"], [(0, 1), (1, 0)]),
        (["tcp", "efa", "tcp"], ["shm", "tcp", "efa"], [(0, 1), (2, 1), (1, 2)]),
        (["tcp"] * 20, ["tcp"], [(rail, 0) for rail in range(16)]),
        (["tcp"] * 15 + ["efa"], ["tcp"] + ["efa"] * 15, [(rail, 0) for rail in range(15)] + [(15, 1)]),
    ],
)
def test_the_pairs_are_those_of_the_examples(
    initiator: list[str], acceptor: list[str], pairs: list[tuple[int, int]]
) -> None:
    assert pair_rails(initiator, acceptor) == pairs
