"""Rounds whose tokens lie in a GPU's memory: the same protocol, with kernels on the GPU and a proxy that posts.

What NICs read and write, the inbox and the outbox, is pinned memory of the host: whether a rail reaches memory of the
GPU is not asked. Kernels pack into it and place out of it themselves, so nothing is copied by the host. What users see
(`x`, `y`, `out`) is in the GPU's memory, and is theirs in the order of the stream: no step waits for the GPU but for
the counts of this rank's own tokens.

A step launches kernels, of which the last raises a flag with the number of the round, and submits writes that a native
thread posts then (`PreparedScatter.submit_when`); their lengths are what a kernel has written by that time. Memory is
used again in the order of the stream: a rank's route leaves once a kernel that comes after all of the last round's has
run, and it is that route, or an answer that was posted in the same way, that permits others to write again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from numpy.typing import NDArray

import aiote

from .arrays import RAW
from .batch import Batch
from .config import ITEMSIZES, MoeConfig
from .device import GpuKernels, Launcher, Span
from .lane import IDS, Lane
from .posting import Write
from .round import Given, Round
from .states import GroupBrokenError
from .wire import ANSWER, HEADER, PAYLOAD, ROUTE, Route

if TYPE_CHECKING:
    from .group import MoeGroup

__all__ = ["DeviceLane", "DeviceRound", "on_device"]

ROUTED, PACKED, ANSWERED, IDLE = range(1, 5)
"""The flags: what a rank says of a round is written; its rows are packed; its answers are; nothing is left to run."""

KERNELS_S = 60.0
"""So long a reset, and a group that is left, wait for kernels that wait behind other work of their stream."""
_kept: list[DeviceLane] = []


def keep(*lanes: DeviceLane) -> None:
    """Keep the memory of lanes until the GPU is through with it, also of those of earlier calls."""
    _kept[:] = [lane for lane in (*_kept, *lanes) if not lane.idle]


def on_device(config: MoeConfig) -> MoeConfig:
    """Return the config of a group on GPUs. Raises UsageError for what only CPUs do."""
    wrong = {
        "placement='direct' writes rows where they stay, which is not the GPU's memory": config.placement == "direct",
        "copies='rank' places rows by what lies in them, which the host reads": config.copies == "rank",
        "on_loss='mask' needs counts before anything is sent": config.on_loss == "mask",
    }
    for why, bad in wrong.items():
        if bad:
            raise aiote.UsageError(f"device: {why}; use placement='packed', copies='expert' and on_loss='raise'")
    return replace(config, placement="packed")


def described(what: str, array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """Return where an array of a GPU lies, its shape, its strides in bytes, and the name of its type."""
    if hasattr(array, "data_ptr") and array.device.type != "cpu":
        size = array.element_size()
        strides = tuple(size * stride for stride in array.stride())
        return array.data_ptr(), tuple(array.shape), strides, str(array.dtype).removeprefix("torch.")
    found = None if hasattr(array, "data_ptr") else getattr(array, "__cuda_array_interface__", None)
    if found is None:
        raise aiote.UsageError(f"{what}: an array in the GPU's memory is expected, got {type(array).__name__}")
    kind, shape = np.dtype(found["typestr"]), tuple(found["shape"])
    together = tuple(kind.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    # What has no name in that interface is raw bytes.
    name = RAW[kind.itemsize] if kind.kind == "V" and kind.itemsize in RAW else kind.name
    return found["data"][0], shape, tuple(found.get("strides") or together), name


def device_lines(what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Span:
    """Return an array as lines of bytes, in place, as `arrays.lines` does; they are all equally far apart."""
    address, found, strides, name = described(what, array)
    size = ITEMSIZES[dtype]
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    if not fits or name not in (dtype, RAW[size]):
        raise aiote.UsageError(f"{what}: expected {dtype} of shape {shape}, got {name} {found}")
    rows = int(np.prod(found[:-1]))
    step = strides[-2] if found[-2] > 1 else strides[0] if len(found) > 2 else found[-1] * size
    regular = len(found) == 2 or found[0] <= 1 or strides[0] == found[1] * step
    if rows and ((found[-1] > 1 and strides[-1] != size) or step < 0 or not regular):
        raise aiote.UsageError(f"{what}: elements of a row lie together, and rows equally far apart, not {strides}")
    return Span.at(address, (rows, found[-1] * size), "|u1", (step, 1))


def numbers(what: str, array: Any, shape: tuple[int, int], names: tuple[str, ...]) -> Span:
    """Return a small array of numbers, which lie together, each at a multiple of its size. Raises UsageError."""
    address, found, strides, name = described(what, array)
    if found != shape or name not in names:
        raise aiote.UsageError(f"{what}: expected {' or '.join(names)} of shape {shape}, got {name} {found}")
    kind = np.dtype(name)
    if 0 not in found and (strides != (found[1] * kind.itemsize, kind.itemsize) or address % kind.itemsize):
        raise aiote.UsageError(f"{what}: on a GPU its numbers lie together, at multiples of {kind.itemsize}")
    return Span.at(address, found, kind.str)


class DeviceKernels:
    """The functions of `kernels` that the steps of a round share, for lines in memory of the GPU or of the host.

    Small arrays of the host's are kept in memory that the GPU reaches until the next round.
    """

    def __init__(self, gpu: GpuKernels, scratch: NDArray[np.int64]) -> None:
        self._gpu, self._scratch, self._taken = gpu, scratch, 0

    def begin(self) -> None:
        """Begin a round: what the last one has kept is not needed any more."""
        self._taken = 0

    def _kept(self, array: NDArray[Any]) -> Span:
        length = -(-array.nbytes // 8)
        kept = self._scratch[self._taken : self._taken + length].view(array.dtype)[: array.size]
        self._taken += length
        kept[:] = array.ravel()
        return Span.of(kept.reshape(array.shape))

    def copy_runs(self, to: Any, source: Any, runs: NDArray[np.int64], nbytes: int, *, raises: int = 0) -> None:
        """Copy the first bytes of rows, for each run (row there, row here, count)."""
        self._gpu.copy_runs(_reached(to), _reached(source), self._kept(runs), nbytes, raises=raises)

    def combine(
        self, out: Any, rows: Any, places: NDArray[np.int32], weights: Any, dtype: str, accumulate: bool
    ) -> None:
        """Sum rows, as `GpuKernels.combine`."""
        self._gpu.combine(out, _reached(rows), self._kept(places), weights, dtype, accumulate)


def _reached(rows: Any) -> Any:
    return Span.of(rows) if isinstance(rows, np.ndarray) else rows


class DeviceLane(Lane):
    """What the rounds of a lane have in common, and what its kernels tell the host."""

    def __init__(self, group: MoeGroup, number: int) -> None:
        super().__init__(group, number)
        sizes, config = self.sizes, self.sizes.config
        assert group.launcher is not None
        launcher: Launcher = group.launcher
        self.launcher = launcher
        self.gpu = GpuKernels(launcher, config.experts, sizes.ranks)
        self.turn = 0
        """The number of the last round that was launched, as flags have it."""
        items = config.tokens * config.top_k
        # Two sets of runs for each source, each by expert; and places.
        scratch = launcher.host(3 * 3 * sizes.ranks * sizes.local + items + 64, np.int64)
        self.kernels = DeviceKernels(self.gpu, scratch)
        self.position = launcher.zeros(items, np.int32).reshape(config.tokens, config.top_k)
        self.weights = launcher.zeros(items, np.float32).reshape(config.tokens, config.top_k)
        width = 4 + 8 * config.top_k
        self.tail = launcher.zeros(config.tokens * width, np.uint8).reshape(config.tokens, width)
        self.mirror: NDArray[np.int32] = launcher.host(items, np.int32).reshape(config.tokens, config.top_k)
        self.lengths: NDArray[np.int64] = launcher.host(sizes.ranks - 1, np.int64)
        self.here: NDArray[np.int64] = launcher.host(sizes.ranks - 1, np.int64)

    def flag(self, number: int) -> NDArray[np.uint32]:
        """Return a flag, for whoever waits for it."""
        return self.gpu.words[number : number + 1]

    def given(self, tokens: int, x: Any, ids: Any, weights: Any, scales: Any) -> Given:
        """Return what a round is given, as kernels take it. Raises UsageError."""
        config, shape = self.sizes.config, (len(ids), self.sizes.config.top_k)
        rows = device_lines("x", x, (len(ids), config.hidden), config.dtype)
        beside = rows
        if config.scales:
            beside = device_lines("scales", scales, (len(ids), config.scales), config.scale_dtype)
        else:
            beside = Span.at(0, (len(ids), 0), "|u1", (0, 1))
        numbered = numbers("topk_ids", ids, shape, IDS)
        weighed = numbers("topk_weights", weights, shape, ("float32",))
        parts = [one.first(tokens) for one in (rows, numbered, weighed, beside)]
        return Given(tokens, parts[0], parts[1], parts[2], parts[3], x)

    def round_of(self, given: Given) -> Round:
        """Return a round of what it is given."""
        return DeviceRound(self, given)

    async def over(self, transfer: aiote.Transfer) -> None:
        """Wait for a transfer that belongs to the round; it ends with the group, too."""
        try:
            await transfer
        except (aiote.TransferError, aiote.PeerError) as error:
            self.group.membership.require_whole()
            raise self.named(error) from error

    async def guard(self, transfer: aiote.Transfer) -> None:
        """Break the group if a transfer fails, as one does whose numbers the GPU has got wrong."""
        try:
            await transfer
        except aiote.AioteError as error:
            if not transfer.was_cancelled:
                self.group.fail(self.named(error), "a write that a GPU has released")

    async def drain(self) -> None:
        """Wait until neither a transfer nor a kernel uses this rank's memory. Cancelling loses nothing.

        Raises GroupBrokenError where kernels take longer than KERNELS_S; what they use is kept until they have ended.
        """
        await super().drain()
        posting, engine = self.group.posting, self.group.engine
        if posting is None or not self.turn:
            return
        try:
            self.signal(IDLE)
        except RuntimeError:
            # A GPU that has failed runs nothing any more.
            return
        keep(self)
        if engine.closed:
            return
        nothing = np.zeros(0, np.int64)
        with anyio.move_on_after(KERNELS_S) as scope, suppress(aiote.AioteError):
            await posting.when(self.flag(IDLE), self.turn, [], (nothing, nothing, nothing), None)
        keep()
        if scope.cancelled_caught:
            raise GroupBrokenError(
                f"rank {self.group.rank}: a GPU has not run in {KERNELS_S} s what was launched for the group, behind "
                "other work of its stream; the memory is kept until it has"
            )

    @property
    def idle(self) -> bool:
        """Whether all kernels have run that were launched before the last `signal(IDLE)`."""
        return int(self.gpu.words[IDLE]) == self.turn

    def signal(self, flag: int) -> None:
        """Have a flag raised once all that was launched has run."""
        nothing = Span.at(0, (0, 3), "<i8")
        rows = Span.at(0, (1, 16), "|u1")
        self.gpu.copy_runs(rows, rows, nothing, 16, raises=flag)


class DeviceRound(Round):
    """A round of tokens in a GPU's memory."""

    _lane: DeviceLane

    def __init__(self, lane: DeviceLane, given: Given) -> None:
        super().__init__(lane, given)
        self._kernels = lane.kernels

    def send(self) -> None:
        """Launch what numbers, tells and packs, and submit what is posted then: the route, and rows."""
        lane, memory, sizes, config, me = self._lane, self._memory, self._sizes, self._config, self._group.rank
        gpu, given, tokens, where = lane.gpu, self._given, self._tokens, self._group.memory.map
        route = memory.own_routes[self._parity]
        nothing = np.zeros(config.experts, np.int64), np.zeros(sizes.ranks, np.int64)
        Route(self._group.membership.epoch, self.number, tokens, *nothing).write(route)
        said = route[HEADER - 1 : HEADER + config.experts + sizes.ranks]
        lane.kernels.begin()
        self._position = lane.mirror[:tokens]
        position, tail, weights = lane.position[:tokens], lane.tail[:tokens], lane.weights[:tokens]
        shape = config.experts, sizes.local, sizes.ranks
        counts = gpu.numbered(given.ids, *shape, False, position, begins=True)
        lane.turn = lane.turn + 1 & 0xFFFFFFFF
        told = [Span.of(one) for one in (self._position, said, lane.lengths, lane.here)]
        at = self._outbox() + where.sent_at
        bounds = sizes.local, me, sizes.private, sizes.row, at
        gpu.describe(given.ids, given.weights, position, counts, *bounds, tail, weights, *told, raises=ROUTED)
        sent, beside = Span.of(memory.sent), given.scales
        gpu.pack(
            sent, sent, 0, 0, position, given.x, beside, tail, sizes.scales_at, sizes.token_at, raises=PACKED
        )  # fmt: skip
        given.weights = weights
        slot = self._base() + (self._parity * sizes.ranks + me) * where.route
        own = self._outbox() + self._parity * where.route
        active = self._group.membership.active
        self._routed = self._when(ROUTED, [Write(rank, slot, own, where.route) for rank in active], ROUTE)
        to = np.full(len(active), self._base() + where.rows_at + me * sizes.private * sizes.row, np.int64)
        self._rows = self._submit(PACKED, active, (lane.lengths, lane.here, to), PAYLOAD)

    def _when(self, flag: int, writes: list[Write], kind: int) -> aiote.Transfer:
        """Have writes posted when a flag is raised."""
        rows = np.array([(one.nbytes, one.at, one.to) for one in writes], np.int64).reshape(-1, 3).T
        self._group.counted.sent_bytes += int(rows[0].sum())
        lengths, here, there = (np.ascontiguousarray(row) for row in rows)
        return self._submit(flag, [one.rank for one in writes], (lengths, here, there), kind)

    def _submit(self, flag: int, ranks: list[int], numbers: Any, kind: int) -> aiote.Transfer:
        posting, lane = self._group.posting, self._lane
        assert posting is not None
        try:
            made = posting.when(lane.flag(flag), lane.turn, ranks, numbers, self._imm(kind))
        except aiote.PeerError as error:
            raise lane.named(error) from error
        lane.post([(-1, made)])
        if kind != ROUTE:
            # Nobody awaits it before others need what it brings; the route is awaited at once.
            self._group.beside(lane.guard, made)
        return made

    async def _receive(self) -> Batch:
        sizes, config = self._sizes, self._config
        await self._lane.over(self._routed)
        said = self._memory.own_routes[self._parity, HEADER:].astype(np.int64)
        self._experts = said[: config.experts]
        self._copies = said[config.experts : config.experts + sizes.ranks]
        sent = sizes.for_ranks(self._experts)
        self._starts = np.cumsum(sent) - sent
        self._group.counted.sent_rows += int(sent.sum())
        self._group.counted.sent_bytes += int(self._lane.lengths.sum())
        if sizes.shared:
            # The host puts what goes beyond the private parts together.
            await self._lane.over(self._rows)
        return await super()._receive()

    def _write(self, writes: list[Write], kind: int) -> None:
        if kind != ANSWER:
            super()._write(writes, kind)
            return
        self._lane.signal(ANSWERED)
        self._when(ANSWERED, writes, kind)

    def _own_places(self, y: Any) -> None:
        """Own answers are packed with the others: `batch.y` is in the GPU's memory, they in the host's."""

    def _lines(self, what: str, array: Any, shape: tuple[int | None, ...], dtype: str) -> Any:
        found = device_lines(what, array, shape, dtype)
        described, size = found.__cuda_array_interface__, ITEMSIZES[dtype]
        if what == "out" and (described["data"][0] % size or described["strides"][0] % size):
            raise aiote.UsageError(f"out: on a GPU its rows begin at multiples of {size} bytes")
        return found

    def _sums(self) -> Any:
        rows, width = self._tokens, self._sizes.y_row
        return self._lane.launcher.zeros(rows * width, np.uint8).reshape(rows, width)
