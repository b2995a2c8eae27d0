"""docs/paper.md is the page of `make paper`. Each cell says what it rests on, and why it misses the goal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from paper.cells import Cell, Section, fitted_table, summary
from paper.page import PAGE, SECTIONS, main

pytestmark = pytest.mark.blocking_allowed("there is no loop whose clock runs on")

TEXT = PAGE.read_text()
CHEAP = ("writes", "scatter", "kvcache", "placement")
"""`make paper`, part of `make test-all`, compares the whole page."""


@pytest.mark.parametrize("name", CHEAP)
def test_a_section_is_on_the_page(name):
    section = SECTIONS[name]()
    missing = [line for line in section.lines() if line and line not in TEXT]
    assert not missing, "make paper ARGS=--write: docs/paper.md has no\n" + "\n".join(missing)
    for cell in section.cells:
        assert cell.why or not cell.missed, f"{cell.what} is {cell.error:+.0%} off, and nothing says why"
        assert cell.fitted <= len(section.fitted)
        assert cell.rests == "predicted" or cell.fitted, f"{cell.what} is calibrated on no number"


def test_the_constants_of_a_round_are_those_of_the_calibrated_cells():
    """A constant that was calibrated on a cell gives that cell. Four of the page's twelve cells are calibrated."""
    rows = [line.split(" | ") for line in TEXT[TEXT.index("## MoE rounds, aiote's own") :].splitlines() if "EP" in line]
    cells = [row for row in rows if len(row) == 6]
    assert len(cells) == 12
    calibrated = [row for row in cells if "calibrated" in row[5]]
    assert {row[0].removeprefix("| ") for row in calibrated} == {
        f"{name}, {phase}" for name in ("ConnectX-7, EP16", "EFA, EP64") for phase in ("dispatch", "combine")
    }
    assert all(float(row[2]) == pytest.approx(float(row[1]), rel=0.01) for row in calibrated)


def test_a_cell_that_is_off_is_bold_and_explained():
    cells = [Cell("a", 100, 111, "predicted", 0, "Because."), Cell("b", 2000, 1990, "calibrated", 1)]
    assert [cell.missed for cell in cells] == [True, False]
    lines = Section("T", "us", "text", cells).lines()
    assert "| a | 100 | 111 | **+11.0%** | 0 | predicted |" in lines
    assert "| b | 2000 | 1990 | -0.5% | 1 | calibrated |" in lines
    assert "*Missed*: a.\nBecause." in lines


def test_a_cell_with_two_fitted_numbers_is_no_evidence():
    several = [Cell("a", 1, 1, "predicted", count) for count in (0, 1, 2)]
    assert [cell.evidence for cell in several] == [True, True, False]
    assert not Cell("a", 1, 1, "calibrated", 1).evidence
    assert [cell.line().split(" | ")[-1] for cell in several] == [
        "predicted |", "predicted |", "predicted, no evidence |",
    ]  # fmt: skip


def test_the_summary_counts_cells_and_names_fitted_numbers():
    cells = [Cell("a", 10, 12, "predicted", 2, "Because."), Cell("b", 10, 10, "calibrated", 1)]
    section = Section("T", "us", "text", cells, ("slope", "offset"))
    assert "| T | 1 of 1 | 0 of 1 | 1 | a: +20% |" in summary([section])
    assert fitted_table([section]).splitlines()[2:] == ["| T | 2 | slope, offset |", "| all | 2 | for 2 cells |"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tariffs"], "tariffs: expected some of moe64, moe32, weights"),
        (["writes", "--write"], "--write needs all sections"),
        (["--processes", "0"], "--processes 0: expected 1 or more"),
        (["--tables", "prices"], "invalid choice: 'prices'"),
    ],
)
def test_wrong_arguments_of_the_command_get_a_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err
