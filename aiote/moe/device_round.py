"""Rounds whose tokens are in a GPU's memory: the same protocol, with kernels on the GPU and a thread that posts.

The inbox and the outbox, which NICs read and write, are pinned host memory, so no rail needs access to the GPU's
memory. Kernels pack into the outbox and place out of the inbox themselves; the host moves only the rows that go beyond
the private parts. The user's arrays (`x`, `y`, `out`) are in the GPU's memory, and are valid in the order of the
stream. A step waits for the GPU only for the counts of this rank's own tokens, and for rows that the host must read.

A step launches kernels; the last one raises a flag with the number of the round. The step also submits writes, which a
native thread posts when the flag is raised (`PreparedScatter.submit_when`), with lengths that a kernel has written by
then. Memory is reused in the order of the stream: a kernel that runs after all kernels of the last round releases this
rank's route. Only that route, or an answer posted in the same way, permits others to write again.

A rank with a GPU makes the same writes as a rank on a CPU, so a group may have both. Rows that were written in place
are copied into the GPU's memory once all have come; the experts' results are copied to where they are written from.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from .arrays import RAW
from .batch import Batch
from .config import ITEMSIZES
from .device import Bounds, DescribedRound, GpuKernels, KernelArray, Launcher
from .lane import IDS, Lane
from .plan import RoundPlan
from .posting import OutboxWrite
from .round import Round
from .round_parts import DispatchArguments, RoundHost
from .runs import unfold
from .states import GroupBrokenError
from .wire import ANSWER, HEADER, PAYLOAD, ROUTE, Route

__all__ = ["DeviceLane", "DeviceRound"]

ROUTED, PACKED, ANSWERED, IDLE = range(1, 5)
"""The flags: a rank's counts of a round are written; its rows are packed; its answers are packed; all kernels ran."""

FAULTS = (errno.ERANGE, errno.EPROTO)
"""The errors of writes whose numbers or flags, which a GPU has written, are impossible."""
KERNELS_S = 60.0
"""Seconds that a reset, and leaving the group, wait for kernels that are queued behind other work of their stream."""
_kept: list[DeviceLane] = []


def keep(*lanes: DeviceLane) -> None:
    """Keep the memory of these lanes until the GPU no longer uses it, and release that of earlier calls once idle."""
    _kept[:] = [lane for lane in (*_kept, *lanes) if not lane.is_idle]


