"""Pauses between attempts: they double up to a limit, no two that began together stay together, success begins anew."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from aiote.aio import Backoff

seconds = st.floats(0.001, 10)


@given(seconds, seconds, st.integers(0, 1 << 32))
def test_pauses_double_up_to_the_longest_and_lose_at_most_half(least, longer, seed):
    most, whole = least + longer, least
    random.seed(seed)
    backoff = Backoff(least, most)
    for _ in range(20):
        assert whole / 2 <= backoff.next() <= whole
        whole = min(2 * whole, most)
    backoff.reset()
    assert least / 2 <= backoff.next() <= least


def test_two_that_failed_together_do_not_try_again_together():
    one, other = Backoff(1, 60), Backoff(1, 60)
    assert [one.next() for _ in range(8)] != [other.next() for _ in range(8)]
