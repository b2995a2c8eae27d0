"""Prepared requests: targets are checked once, then each request brings only arrays of lengths, offsets or pages.

This module owns the checks and the errors of such requests. It must not know how the native core posts them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.striping import NO_IMMEDIATE, native_immediate
from ..errors import FabricError, LeaseRevokedError, TransferError, UsageError
from ..rails import ArmedRun, PreparedTargets, TargetRun, arm
from .regions import as_integer
from .scatter import (
    GroupTransfer,
    PeerGroup,
    ScatterTarget,
    check_group,
    group_room,
    link_of,
    member_of,
    memories_of,
    take_rooms,
    void_lease,
)
from .streams import order_behind, pools_of

if TYPE_CHECKING:
    from ..rails import EventPool, Order
    from ..runtime import Runtime
    from .owner import Destination
    from .regions import Region
    from .transfer import Transfer

__all__ = ["PreparedPages", "PreparedScatter"]

FAULTS = {
    errno.ERANGE: "a length or an offset in memory leaves its target",
    errno.EPROTO: "its flag went backwards, or beyond the value that was awaited",
    errno.ESTALE: "the memory of a target was registered with fewer rails than its owner has connected since",
}
"""What the native thread may find wrong when a flag is raised, by error number; it has posted nothing then."""


class PreparedTransfer(GroupTransfer):
    """A request to prepared targets. The native core makes it without calling `__init__`."""

    def members(self) -> Sequence[Destination]:
        """Return the peer of each target."""
        assert isinstance(self.targets, TargetRun)
        return [self.targets.prepared.peers[row] for row in self.targets.rows()]

    @property
    def description(self) -> str:
        """The operation in words, for error messages."""
        assert isinstance(self.targets, TargetRun)
        return describe_run(self.targets)

    def explain(self) -> TransferError:
        """Return the error that this request ended with; for an armed one, with the fault that the thread found."""
        if not isinstance(self.targets, ArmedRun) or self.errno not in FAULTS:
            return super().explain()
        cause = FabricError(self.errno, FAULTS[self.errno], operation=self.description)
        return self._error(cause, f"{self.description} failed, nothing was posted: {cause}")


def describe_run(run: TargetRun) -> str:
    """Return the operation of a run in words, for error messages."""
    verb = "write_pages" if run.prepared.page_bytes else "scatter"
    return f"prepared {verb} to {len(run)} targets"


class Prepared:
    """Targets of a group that were checked once; the base class of the prepared requests."""

    def __init__(
        self,
        runtime: Runtime,
        group: PeerGroup,
        targets: Iterable[ScatterTarget],
        page_bytes: int = 0,
        strides: tuple[int, int] = (0, 0),
    ) -> None:
        check_group(runtime, group)
        items = list(targets)
        self.group = group
        self._runtime = runtime
        self._targets = PreparedTargets(runtime.core, len(items), page_bytes)
        self._sources: list[Region | None] = []
        self._leases: list[int] = []
        # The devices of all sources. Finding out which of them a request uses would take longer than waiting for all.
        self._pools: tuple[EventPool, ...] = ()
        peers = []
        for position, item in enumerate(items):
            try:
                src, dst = item
            except (TypeError, ValueError):
                raise UsageError(f"scatter: target {position} is {item!r}, expected ScatterTarget(src, dst)") from None
            peers.append(self._add(position, src, dst, strides))
        self._targets.peers = tuple(peers)
        self._pools = pools_of(src.memory for src in self._sources if src is not None)

    def __len__(self) -> int:
        return len(self._sources)

    def _add(self, position: int, src: Any, dst: Any, strides: tuple[int, int]) -> Destination:
        """Check one target and add it; return its peer."""
        peer, link = member_of(self.group, position, dst)
        lease, flight = 0, None
        if src is None:
            self._targets.add(link, None, 0, 0, None, 0, 0)
        else:
            source, remote = memories_of(self._runtime, position, src, dst)
            lease = remote.lease
            flight = peer.lease_flight(lease) if lease else None
            if lease and flight is None:
                raise LeaseRevokedError(
                    peer.name, f"it has revoked lease {lease} of target {position}; ask it for a new descriptor"
                )
            try:
                self._targets.add(
                    link,
                    source.memory,
                    source.start,
                    source.nbytes,
                    remote.memory,
                    remote.start,
                    remote.nbytes,
                    *strides,
                    flight=flight,
                )
            except ValueError as error:
                raise UsageError(f"scatter: target {position}: {error}") from None
        self._sources.append(src)
        self._leases.append(lease)
        return peer

    def _start(self, run: TargetRun, imm: int, stream: Any) -> Transfer:
        """Post a run. Raises UsageError, ClosedError, PeerError, QueueFull or TransferError, always before posting."""
        order = None
        if self._pools or stream is not None:
            order = order_behind(self._pools, stream, describe_run(run))
        transfer = run.start(PreparedTransfer, self.group, imm, order=order)
        return self._start_slowly(run, imm, order) if transfer is None else transfer

    def _start_slowly(self, run: TargetRun, imm: int, order: Order | None) -> Transfer:
        """Find out why a run was not posted, and raise that; if it only lacked a turn to submit, post it now."""
        self._runtime.require_open()
        rows = dict.fromkeys(run.rows())
        peers = self._targets.peers
        for row in rows:
            source, lease = self._sources[row], self._leases[row]
            if source is not None:
                source.require_open()
            link_of(peers[row])
            if lease and peers[row].lease_flight(lease) is None:
                raise void_lease(GroupTransfer(self.group, peers, describe_run(run)), peers[row], lease)
        take_rooms(self._runtime, describe_run(run), [peers[row] for row in rows])
        transfer = run.start(PreparedTransfer, self.group, imm, admitted=True, order=order)
        if transfer is None:
            raise UsageError(
                f"{describe_run(run)}: the owner of a target has connected more rails than its memory was "
                "prepared for; prepare the targets again"
            )
        return transfer

    async def _write(self, run: TargetRun, imm: int, stream: Any) -> None:
        await group_room(self.group)
        await self._start(run, imm, stream)


class PreparedScatter(Prepared):
    """Targets that scatters write to. Made by `Engine.prepare_scatter`; several requests may be in flight at once.

    It names peers, not the engines that reappear at their addresses: once a peer is lost, requests to its target raise
    PeerError. A closed region or a revoked lease raises as well. All of these raise before anything is posted. The
    object holds no resource, so it needs no close.
    """

    def submit(
        self,
        lengths: Any,
        local_offsets: Any = None,
        remote_offsets: Any = None,
        imm: Any = None,
        *,
        to: Any = None,
        stream: Any = None,
    ) -> Transfer:
        """Start a write of `lengths[i]` bytes to target i, between these offsets (bytes) within its two regions.

        Each is an array of int64 or uint64 (NumPy, `array.array`, any buffer), read before this returns; offsets that
        are None are 0. `imm` is one immediate for all writes or an array with one for each: each write then counts 1 at
        its receiver, also a write of length 0. Without `imm` a length of 0 posts nothing. `to` lists the positions of
        the targets that the arrays are for, in any order and as often as needed; the other targets get nothing.
        `stream` is as in `Engine.write`. Raises UsageError for numbers that do not fit, ClosedError, PeerError,
        QueueFull, and TransferError for a void lease, all before anything is posted.
        """
        number, numbers = one_or_each(imm)
        return self._start(self._run(lengths, local_offsets, remote_offsets, to, numbers), number, stream)

    def submit_when(
        self,
        flag: Any,
        value: int,
        lengths: Any,
        local_offsets: Any = None,
        remote_offsets: Any = None,
        imm: Any = None,
        *,
        to: Any = None,
        skip_empty: bool = False,
    ) -> Transfer:
        """Start a write that a native thread posts when `flag`, a uint32 in memory, becomes `value`.

        A GPU or another thread writes the lengths and offsets first, then raises the flag; the native thread then reads
        them once. `to` and `imm` are read now. Lengths and offsets must lie at multiples of 8. All these buffers are
        kept until the transfer is over. With `skip_empty` a length of 0 posts nothing, with or without `imm`. The flag
        may only grow, and wraps. If it passes `value` or goes back, or if a number leaves its target, the transfer ends
        with TransferError before anything is posted. The transfer is in flight from this call on, also while it waits
        for the flag: it can be cancelled, and it ends with its peers and the engine. Raises as `submit`.
        """
        if not 0 <= value < 1 << 32:
            raise UsageError(f"value={value!r}: expected an integer from 0 to 2**32 - 1")
        number, numbers = one_or_each(imm)
        try:
            run = arm(
                self._targets,
                flag,
                value,
                lengths,
                local_offsets,
                remote_offsets,
                to=to,
                skips=skip_empty,
                immediates=numbers,
            )
        except (BufferError, TypeError, ValueError) as error:
            raise UsageError(f"scatter: {error}") from None
        # The flag is raised only after the sources are filled, so the transfer waits on no stream.
        return self._start(run, number, -1)

    async def write(
        self,
        lengths: Any,
        local_offsets: Any = None,
        remote_offsets: Any = None,
        imm: Any = None,
        *,
        to: Any = None,
        stream: Any = None,
    ) -> None:
        """Write as `submit`, once there is room toward every member of the group; return when all writes are over.

        Cancelling is as for `Engine.scatter`. The arrays are read at once, before this waits for room.
        """
        number, numbers = one_or_each(imm)
        await self._write(self._run(lengths, local_offsets, remote_offsets, to, numbers), number, stream)

    def _run(self, lengths: Any, local_offsets: Any, remote_offsets: Any, to: Any, numbers: Any) -> TargetRun:
        try:
            return self._targets.scatter(lengths, local_offsets, remote_offsets, to, numbers)
        except (BufferError, TypeError, ValueError) as error:
            raise UsageError(f"scatter: {error}") from None

    def __repr__(self) -> str:
        return f"<PreparedScatter to {len(self)} targets>"


class PreparedPages(Prepared):
    """Targets that pages are written to. Made by `Engine.prepare_pages`; otherwise as `PreparedScatter`."""

    @property
    def page_bytes(self) -> int:
        """The length of every page in bytes."""
        return self._targets.page_bytes

    def submit(
        self, local_pages: Any, remote_pages: Any, imm: int | None = None, *, counts: Any = None, stream: Any = None
    ) -> Transfer:
        """Start a write of page `local_pages[i]` to page `remote_pages[i]` for every i; with `imm` each page counts 1.

        Page n of a side begins n strides after the start of its region. The first `counts[0]` pages belong to target 0,
        the next `counts[1]` to target 1, and so on; with a single target `counts` may be left out. Arrays and errors
        are as for `PreparedScatter.submit`.
        """
        return self._start(self._run(local_pages, remote_pages, counts), native_immediate(imm), stream)

    async def write(
        self, local_pages: Any, remote_pages: Any, imm: int | None = None, *, counts: Any = None, stream: Any = None
    ) -> None:
        """Write as `submit`, once there is room toward every member of the group; return when all pages are over."""
        await self._write(self._run(local_pages, remote_pages, counts), native_immediate(imm), stream)

    def _run(self, local_pages: Any, remote_pages: Any, counts: Any) -> TargetRun:
        try:
            return self._targets.write_pages(local_pages, remote_pages, counts)
        except (BufferError, TypeError, ValueError) as error:
            raise UsageError(f"write_pages: {error}") from None

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        group: PeerGroup,
        targets: Iterable[ScatterTarget],
        page_bytes: Any,
        strides: tuple[Any, Any],
    ) -> PreparedPages:
        """Prepare targets for pages of `page_bytes`, which is also the default of each stride. Raises UsageError."""
        page = as_integer("page_bytes", page_bytes)
        near, far = (page if stride is None else as_integer("stride", stride) for stride in strides)
        if not 0 < page < 1 << 62 or not 0 <= min(near, far) <= max(near, far) < 1 << 62:
            raise UsageError(
                f"page_bytes={page}, strides {near} and {far}: expected a positive page_bytes, and strides from 0 on"
            )
        return cls(runtime, group, targets, page, (near, far))

    def __repr__(self) -> str:
        return f"<PreparedPages of {self.page_bytes} bytes to {len(self)} targets>"


def one_or_each(imm: Any) -> tuple[int, Any]:
    """Return one immediate for all writes, or an array with one for each; the other is NO_IMMEDIATE or None.

    Raises UsageError for an invalid immediate.
    """
    if imm is None or (hasattr(imm, "__index__") and not getattr(imm, "shape", ())):
        return native_immediate(imm), None
    return NO_IMMEDIATE, imm
