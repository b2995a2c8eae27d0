"""Plan dispatch and combine of an expert-parallel group: run every rank of `aiote.moe` on the simulated network.

    time of a rank = the network's time, from the call until it returns + constant

**Network.** Each rank is an engine with its NICs, and opens a group. `aiote.moe.round` posts routes, rows and answers;
the engine chooses the NICs. Python code takes no virtual time. A NIC sends one packet of each of its writes in turn.

**Node.** Ranks of a node reach each other over NVLink, which is not simulated. So tokens name no expert of their own
node here, and only the (small) routes go to ranks of the same node. With node=1 everything goes over NICs.

**Constant.** Kernels, and the host's work in a round, are not simulated either. They are one number for each NIC model
and phase, calibrated on one published cell each (`CONSTANTS`). For other NICs the number is 0, or the caller's.

**Sizes.** Bytes and rates are divided by the same number (`SHRINK`). This does not change times, but takes less memory.

**Large groups.** With more than `MAX_SIMULATED` ranks no engine runs: `moe_arithmetic` computes the times of the writes
that `aiote.moe.plan` plans, for all pairs of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote
from aiote.moe import Batch, MoeConfig, MoeGroup, open_group
from aiote.moe.config import ITEMSIZES, Sizes
from aiote.moe.memory import LaneMap

from ..testing import Fabric, run
from .moe_arithmetic import PACKET, ComputedRound, last_bytes
from .nics import Nics, in_range
from .shapes import MoeShape

__all__ = ["CONSTANTS", "MAX_RANKS", "MAX_SIMULATED", "Ends", "How", "MoePlan", "MoeScenario", "plan_moe", "with_nics"]

Phase = Literal["dispatch", "combine"]
How = Literal["auto", "engines", "arithmetic"]
MAX_RANKS = 511
"""The most ranks of a group of `aiote.moe`."""
MAX_SIMULATED = 64
"""The most ranks that run as engines unless `how="engines"`. Such a group takes a minute or two to open on one core."""
MAX_ENGINES = 128
SHRINK, LARGE_ROW = 4, 4096
"""Rows of fewer than LARGE_ROW bytes are simulated in full size, because the fields that say where a row comes from
would be too large a part of a fourth of the row."""
ROUNDS = 3
"""How many rounds are simulated. The times of the first are left out, because an engine chooses NICs by the bytes that
each has carried before."""
CONSTANTS: dict[str, dict[Phase, float]] = {
    "ConnectX-7 400G": {"dispatch": 17.0, "combine": 13.8},
    "EFA 200G": {"dispatch": 35.1, "combine": 10.9},
}
"""Microseconds by the name of a NIC model: by how much a published cell is longer than the simulation (docs/paper.md).
The cell for ConnectX-7 has 16 ranks. The cell for EFA has 64 ranks, because there it matters least that the reference
chooses NICs in another way than an engine does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeScenario:
    """A group and its NICs.

    tokens: the tokens of a rank in a round. node: how many ranks share NVLink. zipf: how skewed the choice of experts
    is, 0 for even. private: rows that are sent before the routes are known, as in `MoeConfig`. how: whether every rank
    runs as an engine, or times are computed by arithmetic; "auto" runs engines up to `MAX_SIMULATED` ranks.
    """

    shape: MoeShape
    nics: Nics
    ranks: int = 16
    tokens: int = 128
    node: int = 8
    dtype: str = "float8_e4m3fn"
    scales: int | None = None
    out_dtype: str = "bfloat16"
    private: int | None = None
    zipf: float = 0.0
    seed: int = 0
    how: How = "auto"

    def __post_init__(self) -> None:
        """Check the numbers. Raises UsageError."""
        in_range("ranks", self.ranks, 2, MAX_RANKS)
        in_range("tokens", self.tokens, 1, 4096)
        in_range("node", self.node, 1, self.ranks - 1)
        in_range("zipf", self.zipf, 0, 4)
        if self.how == "engines" and self.ranks > MAX_ENGINES:
            raise aiote.UsageError(f"ranks={self.ranks}: expected from 2 to {MAX_ENGINES} with how=engines")
        if self.ranks % self.node:
            raise aiote.UsageError(f"ranks={self.ranks}: expected a multiple of node={self.node}")
        if self.shape.top_k > self.shape.experts - -(-self.shape.experts // self.ranks) * self.node:
            raise aiote.UsageError(
                f"ranks={self.ranks}: fewer than top-k={self.shape.top_k} of {self.shape.experts} experts are on "
                "other nodes; expected more ranks, or a smaller node"
            )

    @property
    def simulated(self) -> bool:
        """Whether every rank runs as an engine."""
        return self.how == "engines" or (self.how == "auto" and self.ranks <= MAX_SIMULATED)

    @property
    def config(self) -> MoeConfig:
        """The configuration for `aiote.moe`, in full size."""
        fp8 = ITEMSIZES.get(self.dtype) == 1
        scales = self.scales if self.scales is not None else self.shape.hidden // 128 if fp8 else 0
        return MoeConfig(
            experts=self.shape.experts, top_k=self.shape.top_k, hidden=self.shape.hidden, tokens=self.tokens,
            dtype=self.dtype, scales=scales, out_dtype=self.out_dtype, placement="packed", private=self.private,
            layout="contiguous",
        )  # fmt: skip

    def smaller(self) -> tuple[MoeConfig, float, float]:
        """Return a configuration with smaller rows, and the factors of full-size rows and answers to its own."""
        whole = Sizes(self.config, self.ranks)
        if whole.row < LARGE_ROW:
            return self.config, 1.0, 1.0
        config = dataclasses.replace(self.config, hidden=self.shape.hidden // SHRINK, scales=0)
        bare = Sizes(config, self.ranks)
        scales = max(0, round((whole.row / SHRINK - bare.row) / ITEMSIZES[config.scale_dtype]))
        made = Sizes(dataclasses.replace(config, scales=scales), self.ranks)
        return made.config, whole.row / made.row, whole.y_row / made.y_row

    def tokens_of(self, rank: int) -> NDArray[np.int32]:
        """Draw the experts that the tokens of a rank name; -1 replaces experts of the rank's own node."""
        shape = self.shape
        rng = np.random.default_rng((self.seed, self.ranks, rank))
        weights = np.arange(1, shape.experts + 1, dtype=np.float64) ** -self.zipf
        # Draw experts without repetition, with probabilities by weight (Efraimidis and Spirakis).
        keys = rng.exponential(size=(self.tokens, shape.experts)) / weights
        ids = keys.argpartition(shape.top_k - 1, axis=1)[:, : shape.top_k].astype(np.int32)
        local = -(-shape.experts // self.ranks)
        if self.node > 1:
            ids[ids // local // self.node == rank // self.node] = -1
        return ids


class Ends(NamedTuple):
    """Microseconds of one phase: the mean over all ranks, and the slowest rank."""

    mean: float
    slowest: float


Measured: TypeAlias = tuple[dict[Phase, list[float]], list[list[int]], list[list[int]]]
"""Microseconds of the ranks by phase, and bytes by rank and NIC: sent, and received."""


class MoePlan(NamedTuple):
    """The plan of a round. Bytes are for a dispatch and a combine together, by rank and NIC; memory is for one lane.

    The times include `constant`; `of_model` says whether it was calibrated for these NICs. `simulated` says whether
    every rank ran as an engine.
    """

    ranks: int
    nics: Nics
    dispatch: Ends
    combine: Ends
    constant: dict[Phase, float]
    of_model: bool
    sent: list[list[int]]
    received: list[list[int]]
    inbox: int
    outbox: int
    simulated: bool = True

    @property
    def hottest(self) -> tuple[int, int, int]:
        """The rank and the NIC that carry the most bytes in one direction, and these bytes."""
        sides = (self.sent, self.received)
        return max(
            ((rank, nic, size) for side in sides for rank, row in enumerate(side) for nic, size in enumerate(row)),
            key=lambda one: (one[2], -one[0], -one[1]),
        )


def plan_moe(scenario: MoeScenario, constant: dict[Phase, float] | None = None) -> MoePlan:
    """Return the plan of one round, from simulated rounds or by arithmetic. Raises UsageError."""
    known = CONSTANTS.get(scenario.nics.model.name)
    added = constant or known or {"dispatch": 0.0, "combine": 0.0}
    times, sent, received = _simulated(scenario) if scenario.simulated else _computed(scenario)
    whole = LaneMap(Sizes(scenario.config, scenario.ranks))
    ends = {
        phase: Ends(float(np.mean(several)) + added[phase], float(np.max(several)) + added[phase])
        for phase, several in times.items()
    }
    return MoePlan(
        scenario.ranks, scenario.nics, ends["dispatch"], ends["combine"], dict(added),
        known is not None and constant is None, sent, received, whole.inbox, whole.outbox, scenario.simulated,
    )  # fmt: skip


def _simulated(scenario: MoeScenario) -> Measured:
    """Run every rank as an engine."""
    config, row, answer = scenario.smaller()
    # Rows and answers shrink by the same factor, except that their lines are rounded to 16 bytes.
    scale = (row + answer) / 2
    model = dataclasses.replace(
        scenario.nics.model, gbps=scenario.nics.model.gbps / scale, packet_bytes=round(PACKET / scale)
    )
    found = _Rounds(scenario, config)
    run(found.main, scenario.seed, rails=scenario.nics.per_rank, model=model, remembered=1 << 22)
    sent, received = ([[round(size * scale) for size in one] for one in side] for side in (found.sent, found.received))
    return found.times, sent, received


def _computed(scenario: MoeScenario) -> Measured:
    """Compute a round by arithmetic."""
    nics, model = scenario.nics.per_rank, scenario.nics.model
    found = ComputedRound(scenario.config, [scenario.tokens_of(rank) for rank in range(scenario.ranks)], nics)
    dispatch, combine = (last_bytes(posted, nics, model) for posted in (found.dispatch(), found.combine()))
    # A rank ends its combine once its own answers are confirmed, too.
    both = np.maximum(combine.received.max(1), combine.delivered + model.answer_us)
    times: dict[Phase, list[float]] = {"dispatch": dispatch.received.max(1).tolist(), "combine": both.tolist()}
    return times, *found.carried()


class Barrier:
    """A barrier of all ranks. It takes a millisecond, so that transfers in flight can end."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._here, self._event = ranks, 0, anyio.Event()

    async def wait(self) -> None:
        """Wait until all ranks have come."""
        mine = self._event
        self._here += 1
        if self._here % self._ranks:
            await mine.wait()
            return
        self._event = anyio.Event()
        await anyio.sleep(1e-3)
        mine.set()


class _Rounds:
    """Run rounds of all ranks, and keep their times and bytes."""

    def __init__(self, scenario: MoeScenario, config: MoeConfig) -> None:
        self.scenario, self.config = scenario, config
        self.times: dict[Phase, list[float]] = {"dispatch": [], "combine": []}
        self.sent: list[list[int]] = []
        self.received: list[list[int]] = []
        self._barrier = Barrier(scenario.ranks)

    async def main(self, fabric: Fabric) -> None:
        quiet = aiote.EngineConfig(message_pool=2, heartbeat_interval=10.0, heartbeat_timeout=60.0)
        engines = [await fabric.open_engine(config=quiet) for _ in range(self.scenario.ranks)]
        async with anyio.create_task_group() as ranks:
            for rank in range(self.scenario.ranks):
                ranks.start_soon(self._rank, fabric, engines, rank)
        for engine in engines:
            await engine.aclose()

    async def _rank(self, fabric: Fabric, engines: list[aiote.Engine], rank: int) -> None:
        addresses = [engine.address for engine in engines]
        async with open_group(engines[rank], addresses, rank, self.config) as group:
            for number in range(ROUNDS):
                await self._barrier.wait()
                if rank == 0 and number == ROUNDS - 1:
                    self._begin(fabric, engines)
                await self._round(fabric, group, rank, keep=number > 0)
            await self._barrier.wait()
            if rank == 0:
                self._end(fabric, engines)
            await self._barrier.wait()

    async def _round(self, fabric: Fabric, group: MoeGroup, rank: int, *, keep: bool) -> None:
        ids = self.scenario.tokens_of(rank)
        x, scales = group.inputs()
        weights = np.ones(ids.shape, np.float32)
        began = fabric.now
        batch: Batch = await group.dispatch(x, ids, weights, scales)
        dispatched = fabric.now
        await self._barrier.wait()
        again = fabric.now
        await group.combine(batch)
        if keep:
            self.times["dispatch"].append((dispatched - began) * 1e6)
            self.times["combine"].append((fabric.now - again) * 1e6)

    def _begin(self, fabric: Fabric, engines: list[aiote.Engine]) -> None:
        self._before = [engine.statistics().carried for engine in engines]
        self._seen = len(fabric.trace())

    def _end(self, fabric: Fabric, engines: list[aiote.Engine]) -> None:
        for engine, before in zip(engines, self._before, strict=True):
            self.sent.append([now - then for now, then in zip(engine.statistics().carried, before, strict=True)])
        self.received = [[0] * self.scenario.nics.per_rank for _ in engines]
        for event in fabric.trace()[self._seen :]:
            if event.what == "place":
                self.received[event.engine][event.rail] += event.length


def with_nics(
    scenario: MoeScenario, counts: Iterable[int], constant: dict[Phase, float] | None = None
) -> Iterator[MoePlan]:
    """Yield plans with other numbers of NICs for each rank."""
    for count in counts:
        yield plan_moe(dataclasses.replace(scenario, nics=scenario.nics.of(count)), constant)
