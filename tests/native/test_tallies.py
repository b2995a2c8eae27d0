"""The native tally of immediates is a dictionary of numbers: the twin of a table of `reference.channel_counts`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote_native.counters.table import ImmTally
from reference.channel_counts import ChannelCounts

MAX_ENTRIES = 16384
IMM_DATA = st.one_of(st.integers(0, 20), st.sampled_from([0, 2**28, 2**32 - 1, 2**31]), st.integers(0, 2**32 - 1))
CHANGES = st.lists(st.tuples(IMM_DATA, st.integers(-3, 3)), max_size=200)


@given(CHANGES)
def test_a_tally_adds_as_a_dictionary_does(changes):
    tally, plain = ImmTally(), {}
    for imm_data, n in changes:
        tally.add(imm_data, n)
        plain[imm_data] = plain.get(imm_data, 0) + n
        assert tally.get(imm_data) == plain[imm_data]
    assert sorted(tally.items()) == sorted((imm_data, n) for imm_data, n in plain.items() if n)
    assert tally.get(12345) == plain.get(12345, 0)


@given(
    st.lists(
        st.one_of(IMM_DATA.map(lambda imm_data: ("arrive", imm_data)), IMM_DATA.map(lambda imm_data: ("ack", imm_data)))
    )
)
def test_a_tally_is_the_twin_of_channel_counts(steps):
    """What came, less what was acknowledged, in any order: it may be below zero for a while."""
    tally, counts = ImmTally(), ChannelCounts()
    for step, imm_data in steps:
        tally.add(imm_data, 1 if step == "arrive" else -1)
        if step == "arrive":
            counts.arrive(imm_data)
        else:
            counts.ack_counts([(imm_data, 1)])
    if all(n >= 0 for _, n in tally.items()):
        assert tuple(sorted(tally.items())) == counts.arrivals()


def test_immediates_at_zero_take_no_room():
    tally = ImmTally()
    for imm_data in range(100_000):
        tally.add(imm_data, 1)
        tally.add(imm_data, -1)
    assert tally.items() == []
    assert len(tally) < 100


def test_a_tally_is_bounded_and_keeps_what_it_has():
    tally = ImmTally()
    with pytest.raises(MemoryError):
        for imm_data in range(10 * MAX_ENTRIES):
            tally.add(imm_data, 1)
    assert MAX_ENTRIES <= len(tally) <= 2 * MAX_ENTRIES
    # What it has is kept.
    assert tally.get(0) == tally.get(MAX_ENTRIES - 1) == 1
