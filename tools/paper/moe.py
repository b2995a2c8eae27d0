"""The published rounds of decode between nodes (dispatch, combine), from the costs of NICs and of posting a scatter.

The paper's table has 12 cells of 16, 32 and 64 ranks: 128 tokens of 7168 fp8 with 56 scales for 8 of 256 experts, 8
GPUs a node, answers in bfloat16. `aiote.moe`'s plan for random tokens gives the bytes of each pair of ranks. Each rank
writes once to each peer, beginning with the next higher rank, as `aiote.moe` does. Rows within a node go over NVLink at
the same time and are left out.

    time of a rank = constant + posting + from its peers' first byte until its last byte has arrived

**NICs.** `aiote.plan.moe_arithmetic`: a NIC sends a packet of each of its writes in turn and receives packets one after
the other, at the rate that was published for writes of 64 KiB.

**Constants.** Posting a scatter takes the reference's published median for the number of peers. The part that does not
grow with the ranks (kernels, latency) is one number for each cluster and phase. These four come from a fit of constant
+ posting + hottest NIC's bytes / rate to the same twelve cells; no number was fitted to this simulation.

**Placement.** In the reference each NIC of a sender has a range of peers, and writes to the same NIC of the target, so
all ranks of a node reach a receiver over one of its NICs. Combine divides every message over all NICs. "even" gives
each pair of ranks the NIC (source + target) % NICs; over EFA that is a prediction, because no such figures were
published.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiote.moe.config import MoeConfig, Sizes
from aiote.moe.plan import Counts, RoundPlan
from aiote.plan.moe_arithmetic import PostedWrite, last_bytes
from aiote.testing import CONNECTX7_400G, EFA_200G, NicModel
from aiote.testing.tables import KIB
from aiote.testing.tables import PUBLISHED as PUBLISHED_NICS

Placement = Literal["ranges", "cut", "even"]
Phase = Literal["dispatch", "combine"]
PHASES: tuple[Phase, ...] = ("dispatch", "combine")
RANKS = (16, 32, 64)
NODE = 8
CONFIG = MoeConfig(
    experts=256, top_k=8, hidden=7168, tokens=128, dtype="float8_e4m3fn", scales=56, placement="packed", private=256
)
"""`private` is what the paper's benchmark was given: nothing overflows."""


class Cluster(NamedTuple):
    """NICs of a GPU, microseconds to post a scatter to so many peers, and the constants of the formula."""

    name: str
    model: NicModel
    nics: int
    posting: dict[int, float]
    constant: dict[Phase, float]

    @property
    def bytes_us(self) -> float:
        """What a NIC carries in a microsecond: the published rate of writes of 64 KiB."""
        return PUBLISHED_NICS["paged writes", self.model, self.nics][64 * KIB] * 1e3 / 8 / self.nics


# Posting: arXiv 2510.27656, p50 of a scatter to 16, 32 and 64 peers.
CX7 = Cluster("ConnectX-7", CONNECTX7_400G, 1, {16: 1.9, 32: 4.1, 64: 8.5}, {"dispatch": 29.5, "combine": 23.9})
EFA = Cluster("EFA", EFA_200G, 2, {16: 6.5, 32: 13.4, 64: 27.9}, {"dispatch": 54.2, "combine": 78.1})
PUBLISHED: dict[tuple[str, Phase], dict[int, float]] = {
    ("ConnectX-7", "dispatch"): {16: 110.2, 32: 153.9, 64: 187.5},
    ("ConnectX-7", "combine"): {16: 185.5, 32: 266.3, 64: 309.1},
    ("EFA", "dispatch"): {16: 214.8, 32: 229.1, 64: 266.7},
    ("EFA", "combine"): {16: 241.5, 32: 335.0, 64: 391.2},
}


class Cell(NamedTuple):
    """One cell: microseconds, the mean of all ranks, and the mean share of their bytes on their busiest NIC."""

    cluster: Cluster
    phase: Phase
    ranks: int
    placement: Placement
    micros: float
    busiest: float

    @property
    def published(self) -> float:
        """What the paper says."""
        return PUBLISHED[self.cluster.name, self.phase][self.ranks]

    @property
    def predicts(self) -> bool:
        """Whether the reference does otherwise."""
        return self.cluster.nics > 1 and self.placement == "even"

    @property
    def error(self) -> float:
        """How far it is from the paper: 0.1 is ten percent slower."""
        return self.micros / self.published - 1


