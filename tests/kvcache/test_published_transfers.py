"""The simulation of published transfers: its table is that of docs/kvcache.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from paper import kvcache as simulated

from aiote.testing import EFA_200G

PAGE = (Path(__file__).parents[2] / "docs" / "kvcache.md").read_text().splitlines()


@pytest.mark.parametrize("nics", simulated.HOST_US)
def test_the_table_says_what_is_simulated(nics):
    cells = list(simulated.cells(nics))
    assert len(cells) == 4
    for cell in cells:
        assert simulated.line(cell) in PAGE
    # One number for the host stands for all cells over one NIC, and for none of those over two.
    assert all((abs(cell.error) < 0.1) == (nics == 1) for cell in cells)
    # No other number does better: one cell is as much too slow as another is too fast.
    assert min(cell.error for cell in cells) == pytest.approx(-max(cell.error for cell in cells), abs=0.003)


def test_without_the_host_a_layer_takes_what_the_nic_takes():
    row = simulated.PUBLISHED[1]
    took = simulated.simulate(row, 1, 0).transfer
    wire = row.pages * simulated.PAGE_BYTES * 8 / EFA_200G.gbps / 1e6
    assert wire < took < 1.05 * wire


def test_the_computation_is_that_of_one_node():
    for row in simulated.PUBLISHED:
        assert simulated.LAYERS * sum(simulated.computations(row)) == pytest.approx(row.alone, rel=0.02)
