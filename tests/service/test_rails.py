"""Calls over two rails, one much slower than the other, of which one is lost in the midst: every byte is right."""

from __future__ import annotations

import anyio
import pytest

from aiote import service
from aiote.testing import Fabric, run
from support.engines.opening import each_provider, pair
from support.service.arrays import Served, check, use

CALLS = 12
RAILS = ["sim0", "sim1"]


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("lost", RAILS)
@pytest.mark.parametrize("after", [5, 40, 100, 160, 250])
def test_calls_go_on_when_one_of_two_unequal_rails_is_lost(lost, silently, after):
    async def main(fabric: Fabric) -> None:
        async with fabric.open_engine(RAILS) as here, fabric.open_engine(RAILS) as there:
            fabric.slow_rail(there, "sim1", by=0.002)
            async with service.serve(there, Served(there)):
                await use(here, there.address, 1)
                fabric.kill_rail(there, lost, silently=silently, after=after)
                began, seen = fabric.events, []
                for engine in (here, there):
                    engine.listen_events(lambda event: seen.append(event.name))
                check(await use(here, there.address, CALLS), CALLS)
                # It was lost in the midst.
                assert fabric.events > began + after + 100
                assert "rail.failed" in seen
                assert "peer.lost" not in seen
                fabric.restore_rail(there, lost)
                await anyio.sleep(60)
                check(await use(here, there.address, CALLS), CALLS)

    run(main, after, rails=2)


@pytest.mark.anyio
@each_provider
async def test_no_array_over_64_kib_passes_through_a_message(provider):
    async with pair(provider) as (here, there), service.serve(there, Served(there)):
        check(await use(here, there.address, CALLS), CALLS)
