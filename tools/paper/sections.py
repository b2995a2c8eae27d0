"""The tables of docs/paper.md: published figures, and ours by simulation."""

from __future__ import annotations

from aiote.cli import published_models
from aiote.plan import MOE_SHAPES, nics_of
from aiote.plan.moe import Ends, MoeScenario, Phase, plan_moe
from aiote.plan.weights import jobs_of, simulate
from aiote.testing import CONNECTX7_400G, EFA_200G, EFA_400G, tables
from aiote.weights import plan_update

from . import kvcache as kvcache_table
from . import moe as moe_table
from . import weights as weights_table
from .cells import Cell, Rests, Section

__all__ = ["kvcache", "moe16", "moe32", "moe64", "placement", "scatter", "weights", "writes"]

WRITES = """
`aiote.testing.tables` runs two engines on the model's NICs in virtual time. Three constants of `EFA_200G` (`gbps`,
`operation_us`, and the sum of `latency_us` and `answer_us`) and four of `CONNECTX7_400G` (the same, and `overlap`) were
fitted to these sixteen cells. So the table shows that a NIC with so few constants can agree with all cells at once. It
does not show that the model predicts them.
"""
NIC_CONSTANTS = {EFA_200G: ("gbps", "operation_us", "latency_us + answer_us"),
                 CONNECTX7_400G: ("gbps", "operation_us", "latency_us + answer_us", "overlap")}  # fmt: skip


def writes() -> Section:
    """Single and paged writes."""
    found = []
    for figure in tables.cells():
        size = f"{figure.size >> 10}K" if figure.size < 1 << 20 else f"{figure.size >> 20}M"
        what = f"{figure.what}, {figure.rails} x {figure.model.name}, {size}"
        fitted = len(NIC_CONSTANTS[figure.model])
        found.append(Cell(what, figure.published, figure.simulated, "calibrated", fitted))
    names = tuple(f"`{name}` of {model.name}" for model, several in NIC_CONSTANTS.items() for name in several)
    return Section("Single and paged writes", "Gbit/s", WRITES, found, names)


POSTING = {
    "EFA": (EFA_200G, 2, {8: 3.1, 16: 6.5, 32: 13.4, 64: 27.9}),
    "ConnectX-7": (CONNECTX7_400G, 1, {8: 0.84, 16: 1.9, 32: 4.1, 64: 8.5}),
}
SCATTER = """
The published figure is the time that the reference's thread takes to post a scatter (p50). It is a time of the host,
and a simulated NIC has no host. "Line" is a line through the cells of 8 and 64 peers, two numbers for each NIC. "NIC
alone" is the NIC's own time for so many operations (`operation_us`) and contains no number fitted to this table.
[Performance](performance.md) has the measured posting times of an engine of aiote.
"""
NIC_ALONE = """
The NIC's own time does not include the posting thread. On EFA, whose operations take longer, the two are close. A
ConnectX-7 needs 0.088 us for an operation, less than the reference's thread needs to post one.
"""


def scatter() -> Section:
    """Posting to many peers."""
    found = []
    for name, (_, _, published) in POSTING.items():
        slope = (published[64] - published[8]) / (64 - 8)
        for peers, micros in published.items():
            rests: Rests = "calibrated" if peers in (8, 64) else "predicted"
            found.append(Cell(f"{name}, {peers} peers, line", micros, published[8] + slope * (peers - 8), rests, 2))
    for name, (model, nics, published) in POSTING.items():
        for peers, micros in published.items():
            alone = peers * model.operation_us / nics
            found.append(Cell(f"{name}, {peers} peers, NIC alone", micros, alone, "predicted", 0, NIC_ALONE))
    names = tuple(f"{number} of the line of {name}" for name in POSTING for number in ("slope", "offset"))
    return Section("Posting a scatter", "us", SCATTER, found, names)


KVCACHE = """
`aiote.plan.kvcache` runs `aiote.kvcache` itself, on one NIC of 200 Gbit/s for all pages of the table; over two NICs no
single number fits ([KV caches](kvcache.md#the-published-transfer-simulated)). The time between a computed layer and its
first write was not published. This one number, 222 us, was fitted to the four transfers. The first token is predicted:
the published time of one node, and the time that the transfer adds to it.

**Reproduced**: the transfer of a layer. **Not reproduced**: the time added to the first token. It is 46 to 321 ms in
the paper, and the transfer of the last layer, the only part that the computation does not hide, takes 2 ms of it. The
paper does not publish the rest (routing, scheduling, the first step of the decode side), so no simulation can contain
it. The whole first token agrees at 64K and 128K only because its computation is published and takes most of it.
"""
FIRST_TOKEN = "The paper does not publish most of the added time; see the text above."


def kvcache() -> Section:
    """Transfers of caches, and first tokens."""
    cells = list(kvcache_table.cells(1))
    size = {cell.published.tokens: f"{cell.published.tokens >> 10}K tokens" for cell in cells}
    found = [
        Cell(f"{size[cell.published.tokens]}, a layer", cell.published.transfer, cell.transfer, "calibrated", 1)
        for cell in cells
    ]
    for cell in cells:
        what, row = size[cell.published.tokens], cell.published
        found.append(Cell(f"{what}, first token", row.apart, row.alone + cell.added, "predicted", 1, FIRST_TOKEN))
    for cell in cells:
        what, row = size[cell.published.tokens], cell.published
        added = row.apart - row.alone
        found.append(Cell(f"{what}, added to the first token", added, cell.added, "predicted", 1, FIRST_TOKEN))
    return Section("KV caches", "ms", KVCACHE, found, ("`HOST_US`, between a computed layer and its first write",))