def nbytes(ranks: int, phase: Phase) -> NDArray[np.int64]:
    """Return how many bytes each rank writes to each other one, by the plan; nothing within a node."""
    sizes = Sizes(CONFIG, ranks)
    random = np.random.default_rng(ranks)
    ids = random.random((ranks, CONFIG.tokens, CONFIG.experts)).argsort(2)[..., : CONFIG.top_k]
    experts = np.stack([np.bincount(one.reshape(-1), minlength=CONFIG.experts) for one in ids])
    plan = RoundPlan(sizes, 0, Counts(experts, np.zeros((ranks, ranks), np.int64)))
    rows = np.array([[plan.private(source, target) for target in range(ranks)] for source in range(ranks)])
    node = np.arange(ranks) // NODE
    rows[node[:, None] == node] = 0
    # Answers go the other way.
    return rows * sizes.row if phase == "dispatch" else rows.T * sizes.y_row


def writes(sizes: NDArray[np.int64], me: int, nics: int, placement: Placement) -> Iterator[tuple[int, int, int]]:
    """Yield (target, NIC, bytes) of a rank's writes, in the order in which they are posted."""
    ranks = len(sizes)
    peers = np.flatnonzero(sizes[me]).tolist()
    # The reference's list begins with the node behind its own.
    behind = sorted(peers, key=lambda rank: ((rank // NODE - me // NODE) % (ranks // NODE), rank))
    for target in sorted(peers, key=lambda rank: (rank - me) % ranks):
        total = int(sizes[me, target])
        if placement == "cut":
            yield from ((target, nic, total // nics + (nic < total % nics)) for nic in range(nics))
        else:
            of_range = behind.index(target) * nics // len(peers)
            yield target, of_range if placement == "ranges" else (me + target) % nics, total


def arrivals(sizes: NDArray[np.int64], nics: int, placement: Placement, bytes_us: float) -> NDArray[np.float64]:
    """Return when the last byte has come over each NIC of each rank (ranks, NICs), in microseconds."""
    posted = [list(starmap(PostedWrite, writes(sizes, me, nics, placement))) for me in range(len(sizes))]
    model = NicModel(name="bytes alone", gbps=bytes_us * 8 / 1e3, latency_us=0, answer_us=0)
    return last_bytes(posted, nics, model).received


def simulate(cluster: Cluster, phase: Phase, ranks: int, placement: Placement) -> Cell:
    """Simulate one cell."""
    sizes = nbytes(ranks, phase)
    ends = arrivals(sizes, cluster.nics, placement, cluster.bytes_us)
    got = np.zeros((ranks, cluster.nics))
    for me in range(ranks):
        for target, nic, size in writes(sizes, me, cluster.nics, placement):
            got[target, nic] += size
    micros = cluster.constant[phase] + cluster.posting[ranks] + float(ends.max(1).mean())
    return Cell(cluster, phase, ranks, placement, micros, float((got.max(1) / got.sum(1)).mean()))


def cells() -> Iterator[Cell]:
    """Simulate the published cells, and over EFA what an even split of the dispatch would give."""
    for cluster in (CX7, EFA):
        for phase in PHASES:
            reference: Placement = "ranges" if phase == "dispatch" else "cut"
            several: list[Placement] = [reference]
            if cluster is EFA and phase == "dispatch":
                several.append("even")
            for placement in several:
                for ranks in RANKS:
                    yield simulate(cluster, phase, ranks, placement)


def row(cell: Cell) -> str:
    """Return a row of the table of docs/moe.md."""
    error = "a prediction" if cell.predicts else f"{cell.error:+.1%}"
    placement = cell.placement if cell.cluster.nics > 1 else "one NIC"
    return (
        f"| {cell.cluster.name} | {cell.phase} | {placement} | {cell.ranks} | {cell.busiest:.0%} "
        f"| {cell.published:.0f} | {cell.micros:.0f} | {error} |"
    )


def print_table() -> None:
    """Print the table of docs/moe.md."""
    print("| NICs | Phase | Placement | EP | On the busiest NIC | Published, us | Simulated, us | Off |")
    print("|---|---|---|---|---|---|---|---|")
    for cell in cells():
        print(row(cell), flush=True)
