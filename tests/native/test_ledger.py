"""The native tally of words is a dictionary of numbers: the twin of `aiote.core.failover.Ledger`'s tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiote.core.failover import Ledger
from aiote_native.ledger import WordTally

MOST_WORDS = 16384
WORDS = st.one_of(st.integers(0, 20), st.sampled_from([0, 2**28, 2**32 - 1, 2**31]), st.integers(0, 2**32 - 1))
CHANGES = st.lists(st.tuples(WORDS, st.integers(-3, 3)), max_size=200)


@given(CHANGES)
def test_it_adds_as_a_dictionary_does(changes):
    tally, plain = WordTally(), {}
    for word, n in changes:
        tally.add(word, n)
        plain[word] = plain.get(word, 0) + n
        assert tally.get(word) == plain[word]
    assert sorted(tally.items()) == sorted((word, n) for word, n in plain.items() if n)
    assert tally.get(12345) == plain.get(12345, 0)


@given(st.lists(st.one_of(WORDS.map(lambda word: ("arrive", word)), WORDS.map(lambda word: ("settle", word)))))
def test_it_is_the_ledgers_twin(steps):
    """What came, less what was settled, in any order: it may be below zero for a while."""
    tally, ledger = WordTally(), Ledger()
    for step, word in steps:
        tally.add(word, 1 if step == "arrive" else -1)
        if step == "arrive":
            ledger.arrive(word)
        else:
            ledger.ack_counts([(word, 1)])
    if all(n >= 0 for _, n in tally.items()):
        assert tuple(sorted(tally.items())) == ledger.arrivals()


def test_words_at_zero_take_no_room():
    tally = WordTally()
    for word in range(100_000):
        tally.add(word, 1)
        tally.add(word, -1)
    assert tally.items() == []
    assert len(tally) < 100


def test_it_is_bounded():
    tally = WordTally()
    with pytest.raises(MemoryError):
        for word in range(10 * MOST_WORDS):
            tally.add(word, 1)
    assert MOST_WORDS <= len(tally) <= 2 * MOST_WORDS
    # What it has is kept.
    assert tally.get(0) == tally.get(MOST_WORDS - 1) == 1
