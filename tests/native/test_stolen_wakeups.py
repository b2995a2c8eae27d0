"""A round that somebody does in a native thread's place takes the wake-up that the thread was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiote.testing import UNRULY
from support.rails.rail_pair import KINDS, Pair, opened

pytestmark = pytest.mark.libfabric
(SIM,) = [kind for kind in KINDS if kind.provider == "sim"]
REFUSING = replace(UNRULY, refusals=0.5)


def test_the_thread_is_woken_again_afterwards():
    """It slept on, was counted as awake, and nobody woke it for the next post: one that was refused hung for good."""
    with opened(SIM, threaded=True, model=REFUSING) as rails:
        pair = Pair.of(rails)
        for _ in range(300):
            first = pair.a.write(pair.ab, imm=1)
            for _ in range(3):
                pair.a.core.progress()
            rails.finish(first, pair.a.write(pair.ab, imm=1))
