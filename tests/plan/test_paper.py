"""docs/paper.md is what `make paper` prints, and says of each cell what it rests on and why it is off."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from machine import LONG

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import paper

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

TEXT = paper.PAGE.read_text()
CHEAP = ("writes", "scatter", "kvcache", "placement")
ALL = tuple(paper.SECTIONS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ALL if LONG else CHEAP)
def test_a_section_is_what_comes_out(name):
    section = paper.SECTIONS[name]()
    lines = [cell.line() for cell in section.cells] if name.startswith("moe") else section.lines()
    missing = [line for line in lines if line and line not in TEXT]
    assert not missing, "make paper ARGS=--write: docs/paper.md has no\n" + "\n".join(missing)
    for cell in section.cells:
        assert cell.why or not cell.missed, f"{cell.what} is {cell.error:+.0%} off, and nothing says why"


def test_the_constants_of_a_round_are_those_of_the_calibrated_cells():
    """What was calibrated on a cell gives that cell; the page has each cell, and calls four of twelve calibrated."""
    rows = [line.split(" | ") for line in TEXT[TEXT.index("## MoE rounds, aiote's own") :].splitlines() if "EP" in line]
    cells = [row for row in rows if len(row) == 5]
    assert len(cells) == 12
    calibrated = [row for row in cells if "calibrated" in row[4]]
    assert {row[0].removeprefix("| ") for row in calibrated} == {
        f"{name}, {phase}" for name in ("ConnectX-7, EP16", "EFA, EP64") for phase in ("dispatch", "combine")
    }
    assert all(float(row[2]) == pytest.approx(float(row[1]), rel=0.01) for row in calibrated)


def test_a_cell_that_is_off_is_bold_and_explained():
    cells = [paper.Cell("a", 100, 111, "predicted", "Because."), paper.Cell("b", 2000, 1990, "calibrated")]
    assert [cell.missed for cell in cells] == [True, False]
    lines = paper.Section("T", "us", "text", cells).lines()
    assert "| a | 100 | 111 | **+11.0%** | predicted |" in lines
    assert "| b | 2000 | 1990 | -0.5% | calibrated |" in lines
    assert "*Missed*: a.\nBecause." in lines


def test_the_summary_counts_what_rests_on_what():
    cells = [paper.Cell("a", 10, 12, "predicted", "Because."), paper.Cell("b", 10, 10, "calibrated")]
    assert "| T | 1 of 1 | 0 of 1 | a: +20% |" in paper.summary([paper.Section("T", "us", "text", cells)])
