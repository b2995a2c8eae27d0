"""The engine: rails, regions, peers and counters of one event loop."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from . import submit
from .aio import Driver, Signal, current_loop, sleep, wake
from .barrier import barrier
from .config import EngineConfig
from .connections import Connections
from .core.address import Address
from .core.descriptor import RegionDescriptor
from .core.striping import check_immediate
from .counter import Counter, CounterRow, open_counter, open_row
from .errors import UsageError
from .group import PeerGroup, ScatterTarget, group_room, make_group, submit_scatter
from .hosts import bind_host, host_identity
from .inbox import Inbox, Message, Messages
from .leases import Leases
from .lifetime import Lifetime
from .observe import EngineStatistics, Event, Events
from .peer import Peer
from .railevents import RailEvents
from .rails import Fabric, PeerLink, RailInfo, acquire, quick, quick_pages, quick_send, section
from .region import Pages, Region, RegionBook, RemoteRegion
from .transfer import Launch, Transfer
from .watching import Changes, watch

if TYPE_CHECKING:
    from types import TracebackType

    from .aio import Waiter
    from .rails import Core, LocalMemory

__all__ = ["Engine"]

TIDY_S = (0.05, 0.5, 2.0)
FIRST_AUTOMATIC = 1 << 27  # immediates below are left to users who number their own
LAST_AUTOMATIC = (1 << 28) - 1


class Engine(Connections):
    """A transfer engine. Made by `open_engine`; belongs to one event loop and is not to be used from another thread.

    Every verb has two forms: `await engine.write(...)`, which ends when the transfer is over and cancels it when
    it is cancelled, and `engine.submit_write(...)`, which returns a `Transfer` at once. Toward one peer at most
    `config.max_transfers` are unfinished: beyond, the first form waits in line, the second raises QueueFull.
    """

    def __init__(self, provider: str, rails: tuple[str, ...] | None, config: EngineConfig) -> None:
        self.config = config
        self.loop = current_loop()
        self.events = Events()
        self.memories: set[LocalMemory] = set()
        self.waiting: set[Waiter] = set()
        self._regions: dict[LocalMemory, Region] = {}
        self._idle = Signal(self.loop)
        self.leases = Leases(self)
        self._tidying = False
        self._next_imm = FIRST_AUTOMATIC + secrets.randbelow(LAST_AUTOMATIC - FIRST_AUTOMATIC)
        host = bind_host(config)
        super().__init__(host)
        with ExitStack() as undo:
            undo.callback(self.heartbeats.abandon)
            self.fabric = Fabric(provider, rails, host=host, **config.of_fabric)
            undo.callback(self.fabric.close)
            assert self.fabric.core is not None
            self.core: Core = self.fabric.core
            self.host_id = host_identity()
            self.inbox = Inbox(self.loop, self.core)
            self._driver = Driver(self.loop, self.core, self._on_round)
            undo.callback(self._driver.detach)
            self._rail_events = RailEvents(self)
            undo.pop_all()
        # Last: what could not be made has nothing to close, and is not reported as left open.
        self._lifetime = Lifetime(self)

    async def open(self) -> None:
        """Begin to listen; called once, by `open_engine`."""
        await self.listen()
        self._lifetime.opened()
        self._lifetime.register(self)

    # What the engine is.

    @property
    def address(self) -> Address:
        """Where peers reach this engine; it travels as bytes or text."""
        return self._address

    @property
    def rails(self) -> tuple[RailInfo, ...]:
        """The opened NICs."""
        return self.fabric.info

    @property
    def closed(self) -> bool:
        """Whether the engine is closed or being closed."""
        return self._lifetime.closed

    def statistics(self) -> EngineStatistics:
        """Return what was counted since the engine was opened."""
        return EngineStatistics.of(self.inbox.counted(self.core.statistics()), len(self.rails))

    def listen_events(self, listener: Callable[[Event], object]) -> Callable[[], None]:
        """Call `listener` for each event (a peer connected or lost, a rail failed); what is returned stops that."""
        return self.events.listen(listener)

    def require_open(self) -> None:
        """Raise ClosedError when the engine is closed, UsageError in a child of a fork."""
        self._lifetime.require_open()

    # Memory.

    def register(self, array: Any) -> Region:
        """Register memory with every rail: buffer protocol, DLPack or `__cuda_array_interface__`; contiguous.

        Read-only memory can be a source only. The region keeps the buffer exported until it is closed; the
        same memory registered twice gives two regions with their own keys. Raises UsageError for what is no
        such memory, FabricError when the NIC refuses.
        """
        self.require_open()
        try:
            buffer = acquire(array)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(f"register: {error}") from error
        memory = self.fabric.register(buffer)
        memory.owner = self.core
        number, grant = secrets.randbits(64), self.leases.grant
        book = RegionBook(self.address, number, self._register_part, self._wait_idle, self._region_closed, grant)
        region = Region(memory, 0, memory.length, book, is_slice=False)
        self.memories.add(memory)
        self._regions[memory] = region
        return region

    def attach(self, descriptor: bytes | bytearray | memoryview) -> RemoteRegion:
        """Make another engine's memory usable from its descriptor. Raises UsageError for bytes that are none.

        Nothing is connected before the first use.
        """
        self.require_open()
        return RemoteRegion.attached(RegionDescriptor.from_bytes(descriptor), self.address.identity)

    def _register_part(self, whole: LocalMemory, start: int, stop: int) -> LocalMemory:
        memory = self.fabric.register(section(whole.buffer, start, stop))
        self.memories.add(memory)
        return memory

    async def _wait_idle(self, memory: LocalMemory) -> None:
        await self.leases.revoke_all(memory)
        while memory.in_flight:
            memory.on_idle = self._idle.set
            await self._idle.wait()

    def _region_closed(self, region: Region) -> None:
        for memory in (*region.parts, region.memory):
            memory.close()
            self.memories.discard(memory)
        self._regions.pop(region.memory, None)

    # Transfers.

    def submit(
        self,
        peer: Peer,
        description: str,
        launch: Launch,
        *,
        waits: bool = False,
        lease: int = 0,
        rail: str | int | None = None,
    ) -> Transfer:
        """Make a transfer and start it as soon as its peer is connected and has room; see `Peer.submit`."""
        transfer = Transfer(peer, description, launch, lease)
        if rail is not None:
            transfer.prefer(self._rail_of(rail))
        peer.submit(transfer, waits=waits)
        return transfer

    async def room(self, target: Peer | Address | RemoteRegion) -> None:
        """Wait until a `submit_` form toward a peer, or the owner of a region, would not raise QueueFull.

        At most `max_transfers` transfers toward one peer are unfinished at a time. Raises PeerError, ClosedError.
        """
        self.require_open()
        await self.peer_of(target.owner if isinstance(target, RemoteRegion) else target).room()

    def submit_write(
        self, src: Region, dst: RemoteRegion, imm: int | None = None, *, rail: str | int | None = None
    ) -> Transfer:
        """Start a write of all of `src` to all of `dst` (same length); with `imm` it counts 1 at the receiver."""
        return quick(self.core, Transfer, src, dst, False, imm, rail) or submit.submit_write(
            self, src, dst, imm, rail=rail
        )

    async def write(self, src: Region, dst: RemoteRegion, *, rail: str | int | None = None) -> None:
        """Write all of `src` to all of `dst`, one-sided; the bytes are there when this returns.

        `src` belongs to the NIC until then. `rail` names one of `engine.rails`, or is its position: the write goes over
        that one alone for as long as it is there; without it over those that will have carried it first. Cancelling
        drops what is not posted and drains what is, then raises. Raises UsageError, TransferError, PeerError,
        ClosedError.
        """
        await (
            quick(self.core, Transfer, src, dst, False, None, rail)
            or submit.submit_write(self, src, dst, None, waits=True, rail=rail)
        )

    def submit_write_imm(
        self, src: Region | None, dst: RemoteRegion | Peer | Address, imm: int, *, rail: str | int | None = None
    ) -> Transfer:
        """Start a write that counts 1 at the receiver, or (`src` None) an immediate alone to a peer or an owner."""
        return quick(self.core, Transfer, src, dst, False, imm, rail) or submit.submit_write(
            self, src, dst, imm, rail=rail
        )

    async def write_imm(
        self, src: Region | None, dst: RemoteRegion | Peer | Address, imm: int, *, rail: str | int | None = None
    ) -> None:
        """Write and count 1 on immediate `imm` (28 bits) at the receiver once the bytes are there; else as `write`."""
        await (
            quick(self.core, Transfer, src, dst, False, imm, rail)
            or submit.submit_write(self, src, dst, imm, waits=True, rail=rail)
        )

    def submit_read(self, src_remote: RemoteRegion, dst_local: Region, *, rail: str | int | None = None) -> Transfer:
        """Start a read of all of `src_remote` into all of `dst_local` (same length)."""
        return quick(self.core, Transfer, dst_local, src_remote, True, None, rail) or submit.submit_read(
            self, src_remote, dst_local, rail=rail
        )

    async def read(self, src_remote: RemoteRegion, dst_local: Region, *, rail: str | int | None = None) -> None:
        """Read all of `src_remote` into all of `dst_local`, one-sided; `dst_local` belongs to the NIC until this
        returns.
        """
        await (
            quick(self.core, Transfer, dst_local, src_remote, True, None, rail)
            or submit.submit_read(self, src_remote, dst_local, waits=True, rail=rail)
        )

    def submit_write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: str | int | None = None
    ) -> Transfer:
        """Start paged writes, page i of `src` to page i of `dst`; with `imm` each page counts 1 at the receiver."""
        return quick_pages(self.core, Transfer, src, dst, imm, rail) or submit.submit_pages(
            self, src, dst, imm, rail=rail
        )

    async def write_pages(
        self, src: Pages, dst: Pages, imm: int | None = None, *, rail: str | int | None = None
    ) -> None:
        """Write page i of `src` to page i of `dst` for all i, one request and one await for all; an empty list is over
        at once.
        """
        await (
            quick_pages(self.core, Transfer, src, dst, imm, rail)
            or submit.submit_pages(self, src, dst, imm, waits=True, rail=rail)
        )

    # Many peers at once.

    async def peer_group(self, members: Iterable[Peer | Address | str]) -> PeerGroup:
        """Connect to engines, all at once, and return them as a group for `scatter` and `barrier`.

        Raises UsageError for one that is named twice, PeerError for one that cannot be reached.
        """
        self.require_open()
        return await make_group(self, members)

    async def room_for(self, group: PeerGroup) -> None:
        """Wait until a `submit_scatter` to any member would not raise QueueFull. Raises PeerError, ClosedError."""
        self.require_open()
        await group_room(group)

    def submit_scatter(self, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None = None) -> Transfer:
        """Start a write to each target, one request for all; with `imm` each counts 1 at its receiver."""
        return submit_scatter(self, group, targets, imm)

    async def scatter(self, group: PeerGroup, targets: Iterable[ScatterTarget], imm: int | None = None) -> None:
        """Write each target's `src` to its `dst`, all over when this returns; with `imm` each counts 1 at its receiver.

        Lengths and places are each target's own, several may go to one member, none is over at once. A target that
        fails stops no other; the error names the first. Cancelling is as of `write`, for all of them. Raises
        UsageError, TransferError, PeerError, ClosedError.
        """
        chosen = list(targets)
        self.require_open()
        if isinstance(group, PeerGroup):
            await self.room_for(group)
        await submit_scatter(self, group, chosen, imm)

    async def barrier(self, group: PeerGroup, imm: int) -> None:
        """Wait until every member of the group is here: each has called its own `barrier` as often as this engine.

        Immediates alone are written; the values `imm` and `imm ^ 1` belong to the barrier. An empty group is through
        at once. Cancelled or failed, the group's rounds on that value are out of step, and it says so from then on.
        Raises PeerError or TransferError for a member that is lost before all have come, UsageError, ClosedError.
        """
        self.require_open()
        await barrier(self, group, imm)

    # Messages.

    def submit_send(self, to: Peer | Address, payload: Any) -> Transfer:
        """Start a message of at most the receiver's `message_bytes`; the payload is copied before this returns."""
        return self._quick_send(to, payload) or submit.submit_send(self, to, payload)

    async def send(self, to: Peer | Address, payload: Any) -> None:
        """Send a message; the payload may be reused at once. A sender that outruns the receiver's pool waits here.

        Returning means that the message is on its way into the receiver's pool, not that anyone took it.
        """
        await (self._quick_send(to, payload) or submit.submit_send(self, to, payload, waits=True))

    def _quick_send(self, to: Peer | Address, payload: Any) -> Transfer | None:
        peer = to if type(to) is Peer else self._known(to) if type(to) is Address else None
        return None if peer is None or peer.link is None else quick_send(self.core, Transfer, peer.link, payload)

    async def recv(self) -> Message:
        """Return the next message of any peer; waiting costs nothing, cancelling loses nothing."""
        while True:
            self.require_open()
            message = self.inbox.take()
            if message is not None:
                self.kick()
                return message
            self.kick()
            await self.inbox.wait()

    def messages(self) -> Messages:
        """Iterate over messages until the engine is closed."""
        return Messages(self.recv)

    # Counts and words.

    def counter(self, imm: int | None = None) -> Counter:
        """Return the counter of an immediate, or of one that nobody uses. Raises UsageError at `max_counters`.

        Immediates from 2**27 on are picked from for those; use lower ones for numbers of your own.
        """
        self.require_open()
        return open_counter(self, self._free_immediate() if imm is None else check_immediate(imm))

    def counters(self, first: int, needs: Sequence[int]) -> CounterRow:
        """Wait for `needs[i]` writes on immediate `first` + i, together; what came on them before is dropped, unless
        others have counters of theirs. Raises as `counter`.
        """
        self.require_open()
        return open_row(self, check_immediate(first), needs)

    def _free_immediate(self) -> int:
        # In turn, so that one that was freed is not soon another's, while a late write may still count on it.
        for _ in range(LAST_AUTOMATIC - FIRST_AUTOMATIC + 1):
            value = self._next_imm
            self._next_imm = FIRST_AUTOMATIC if value == LAST_AUTOMATIC else value + 1
            if not self.core.counted(value):
                return value
        raise UsageError("counter: no immediate is free")

    def watch(self, word: Any) -> Changes:
        """Iterate over the changes of a word of 1, 2, 4 or 8 bytes in memory, as (old, new); values in between
        may be missed.

        The word is looked at every 50 us to 1 ms while somebody waits, rarer the longer it stays. Raises
        UsageError for memory that is not such a word.
        """
        self.require_open()
        return watch(self, word)

    # Progress and the end.

    def tidy_up(self) -> None:
        """Remove what a lost peer may have left in shared memory, if it was killed."""
        if self.fabric.tidy() and not self._tidying:
            self._tidying = True
            self.spawn(self._tidy_up, name="aiote tidy up")

    async def _tidy_up(self) -> None:
        try:
            # The kernel closes the sockets of a process before its number is free, with all that it had mapped.
            for pause in TIDY_S:
                await sleep(pause)
                self.fabric.tidy()
        finally:
            self._tidying = False

    def kick(self) -> None:
        """Have the event loop make progress soon."""
        self._driver.kick()

    def _on_round(self, failed: list[PeerLink]) -> None:
        for link in failed:
            link.tag.data_failed(link)  # type: ignore[attr-defined]
        for link in self.core.noticed():
            link.tag.notice(link)  # type: ignore[attr-defined]
        if self.core.inbox:
            self.inbox.arrived()

    def _rail_of(self, rail: str | int) -> int:
        """Return the position of a rail. Raises UsageError where there is none of that name or number."""
        names = [one.name for one in self.rails]
        position = names.index(rail) if rail in names else rail
        if isinstance(position, int) and 0 <= position < len(names):
            return position
        raise UsageError(f"rail={rail!r}: expected one of {', '.join(names)}, or a number from 0 to {len(names) - 1}")

    def rail_name(self, rail: int) -> str:
        """Name a rail by its index; an empty string when there is none."""
        return self.fabric.rails[rail].name if 0 <= rail < len(self.fabric.rails) else ""

    def probe(self, peer: Peer, link: PeerLink, number: int) -> Transfer:
        """Start to write nothing to a peer over one channel, to see that the data path is there."""

        def launch(transfer: Transfer, link: PeerLink) -> None:
            self.core.submit_probe(link, transfer, number)

        transfer = Transfer(peer, "probe", launch)
        peer.start(transfer, link)
        return transfer

    async def aclose(self) -> None:
        """Say goodbye to every peer, end every await with an error, and let go of all memory. Idempotent.

        Transfers under way are not waited for: await them first. Cancelling leaves nothing half-closed.
        """
        if self._lifetime.inherited:
            return
        if not self._lifetime.begin_close():
            await self._lifetime.wait_closed(self.loop)
            return
        self.core.closing = True
        try:
            await self.disconnect("its engine was closed")
            await self._driver.stop()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close at once, without a word to the peers: they notice by themselves. Idempotent.

        In a child of a fork neither this nor `aclose` does anything: the engine is the parent's.
        """
        if self._lifetime.inherited:
            return
        self._lifetime.begin_close()
        self.core.closing = True
        self._driver.detach()
        self._rail_events.close()
        self.abandon_connections("the engine was aborted")
        if not self.core.closed:
            for link in tuple(self.core.peers):
                link.close()
            self.core.reap()
        self.leases.abandon()
        for memory in self.memories:
            memory.close()
        self.memories.clear()
        self._regions.clear()
        self.fabric.close()
        for waiter in tuple(self.waiting):
            wake(waiter)
        self.inbox.end()
        self._idle.set()
        self._lifetime.closed_now()

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