WEIGHTS = """
`aiote.plan.weights` follows the plan that `aiote.weights` makes for the model's shapes. Each call costs what it cost
the first trainer (totals / counts of the published table). Counts of calls, totals and waiting are predicted, and no
number was fitted to them. The layouts come from a second-hand source. The paper does not say how many inference ranks
share a set of experts: EP64 has the published count of writes, and the second-hand source says EP32. As in the
reference, trainers gather whole tensors (`gather="always"`) in the order of their parameters. Cells with "(calls)" are
counts.
"""
WAITING = """
With EP64 fewer ranks write to the same rank at the same time. If one stage is 10 % slower than the others, which the
paper does not say, the first trainer waits 372 ms ([weights](weights.md#the-published-update-simulated)).
"""
QWEN = """
The costs of a call are those of Kimi-K2's tensors, because those of Qwen3-235B were not published. Its layout was not
published in full either. The published figure is the lower end of 1.69 to 2 s.
"""


def _calls(stages: weights_table.Stages) -> list[Cell]:
    """Return the counts of calls of the first trainer."""
    mine = stages.jobs[0]
    posted = sum(len(ranks) * (1 + bool(scale)) for job in mine for ranks, _, scale in job.writes)
    return [
        Cell("Kimi-K2, copies (calls)", 487, sum(job.parameters for job in mine), "predicted"),
        Cell("Kimi-K2, full_tensor (calls)", 974, 2 * sum(job.gathers for job in mine), "predicted"),
        Cell("Kimi-K2, quantize (calls)", 647, sum(job.outputs for job in mine), "predicted"),
        Cell("Kimi-K2, writes (calls)", 1144, posted, "predicted"),
    ]


def weights() -> Section:
    """Counts of calls, times of updates."""
    found = []
    for expert_ranks in (64, 32):
        stages = weights_table.Stages.of(weights_table.planned(expert_ranks, "always"), "parameters")
        if expert_ranks == 64:
            found += _calls(stages)
        times, name = weights_table.simulate(stages.spread()), f"Kimi-K2, EP{expert_ranks}"
        found += [
            Cell(f"{name}, total", weights_table.PUBLISHED_MS, times.total, "predicted"),
            Cell(f"{name}, waiting", weights_table.PUBLISHED_WAITING_MS, times.waiting, "predicted", 0, WAITING),
        ]
    qwen = plan_update(*published_models.qwen3_235b().plan_of(), gather="always")
    total = simulate(jobs_of(qwen, "parameters"), EFA_400G).total
    found.append(Cell("Qwen3-235B, 128 to 32 ranks, total", 1690, total, "predicted", 0, QWEN))
    return Section("Weight updates", "ms", WEIGHTS, found)


def _constants() -> tuple[str, ...]:
    return tuple(f"constant of {phase} on {cluster}" for cluster in ("ConnectX-7", "EFA") for phase in moe_table.PHASES)


PLACEMENT = """
`tools/paper/moe.py` takes the bytes from `aiote.moe.plan` and computes the times of the NICs by arithmetic, in the
reference's own placement. Four constants, one for each cluster and phase, come from a fit of `constant + posting +
hottest NIC's bytes / rate` to these same twelve cells, so all cells are calibrated.
"""


def placement() -> Section:
    """Rounds in the reference's placement of writes on NICs."""
    cells = [cell for cell in moe_table.cells() if not cell.predicts]
    found = [
        Cell(f"{cell.cluster.name}, EP{cell.ranks}, {cell.phase}", cell.published, cell.micros, "calibrated", 1)
        for cell in cells
    ]
    return Section("MoE rounds, the reference's placement", "us", PLACEMENT, found, _constants())


ROUNDS = """
`aiote plan moe --model deepseek-v3 --private 256` runs every rank of `aiote.moe` on the simulated network, and the
engine chooses NICs. The time of kernels and hosts is one constant for each cluster and phase. On ConnectX-7 it was
calibrated on the cell of 16 ranks, on EFA on the cell of 64 ranks. The other eight cells are predicted.
"""
OWN_NICS = """
With two NICs aiote places writes in another way than the reference. With 16 ranks the reference sends a node's whole
dispatch to one NIC of the target, as the table above does. It also divides each answer over both NICs, whereas an
engine gives most writes one NIC.
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
            published = moe_table.PUBLISHED[name, phase][ranks]
            found.append(Cell(f"{name}, EP{ranks}, {phase}", published, ends.mean, rests, 1, OWN_NICS))
    return found


def _moe(ranks: int) -> Section:
    return Section("MoE rounds, aiote's own", "us", ROUNDS, rounds(ranks), _constants())


def moe16() -> Section:
    """Rounds of 16 ranks."""
    return _moe(16)


def moe32() -> Section:
    """Rounds of 32 ranks."""
    return _moe(32)


def moe64() -> Section:
    """Rounds of 64 ranks."""
    return _moe(64)
