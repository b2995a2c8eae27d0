"""The published figures of TransferEngine (arXiv 2510.27656) beside ours, cell by cell: docs/paper.md is this output.

Each cell says what its figure rests on. "calibrated": a number of ours was fitted to the cell itself, so that it agrees
says little. "predicted": no number of ours was fitted to it. A cell that is more than 10 % off says why.

    make paper                           print it all, and say whether docs/paper.md says the same: minutes
    make paper ARGS=--write              write docs/paper.md
    make paper ARGS="writes kvcache"     some sections
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.append(str(Path(__file__).parent))

import simulate_kvcache
import simulate_moe
import simulate_weights

from aiote.cli import published_models
from aiote.plan import MOE_SHAPES, nics_of
from aiote.plan.moe import Ends, MoeScenario, Phase, plan_moe
from aiote.plan.weights import jobs_of, simulate
from aiote.testing import CONNECTX7_400G, EFA_200G, EFA_400G, tables
from aiote.weights import plan_update

PAGE = Path(__file__).parents[1] / "docs" / "paper.md"
GOAL = 0.10
Rests = Literal["calibrated", "predicted"]


def number(value: float) -> str:
    """Return three or four digits of a figure."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


class Cell(NamedTuple):
    """A published figure and ours, in the same unit; `why` it is off, where that is more than the goal."""

    what: str
    published: float
    ours: float
    rests: Rests
    why: str = ""

    @property
    def error(self) -> float:
        """How far ours is: 0.1 is ten percent more."""
        return self.ours / self.published - 1

    @property
    def missed(self) -> bool:
        """Whether that is more than the goal."""
        return abs(self.error) > GOAL

    def line(self) -> str:
        """Return its row."""
        off = f"**{self.error:+.1%}**" if self.missed else f"{self.error:+.1%}"
        return f"| {self.what} | {number(self.published)} | {number(self.ours)} | {off} | {self.rests} |"


class Section(NamedTuple):
    """A table of the paper: what it is of, its unit, what ours rests on, and its cells."""

    title: str
    unit: str
    text: str
    cells: list[Cell]

    def lines(self) -> list[str]:
        """Return it as Markdown."""
        made = [f"## {self.title}", "", self.text.strip(), ""]
        made += [f"| Cell | Published, {self.unit} | Ours, {self.unit} | Off | Ours is |", "|---|---|---|---|---|"]
        made += [cell.line() for cell in self.cells]
        for why in dict.fromkeys(cell.why for cell in self.cells if cell.missed):
            names = "; ".join(cell.what for cell in self.cells if cell.missed and cell.why == why)
            made += ["", f"*Missed*: {names}.\n{why.strip()}"]
        return [*made, ""]


WRITES = """
`aiote.testing.tables`: two engines on the model's NICs in virtual time. The constants of `EFA_200G` (`gbps`,
`operation_us`, and what `latency_us` and `answer_us` are together) and of `CONNECTX7_400G` (the same, and `overlap`)
were fitted to these sixteen cells: seven numbers for sixteen. So the table says that a NIC of so few numbers can be all
of these cells at once, not that ours predicts them.
"""


def writes() -> Section:
    """Single and paged writes."""
    found = []
    for figure in tables.cells():
        size = f"{figure.size >> 10}K" if figure.size < 1 << 20 else f"{figure.size >> 20}M"
        what = f"{figure.what}, {figure.rails} x {figure.model.name}, {size}"
        found.append(Cell(what, figure.published, figure.simulated, "calibrated"))
    return Section("Single and paged writes", "Gbit/s", WRITES, found)


