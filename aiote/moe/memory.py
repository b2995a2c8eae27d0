"""A rank's memory: the inbox, which peers write to, and the outbox, which the rank writes from.

Both are allocated and registered when the group opens. The map of a lane is the same on every rank, so a rank can
compute where its rows go in another's inbox:

    inbox:  routes [rank][parity] | rows | answers
    outbox: routes [parity] | rows | the experts' results, if written from there | answers, if packed

If rows are written in place (`direct`, layout "rank"), the rows of the inbox are those of the batch itself. Otherwise
they are a private part for each source and a shared part, and the receiver copies them from there to their places.

With on_loss="mask" each source has a part of its own for its routes, rows and answers, and its lease covers only these
parts. Therefore no rank can make the others mask a third one. With on_loss="raise" a rank that writes elsewhere spoils
the round for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiote

from ..service.background import run_shielded
from .arrays import Bytes, zeros
from .config import Sizes, round_up
from .device import Launcher
from .wire import route_bytes

__all__ = ["LaneMap", "LaneMemory", "RankMemory"]

PAGE = 4096


class LaneMap:
    """The offsets of a lane's parts in the inbox and in the outbox, and how many lines each part has."""

    def __init__(self, sizes: Sizes) -> None:
        self.route = route_bytes(sizes)
        in_place = sizes.direct or sizes.whole
        self.inbox_rows = sizes.placed if in_place else sizes.ranks * sizes.private + sizes.shared
        self.rows_at = round_up(2 * sizes.ranks * self.route, PAGE)
        self.answers_at = self.rows_at + round_up(self.inbox_rows * sizes.row, PAGE)
        self.inbox = self.answers_at + round_up(sizes.answer_lines * sizes.y_row, PAGE)
        self.outbox_rows = sizes.config.tokens if sizes.direct else sizes.sent
        # With reduce="expert" each copy has one answer. Otherwise each place has one row, and each row one answer.
        copies = sizes.ranks * sizes.config.tokens
        self.packed = (
            0
            if in_place
            else copies
            if sizes.config.reduce == "expert"
            else min(sizes.placed, sizes.ranks * sizes.answers)
        )
        self.sent_at = round_up(2 * self.route, PAGE)
        self.y_at = self.sent_at + round_up(self.outbox_rows * sizes.row, PAGE)
        self.written = sizes.placed if in_place else 0
        self.packed_at = self.y_at + round_up(self.written * sizes.y_row, PAGE)
        self.outbox = self.packed_at + round_up(self.packed * sizes.y_row, PAGE)
        self._sizes = sizes

    def route_at(self, rank: int, parity: int) -> int:
        """Return the offset in each inbox of a rank's route for rounds of a parity."""
        return (2 * rank + parity) * self.route

    def parts(self, rank: int) -> list[slice]:
        """Return the parts of another's inbox that a rank may write to, in order, and as few of them as possible."""
        sizes, lanes = self._sizes, self._sizes.config.lanes
        if not sizes.has_own_slots:
            return [slice(0, self.inbox * lanes)]
        rows, answers = sizes.private * sizes.row, sizes.answers_of_rank * sizes.y_row
        own = (
            (self.route_at(rank, 0), 2 * self.route),
            (self.rows_at + rank * rows, rows),
            (self.answers_at + rank * answers, answers),
        )
        firsts = range(0, self.inbox * lanes, self.inbox)
        return [slice(first + at, first + at + nbytes) for first in firsts for at, nbytes in own]


def _lines(memory: Bytes, at: int, count: int, width: int) -> Bytes:
    return memory[at : at + count * width].reshape(count, width)


