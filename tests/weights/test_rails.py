"""Updates over two rails, one much slower than the other, of which one is lost in the midst: every byte is right."""

from __future__ import annotations

import numpy as np
import pytest

from aiote.testing import Fabric, run
from aiote.weights import Controller, Layout, Replicate, Shard, serve_source, serve_target

RAILS = ["sim0", "sim1"]
SHAPE = (128, 256)
SOURCES = Layout.over([0], {name: (SHAPE, "I32", Replicate()) for name in "abcd"})
TARGETS = Layout.over([0], {name: (SHAPE, "I32", Shard(1)) for name in "abcd"})


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("lost", RAILS)
@pytest.mark.parametrize("after", [5, 40, 100])
def test_an_update_goes_on_when_one_of_two_unequal_rails_is_lost(lost, silently, after):
    async def main(fabric: Fabric) -> None:
        values = {n: np.arange(SHAPE[0] * SHAPE[1], dtype=np.int32).reshape(SHAPE) for n in SOURCES.tensors}
        arrays = {name: np.zeros(SHAPE, np.int32) for name in values}
        async with fabric.open_engine(RAILS) as one, fabric.open_engine(RAILS) as other, fabric.open_engine() as own:
            fabric.slow_rail(other, "sim1", by=0.002)
            async with serve_source(one, SOURCES, 0, values), serve_target(other, TARGETS, 0, arrays):
                controller = Controller(own, [one.address], [other.address])
                seen = []
                one.listen_events(lambda event: seen.append(event.name))
                other.listen_events(lambda event: seen.append(event.name))
                for version in range(1, 7):
                    for number, array in enumerate(values.values()):
                        array += 1000 * version + number
                    if version == 2:
                        fabric.kill_rail(other, lost, silently=silently, after=after)
                    assert (await controller.update(version)).attempts == 1
                    for name, array in values.items():
                        np.testing.assert_array_equal(arrays[name], array)
                assert "rail.failed" in seen
                assert "peer.lost" not in seen

    run(main, after, rails=2)
