"""All ranks that write to one load its NICs alike: each begins with another, and goes on with what has carried less."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiote.moe import MoeConfig
from aiote.testing import EFA_200G, Fabric, run
from support import machine
from support.moe.ranks import Tokens, all_of, compute, ranks

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

MESSAGE_BYTES = 256
"""What a message counts beside its bytes (schedule.pyx)."""

many = settings(max_examples=300 if machine.LONG else 20, deadline=None)


@many
@given(
    st.sampled_from(["packed", "direct"]),
    st.integers(2, 6),
    st.integers(2, 3),
    st.integers(1, 8),
    st.sampled_from([64, 1024, 7168]),
    st.integers(1, 4),
)
def test_an_all_to_one_loads_every_nic_of_the_receiver(placement, count, nics, tokens, hidden, number):
    """Every rank sends as much, so the NICs differ by no more than what one rank sends in one round."""
    config = MoeConfig(
        experts=2 * count, top_k=2, hidden=hidden, tokens=tokens, placement=placement, dtype="float8_e4m3fn",
        rows=count * tokens,
    )  # fmt: skip

    async def main(fabric: Fabric) -> list[int]:
        async with ranks(fabric.open_engine, count, config) as groups:
            given = [Tokens(np.random.default_rng(rank), config, tokens, wild=False) for rank in range(count)]
            begun = len(fabric.trace())

            async def rounds(rank: int) -> None:
                given[rank].ids[...] = [[0, 1]]
                for _ in range(number):
                    batch = await groups[rank].dispatch(given[rank].x, given[rank].ids, given[rank].weights)
                    await groups[rank].combine(batch, compute(groups[rank], batch))

            await all_of(*[lambda rank=rank: rounds(rank) for rank in range(count)])
            got = Counter(dict.fromkeys(range(nics), 0))
            for event in fabric.trace()[begun:]:
                if event.what == "place" and event.engine == 0:
                    got[event.rail] += event.length + MESSAGE_BYTES
            return sorted(got.values())

    found = run(main, 1, model=[EFA_200G] * nics)
    rows = sum(found) / (count - 1) / number
    assert found[-1] - found[0] <= rows, (found, rows)