class LaneMemory:
    """The arrays of one lane: its lines of bytes, and the numbers that its steps share."""

    def __init__(self, sizes: Sizes, lane: LaneMap, inbox: Bytes, outbox: Bytes, launcher: Launcher | None) -> None:
        self._launcher = launcher
        self.routes: NDArray[np.uint32] = (
            inbox[: 2 * sizes.ranks * lane.route].view(np.uint32).reshape(sizes.ranks, 2, -1).swapaxes(0, 1)
        )
        self.received = _lines(inbox, lane.rows_at, lane.inbox_rows, sizes.row)
        self.answers = _lines(inbox, lane.answers_at, sizes.answer_lines, sizes.y_row)
        self.own_routes: NDArray[np.uint32] = outbox[: 2 * lane.route].view(np.uint32).reshape(2, -1)
        self.sent = _lines(outbox, lane.sent_at, lane.outbox_rows, sizes.row)
        self.inputs: Any = self.sent if sizes.direct else zeros(sizes.config.tokens * sizes.row).reshape(-1, sizes.row)
        self.packed = _lines(outbox, lane.packed_at, lane.packed, sizes.y_row)
        in_place = sizes.direct or sizes.whole
        self.placed: Any = self.received
        # Lines of the experts' results that are written to peers without a copy.
        self.written = _lines(outbox, lane.y_at, lane.written, sizes.y_row)
        self.y: Any = self.written
        if not in_place:
            self.placed = zeros(sizes.placed * sizes.row).reshape(sizes.placed, sizes.row)
            self.y = zeros(sizes.placed * sizes.y_row).reshape(sizes.placed, sizes.y_row)
        tokens, top_k = sizes.config.tokens, sizes.config.top_k
        self.position = np.empty((tokens, top_k), np.int32)
        self.copy_position = np.empty((tokens, top_k), np.int32)
        self.tail = np.empty((tokens, 4 + 8 * top_k), np.uint8)
        # With copies by rank: where the rows of each copy are; with layout "rank", which experts the copy is for.
        shape = sizes.ranks, tokens if sizes.config.copies == "rank" else 0, top_k
        self.copies = np.empty(shape, np.int32)
        self.topk_ids: Any = self.copies
        if launcher is not None:
            # The user's arrays are in the GPU's memory; the memory that NICs read and write is the host's.
            self.inputs, self.placed, self.y = (
                launcher.zeros(one.size, np.uint8).reshape(one.shape) for one in (self.inputs, self.placed, self.y)
            )
            self.copies = launcher.host(self.copies.size, np.int32).reshape(shape)
            self.topk_ids = launcher.zeros(self.copies.size, np.int32).reshape(shape)

    def on_host(self, rows: Any) -> Bytes:
        """Return lines in memory that NumPy can read; for lines in a GPU's memory wait for the GPU, and copy them."""
        return rows if self._launcher is None else self._launcher.fetch(rows)


class RankMemory:
    """The inbox and the outbox. While the group is open, each peer holds a lease of its parts of the inbox."""

    def __init__(self, sizes: Sizes, launcher: Launcher | None = None) -> None:
        """Allocate the memory. For a GPU it is host memory that kernels can reach, so that every rail can, too."""
        self.map = LaneMap(sizes)
        lanes = sizes.config.lanes
        lengths = self.map.inbox * lanes, self.map.outbox * lanes
        self._inbox, self._outbox = (
            zeros(one) if launcher is None else launcher.host(one, np.uint8) for one in lengths
        )
        self.lanes = [
            LaneMemory(
                sizes,
                self.map,
                self._inbox[lane * self.map.inbox : (lane + 1) * self.map.inbox],
                self._outbox[lane * self.map.outbox : (lane + 1) * self.map.outbox],
                launcher,
            )
            for lane in range(lanes)
        ]
        self._regions: list[aiote.Region] = []
        self._leases: dict[int, aiote.Lease] = {}

    @property
    def inbox(self) -> aiote.Region:
        """The region that peers write to."""
        return self._regions[0]

    @property
    def outbox(self) -> aiote.Region:
        """The region that this rank writes from."""
        return self._regions[1]

    async def register(self, engine: aiote.Engine) -> None:
        """Register the inbox and the outbox. If one fails, close what was registered and raise its error."""
        self._engine = engine
        try:
            for memory in (self._inbox, self._outbox):
                self._regions.append(await engine.register_async(memory, "local"))
        except BaseException:
            await run_shielded(self.close)
            raise

    def lend(self, rank: int, address: aiote.Address) -> list[bytes]:
        """Lease a peer its parts of the inbox, and return their descriptors; the lease lasts until `take_back`."""
        if rank not in self._leases:
            parts = [self.inbox[part] for part in self.map.parts(rank)]
            self._leases[rank] = self._engine.lease(parts, address)
        return list(self._leases[rank].descriptors)

    async def take_back(self, rank: int) -> None:
        """Revoke a peer's lease; return once the peer cannot write any more. Cancelling does not stop revoking."""
        lease = self._leases.get(rank)
        if lease is not None:
            await lease.revoke()
            self._leases.pop(rank, None)

    async def take_all_back(self) -> None:
        """Revoke all leases; return once no peer can write to the inbox any more."""
        for lease in self._leases.values():
            lease.begin_revoking()
        for rank in tuple(self._leases):
            await self.take_back(rank)

    async def close(self) -> None:
        """Close the registrations, once no transfer uses them. Idempotent."""
        while self._regions:
            await self._regions[-1].aclose()
            self._regions.pop()
