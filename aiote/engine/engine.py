"""The engine: rails, regions, peers and counters of one event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from ..core.address import Address
from ..links import ConnectionTable, NicEvents
from ..observe import EngineStatistics, Event
from ..rails import RailInfo, quick, quick_pages
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

if TYPE_CHECKING:
    from types import TracebackType

    from ..config import EngineConfig
    from ..transfers import Access, Lease

    RailChoice = str | int | None
    Descriptor = bytes | bytearray | memoryview
    Use = Literal["read", "write"] | None
    Target = RemoteRegion | Peer | Address | str

__all__ = ["Engine"]


class Engine:
    """A transfer engine. Made by `open_engine`; belongs to the event loop that it was opened in.

    Called from another loop or thread, all its methods but `statistics` and `listen_events`, and those of what it
    makes, raise UsageError before they do anything. `aiote.bridge` shares an engine between threads and loops.

    Every verb has two forms: `await engine.write(...)`, which ends when the transfer is over and cancels it when
    it is cancelled, and `engine.submit_write(...)`, which returns a `Transfer` at once. Toward one peer at most
    `config.max_transfers` are unfinished: beyond, the first form waits for room, the second raises QueueFull.
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
        self._runtime, self._links, self._core = runtime, links, runtime.core
        self._regions = Regions(runtime, links.leases)
        self._requests = Requests(runtime, links)
        self._counters = Counters(runtime)
        # Last: what could not be made has nothing to close, and is not reported as left open.
        self._lifetime = Lifetime(runtime, links, self._regions, nic_events)
        if config.status_page and provider != "sim":
            self._lifetime.show(self)

    async def _open(self) -> None:
        """Begin to listen; called once, by `open_engine`."""
        await self._links.listen()
        self._lifetime.opened(self)
        self._links.heartbeats.afterwards = self._lifetime.beat

    # What the engine is.

    @property
    def address(self) -> Address:
        """Where peers reach this engine; it travels as bytes or text."""
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
        """The engines that are connected now."""
        return self._links.peers

    def find_peer(self, address: Address | str) -> Peer | None:
        """Return the peer that is connected at an address, None where there is none. Raises UsageError."""
        self._runtime.require_here()
        known = self._links.known(Address.parse(address) if isinstance(address, str) else address)
        return known.peer if known is not None and known.connected else None

    @property
    def closed(self) -> bool:
        """Whether the engine is closed or being closed."""
        return self._runtime.closed

    def statistics(self) -> EngineStatistics:
        """Return what was counted since the engine was opened; from any thread."""
        return EngineStatistics.of(
            self._links.inbox.counted(self._core.statistics()),
            tuple(rail.device.served for rail in self._runtime.rail_set.rails),
            peers=self._links.connected,
            **self._regions.counted(),
            **self._runtime.counted(),
        )

    def time_rails(self, every: int) -> None:
        """Take the time of one work request in `every` on each rail from now on (`statistics().times`); 0 ends that.

        From its post until its end is seen; one a rail and peer at once. Raises UsageError, ClosedError.
        """
        self._runtime.time_rails(every)

    def listen_events(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event (a peer connected or lost, a rail failed); what is returned stops that.

        From any thread; the listener is called in the engine's own.
        """
        return self._runtime.events.listen(listener)

    # Memory.

    def register(self, array: Any, access: Access = "read-write") -> Region:
        """Register memory with every rail: buffer protocol, DLPack or `__cuda_array_interface__`; contiguous.

        `access` is what peers that have the descriptor may do: "read-write", "read", "write", or "local" for memory
        that is no peer's business but may be lent by lease. This engine's own transfers may always use it. Read-only
        memory can be a source only. The region keeps the buffer exported until it is closed; the same memory registered
        twice gives two regions with their own keys. `region.reach` says how each rail reaches a GPU's. Raises
        UsageError for what is no such memory, FabricError when the NIC refuses.
        """
        return self._regions.register(array, access)

    async def register_async(self, array: Any, access: Access = "read-write") -> Region:
        """Register as `register` does, without holding the event loop while the kernel pins the pages of large memory.

        That takes seconds for many GiB; it is done in a thread of its own, and the array is not to be freed or moved
        before this ends. Rails that pin nothing (`local`, `socket`, `tcp`, `shm`) are done at once, without a thread.
        The kernel does not interrupt it: a cancelled await ends when the kernel is done and nothing is registered any
        more. Raises as `register`, and ClosedError where the engine is closed meanwhile, which waits for it, too:
        `abort` holds the loop for that long.
        """
        return await self._regions.register_async(array, access)

    def attach(
        self, descriptor: Descriptor, *, owner: Peer | Address | None = None, access: Use = None, nbytes: int = 0
    ) -> RemoteRegion:
        """Make another engine's memory usable from its descriptor. Raises UsageError for bytes that are none.

        With `owner` also for memory of any other engine, or of another life of that one, and for a lease that this Peer
        has revoked; also for memory that `access` is not allowed to, or of fewer than `nbytes`. Connects nothing.
        """
        return self._regions.attach(descriptor, owner, access, nbytes)

    def lease(self, slices: Iterable[Region], to: Peer | Address | str) -> Lease:
        """Lend slices of regions to one peer until they are revoked, all at once: `lease.descriptors` has one of each.

        As `Region.lease` of each slice, with one number, one message and one answer for the revocation of all. Closing
        the region of any of them revokes all. Raises as `Region.lease`, and UsageError for no slice at all.
        """
        return self._links.leases.grant(list(slices), to)

    # Transfers.

    async def connect(self, address: Address | str) -> Peer:
        """Connect to an engine and return its Peer; optional, for the first use connects.

        Text is parsed; `host:port` without an identity reaches whoever listens there. Raises UsageError,
        PeerError with the reason, within `connect_timeout`. Cancelling the wait leaves the attempt to end
        by itself.
        """
        self._runtime.require_open()
        return (await self._links.find(address).ready()).peer

    async def room(self, target: Peer | Address | str | RemoteRegion) -> None:
        """Wait until a `submit_` form toward a peer, or the owner of a region, would not raise QueueFull.

        At most `max_transfers` transfers toward one peer are unfinished at a time. Raises PeerError, ClosedError.
        """
        self._runtime.require_open()
        await self._links.find(target.owner if isinstance(target, RemoteRegion) else target).room()

    def submit_write(
        self, src: Region, dst: RemoteRegion, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a write of all of `src` to all of `dst` (same length); with `imm` it counts 1 at the receiver."""
        return quick(self._core, Transfer, src, dst, False, imm, rail, stream) or self._requests.write(
            src, dst, imm, rail=rail, stream=stream
        )

    async def write(self, src: Region, dst: RemoteRegion, *, rail: RailChoice = None, stream: Any = None) -> None:
        """Write all of `src` to all of `dst`, one-sided; the bytes are there when this returns.

        `src` belongs to the NIC until then. `rail` names one of `engine.rails`, or is its position: the write goes over
        that one alone for as long as it is there; without it over the rails expected to finish earliest. Cancelling
        drops what is not posted and drains what is, then raises. Raises UsageError, TransferError, PeerError,
        ClosedError.

        Where `src` is a GPU's the write is behind what `stream` has to do now, as a kernel there would be: a stream
        object (cupy, torch, numba, cuda.core), its address, None or 1 for the legacy default stream, 2 for the thread's
        default, -1 for memory that is ready. The stream goes on, and nothing is synchronized. Raises UsageError for 0,
        for a stream of another device, and for one whose work is being captured.
        """
        await (
            quick(self._core, Transfer, src, dst, False, None, rail, stream)
            or self._requests.write(src, dst, None, waits=True, rail=rail, stream=stream)
        )

    def submit_write_imm(
        self, src: Region | None, dst: Target, imm: int, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a write that counts 1 at the receiver, or (`src` None) an immediate alone to a peer or an owner."""
        return quick(self._core, Transfer, src, dst, False, imm, rail, stream) or self._requests.write(
            src, dst, imm, rail=rail, stream=stream
        )

    async def write_imm(
        self, src: Region | None, dst: Target, imm: int, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Write and count 1 on immediate `imm` (28 bits) at the receiver once the bytes are there; else as `write`."""
        await (
            quick(self._core, Transfer, src, dst, False, imm, rail, stream)
            or self._requests.write(src, dst, imm, waits=True, rail=rail, stream=stream)
        )

    def submit_read(
        self, src_remote: RemoteRegion, dst_local: Region, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start a read of all of `src_remote` into all of `dst_local` (same length)."""
        return quick(self._core, Transfer, dst_local, src_remote, True, None, rail, stream) or self._requests.read(
            src_remote, dst_local, rail=rail, stream=stream
        )

    async def read(
        self, src_remote: RemoteRegion, dst_local: Region, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Read all of `src_remote` into all of `dst_local`, one-sided; `dst_local` belongs to the NIC until this
        returns. `stream` is as of `write`: the kernels that still use `dst_local` come first.
        """
        await (
            quick(self._core, Transfer, dst_local, src_remote, True, None, rail, stream)
            or self._requests.read(src_remote, dst_local, waits=True, rail=rail, stream=stream)
        )

    def submit_write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start paged writes, page i of `src` to page i of `dst`; with `imm` each page counts 1 at the receiver."""
        return quick_pages(self._core, Transfer, src, dst, imm, rail, stream) or self._requests.pages(
            src, dst, imm, rail=rail, stream=stream
        )

    async def write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Write page i of `src` to page i of `dst` for all i, one request and one await for all; an empty list is over
        at once. `stream` is as of `write`.
        """
        await (
            quick_pages(self._core, Transfer, src, dst, imm, rail, stream)
            or self._requests.pages(src, dst, imm, waits=True, rail=rail, stream=stream)
        )

    def submit_read_pages(
        self, src_remote: Pages, dst_local: Pages, *, rail: RailChoice = None, stream: Any = None
    ) -> Transfer:
        """Start paged reads, page i of `src_remote` to page i of `dst_local`."""
        return self._requests.read_pages(src_remote, dst_local, rail=rail, stream=stream)

    async def read_pages(
        self, src_remote: Pages, dst_local: Pages, *, rail: RailChoice = None, stream: Any = None
    ) -> None:
        """Read page i of `src_remote` into page i of `dst_local` for all i, one request and one await for all; the
        local pages belong to the NIC until this returns. `stream` is as of `read`.
        """
        await self._requests.read_pages(src_remote, dst_local, waits=True, rail=rail, stream=stream)

    # Many peers at once.

    async def peer_group(self, members: Iterable[Peer | Address | str]) -> PeerGroup:
        """Connect to engines, all at once, and return them as a group for `scatter` and `barrier`.

        Raises UsageError for one that is named twice, PeerError for one that cannot be reached.
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
        """Start a write to each target, one request for all; with `imm` each counts 1 at its receiver."""
        return submit_scatter(self._runtime, group, targets, imm, stream)

    async def scatter(
        self, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None = None, *, stream: Any = None
    ) -> None:
        """Write each target's `src` to its `dst`, all over when this returns; with `imm` each counts 1 at its receiver.

        Lengths and places are each target's own, several may go to one member, none is over at once. A target that
        fails stops no other; the error names the first. Cancelling is as of `write`, for all of them, and `stream`:
        all are behind it. Raises UsageError, TransferError, PeerError, ClosedError.
        """
        chosen = list(targets)
        self._runtime.require_open()
        if isinstance(group, PeerGroup):
            await self.room_for(group)
        await submit_scatter(self._runtime, group, chosen, imm, stream)

    def prepare_scatter(self, group: PeerGroup, targets: Iterable[ScatterTarget]) -> PreparedScatter:
        """Check targets once for many scatters, each of which brings arrays of lengths and offsets within them.

        `src` and `dst` of a target may differ in length: they bound what is written. Raises UsageError, ClosedError,
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
        """Check targets once for many writes of pages, each of which brings arrays of page numbers.

        Page n of a side begins n strides (bytes; `page_bytes` unless given) behind the start of its region. Raises as
        `prepare_scatter`.
        """
        return PreparedPages.of(self._runtime, group, targets, page_bytes, (src_stride, dst_stride))

    async def barrier(self, group: PeerGroup, imm: int) -> None:
        """Wait until every member of the group is here: each has called its own `barrier` as often as this engine.

        Immediates alone are written; the values `imm` and `imm ^ 1` belong to the barrier. An empty group is through
        at once. Cancelled or failed, the group's rounds on that value are out of step, and it says so from then on.
        Raises PeerError or TransferError for a member that is lost before all have come, UsageError, ClosedError.
        """
        await barrier(self._counters, group, imm)

    # Messages.

    def submit_send(self, to: Peer | Address | str, payload: Any) -> Transfer:
        """Start a message of at most the receiver's `message_bytes`; the payload is copied before this returns."""
        return self._requests.send(to, payload)

    async def send(self, to: Peer | Address | str, payload: Any) -> None:
        """Send a message; the payload may be reused at once. A sender that outruns the receiver's pool waits here.

        Returning means that the message is on its way into the receiver's pool, not that anyone took it.
        """
        await self._requests.send(to, payload, waits=True)

    async def recv(self) -> Message:
        """Return the next message of any peer; waiting costs nothing, cancelling loses nothing."""
        while (message := self.recv_nowait()) is None:
            self._runtime.kick()
            await self._links.inbox.wait()
        return message

    async def recv_into(self, buffer: Any) -> tuple[int, Peer]:
        """Copy the next message of any peer into `buffer`; return its length and its source.

        A buffer of `message_bytes` has room for any. Cancelling loses nothing, and writes nothing to the buffer. Raises
        UsageError for a buffer that is read-only, not contiguous or shorter than the message, which stays; ClosedError.
        """
        return await self._links.inbox.receive_into(self._runtime, buffer)

    def recv_nowait(self) -> Message | None:
        """Return the next message of any peer, None where there is none. Raises ClosedError."""
        self._runtime.require_open()
        message = self._links.inbox.take()
        if message is not None:
            self._runtime.kick()
        return message

    def listen_messages(self, listener: Callable[[], object], over: Callable[[], object]) -> Callable[[], None]:
        """Call `listener()` whenever `recv_nowait` may find a message, and `over()` when the engine is closed.

        They are callbacks of the event loop: no task is running. What is returned stops that. An engine has one
        listener; it has to take every message that there is. Raises UsageError for another, and ClosedError.
        """
        self._runtime.require_open()
        return self._links.inbox.listen(listener, over)

    def messages(self) -> Messages:
        """Iterate over messages until the engine is closed."""
        return Messages(self.recv)

    # Counts and values.

    def counter(self, imm: int | None = None) -> Counter:
        """Return the counter of an immediate that you number, below 2**27, or of one that the engine grants.

        Raises UsageError at `max_counters`.
        """
        return self._counters.open(imm)

    def counters(self, first: int, needs: Sequence[int]) -> CounterRow:
        """Wait for `needs[i]` writes on immediate `first` + i, together; what came on them before is dropped, unless
        others have counters of theirs. Raises as `counter`.
        """
        return self._counters.open_row(first, needs)

    def reserve_immediates(self, count: int, sources: Iterable[Peer | Address | str] | None = None) -> ImmediateBlock:
        """Reserve 1 to 2**16 immediates in a row, from `block.first` on, that nobody else is granted until long after
        the block is closed. Raises UsageError beyond 2**26 in all blocks, ClosedError.

        With `sources`, which may be empty, the engine counts writes of these engines alone, and of what `block.allow`
        adds; `statistics().uninvited` is the number of writes that it did not count.
        """
        return self._counters.reserve(count, sources)

    def watch(self, value: Any) -> Changes:
        """Iterate over the changes of a value of 1, 2, 4 or 8 bytes in memory, as (old, new); what it was in between
        may be missed.

        The value is looked at every 50 us to 1 ms while somebody waits, rarer the longer it stays. Raises
        UsageError for memory that is no such value.
        """
        return watch(self._runtime, value)

    # The end.

    async def wait_closed(self) -> None:
        """Wait until the engine is closed, by whomever; it raises nothing. Cancelling this wait does nothing else."""
        await self._lifetime.wait_closed()

    async def aclose(self) -> None:
        """Say goodbye to every peer, end every await with an error, and let go of all memory. Idempotent.

        Transfers under way are not waited for: await them first. Cancelling leaves nothing half-closed.
        """
        await self._lifetime.close()

    def abort(self) -> None:
        """Close at once and tell the peers nothing: they notice by themselves. Idempotent.

        In a child of a fork neither this nor `aclose` does anything: the engine is the parent's.
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
            lifetime.dropped(self)

    def __repr__(self) -> str:
        return f"<Engine {self.address}, {'closed' if self.closed else 'open'}>"
