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

Ranks of the same host write through shared memory (`sharing`), if their arrays are on the CPU. With on_loss="raise" the
inbox lies in memory that all of them map. With "mask" each maps a slot of its own, and this rank copies from there into
the inbox what has been counted. Pages are allocated when they are touched, as those of other memory are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiote

from ..aio import run_shielded
from .arrays import Bytes, zeros
from .config import Sizes, round_up
from .device import Launcher
from .wire import route_bytes

__all__ = ["InboxLane", "LaneMap", "LaneMemory", "RankMemory", "SlotLane"]

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
        # The memory that one source maps with on_loss="mask".
        self.slot_answers_at = round_up(sizes.private * sizes.row, PAGE)
        self.slot = self.slot_answers_at + round_up(sizes.answers_of_rank * sizes.y_row, PAGE)
        self._sizes = sizes

    @property
    def mapped_bytes(self) -> int:
        """How many bytes of each lane another rank of this host maps."""
        return self.slot if self._sizes.has_own_slots else self.inbox

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


class InboxLane:
    """The arrays of one lane in an inbox: this rank's own, or one that is mapped."""

    def __init__(self, sizes: Sizes, lane: LaneMap, inbox: Bytes) -> None:
        self.routes: NDArray[np.uint32] = (
            inbox[: 2 * sizes.ranks * lane.route].view(np.uint32).reshape(sizes.ranks, 2, -1).swapaxes(0, 1)
        )
        self.received = _lines(inbox, lane.rows_at, lane.inbox_rows, sizes.row)
        self.answers = _lines(inbox, lane.answers_at, sizes.answer_lines, sizes.y_row)


class SlotLane:
    """The arrays of one lane that a single rank writes to with on_loss="mask": its rows, and its answers."""

    def __init__(self, sizes: Sizes, lane: LaneMap, slot: Bytes) -> None:
        self.received = _lines(slot, 0, sizes.private, sizes.row)
        self.answers = _lines(slot, lane.slot_answers_at, sizes.answers_of_rank, sizes.y_row)


class LaneMemory:
    """The arrays of one lane: its lines of bytes, and the numbers that its steps share."""

    def __init__(self, sizes: Sizes, lane: LaneMap, inbox: Bytes, outbox: Bytes, launcher: Launcher | None) -> None:
        self._launcher = launcher
        self._in_place = sizes.direct or sizes.whole
        self.placed: Any = None
        self.use_inbox(InboxLane(sizes, lane, inbox))
        self.slots: dict[int, SlotLane] = {}
        """The slots of the ranks that may write there through shared memory, with on_loss="mask"."""
        self.own_routes: NDArray[np.uint32] = outbox[: 2 * lane.route].view(np.uint32).reshape(2, -1)
        self.sent = _lines(outbox, lane.sent_at, lane.outbox_rows, sizes.row)
        self.inputs: Any = self.sent if sizes.direct else zeros(sizes.config.tokens * sizes.row).reshape(-1, sizes.row)
        self.packed = _lines(outbox, lane.packed_at, lane.packed, sizes.y_row)
        # Lines of the experts' results that are written to peers without a copy.
        self.written = _lines(outbox, lane.y_at, lane.written, sizes.y_row)
        self.y: Any = self.written
        if not self._in_place:
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

    def use_inbox(self, inbox: InboxLane) -> None:
        """Take the lines of an inbox that replaces the one before."""
        self.routes, self.received, self.answers = inbox.routes, inbox.received, inbox.answers
        if self._in_place:
            self.placed = self.received

    def on_host(self, rows: Any) -> Bytes:
        """Return lines in memory that NumPy can read; for lines in a GPU's memory wait for the GPU, and copy them."""
        return rows if self._launcher is None else self._launcher.fetch(rows)