POSTING = {
    "EFA": (EFA_200G, 2, {8: 3.1, 16: 6.5, 32: 13.4, 64: 27.9}),
    "ConnectX-7": (CONNECTX7_400G, 1, {8: 0.84, 16: 1.9, 32: 4.1, 64: 8.5}),
}
SCATTER = """
How long the reference's thread takes to post a scatter, p50. That is the host's time, and a simulated NIC has no host.
Ours are a line through the cells of 8 and 64 peers, which it is calibrated on; and the NIC's own time for so many
operations (`operation_us`, from the table above), which was not fitted to any of these. What posting takes an engine of
aiote is measured, not simulated: [performance](performance.md).
"""
NIC_ALONE = """
The NIC's own time is no model of who posts. Over EFA, the slower of the two, it is near the published time; a
ConnectX-7 takes an operation in 0.088 us, less than the reference's thread needs to make one.
"""


def scatter() -> Section:
    """Posting to many peers."""
    found = []
    for name, (_, _, published) in POSTING.items():
        slope = (published[64] - published[8]) / (64 - 8)
        for peers, micros in published.items():
            ends = peers in (8, 64)
            line = published[8] + slope * (peers - 8)
            found.append(Cell(f"{name}, {peers} peers, line", micros, line, "calibrated" if ends else "predicted"))
    for name, (model, nics, published) in POSTING.items():
        for peers, micros in published.items():
            alone = peers * model.operation_us / nics
            found.append(Cell(f"{name}, {peers} peers, NIC alone", micros, alone, "predicted", NIC_ALONE))
    return Section("Posting a scatter", "us", SCATTER, found)


KVCACHE = """
`tools/simulate_kvcache.py`, by `aiote.plan.kvcache`: `aiote.kvcache` itself, on one NIC of 200 Gbit/s for all pages of
the table (over two no one number fits: [KvCache](kvcache.md)). What is between a computed layer and its first write was
not published; one number, 222 us, was fitted to the four transfers. The first token is then predicted: the published
time of one node, and what the transfer adds to it.
"""
FIRST_TOKEN = """
The published service adds 46 to 321 ms to the computation, where the transfer of the last layer takes 2 ms. What else
is in it (routing, scheduling, the decode side's first step) was not published, and is not in ours.
"""


def kvcache() -> Section:
    """Transfers of caches, and first tokens."""
    cells = list(simulate_kvcache.cells(1))
    size = {cell.published.tokens: f"{cell.published.tokens >> 10}K tokens" for cell in cells}
    found = [
        Cell(f"{size[cell.published.tokens]}, a layer", cell.published.transfer, cell.transfer, "calibrated")
        for cell in cells
    ]
    for cell in cells:
        what, alone = f"{size[cell.published.tokens]}, first token", cell.published.alone
        found.append(Cell(what, cell.published.apart, alone + cell.added, "predicted", FIRST_TOKEN))
    return Section("KvCache", "ms", KVCACHE, found)


WEIGHTS = """
`tools/simulate_weights.py`, by `aiote.plan.weights`: the plan of `aiote.weights` for the model's shapes, with what a
call cost the first trainer (totals / counts of the published table). Counts of calls, the total and the waiting are
predicted; nothing was fitted to them. Layouts are as said second hand. The paper does not say how many inference
ranks share a set of experts: EP64 has the published count of writes, EP32 is said second hand, too. All in the order
of the parameters, with `gather="always"`, as the reference does it. Where a cell says "calls" it counts them.
"""
WAITING = """
With EP64 fewer ranks write to the same one at the same time. If one stage is 10 % slower than the others, which was not
published, the first trainer waits 372 ms ([weights](weights.md)).
"""
QWEN = """
The costs of a call are those of Kimi-K2's tensors. Those of Qwen3-235B were not published, nor was its layout in full;
the published figure is the lower end of 1.69 to 2 s.
"""


