"""A rail whose wire loses, delays or reorders packets: everything arrives and is counted once.

Few kernels without RDMA have netem; the guest that brings soft-RoCE NICs has.
"""

from __future__ import annotations

import pytest

from support.network.namespaced_engines import ONCE, opened, pour

pytestmark = [
    pytest.mark.libfabric,
    pytest.mark.needs_netem,
    pytest.mark.blocking_allowed("starts processes, and no engine runs here"),
]


DISTURBANCES = {
    "loses one in a hundred": ("loss", "1%"),
    "loses one in ten": ("loss", "10%"),
    "is far away": ("delay", "20ms", "5ms"),
    "reorders": ("delay", "5ms", "reorder", "30%", "50%"),
}


@pytest.mark.parametrize("netem", DISTURBANCES.values(), ids=DISTURBANCES)
async def test_writes_over_a_disturbed_rail_arrive_and_count_once(network, processes, netem):
    """Whatever a wire does to packets: everything arrives and is counted once, with the other rail's help."""
    async with opened(network, processes, rails=2) as (network, near, far):
        await pour(near, far, 1, ONCE)
        await network.disturb(network.cables[2], *netem)
        try:
            for imm in (2, 3):
                await pour(near, far, imm, ONCE)
        finally:
            await network.limit(network.cables[2], 0)
        await pour(near, far, 4, ONCE)