class RankMemory:
    """The inbox and the outbox. While the group is open, each peer holds a lease of its parts of the inbox."""

    def __init__(self, sizes: Sizes, launcher: Launcher | None = None) -> None:
        """Allocate the memory. For a GPU it is host memory that kernels can reach, so that every rail can, too."""
        self.map = LaneMap(sizes)
        self._sizes = sizes
        config, lanes = sizes.config, sizes.config.lanes
        self.may_share = config.shared_memory == "auto" and launcher is None
        self._shared: aiote.SharedMemory | None = None
        self._slots: dict[int, aiote.SharedMemory] = {}
        self._named: tuple[aiote.Address, ...] = ()
        self._sharers: set[int] = set()
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
        self._retired: list[aiote.Region] = []
        self._leases: dict[int, aiote.Lease] = {}

    @property
    def inbox(self) -> aiote.Region:
        """The region that peers write to."""
        return self._regions[0]

    @property
    def outbox(self) -> aiote.Region:
        """The region that this rank writes from."""
        return self._regions[1]

    async def register(self, engine: aiote.Engine, members: Sequence[aiote.Address] = ()) -> None:
        """Register the inbox and the outbox. If one fails, close what was registered and raise its error.

        The members may map the inbox, if they run on this host.
        """
        self._engine = engine
        try:
            shared = await self._share(members)
            if shared is not None:
                self._use_inbox(np.frombuffer(shared.view, np.uint8), shared)
            for memory in (self._inbox, self._outbox):
                self._regions.append(await engine.register_async(memory, "local"))
        except BaseException:
            await run_shielded(self.close)
            raise

    async def _share(self, members: Sequence[aiote.Address]) -> aiote.SharedMemory | None:
        """Return shared memory for the inbox, or None, with which no rank maps it."""
        self._named = tuple(members)
        if not self.may_share or self._sizes.has_own_slots or not members:
            return None
        return await self._allocate(len(self._inbox), members)

    async def _allocate(self, nbytes: int, members: Sequence[aiote.Address]) -> aiote.SharedMemory | None:
        try:
            return await self._engine.share_memory(nbytes, members, reserve=False)
        except (aiote.FabricError, aiote.UsageError):
            # There is less memory than the rank may need, or none at all. Over rails the group may do with less.
            return None

    def _use_inbox(self, memory: Bytes, shared: aiote.SharedMemory | None) -> None:
        self._shared, self._inbox = shared, memory
        for number, lane in enumerate(self.lanes):
            begin = number * self.map.inbox
            lane.use_inbox(InboxLane(self._sizes, self.map, self._inbox[begin : begin + self.map.inbox]))

    async def describe(self, rank: int, peer: aiote.Peer) -> bytes:
        """Return the descriptor of the memory that a rank may map in this epoch, or nothing."""
        if not self.may_share or not peer.shares_memory:
            return b""
        shared = await self._slot_of(rank, peer) if self._sizes.has_own_slots else self._shared
        if shared is None:
            return b""
        self._sharers.add(rank)
        return shared.descriptor

    async def _slot_of(self, rank: int, peer: aiote.Peer) -> aiote.SharedMemory | None:
        """Return the slot of a rank, which is allocated once in an epoch; None without memory."""
        if rank not in self._slots:
            sharers, length = self._sharers, self.map.slot
            shared = await self._allocate(length * len(self.lanes), [peer.address])
            if shared is None:
                return None
            if sharers is not self._sharers or rank in self._slots:
                # Another epoch has begun meanwhile, or another call was faster.
                shared.close()
                return self._slots.get(rank) if sharers is self._sharers else None
            self._slots[rank] = shared
            slot = np.frombuffer(shared.view, np.uint8)
            for number, lane in enumerate(self.lanes):
                lane.slots[rank] = SlotLane(self._sizes, self.map, slot[number * length : (number + 1) * length])
        return self._slots[rank]

    def is_shared_with(self, rank: int) -> bool:
        """Return whether a rank was given a descriptor in this epoch, so that it may write there at any time."""
        return rank in self._sharers

    async def renew(self, members: Sequence[aiote.Address]) -> None:
        """Replace memory that other ranks may have mapped, or that other members may map: by new memory, for these.

        Call it when no lease is left. After a cancellation or an error, call it again to continue.
        """
        if self._shared is not None and (self._sharers or self._named != tuple(members)):
            shared = await self._share(members)
            try:
                memory = zeros(len(self._inbox)) if shared is None else np.frombuffer(shared.view, np.uint8)
                region = await self._engine.register_async(memory, "local")
            except BaseException:
                if shared is not None:
                    shared.close()
                raise
            self._shared.close()
            self._retired.append(self._regions[0])
            self._regions[0] = region
            self._use_inbox(memory, shared)
        self._sharers = set()
        self._close_slots()
        await self._close(self._retired)

    def _close_slots(self) -> None:
        for lane in self.lanes:
            lane.slots.clear()
        while self._slots:
            self._slots.popitem()[1].close()

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
        await self._close(self._retired)
        await self._close(self._regions)
        self._close_slots()
        if self._shared is not None:
            self._shared.close()

    async def _close(self, regions: list[aiote.Region]) -> None:
        while regions:
            await regions[-1].aclose()
            regions.pop()
