"""Own the public engine object: the rails, regions, peers and counters of one event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from ..core.address import Address
from ..links import ConnectionTable, NicEvents
from ..observe import EngineStatistics, Event
from ..rails import RailInfo
from ..runtime import Runtime
from ..transfers import (
    Changes,
    Counter,
    CounterRow,
    Counters,
    ImmediateBlock,
    Message,
    Messages,
    Pages,
    Peer,
    PeerGroup,
    PreparedPages,
    PreparedScatter,
    Region,
    Regions,
    RemoteRegion,
    Requests,
    ScatterTarget,
    Transfer,
    barrier,
    group_room,
    make_group,
    submit_scatter,
    watch,
)
from .lifetime import Lifetime
from .sharing import SharingVerbs

if TYPE_CHECKING:
    from types import TracebackType

    from ..config import EngineConfig
    from ..observe import WaitTimes
    from ..transfers import Access, Lease

    RailChoice = str | int | None
    Descriptor = bytes | bytearray | memoryview
    Use = Literal["read", "write"] | None
    Target = RemoteRegion | Peer | Address | str

__all__ = ["Engine"]


class Engine(SharingVerbs):
    """A transfer engine. `open_engine` makes it; it belongs to the event loop that opened it.

    Another loop or thread may call only `statistics` and `listen_events`; all other methods, and those of the objects
    that the engine makes, raise UsageError at once. `aiote.bridge` shares an engine between threads and loops.

    Every verb has two forms: `await engine.write(...)` returns when the transfer is over, and cancelling the await
    cancels the transfer; `engine.submit_write(...)` returns a `Transfer` at once. At most `config.max_transfers`
    transfers toward one peer are unfinished: at this limit the first form waits and the second raises QueueFull.
    """

    def __init__(self, provider: str, rails: tuple[str, ...] | None, config: EngineConfig) -> None:
        runtime = Runtime(provider, rails, config)
        with ExitStack() as undo:
            undo.callback(runtime.close)
            links = ConnectionTable(runtime)
            undo.callback(links.heartbeats.abandon)
            runtime.start(links.on_round)
            undo.callback(runtime.detach)
            nic_events = NicEvents(runtime)
            undo.pop_all()
        self._runtime, self._links = runtime, links
        self._regions = Regions(runtime, links.leases)
        self._requests = Requests(runtime, links)
        self._counters = Counters(runtime)
        # Last: if a step above fails, the engine has no lifetime to close and is not reported as left open.
        self._lifetime = Lifetime(runtime, links, self._regions, nic_events)
        if config.status_page and provider != "sim":
            self._lifetime.show(self)

    async def _open(self) -> None:
        """Start to listen for peers; `open_engine` calls this once."""
        await self._links.listen()
        self._lifetime.record_opened(self)
        self._links.heartbeats.afterwards = self._lifetime.beat

    # Identity and state.

    @property
    def address(self) -> Address:
        """The address at which peers reach this engine; it can be sent as bytes or text."""
        return self._runtime.address

    @property
    def rails(self) -> tuple[RailInfo, ...]:
        """The opened NICs."""
        return self._runtime.rail_set.info

    @property
    def config(self) -> EngineConfig:
        """The settings that the engine was opened with."""
        return self._runtime.config

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The peers that are connected now."""
        return self._links.peers

    def find_peer(self, address: Address | str) -> Peer | None:
        """Return the connected peer at an address, or None if no peer is connected there. Raises UsageError."""
        self._runtime.require_here()
        known = self._links.look_up(Address.parse(address) if isinstance(address, str) else address)
        return known.peer if known is not None and known.connected else None

    @property
    def closed(self) -> bool:
        """Whether the engine is closed or being closed."""
        return self._runtime.closed

    def statistics(self) -> EngineStatistics:
        """Return the counts since the engine was opened; callable from any thread."""
        return EngineStatistics.of(
            self._links.inbox.add_counts(self._runtime.core.statistics()),
            tuple(rail.device.served for rail in self._runtime.rail_set.rails),
            peers=self._links.connected,
            **self._regions.count_regions(),
            **self._links.leases.counted(),
            **self._runtime.outer_counts(),
        )

    def time_rails(self, every: int) -> None:
        """Time one work request in `every` on each rail from now on (see `statistics().times`); 0 stops the timing.

        It is timed from post to completion, one at once per rail and peer. Raises UsageError, ClosedError.
        """
        self._runtime.time_rails(every)

    def time_waits(self, times: WaitTimes | None) -> None:
        """Time waits on counts and watched values with `times`, or none with None. Raises UsageError, ClosedError."""
        self._runtime.time_waits(times)

    def listen_events(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event (a peer connected or lost, a rail failed); return a function that stops this.

        Callable from any thread; the listener runs in the engine's thread.
        """
        return self._runtime.events.listen(listener)

    # Memory.

    def register(self, array: Any, access: Access = "read-write") -> Region:
        """Register contiguous memory with every rail: buffer protocol, DLPack or `__cuda_array_interface__`.

        `access` says what a peer with the descriptor may do: "read-write", "read", "write", or "local" (nothing, but
        slices may still be leased). This engine's own transfers may always use it. Read-only memory can only be a
        source. The region keeps the buffer exported until it is closed; the same memory registered twice gives two
        regions with separate keys. `region.reach` says how each rail reaches GPU memory. Raises UsageError for an
        object without such memory, FabricError when the NIC refuses.
        """
        return self._regions.register(array, access)

    async def register_async(self, array: Any, access: Access = "read-write") -> Region:
        """Register memory like `register`, without blocking the event loop while the kernel pins the pages.

        Pinning many GiB takes seconds; a separate thread does it. The caller must not free or move the array before
        this ends. Rails that do not pin (`local`, `socket`, `tcp`, `shm`) register at once, without a thread. The
        kernel does not interrupt pinning: a cancelled await ends when the kernel is done and the registration is undone
        again. Raises as `register`, and ClosedError if the engine is closed meanwhile. Closing the engine waits for the
        kernel, too: `abort` blocks the loop for that long.
        """
        return await self._regions.register_async(array, access)

    def attach(
        self, descriptor: Descriptor, *, owner: Peer | Address | None = None, access: Use = None, nbytes: int = 0
    ) -> RemoteRegion:
        """Make another engine's memory usable from its descriptor, without connecting to that engine.

        Raises UsageError for bytes that are not a descriptor, if the memory does not permit `access` or is shorter than
        `nbytes`, if it belongs to another engine or incarnation than `owner`, and if Peer `owner` revoked its lease.
        """
        return self._regions.attach(descriptor, owner, access, nbytes)

    def lease(self, slices: Iterable[Region], to: Peer | Address | str) -> Lease:
        """Lend slices of regions to one peer until the lease is revoked; `lease.descriptors` has one for each slice.

        Like `Region.lease` for each slice, but with one lease number: one message and one answer revoke all slices.
        Closing the region of any slice revokes all. Raises as `Region.lease`, and UsageError without slices.
        """
        return self._links.leases.grant(list(slices), to)

    # Transfers.

    async def connect(self, address: Address | str) -> Peer:
        """Connect to an engine and return its Peer. This is optional because the first use of an address connects.

        Text is parsed; `host:port` without an identity reaches any engine that listens there. Raises UsageError, and
        PeerError with the reason, within `connect_timeout`. If the wait is cancelled, the attempt to connect still
        runs to its end.
        """
        self._runtime.require_open()
        return (await self._links.find_or_connect(address).wait_ready()).peer

    async def room(self, target: Peer | Address | str | RemoteRegion) -> None:
        """Wait until a `submit_` form toward a peer, or toward the owner of a region, would not raise QueueFull.

        At most `max_transfers` transfers toward one peer are unfinished at a time. Raises PeerError, ClosedError.
        """
        self._runtime.require_open()
        await self._links.find_or_connect(target.owner if isinstance(target, RemoteRegion) else target).room()

    def submit_write(
        self, src: Region, dst: RemoteRegion, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a write of all of `src` to all of `dst` (same length); with `imm` the receiver counts 1 on it."""
        return self._requests.write(src, dst, imm, rail, stream)

    async def write(self, src: Region, dst: RemoteRegion, *, rail: RailChoice = None, stream: Any = None) -> None:
        """Write all of `src` to all of `dst`, one-sided; the bytes are in `dst` when this returns.

        `src` belongs to the NIC until then. `rail` is the name or position of one of `engine.rails`: the write uses
        that rail alone while it is up; without `rail` it uses the rails with the earliest expected finish. Cancelling
        drops the work requests that are not posted, drains those that are, then raises. Raises UsageError,
        TransferError, PeerError, ClosedError.

        If `src` is GPU memory, the write starts after the work that `stream` has now, like a kernel launched there.
        `stream`: a stream object (cupy, torch, numba, cuda.core), its address, None or 1 for the legacy default stream,
        2 for the thread's default, -1 for memory that is ready. The stream continues without synchronization. Raises
        UsageError for 0, a stream of another device, and a stream whose work is being captured.
        """
        await self._requests.write(src, dst, None, rail, stream, waits=True)

    def submit_write_imm(
        self, src: Region | None, dst: Target, imm: int, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a write that counts 1 at the receiver; with `src` None send `imm` alone, to a peer or an owner."""
        return self._requests.write(src, dst, imm, rail, stream)

    async def write_imm(
        self, src: Region | None, dst: Target, imm: int, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Write like `write`; the receiver counts 1 on immediate `imm` (28 bits) once the bytes have arrived."""
        await self._requests.write(src, dst, imm, rail, stream, waits=True)

    def submit_read(
        self, src_remote: RemoteRegion, dst_local: Region, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a read of all of `src_remote` into all of `dst_local` (same length)."""
        return self._requests.read(src_remote, dst_local, rail, stream)

    async def read(
        self, src_remote: RemoteRegion, dst_local: Region, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Read all of `src_remote` into all of `dst_local`, one-sided; `dst_local` belongs to the NIC until this
        returns. `stream` is as in `write`: the read starts after the kernels that still use `dst_local`.
        """
        await self._requests.read(src_remote, dst_local, rail, stream, waits=True)

    def submit_write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start paged writes, page i of `src` to page i of `dst`; with `imm` the receiver counts 1 for each page."""
        return self._requests.write_pages(src, dst, imm, rail, stream)

    async def write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Write page i of `src` to page i of `dst` for all i, with one request and one await; an empty list completes
        at once. `stream` is as in `write`.
        """
        await self._requests.write_pages(src, dst, imm, rail, stream, waits=True)

    def submit_read_pages(
        self, src_remote: Pages, dst_local: Pages, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start paged reads, page i of `src_remote` to page i of `dst_local`."""
        return self._requests.read_pages(src_remote, dst_local, rail, stream)

    async def read_pages(
        self, src_remote: Pages, dst_local: Pages, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Read page i of `src_remote` into page i of `dst_local` for all i, with one request and one await; the local
        pages belong to the NIC until this returns. `stream` is as in `read`.
        """
        await self._requests.read_pages(src_remote, dst_local, rail, stream, waits=True)

    # Many peers at once.

    async def peer_group(self, members: Iterable[Peer | Address | str]) -> PeerGroup:
        """Connect to engines, all at once, and return them as a group for `scatter` and `barrier`.

        Raises UsageError for a member that is named twice, PeerError for a member that cannot be reached.
        """
        self._runtime.require_open()
        return await make_group(self._runtime, self._links, members)

    async def room_for(self, group: PeerGroup) -> None:
        """Wait until a `submit_scatter` to any member would not raise QueueFull. Raises PeerError, ClosedError."""
        self._runtime.require_open()
        await group_room(group)

    def submit_scatter(
        self, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None = None, *, stream: Any = None
    ) -> Transfer:
        """Start a write to each target with one request; with `imm` each receiver counts 1 for each of its targets."""
        return submit_scatter(self._runtime, group, targets, imm, stream)

    async def scatter(
        self, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None = None, *, stream: Any = None
    ) -> None:
        """Write each target's `src` to its `dst` and wait for all; with `imm` the receiver counts 1 for each target.

        Each target has its own length and place, and several may go to one member; an empty list completes at once. If
        a target fails, the others continue; the error names the first that failed. Cancelling and `stream` are as in
        `write`, for all targets. Raises UsageError, TransferError, PeerError, ClosedError.
        """
        chosen = list(targets)
        self._runtime.require_open()
        if isinstance(group, PeerGroup):
            await self.room_for(group)
        await submit_scatter(self._runtime, group, chosen, imm, stream)

    def prepare_scatter(self, group: PeerGroup, targets: Iterable[ScatterTarget]) -> PreparedScatter:
        """Check targets once for many scatters; each scatter brings arrays of lengths and of offsets in the targets.

        `src` and `dst` of a target may differ in length: they bound each write. Raises UsageError, ClosedError,
        PeerError.
        """
        return PreparedScatter(self._runtime, group, targets)

    def prepare_pages(
        self,
        group: PeerGroup,
        targets: Iterable[ScatterTarget],
        page_bytes: int,
        *,
        src_stride: int | None = None,
        dst_stride: int | None = None,
    ) -> PreparedPages:
        """Check targets once for many writes of pages; each write brings arrays of page numbers.

        Page n of a side begins n strides (bytes; `page_bytes` unless given) after the start of its region. Raises as
        `prepare_scatter`.
        """
        return PreparedPages.of(self._runtime, group, targets, page_bytes, (src_stride, dst_stride))

    async def barrier(self, group: PeerGroup, imm: int) -> None:
        """Wait until every member of the group has called its own `barrier` as often as this engine has.

        It writes immediates alone and owns the values `imm` and `imm ^ 1`. An empty group passes at once. A cancelled
        or failed barrier leaves the members' rounds on that value out of step: later calls on it raise UsageError.
        Raises PeerError or TransferError for a member that is lost before all have called, UsageError, ClosedError.
        """
        await barrier(self._counters, group, imm)

    # Messages.

    def submit_send(self, to: Peer | Address | str, payload: Any) -> Transfer:
        """Start to send a message of at most the receiver's `message_bytes`; copy the payload before returning."""
        return self._requests.send(to, payload)

    async def send(self, to: Peer | Address | str, payload: Any) -> None:
        """Send a message; the payload may be reused at once. While the receiver's pool is full, the sender waits here.

        When this returns the message is on its way into the receiver's pool; the receiver may not have taken it yet.
        """
        await self._requests.send(to, payload, waits=True)

    async def recv(self) -> Message:
        """Return the next message of any peer. Waiting costs nothing; a cancelled wait loses no message."""
        while (message := self.recv_nowait()) is None:
            self._runtime.kick()
            await self._links.inbox.wait()
        return message

    async def recv_into(self, buffer: Any) -> tuple[int, Peer]:
        """Copy the next message of any peer into `buffer`; return its length and its source.

        A buffer of `message_bytes` holds any message. A cancelled wait loses no message and does not change the buffer.
        Raises UsageError for a buffer that is read-only, not contiguous or too short (the message stays); ClosedError.
        """
        return await self._links.inbox.receive_into(self._runtime, buffer)

    def recv_nowait(self) -> Message | None:
        """Return the next message of any peer, or None if no message is there. Raises ClosedError."""
        self._runtime.require_open()
        message = self._links.inbox.take_message()
        if message is not None:
            self._runtime.kick()
        return message

    def listen_messages(self, listener: Callable[[], object], over: Callable[[], object]) -> Callable[[], None]:
        """Call `listener()` whenever `recv_nowait` may find a message, and `over()` when the engine is closed.

        The event loop calls both as callbacks, outside of any task. Return a function that removes the listener. An
        engine has one listener, which has to take every message. Raises UsageError for a second one, and ClosedError.
        """
        self._runtime.require_open()
        return self._links.inbox.listen(listener, over)

    def messages(self) -> Messages:
        """Iterate over messages until the engine is closed."""
        return Messages(self.recv)

    # Counts and values.

    def counter(self, imm: int | None = None) -> Counter:
        """Return the counter of immediate `imm`, below 2**27, or of an immediate that the engine chooses.

        Raises UsageError at `max_counters`.
        """
        return self._counters.open(imm)

    def counters(self, first: int, needs: Sequence[int]) -> CounterRow:
        """Return a row of counters that waits for `needs[i]` writes on each immediate `first` + i, together. Counts
        from before are dropped, except on immediates that have other counters. Raises as `counter`.
        """
        return self._counters.open_row(first, needs)

    def reserve_immediates(self, count: int, sources: Iterable[Peer | Address | str] | None = None) -> ImmediateBlock:
        """Reserve 1 to 2**16 consecutive immediates from `block.first` on; the engine grants them to no other caller
        until long after the block is closed. Raises UsageError beyond 2**26 in all blocks, ClosedError.

        With `sources`, which may be empty, the engine counts only the writes of these engines and of any engine that
        `block.allow` adds; `statistics().uninvited` is the number of writes that it did not count.
        """
        return self._counters.reserve(count, sources)

    def watch(self, value: Any) -> Changes:
        """Iterate over the changes of a value of 1, 2, 4 or 8 bytes in memory, as (old, new). Values between two looks
        may be missed.

        While a task waits the engine looks at the value every 50 us to 1 ms, less often the longer it stays the same.
        Raises UsageError for memory that is not such a value.
        """
        return watch(self._runtime, value)

    # The end.

    async def wait_closed(self) -> None:
        """Wait until the engine is closed, by any caller; raise no error then. Cancelling affects only this wait."""
        await self._lifetime.wait_closed()

    async def aclose(self) -> None:
        """Tell every peer that the engine closes, end every await with an error, release all memory. Idempotent.

        It does not wait for transfers in flight: await them first. If cancelled, it still closes the engine completely.
        """
        await self._lifetime.close()

    def abort(self) -> None:
        """Close at once without a message to the peers, which detect the loss themselves. Idempotent.

        In a forked child this and `aclose` do nothing because the engine belongs to the parent.
        """
        if not self._runtime.inherited:
            self._runtime.require_here()
            self._lifetime.end()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        lifetime = getattr(self, "_lifetime", None)
        if lifetime is not None:
            lifetime.close_dropped(self)

    def __repr__(self) -> str:
        return f"<Engine {self.address}, {'closed' if self.closed else 'open'}>"
