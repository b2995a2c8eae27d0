"""The simulation of the published rounds: its cells are within a tenth of the paper's, its table is docs/moe.md's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from paper import moe as simulated

PAGE = (Path(__file__).parents[2] / "docs" / "moe.md").read_text()


def test_the_published_cells_come_out_and_the_page_has_them():
    found = list(simulated.cells())
    lines = PAGE.splitlines()
    missing = [simulated.row(cell) for cell in found if simulated.row(cell) not in lines]
    assert not missing, "docs/moe.md says otherwise:\n" + "\n".join(missing)
    like_the_reference = [cell for cell in found if not cell.predicts]
    assert len(like_the_reference) == 12
    for cell in like_the_reference:
        assert abs(cell.error) < 0.1, cell


def test_ranges_of_peers_make_one_nic_hot_and_an_even_split_does_not():
    ranges, even = (simulated.simulate(simulated.EFA, "dispatch", 16, placement) for placement in ("ranges", "even"))
    assert ranges.busiest == 1
    assert even.busiest < 0.55
    assert even.micros < 0.7 * ranges.micros
    # With an even split instead the reference's own cell would be a quarter off: the hot NIC is needed to explain it.
    assert even.error < -0.25


@pytest.mark.parametrize("phase", simulated.PHASES)
def test_what_is_written_is_the_plans_whatever_the_placement(phase):
    sizes = simulated.nbytes(16, phase)
    assert (sizes[:8, :8] == 0).all()
    assert (sizes[:8, 8:] > 0).all()
    row = 7472 if phase == "dispatch" else 14336
    assert (sizes % row == 0).all()
    # Each token has 8 rows, half of which leave the node, but for chance.
    assert sizes.sum() / row == pytest.approx(16 * 128 * 8 / 2, rel=0.02)
    for placement in ("ranges", "cut", "even"):
        for me in range(16):
            got = np.zeros(16, np.int64)
            for target, nic, size in simulated.writes(sizes, me, 2, placement):
                assert nic in (0, 1)
                got[target] += size
            assert (got == sizes[me]).all()


def test_a_lone_write_takes_its_bytes_and_two_to_one_rank_take_theirs():
    lone = np.zeros((16, 16), np.int64)
    lone[0, 8] = 1_000_000
    assert simulated.arrivals(lone, 1, "ranges", 50_000.0).max() == pytest.approx(20)
    lone[1, 8] = 500_000
    assert simulated.arrivals(lone, 1, "ranges", 50_000.0).max() == pytest.approx(30, rel=0.01)
    assert simulated.arrivals(lone, 2, "cut", 50_000.0).max() == pytest.approx(15, rel=0.01)