def weights() -> Section:
    """Counts of calls, times of updates."""
    found = []
    for expert_ranks in (64, 32):
        plan = simulate_weights.planned(expert_ranks, "always")
        stages = simulate_weights.Stages.of(plan, "parameters")
        if expert_ranks == 64:
            mine = stages.jobs[0]
            posted = sum(len(ranks) * (1 + bool(scale)) for job in mine for ranks, _, scale in job.writes)
            found += [
                Cell("Kimi-K2, copies (calls)", 487, sum(job.parameters for job in mine), "predicted"),
                Cell("Kimi-K2, full_tensor (calls)", 974, 2 * sum(job.gathers for job in mine), "predicted"),
                Cell("Kimi-K2, quantize (calls)", 647, sum(job.outputs for job in mine), "predicted"),
                Cell("Kimi-K2, writes (calls)", 1144, posted, "predicted"),
            ]
        times = simulate_weights.simulate(stages.spread())
        name = f"Kimi-K2, EP{expert_ranks}"
        found.append(Cell(f"{name}, total", simulate_weights.PUBLISHED_MS, times.total, "predicted"))
        waiting = Cell(f"{name}, waiting", simulate_weights.PUBLISHED_WAITING_MS, times.waiting, "predicted", WAITING)
        found.append(waiting)
    qwen = plan_update(*published_models.qwen3_235b().plan_of(), gather="always")
    total = simulate(jobs_of(qwen, "parameters"), EFA_400G).total
    found.append(Cell("Qwen3-235B, 128 to 32 ranks, total", 1690, total, "predicted", QWEN))
    return Section("Weight updates", "ms", WEIGHTS, found)


PLACEMENT = """
`tools/simulate_moe.py`: the bytes of `aiote.moe.plan` over NICs that are arithmetic, in the reference's own placement.
Four constants (of a cluster and a phase each) come from a fit of `constant + posting + hottest NIC's bytes / rate` to
these same twelve cells, so all are calibrated.
"""


def placement() -> Section:
    """Rounds in the reference's placement of writes on NICs."""
    cells = [cell for cell in simulate_moe.cells() if not cell.predicts]
    found = [
        Cell(f"{cell.cluster.name}, EP{cell.ranks}, {cell.phase}", cell.published, cell.micros, "calibrated")
        for cell in cells
    ]
    return Section("MoE rounds, the reference's placement", "us", PLACEMENT, found)


ROUNDS = """
`aiote plan moe --model deepseek-v3 --private 256`, by `aiote.plan.moe`: `aiote.moe` itself, every rank, on the
simulated network; the engine chooses NICs. What kernels and hosts take is one number for a cluster and a phase,
calibrated on one cell: of 16 ranks over ConnectX-7, of 64 ranks over EFA. The other eight are predicted.
"""
OWN_NICS = """
With two NICs aiote places writes in its own way. Of 16 ranks the reference sends a node's whole dispatch to one NIC of
the target (the table above has that); and it cuts each answer over both, where an engine gives most writes one NIC.
"""


def rounds(ranks: int) -> list[Cell]:
    """Rounds of `aiote.moe` on the simulated network, of so many ranks."""
    found = []
    for name, nics, calibrated in (("ConnectX-7", "connectx-7", 16), ("EFA", "efa-200g", 64)):
        scenario = MoeScenario(shape=MOE_SHAPES["deepseek-v3"], nics=nics_of(nics), ranks=ranks, private=256)
        plan = plan_moe(scenario)
        rests: Rests = "calibrated" if ranks == calibrated else "predicted"
        both: tuple[tuple[Phase, Ends], ...] = (("dispatch", plan.dispatch), ("combine", plan.combine))
        for phase, ends in both:
            published = simulate_moe.PUBLISHED[name, phase][ranks]
            found.append(Cell(f"{name}, EP{ranks}, {phase}", published, ends.mean, rests, OWN_NICS))
    return found


def moe16() -> Section:
    """Rounds of 16 ranks."""
    return Section("MoE rounds, aiote's own", "us", ROUNDS, rounds(16))


def moe32() -> Section:
    """Rounds of 32 ranks."""
    return moe16()._replace(cells=rounds(32))