def describe_cuda_array(what: str, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """Return the address of an array in a GPU's memory, its shape, its strides in bytes, and the name of its type.

    Raises UsageError for any other array.
    """
    if hasattr(array, "data_ptr") and array.device.type != "cpu":
        size = array.element_size()
        strides = tuple(size * stride for stride in array.stride())
        return array.data_ptr(), tuple(array.shape), strides, str(array.dtype).removeprefix("torch.")
    found = None if hasattr(array, "data_ptr") else getattr(array, "__cuda_array_interface__", None)
    if found is None:
        raise aiote.UsageError(f"{what}: expected an array in the GPU's memory, got {type(array).__name__}")
    kind, shape = np.dtype(found["typestr"]), tuple(found["shape"])
    together = tuple(kind.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    # A type that has no name in that interface is described as raw bytes.
    name = RAW[kind.itemsize] if kind.kind == "V" and kind.itemsize in RAW else kind.name
    return found["data"][0], shape, tuple(found.get("strides") or together), name


def device_lines(what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> KernelArray:
    """Return an array as lines of bytes, in place, as `arrays.lines` does. All lines must be equally far apart.

    Raises UsageError.
    """
    address, found, strides, name = describe_cuda_array(what, array)
    size = ITEMSIZES[dtype]
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    if not fits or name not in (dtype, RAW[size]):
        raise aiote.UsageError(f"{what}: expected {dtype} of shape {shape}, got {name} {found}")
    rows = int(np.prod(found[:-1]))
    step = strides[-2] if found[-2] > 1 else strides[0] if len(found) > 2 else found[-1] * size
    regular = len(found) == 2 or found[0] <= 1 or strides[0] == found[1] * step
    if rows and ((found[-1] > 1 and strides[-1] != size) or step < 0 or not regular):
        raise aiote.UsageError(f"{what}: expected contiguous rows at equal distances, got strides {strides}")
    return KernelArray.at(address, (rows, found[-1] * size), "|u1", (step, 1), array)


class DeviceKernels:
    """The functions of `kernels` that the steps of a round share, for lines in the GPU's or in host memory.

    Small NumPy arrays are copied into memory that the GPU can access, and kept there until the next round.
    """

    def __init__(self, gpu: GpuKernels, scratch: NDArray[np.int64]) -> None:
        self._gpu, self._scratch, self._taken = gpu, scratch, 0

    def begin(self) -> None:
        """Begin a round, which overwrites the arrays that the last round kept."""
        self._taken = 0

    def _kept(self, array: NDArray[Any]) -> KernelArray:
        length = -(-array.nbytes // 8)
        kept = self._scratch[self._taken : self._taken + length].view(array.dtype)[: array.size]
        self._taken += length
        kept[:] = array.ravel()
        return KernelArray.of(kept.reshape(array.shape))

    def copy_runs(self, to: Any, source: Any, runs: NDArray[np.int64], nbytes: int, *, raises: int = 0) -> None:
        """Copy the first `nbytes` of rows, for each run (row in `to`, row in `source`, count)."""
        self._gpu.copy_runs(_reached(to), _reached(source), self._kept(runs), nbytes, raises=raises)

    def combine(
        self, out: Any, rows: Any, places: NDArray[np.int32], weights: Any, dtype: str, accumulate: bool
    ) -> None:
        """Sum rows, as `GpuKernels.combine`."""
        factors = self._kept(weights) if isinstance(weights, np.ndarray) else weights
        self._gpu.combine(_reached(out), _reached(rows), self._kept(places), factors, dtype, accumulate)

    def spread_rows(self, to: Any, source: Any, at: NDArray[np.int32]) -> None:
        """Copy each row to all places that `at` (rows, k) names."""
        rows, there = _reached(source), _reached(to)
        nothing = KernelArray.at(0, (len(rows), 0), "|u1", (0, 1))
        self._gpu.pack(there, there, 0, 0, self._kept(at), rows, scales=nothing, tail=nothing)


def _reached(rows: Any) -> Any:
    return KernelArray.of(rows) if isinstance(rows, np.ndarray) else rows


class DeviceLane(Lane):
    """The state of a lane that its rounds share, and the numbers that its kernels write for the host."""

    def __init__(self, group: RoundHost, number: int) -> None:
        super().__init__(group, number)
        sizes, config = self.sizes, self.sizes.config
        assert group.launcher is not None
        launcher: Launcher = group.launcher
        self.launcher = launcher
        self.gpu = GpuKernels(launcher, config.experts, sizes.ranks)
        self.flag_value = 0
        """The number of the last launched round, as flags have it: it wraps at 32 bits."""
        items = config.tokens * config.top_k
        # Scratch for three sets of runs, of three numbers for each source and expert, and for places. With copies by
        # rank also for the places of every source's copies, twice, and their weights.
        places = items if config.copies == "expert" else items + 2 * (sizes.ranks + 1) * (items + 1)
        scratch = launcher.host(3 * 3 * sizes.ranks * sizes.local + places + 64, np.int64)
        self.kernels = DeviceKernels(self.gpu, scratch)
        self.position, self.copy = (
            launcher.zeros(items, np.int32).reshape(config.tokens, config.top_k) for _ in range(2)
        )
        self.weights = launcher.zeros(items, np.float32).reshape(config.tokens, config.top_k)
        width = 4 + 8 * config.top_k
        self.tail = launcher.zeros(config.tokens * width, np.uint8).reshape(config.tokens, width)
        self.host_positions, self.host_copies = (
            launcher.host(items, np.int32).reshape(config.tokens, config.top_k) for _ in range(2)
        )
        self.argument_copies = {
            "topk_ids": launcher.zeros(8 * items, np.uint8),
            "topk_weights": launcher.zeros(items, np.float32),
        }
        self.in_order = launcher.host(config.tokens, np.int32)
        self.in_order[...] = np.arange(config.tokens)
        self.poison = launcher.host(sizes.row, np.uint8)
        self.poison[...] = 0xFF
        # For the other ranks, from the next higher one on.
        self.others = [(group.rank + 1 + place) % sizes.ranks for place in range(sizes.ranks - 1)]
        self.lengths, self.here, self.routed = (launcher.host(sizes.ranks - 1, np.int64) for _ in range(3))

    def flag(self, number: int) -> NDArray[np.uint32]:
        """Return the word of a flag, to wait for it."""
        return self.gpu.words[number : number + 1]

    def read_arguments(self, tokens: int, x: Any, ids: Any, weights: Any, scales: Any) -> DispatchArguments:
        """Return the arrays that a round is given, in the form that kernels take. Raises UsageError."""
        config, shape = self.sizes.config, (len(ids), self.sizes.config.top_k)
        rows = device_lines("x", x, (len(ids), config.hidden), config.dtype)
        beside = rows
        if config.scales:
            beside = device_lines("scales", scales, (len(ids), config.scales), config.scale_dtype)
        else:
            beside = KernelArray.at(0, (len(ids), 0), "|u1", (0, 1))
        numbered = self.numbers("topk_ids", ids, shape, IDS, tokens)
        weighed = self.numbers("topk_weights", weights, shape, ("float32",), tokens)
        return DispatchArguments(tokens, rows.first_rows(tokens), numbered, weighed, beside.first_rows(tokens), x)

    def numbers(self, what: str, array: Any, shape: tuple[int, int], names: tuple[str, ...], rows: int) -> KernelArray:
        """Return the first rows of a small array of numbers, as a contiguous copy if need be. Raises UsageError.

        All copies of one argument share a buffer: in the order of the stream, each is used before the next is made.
        """
        address, found, strides, name = describe_cuda_array(what, array)
        if found != shape or name not in names:
            raise aiote.UsageError(f"{what}: expected {' or '.join(names)} of shape {shape}, got {name} {found}")
        size, width, (down, across) = np.dtype(name).itemsize, shape[1], strides
        if not rows or ((down, across) == (width * size, size) and address % size == 0):
            return KernelArray.at(address, (rows, width), np.dtype(name).str, owner=array)
        room = describe_cuda_array(what, self.argument_copies[what])[0]
        pieces = [(0, width * size)] if across == size else [(column, size) for column in range(width)]
        at, nothing = KernelArray.of(self.in_order[:rows].reshape(-1, 1)), KernelArray.at(0, (rows, 0), "|u1", (0, 1))
        for column, nbytes in pieces:
            to = KernelArray.at(room + column * size, (rows, nbytes), "|u1", (width * size, 1))
            there = KernelArray.at(address + column * across, (rows, nbytes), "|u1", (down, 1), array)
            self.gpu.pack(to, to, 0, 0, at, there, scales=nothing, tail=nothing)
        return KernelArray.at(room, (rows, width), np.dtype(name).str, owner=array)

    def round_of(self, given: DispatchArguments) -> Round:
        """Return a new round for these tokens."""
        return DeviceRound(self, given)

    async def wait_transfer(self, transfer: aiote.Transfer) -> None:
        """Wait for a transfer of the round. Raises the reason why the group is broken, else the transfer's error."""
        try:
            await transfer
        except (aiote.TransferError, aiote.PeerError) as error:
            self.group.membership.require_whole()
            raise self.name_rank(error) from error

    async def guard(self, rank: int, transfer: aiote.Transfer) -> None:
        """Wait for a transfer; if it fails, break the group or lose the transfer's rank.

        Impossible numbers from the GPU always break the group. Cancelled transfers, and those to ranks that need no
        more of this round, are ignored.
        """
        try:
            await transfer
        except aiote.AioteError as error:
            cause = error.cause if isinstance(error, aiote.TransferError) else error
            if transfer.was_cancelled or self.needs_nothing(rank):
                return
            lies = isinstance(cause, aiote.FabricError) and cause.errno in FAULTS
            if lies or self.group.config.on_loss == "raise":
                self.group.fail(self.name_rank(error), "a write that a GPU has released")
            else:
                self.group.lose(rank, str(error))

    async def drain(self) -> None:
        """Wait until neither a transfer nor a kernel uses this rank's memory. Cancelling loses nothing.

        Raises GroupBrokenError if kernels take longer than KERNELS_S; their memory is then kept until they have ended.
        """
        await super().drain()
        posting, engine = self.group.posting, self.group.engine
        if posting is None or not self.flag_value:
            return
        try:
            self.signal(IDLE)
        except RuntimeError:
            # A failed GPU runs no more kernels.
            return
        keep(self)
        if engine.closed:
            return
        with anyio.move_on_after(KERNELS_S) as scope, suppress(aiote.AioteError):
            await posting.submit_flag_wait(self.flag(IDLE), self.flag_value)
        keep()
        if scope.cancelled_caught:
            raise GroupBrokenError(
                f"rank {self.group.rank}: the GPU did not run the group's kernels within {KERNELS_S} "
                "s, because other work "
                "of its stream comes first; the group's memory is kept until they have run"
            )

    @property
    def is_idle(self) -> bool:
        """Whether all kernels launched before the last `signal(IDLE)` have run."""
        return int(self.gpu.words[IDLE]) == self.flag_value

    def signal(self, flag: int) -> None:
        """Launch a kernel that raises a flag once all kernels launched before have run."""
        nothing = KernelArray.at(0, (0, 3), "<i8")
        rows = KernelArray.at(0, (1, 16), "|u1")
        self.gpu.copy_runs(rows, rows, nothing, 16, raises=flag)


class DeviceRound(Round):
    """A round whose tokens are in a GPU's memory."""

    _lane: DeviceLane

    def __init__(self, lane: DeviceLane, given: DispatchArguments) -> None:
        super().__init__(lane, given)
        self._kernels = lane.kernels
        self._own_received = False
        self._by_rank = self._config.copies == "rank"

    def send(self) -> None:
        """Launch the kernels that number, describe and pack, and submit the writes of the route and of rows."""
        lane, memory, sizes, config = self._lane, self._memory, self._sizes, self._config
        tokens, where, me = self._tokens, self._map, self._me
        route = memory.own_routes[self._parity]
        nothing = np.zeros(config.experts, np.int64), np.zeros(sizes.ranks, np.int64)
        Route(self._membership.epoch, self.number, tokens, *nothing).write(route)
        lane.kernels.begin()
        self._position, self._copy = lane.host_positions[:tokens], lane.host_copies[:tokens]
        self._describe(route[HEADER - 1 : HEADER + config.experts + sizes.ranks])
        self._pack_all()
        slot = self._base() + where.route_at(me, self._parity)
        own = self._outbox() + self._parity * where.route
        alike = [np.full(len(lane.others), at, np.int64) for at in (own, slot)]
        self._submit(ROUTED, lane.others, (lane.routed, *alike), ROUTE)
        # The host packs the rows beyond the private parts, and reads which experts copies are for, including its own.
        self._reads_rows = self._by_rank or sizes.shared > 0
        self._flag_waits = {
            flag: self._submit_flag_wait(flag) for flag in ((ROUTED, PACKED) if self._reads_rows else (ROUTED,))
        }
        if not sizes.direct:
            to = np.full(len(lane.others), self._base() + where.rows_at + me * sizes.private * sizes.row, np.int64)
            self._submit(PACKED, lane.others, (lane.lengths, lane.here, to), PAYLOAD)

    def _describe(self, said: NDArray[np.uint32]) -> None:
        """Launch the kernels that number the rows, and that write the numbers for the host."""
        lane, sizes, config, given, tokens = self._lane, self._sizes, self._config, self._given, self._tokens
        gpu, position, where = lane.gpu, lane.position[:tokens], self._map
        shape = config.experts, sizes.local, sizes.ranks
        counts = gpu.number_rows(given.ids, *shape, by_rank=False, out=position, begins=True)
        lane.flag_value = lane.flag_value + 1 & 0xFFFFFFFF
        copy = lane.copy[:tokens] if self._by_rank else None
        if copy is not None:
            gpu.number_rows(given.ids, *shape, by_rank=True, out=copy)
        at, weights = self._outbox() + where.sent_at, lane.weights[:tokens]
        bounds = Bounds(sizes.local, self._me, sizes.private, sizes.row, at, *sizes.most_of_source(), where.route)
        small = [
            KernelArray.of(one) for one in (self._position, self._copy, said, lane.lengths, lane.here, lane.routed)
        ]
        described = DescribedRound(weights, *small)
        tail = lane.tail[:tokens]
        numbered = position, copy
        gpu.describe(given.ids, given.weights, numbered, counts, bounds, tail, described=described, raises=ROUTED)
        # Keep the caller's weights until the round is over, by when kernels have read them.
        self._dispatched, given.weights = given.weights, weights

    def _pack_all(self) -> None:
        """Launch the kernel that packs tokens into the outbox, including those for this rank's own experts."""
        lane, sizes, given, tokens = self._lane, self._sizes, self._given, self._tokens
        sent = KernelArray.of(self._memory.sent)
        at: Any = (lane.copy if self._by_rank else lane.position)[:tokens]
        if sizes.direct:
            at = KernelArray.of(lane.in_order[:tokens].reshape(-1, 1))
        lane.gpu.pack(
            sent,
            sent,
            0,
            0,
            at,
            given.x,
            scales=given.scales,
            tail=lane.tail[:tokens],
            scales_at=sizes.scales_at,
            tail_at=sizes.token_at,
            raises=PACKED,
        )

    def _submit_flag_wait(self, flag: int) -> aiote.Transfer:
        """Return a transfer that ends when a flag is raised."""
        posting, lane = self._group.posting, self._lane
        assert posting is not None
        made = posting.submit_flag_wait(lane.flag(flag), lane.flag_value)
        lane.keep_transfers([(-1, made)])
        return made

    def _submit(self, flag: int, ranks: Sequence[int], numbers: Any, kind: int) -> None:
        """Submit writes that are posted when a flag is raised."""
        posting, lane, group = self._group.posting, self._lane, self._group
        assert posting is not None
        if not ranks:
            return
        # The host does not know yet which ranks get no rows. Such a rank may leave before the others are written to, so
        # each rank's write is a transfer of its own.
        submit = posting.post_when_alone if numbers[0] is lane.lengths else posting.post_when
        try:
            made = submit(lane.flag(flag), lane.flag_value, ranks, numbers, self._slot(kind))
        except aiote.PeerError as error:
            raise lane.name_rank(error) from error
        lane.keep_transfers(made)
        for rank, transfer in made:
            # No step awaits this transfer before the other ranks need its data, so a task does.
            group.start_task(lane.guard, rank, transfer)

    async def _receive(self) -> Batch:
        lane, sizes, config = self._lane, self._sizes, self._config
        await lane.wait_transfer(self._flag_waits[ROUTED])
        said = self._memory.own_routes[self._parity, HEADER:].astype(np.int64)
        self._experts = said[: config.experts]
        self._copies = said[config.experts : config.experts + sizes.ranks]
        if sizes.may_overflow(self._experts):
            # No write was posted. Wait until the posting thread no longer reads the numbers.
            await lane.wait_sent()
        self._require_room()
        sent = self._copies if self._by_rank else sizes.for_ranks(self._experts)
        self._starts = np.cumsum(sent) - sent
        self._counted.sent_rows += int(sent.sum())
        self._counted.sent_bytes += int(lane.routed.sum()) + (0 if sizes.direct else int(lane.lengths.sum()))
        if self._reads_rows:
            await lane.wait_transfer(self._flag_waits[PACKED])
        return await super()._receive()

    def _pages(self, rank: int, to: tuple[int, Any], at: tuple[int, Any], nbytes: int, kind: int) -> None:
        there, here = (np.ascontiguousarray(first + nbytes * rows, np.int64) for first, rows in (to, at))
        if len(here):
            lengths = np.full(len(here), nbytes, np.int64)
            self._submit(ANSWERED if kind == ANSWER else PACKED, [rank] * len(here), (lengths, here, there), kind)
            self._counted.sent_bytes += nbytes * len(here)

    def _spread_rows(self, rows: Any, at: NDArray[np.int32]) -> None:
        self._kernels.spread_rows(self._memory.placed, rows, at)

    def _place(self, plan: RoundPlan) -> int | None:
        if self._by_rank:
            faulty = self._unfold(plan)
            if faulty is None:
                self._place_copies(plan)
            return faulty
        memory, row = self._memory, self._sizes.row
        if self._sizes.direct:
            runs = [plan.runs(rank, plan.me)[:, [0, 0, 2]] for rank in self._arrived_ranks]
        else:
            runs = [plan.received_runs(rank) for rank in self._arrived_ranks]
            own = plan.runs(plan.me, plan.me) + np.array([0, self._starts[plan.me], 0])
            self._kernels.copy_runs(memory.placed, memory.sent, own, row)
        if runs:
            self._kernels.copy_runs(memory.placed, memory.received, np.concatenate(runs), row)
        return None

    def _unfold(self, plan: RoundPlan) -> int | None:
        """Find the places of copies on the CPU before any is moved; return a rank whose copies do not fit its route."""
        self._memory.copies.fill(-1)
        for source in sorted((plan.me, *self._arrived_ranks)):
            if not unfold(self._memory, plan, source, self._copies_of(plan, source), 0) and source != plan.me:
                return source
        return None

    def _place_copies(self, plan: RoundPlan) -> None:
        """Launch the kernels that move copies to their experts' rows, or, in layout "rank", to their source's rows."""
        memory, sizes, me = self._memory, self._sizes, plan.me
        tokens, own = self._config.tokens, self._copies_of(plan, me)
        if sizes.whole:
            runs = [[rank * tokens, rank * tokens, int(plan.sent[rank, me])] for rank in self._arrived_ranks]
            self._kernels.copy_runs(memory.placed, memory.received, np.array(runs, np.int64).reshape(-1, 3), sizes.row)
            self._kernels.copy_runs(memory.placed, own, np.array([[me * tokens, 0, len(own)]]), sizes.row)
            every = np.array([[0, 0, len(memory.copies)]])
            ids = memory.copies.reshape(len(memory.copies), -1).view(np.uint8)
            self._kernels.copy_runs(memory.topk_ids.reshape(len(ids), -1).view(np.uint8), ids, every, ids.shape[1])
            return
        self._spread_rows(own, memory.copies[me, : len(own)])
        others = memory.copies.copy()
        others[me] = -1
        self._spread_rows(memory.received, others.reshape(-1, self._config.top_k))

    def _write(self, writes: list[OutboxWrite], kind: int) -> None:
        if kind != ANSWER:
            super()._write(writes, kind)
            return
        self._lane.signal(ANSWERED)
        rows = np.array([(one.nbytes, one.at, one.to) for one in writes], np.int64).reshape(-1, 3).T
        self._counted.sent_bytes += int(rows[0].sum())
        lengths, here, there = (np.ascontiguousarray(row) for row in rows)
        self._submit(ANSWERED, [one.rank for one in writes], (lengths, here, there), kind)

    def _poison(self) -> None:
        lane, placed = self._lane, self._memory.placed
        rows, row = len(placed), self._sizes.row
        source = KernelArray.at(lane.poison.ctypes.data, (rows, row), "|u1", (0, 1))
        self._kernels.copy_runs(placed, source, np.array([[0, 0, rows]]), row)

    def _in_place(self, y: Any) -> bool:
        """Return False: `batch.y` is in the GPU's memory, but answers are written and summed from host memory."""
        return False

    def _weights(self, topk_weights: Any) -> Any:
        shape = self._tokens, self._config.top_k
        return self._lane.numbers("topk_weights", topk_weights, shape, ("float32",), self._tokens)

    def _lines(self, what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Any:
        return device_lines(what, array, shape, dtype)

    def _sums(self) -> Any:
        rows, width = self._tokens, self._sizes.y_row
        return self._lane.launcher.zeros(rows * width, np.uint8).reshape(rows, width)
