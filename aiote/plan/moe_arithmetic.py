"""Compute the times of an expert-parallel round by arithmetic, for groups that are too large to run rank by rank.

`aiote.moe.plan` says how many rows each rank sends to each other rank, and `Sizes` how many bytes a row, an answer and
a route have. Writes are posted in the order of `aiote.moe.round`: each rank begins with the next higher rank. A NIC
sends one packet of each of its writes in turn and receives packets in the order in which they leave, as the simulated
NICs do, but no engine runs.

Three things differ from the simulation of every rank. Each pair of ranks has a fixed NIC, `(source + target) % NICs`,
which is what an engine chooses if all NICs have carried the same. Rows beyond the private part are sent with the
others, although they wait for routes. Immediates and acknowledgements take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiote.moe.config import MoeConfig, Sizes
from aiote.moe.memory import LaneMap
from aiote.moe.plan import Counts, RoundPlan

from ..testing import NicModel

__all__ = ["PACKET", "ComputedRound", "LastBytes", "PostedWrite", "last_bytes"]

PACKET = 4096


class PostedWrite(NamedTuple):
    """A write of a rank: its target, the NIC that carries it on both sides, and its bytes."""

    target: int
    nic: int
    nbytes: int


class ComputedRound:
    """The writes of all ranks in a round. `ids` has the experts that each rank's tokens name; -1 is no expert."""

    def __init__(self, config: MoeConfig, ids: Sequence[NDArray[np.int32]], nics: int) -> None:
        self.ranks, self.nics = len(ids), nics
        self._sizes = Sizes(config, self.ranks)
        experts = np.stack([np.bincount(one[one >= 0], minlength=config.experts) for one in ids])
        plan = RoundPlan(self._sizes, 0, Counts(experts, np.zeros((self.ranks, self.ranks), np.int64)))
        self.rows = plan.sent * self._sizes.row
        # Each answer goes from the target of a row back to its source.
        self.answers = plan.returned.T * self._sizes.y_row
        self.route = LaneMap(self._sizes).route

    def dispatch(self) -> list[list[PostedWrite]]:
        """Return the writes of each rank's dispatch: its route to every rank, then its rows."""
        return [
            [*self._each(me, 0, [self.route] * self.ranks), *self._each(me, 1, self.rows[me].tolist())]
            for me in range(self.ranks)
        ]

    def combine(self) -> list[list[PostedWrite]]:
        """Return the writes of each rank's combine: its answers."""
        return [list(self._each(me, 0, self.answers[me].tolist())) for me in range(self.ranks)]

    def _each(self, me: int, turn: int, sizes: Sequence[int]) -> Iterator[PostedWrite]:
        for step in range(1, self.ranks):
            target = (me + step) % self.ranks
            if sizes[target]:
                yield PostedWrite(target, (me + target + turn) % self.nics, sizes[target])

    def carried(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the bytes of a dispatch and a combine together, by rank and NIC: sent, and received."""
        sent, received = (np.zeros((self.ranks, self.nics), np.int64) for _ in range(2))
        for posted in (self.dispatch(), self.combine()):
            for me, writes in enumerate(posted):
                targets, nics, sizes = np.array(writes, np.int64).reshape(-1, 3).T
                np.add.at(sent[me], nics, sizes)
                np.add.at(received, (targets, nics), sizes)
        return sent.tolist(), received.tolist()


class LastBytes(NamedTuple):
    """Microseconds after all writes were posted.

    received: when the last byte has arrived over each NIC of each rank (ranks, NICs), 0 without any. delivered: when
    the last byte of each rank's own writes has arrived at its target (ranks,).
    """

    received: NDArray[np.float64]
    delivered: NDArray[np.float64]


def last_bytes(posted: Sequence[Sequence[PostedWrite]], nics: int, model: NicModel) -> LastBytes:
    """Send all writes of all ranks over their NICs, posted at time 0. The model's `latency_us` is included."""
    per_byte = 8e-3 / model.gbps
    packets = [
        (*_packets(mine, model, per_byte), rank)
        for rank, writes in enumerate(posted)
        for nic in range(nics)
        if len(mine := np.array([(w.target * nics + nic, w.nbytes) for w in writes if w.nic == nic], np.int64))
    ]
    received, delivered = np.zeros(len(posted) * nics), np.zeros(len(posted))
    if packets:
        leaves, ports, sizes = (np.concatenate([one[column] for one in packets]) for column in range(3))
        senders = np.repeat([one[3] for one in packets], [len(one[0]) for one in packets])
        for port in np.unique(ports):
            mine = np.flatnonzero(ports == port)
            mine = mine[np.argsort(leaves[mine], kind="stable")]
            # A packet is received while it is sent, unless another packet is being received.
            done = np.cumsum(sizes[mine]) * per_byte
            there = done + np.maximum.accumulate(leaves[mine] - done) + model.latency_us
            received[port] = there[-1]
            np.maximum.at(delivered, senders[mine], there)
    return LastBytes(received.reshape(len(posted), nics), delivered)


def _packets(
    writes: NDArray[np.int64], model: NicModel, per_byte: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return when each packet of a NIC has left it, its port (target rank and NIC), and its bytes."""
    ports, totals = writes.T
    counts = -(-totals // PACKET)
    place = np.repeat(np.arange(len(totals)), counts)
    turn = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.lexsort((place, turn))
    place, turn = place[order], turn[order]
    sizes = np.minimum(PACKET, totals[place] - turn * PACKET)
    # The first packet of a write also takes the operation's own time.
    whole = totals * per_byte
    service = np.linalg.norm(
        np.stack([whole, np.full(len(whole), model.operation_us)]), model.overlap or np.inf, axis=0
    )
    leaves = np.cumsum(sizes * per_byte + np.where(turn == 0, (service - whole)[place], 0.0))
    return leaves, ports[place], sizes