def moe64() -> Section:
    """Rounds of 64 ranks."""
    return moe16()._replace(cells=rounds(64))


SECTIONS: dict[str, Callable[[], Section]] = {
    "moe64": moe64,
    "moe32": moe32,
    "weights": weights,
    "writes": writes,
    "scatter": scatter,
    "kvcache": kvcache,
    "placement": placement,
    "moe16": moe16,
}
"""The longest first."""
ORDER = ("writes", "scatter", "kvcache", "weights", "placement", "moe")
HEAD = """# The published figures, beside ours

What was published of TransferEngine ([arXiv 2510.27656](https://arxiv.org/abs/2510.27656): 8xH200 with two EFA NICs of
200 Gbit/s a GPU, 8xH100 with one ConnectX-7 of 400), cell by cell, and what comes out here on simulated NICs. `make
paper` prints this page; nothing on it was measured on an RDMA NIC. The goal is {goal:.0%} a cell. Cells that miss it
are bold, and the text below their table says why.

*Calibrated* cells are what a number of ours was fitted to: they show that the numbers are enough, not that they are
right. *Predicted* cells had no part in any fit.

Not here: the watcher's callback (6.3 and 9.8 us), which is a host's time and no NIC's, and rounds of 8 ranks, which use
no NIC.

{summary}
"""


def merged(found: dict[str, Section]) -> list[Section]:
    """Return sections in the page's order; those of one table together."""
    several = {name: section for name, section in found.items() if not name.startswith("moe")}
    rows = [section for name, section in sorted(found.items()) if name.startswith("moe")]
    if rows:
        several["moe"] = rows[0]._replace(cells=[cell for section in rows for cell in section.cells])
    return [several[name] for name in ORDER if name in several]


def summary(sections: Sequence[Section]) -> str:
    """Return a table of how many cells rest on what, and how many are off."""
    lines = ["| Table | Calibrated, within 10 % | Predicted, within 10 % | Farthest predicted |", "|---|---|---|---|"]
    for section in sections:
        counts = []
        for rests in ("calibrated", "predicted"):
            mine = [cell for cell in section.cells if cell.rests == rests]
            counts.append(f"{sum(not cell.missed for cell in mine)} of {len(mine)}" if mine else "none")
        predicted = [cell for cell in section.cells if cell.rests == "predicted"]
        worst = max(predicted, key=lambda cell: abs(cell.error), default=None)
        farthest = f"{worst.what}: {worst.error:+.0%}" if worst else ""
        lines.append(f"| {section.title} | {counts[0]} | {counts[1]} | {farthest} |")
    return "\n".join(lines)


def page(found: dict[str, Section]) -> str:
    """Return all of it."""
    sections = merged(found)
    lines = [line for section in sections for line in section.lines()]
    return HEAD.format(goal=GOAL, summary=summary(sections)) + "\n" + "\n".join(lines).rstrip() + "\n"


def made(names: Sequence[str], processes: int) -> dict[str, Section]:
    """Simulate sections, several at a time."""
    with ProcessPoolExecutor(processes) as pool:
        futures = {name: pool.submit(SECTIONS[name]) for name in SECTIONS if name in names}
        return {name: future.result() for name, future in futures.items()}


def main() -> int:
    """Print sections; of all of them say whether docs/paper.md has the same. 1: it has not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--write", action="store_true", help="write docs/paper.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="so many at a time")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}")
    if options.sections and options.write:
        parser.error("--write needs all sections")
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: expected 1 or more")
    found = made(options.sections or list(SECTIONS), options.processes)
    if options.sections:
        print("\n".join(line for section in merged(found) for line in section.lines()))
        return 0
    text = page(found)
    print(text)
    if options.write:
        PAGE.write_text(text)
    same = PAGE.exists() and PAGE.read_text() == text
    print(f"{PAGE.name} {'says the same' if same else 'says otherwise: make paper ARGS=--write'}", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
