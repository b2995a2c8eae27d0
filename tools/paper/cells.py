"""Cells and sections of docs/paper.md, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["GOAL", "Cell", "Rests", "Section", "fitted_table", "summary"]

GOAL = 0.10
Rests = Literal["calibrated", "predicted"]


def number(value: float) -> str:
    """Return three or four digits of a figure."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


class Cell(NamedTuple):
    """A published figure and ours, in the same unit.

    rests: whether a number was fitted to this cell. fitted: how many numbers that were fitted to cells of this table
    are in our figure. why: the reason, if the cell misses the goal.
    """

    what: str
    published: float
    ours: float
    rests: Rests
    fitted: int = 0
    why: str = ""

    @property
    def error(self) -> float:
        """The error of our figure: 0.1 is ten percent more than the published one."""
        return self.ours / self.published - 1

    @property
    def missed(self) -> bool:
        """Whether the error exceeds the goal."""
        return abs(self.error) > GOAL

    @property
    def evidence(self) -> bool:
        """Whether agreement says anything: a predicted cell with one fitted number at most."""
        return self.rests == "predicted" and self.fitted <= 1

    def line(self) -> str:
        """Return the cell's row."""
        off = f"**{self.error:+.1%}**" if self.missed else f"{self.error:+.1%}"
        kind = f"{self.rests}, no evidence" if self.fitted > 1 else self.rests
        return f"| {self.what} | {number(self.published)} | {number(self.ours)} | {off} | {self.fitted} | {kind} |"


class Section(NamedTuple):
    """A table of the paper: title, unit, a text about our figures, cells, and the names of its fitted numbers."""

    title: str
    unit: str
    text: str
    cells: list[Cell]
    fitted: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the section as Markdown."""
        made = [f"## {self.title}", "", self.text.strip(), ""]
        made += [
            f"| Cell | Published, {self.unit} | Ours, {self.unit} | Off | Fitted numbers | Ours is |",
            "|---|---|---|---|---|---|",
        ]
        made += [cell.line() for cell in self.cells]
        for why in dict.fromkeys(cell.why for cell in self.cells if cell.missed):
            names = "; ".join(cell.what for cell in self.cells if cell.missed and cell.why == why)
            made += ["", f"*Missed*: {names}.\n{why.strip()}"]
        return [*made, ""]


def summary(sections: Sequence[Section]) -> str:
    """Return a table that counts cells by their kind, those within the goal, and fitted numbers."""
    lines = [
        "| Table | Calibrated, within 10 % | Predicted, within 10 % | No evidence | Farthest predicted |",
        "|---|---|---|---|---|",
    ]
    for section in sections:
        counts = []
        for rests in ("calibrated", "predicted"):
            mine = [cell for cell in section.cells if cell.rests == rests]
            counts.append(f"{sum(not cell.missed for cell in mine)} of {len(mine)}" if mine else "none")
        counts.append(str(sum(cell.fitted > 1 for cell in section.cells) or "none"))
        predicted = [cell for cell in section.cells if cell.rests == "predicted"]
        worst = max(predicted, key=lambda cell: abs(cell.error), default=None)
        farthest = f"{worst.what}: {worst.error:+.0%}" if worst else ""
        lines.append(f"| {section.title} | {' | '.join(counts)} | {farthest} |")
    return "\n".join(lines)


def fitted_table(sections: Sequence[Section]) -> str:
    """Return a table of the fitted numbers by name, and their count."""
    lines = ["| Table | Fitted numbers | Which |", "|---|---|---|"]
    lines += [
        f"| {section.title} | {len(section.fitted) or 'none'} | {', '.join(section.fitted)} |" for section in sections
    ]
    total = sum(len(section.fitted) for section in sections)
    cells = sum(len(section.cells) for section in sections)
    return "\n".join([*lines, f"| all | {total} | for {cells} cells |"])
