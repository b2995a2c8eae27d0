"""The page docs/paper.md, and the command that prints, checks and writes it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import paper
from paper import kvcache, kvlatency, moe, sections, weights
from paper.cells import GOAL, Section, fitted_table, summary

__all__ = ["PAGE", "SECTIONS", "TABLES", "main", "merged", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "paper.md"
SECTIONS: dict[str, Callable[[], Section]] = {
    "moe64": sections.moe64,
    "moe32": sections.moe32,
    "weights": sections.weights,
    "writes": sections.writes,
    "scatter": sections.scatter,
    "kvcache": sections.kvcache,
    "placement": sections.placement,
    "moe16": sections.moe16,
}
"""The longest first."""
ORDER = ("writes", "scatter", "kvcache", "weights", "placement", "moe")
TABLES: dict[str, Callable[[], None]] = {
    "kvcache": kvcache.print_table,
    "kvlatency": kvlatency.print_tables,
    "moe": moe.print_table,
    "weights": weights.print_table,
}
"""The simulated tables of the services' own pages."""
HEAD = """# The published figures, beside ours

This page compares each figure that was published of TransferEngine ([arXiv 2510.27656](https://arxiv.org/abs/2510.27656))
with ours on simulated NICs. The published machines are 8xH200 with two EFA NICs of 200 Gbit/s for each GPU, and 8xH100
with one ConnectX-7 of 400. `make paper` prints this page and checks it. Nothing on it was measured on an RDMA NIC. The
goal is an error of at most {goal:.0%} in each cell. Cells that miss it are bold, and the text below their table gives
the reason.

A number of ours was fitted to each *calibrated* cell, so its agreement proves nothing beyond the fit. No number was
fitted to a *predicted* cell. "Fitted numbers" counts, for each cell, the numbers in our figure that were fitted to
cells of the same table. A cell with more than one of them is *no evidence*. The constants of the NICs are counted in
the first table only; later tables take them from there unchanged.

Two published figures are not here: the watcher's callback (6.3 and 9.8 us), which is the time of a host, and rounds of
8 ranks, which use no NIC.

{summary}

{fitted}
"""


def merged(found: dict[str, Section]) -> list[Section]:
    """Return sections in the page's order. Sections of one table are put together."""
    several = {name: section for name, section in found.items() if not name.startswith("moe")}
    rows = [section for name, section in sorted(found.items()) if name.startswith("moe")]
    if rows:
        several["moe"] = rows[0]._replace(cells=[cell for section in rows for cell in section.cells])
    return [several[name] for name in ORDER if name in several]


def page(found: dict[str, Section]) -> str:
    """Return the whole page."""
    several = merged(found)
    lines = [line for section in several for line in section.lines()]
    head = HEAD.format(goal=GOAL, summary=summary(several), fitted=fitted_table(several))
    return head + "\n" + "\n".join(lines).rstrip() + "\n"


def made(names: Sequence[str], processes: int) -> dict[str, Section]:
    """Simulate sections, several at a time."""
    with ProcessPoolExecutor(processes) as pool:
        futures = {name: pool.submit(SECTIONS[name]) for name in SECTIONS if name in names}
        return {name: future.result() for name, future in futures.items()}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(
        prog="paper", description=paper.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--write", action="store_true", help="write docs/paper.md")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[], help="print the simulated tables of a page")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many run at a time")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}")
    if (options.sections or options.tables) and options.write:
        parser.error("--write needs all sections")
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: expected 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables, sections, or the page. Return 1 if docs/paper.md is not the page."""
    options = parsed(arguments)
    for name in options.tables:
        TABLES[name]()
    if options.tables:
        return 0
    found = made(options.sections or list(SECTIONS), options.processes)
    if options.sections:
        print("\n".join(line for section in merged(found) for line in section.lines()))
        return 0
    text = page(found)
    print(text)
    if options.write:
        PAGE.write_text(text)
    same = PAGE.exists() and PAGE.read_text() == text
    print(f"{PAGE.name} {'is the same' if same else 'differs: make paper ARGS=--write'}", file=sys.stderr)
    return 0 if same else 1
