"""Memory that takes part in transfers: local regions, and other engines' regions as their descriptors give them.

This module owns the registrations of one engine. It must not know how leases are granted or how peers are found.
"""

from __future__ import annotations

import errno
import operator
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

from ..aio import Condition, ThreadCall, poll_until
from ..core.address import Address
from ..core.descriptor import RailKey, RegionDescriptor
from ..errors import ClosedError, FabricError, UsageError
from ..rails import (
    MAY_ALL,
    MAY_READ,
    MAY_WRITE,
    LocalMemory,
    LocalSlice,
    RemoteMemory,
    RemoteSlice,
    acquire,
    device_name,
    section,
)

if TYPE_CHECKING:
    from types import TracebackType

    from ..rails import AcquiredBuffer, Reach
    from ..runtime import Runtime
    from .lease import Lease
    from .peer import Peer

__all__ = ["Access", "LeaseGranter", "Region", "Regions", "RemoteRegion", "as_integer"]

Access: TypeAlias = Literal["read-write", "read", "write", "local"]
THREAD = "aiote register"
COPIES_S = 10.0
"""A GPU's copy takes a millisecond; one without progress for this long is given up (aiote_native/cuda/driver.pyx)."""
ACCESS: dict[Access, int] = {"read-write": MAY_ALL, "read": MAY_READ, "write": MAY_WRITE, "local": 0}


def _bounds(item: object, length: int, kind: str) -> tuple[int, int]:
    """Return the bounds of a slice of bytes. A slice that leaves the region is an error and is never clipped."""
    if not isinstance(item, slice):
        raise UsageError(f"{kind}[{item!r}]: expected a slice of bytes, like {kind}[0:4096]")
    if item.step not in (None, 1):
        raise UsageError(f"{kind}: a slice has no step, got {item.step}; for strided access use Pages")
    start = 0 if item.start is None else as_integer(f"{kind}: the start of a slice", item.start)
    stop = length if item.stop is None else as_integer(f"{kind}: the end of a slice", item.stop)
    if not 0 <= start <= stop <= length:
        raise UsageError(f"{kind}[{start}:{stop}] leaves its {length} bytes: expected 0 <= start <= stop <= {length}")
    return start, stop


def as_integer(what: str, value: Any) -> int:
    """Return the value as an int, also from a numpy integer. Raises UsageError."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} is {value!r}, expected an integer") from None


def _check_owner(remote: RemoteRegion, owner: Peer | Address) -> None:
    """Raise UsageError unless that engine, in this life, owns the memory and has not revoked its lease, if any."""
    theirs, address = remote.owner, owner if isinstance(owner, Address) else owner.address
    if theirs.identity != address.identity:
        raise UsageError(f"attach: {remote} is not memory of {address}: expected a descriptor of its own memory")
    if theirs.incarnation != address.incarnation:
        raise UsageError(
            f"attach: {remote} has incarnation {theirs.incarnation:#x}, expected {address.incarnation:#x}, that of "
            f"{address}: one of the two is from before a restart; ask for a new descriptor"
        )
    if remote.lease and not isinstance(owner, Address) and owner.has_revoked(remote.lease):
        raise UsageError(
            f"attach: the owner of {remote} has revoked its lease {remote.lease}; ask for a new descriptor"
        )


class LeaseGranter(Protocol):
    """Grants leases of memory to peers, and revokes them."""

    def grant(self, slices: Sequence[Region], to: Peer | Address | str) -> Lease: ...
    async def revoke_all(self, memory: LocalMemory) -> None: ...


@dataclass(frozen=True, slots=True)
class RegionState:
    """The state that a region shares with its slices: its table, its random number, and the registered slices."""

    table: Regions
    identity: int
    access: int
    device: str
    reach: dict[str, Reach]
    parts: dict[tuple[int, int], LocalMemory] = field(default_factory=dict)

    def register_part(self, whole: LocalMemory, start: int, stop: int) -> LocalMemory:
        """Return the registration of a slice, which the first call makes; its keys give access to these bytes only."""
        if (start, stop) == (0, whole.length):
            return whole
        found = self.parts.get((start, stop))
        if found is None:
            found = self.parts[start, stop] = self.table.register_part(whole, start, stop, self.access)
        return found


class Region(LocalSlice):
    """Registered local memory, or a slice of it. Made by `Engine.register`.

    The region keeps its buffer alive and exported until it is closed; other code must not free or move the buffer
    before that. `region[a:b]` is bytes a to b, with the same registration. A region is a context manager that closes
    itself. `memoryview(region)` shows its bytes, and holds the buffer until the view is released, even after the region
    is closed.
    """

    __slots__ = ("__weakref__", "_is_slice", "_state")

    def __init__(self, memory: LocalMemory, start: int, nbytes: int, state: RegionState, *, is_slice: bool) -> None:
        self._state = state
        self._is_slice = is_slice

    def __len__(self) -> int:
        return self.nbytes

    @property
    def writable(self) -> bool:
        """Whether transfers of this engine may write to it."""
        return self.memory.writable

    @property
    def access(self) -> Access:
        """The access of a peer that has its descriptor."""
        return next(name for name, access in ACCESS.items() if access == self._state.access)

    @property
    def device(self) -> str:
        """The device that holds the memory: "cpu", "cuda:0"."""
        return self._state.device

    @property
    def reach(self) -> Mapping[str, Reach]:
        """How each rail of the engine reaches the memory, by the rail's name.

        `.way` is "direct", "shared", "staged", "dmabuf", "peermem" or "none" (other rails carry it), `.reason` says
        why.
        """
        return MappingProxyType(self._state.reach)

    @property
    def closed(self) -> bool:
        """Whether the region or its engine is closed."""
        return self.memory.closing or not self.memory.registrations

    def __getitem__(self, item: slice) -> Region:
        start, stop = _bounds(item, self.nbytes, "region")
        return Region(self.memory, self.start + start, stop - start, self._state, is_slice=True)

    @property
    def descriptor(self) -> bytes:
        """The portable description of this region or slice, for `Engine.attach` on another engine.

        An engine that has it may read these bytes and, if the region is writable, write them, and no other bytes, until
        the region is closed. To ensure that, the first use of `descriptor` on a slice registers the slice again with
        its own keys, so descriptors of many slices cost the NIC many registrations. Raises ClosedError, FabricError,
        and UsageError for a region that was registered as local.
        """
        self.require_open()
        if not self._state.access:
            raise UsageError(
                "the region is local: register it with access='read', 'write' or 'read-write' for peers to use it, or "
                "lend a slice of it by region.lease"
            )
        # An empty slice needs no access, so its keys are 0.
        keys = [(0, 0) for _ in self.memory.keys]
        if self.nbytes:
            keys = list(self._state.register_part(self.memory, self.start, self.start + self.nbytes).keys)
        return bytes(
            RegionDescriptor(
                owner=self._state.table.address,
                region=self._state.identity,
                address=self.memory.address + self.start,
                length=self.nbytes,
                writable=bool(self.memory.access & MAY_WRITE),
                readable=bool(self.memory.access & MAY_READ),
                keys=tuple(RailKey(key, base) for key, base in keys),
            )
        )

    @property
    def parts(self) -> tuple[LocalMemory, ...]:
        """The registrations of the slices whose descriptors were requested."""
        return tuple(self._state.parts.values())

    @property
    def identity(self) -> int:
        """The random number of this registration."""
        return self._state.identity

    def lease(self, item: slice, to: Peer | Address | str) -> Lease:
        """Lend a slice of the region to one peer until it is revoked: `async with region.lease(slice(a, b), peer)`.

        The lease has its own keys and the region's access; a lease of a local region allows reads and writes. Raises
        UsageError for a slice that leaves the region and for an address without an identity, FabricError if the NIC
        refuses.
        """
        return self._state.table.leases.grant([self[item]], to)

    def require_open(self) -> None:
        """Raise ClosedError when the region is closed."""
        if self.closed:
            raise ClosedError("the region is closed")

    async def aclose(self) -> None:
        """Revoke its leases, wait for the transfers that use it, end the registration and release the buffer.

        Idempotent. Closing a slice does nothing. A cancelled close leaves the region closed for new transfers; call it
        again.
        """
        self._state.table.require_here()
        if self._is_slice:
            return
        self.memory.closing = True
        if self.memory.registrations:
            await self._state.table.wait_idle(self.memory)
            await self._state.table.retire(self)
            self._state.table.remove(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Region {self.nbytes} bytes at {self.memory.address + self.start:#x}, {state}>"


class RemoteRegion(RemoteSlice):
    """Another engine's memory, or a slice of it, as its descriptor states it. Made by `Engine.attach`."""

    __slots__ = ("_descriptor",)

    def __init__(self, memory: RemoteMemory, start: int, nbytes: int, descriptor: RegionDescriptor) -> None:
        self._descriptor = descriptor

    @classmethod
    def attached(cls, descriptor: RegionDescriptor, identity: bytes) -> RemoteRegion:
        """Make the remote region that a descriptor describes; `identity` names the engine that will use it.

        Raises UsageError if that engine owns the memory itself, or if the memory was lent to another engine.
        """
        if descriptor.owner.identity == identity:
            raise UsageError(
                "attach: the descriptor is of this engine's own memory; copy that memory without an engine"
            )
        if descriptor.lease and descriptor.holder != identity:
            raise UsageError(
                "attach: the lease was granted to another engine, and only that engine may use it; "
                "ask the owner for one of your own"
            )
        keys = [(item.key, item.base) for item in descriptor.keys]
        memory = RemoteMemory(descriptor.length, descriptor.writable, keys, descriptor.lease, descriptor.readable)
        return cls(memory, 0, descriptor.length, descriptor)

    @property
    def owner(self) -> Address:
        """The address of the engine that owns the memory."""
        return self._descriptor.owner

    def __len__(self) -> int:
        return self.nbytes

    @property
    def writable(self) -> bool:
        """Whether the owner allows other engines to write to it."""
        return self._descriptor.writable

    @property
    def readable(self) -> bool:
        """Whether the owner allows other engines to read it."""
        return self._descriptor.readable

    @property
    def lease(self) -> int:
        """The number of the owner's lease; 0 if the memory is not lent by a lease."""
        return self._descriptor.lease

    def __getitem__(self, item: slice) -> RemoteRegion:
        start, stop = _bounds(item, self.nbytes, "remote")
        return RemoteRegion(self.memory, self.start + start, stop - start, self._descriptor)

    def __repr__(self) -> str:
        return f"<RemoteRegion {self.nbytes} bytes of {self.owner}>"


class Regions:
    """The registered memory of one engine."""

    def __init__(self, runtime: Runtime, leases: LeaseGranter) -> None:
        self._runtime = runtime
        self.leases = leases
        self._memories: set[LocalMemory] = set()
        # This keeps a region registered after the user drops it, because peers may hold its descriptor.
        self._regions: dict[LocalMemory, Region] = {}
        self._registered = 0
        self._idle = Condition(runtime.loop)
        self._calls: set[ThreadCall[LocalMemory]] = set()

    @property
    def address(self) -> Address:
        """The address of the engine that owns the memory."""
        return self._runtime.address

    def require_here(self) -> None:
        """Raise UsageError if the caller runs in another event loop than the engine's."""
        self._runtime.loop.require_here()

    def register(self, array: Any, access: Access = "read-write") -> Region:
        """Register memory with every rail; see `Engine.register`."""
        buffer = self._borrow_buffer(array, access)
        return self._enter_region(self._runtime.rail_set.register(buffer, ACCESS[access]), access)

    async def register_async(self, array: Any, access: Access = "read-write") -> Region:
        """Register memory, in a thread if that takes long; see `Engine.register_async`."""
        rail_set = self._runtime.rail_set
        buffer = self._borrow_buffer(array, access)
        if not rail_set.pins(buffer):
            return self._enter_region(rail_set.register(buffer, ACCESS[access]), access)
        try:
            call = ThreadCall(
                self._runtime.loop, partial(rail_set.pin, buffer, ACCESS[access]), LocalMemory.close, name=THREAD
            )
        except RuntimeError as error:
            buffer.release()
            raise FabricError(errno.EAGAIN, str(error), operation="register memory") from error
        self._calls.add(call)
        try:
            await call.join()
            if self._runtime.closed:
                call.give_up()
        finally:
            if call.returned:
                self._calls.discard(call)
        self._runtime.require_open()
        return self._enter_region(rail_set.keep_memory(call.result()), access)

    def _borrow_buffer(self, array: Any, access: Access) -> AcquiredBuffer:
        """Borrow the buffer of an array that may be registered with this access. Raises UsageError and ClosedError."""
        self._runtime.require_open()
        if access not in ACCESS:
            raise UsageError(f"register: access={access!r}: expected one of {', '.join(map(repr, ACCESS))}")
        try:
            buffer = acquire(array)
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(f"register: {error}") from error
        if buffer.readonly and access == "write":
            buffer.release()
            raise UsageError("register: the memory is read-only, so peers cannot write to it; use access='read'")
        return buffer

    def _enter_region(self, memory: LocalMemory, access: Access) -> Region:
        """Make a region of registered memory, and enter it in the table."""
        memory.owner = self._runtime.core
        reach = self._runtime.rail_set.reach(memory)
        device = device_name(memory)
        state = RegionState(self, secrets.randbits(64), ACCESS[access], device, reach)
        region = Region(memory, 0, memory.length, state, is_slice=False)
        self._memories.add(memory)
        self._regions[memory] = region
        self._registered += 1
        for rail, found in reach.items():
            if found.way in ("staged", "none"):
                self._runtime.events.emit("memory.staged", rail=rail, device=device, reason=found.reason)
        return region

    def count_regions(self) -> dict[str, int]:
        """Return the number of open regions, their bytes, and the number of registrations made so far."""
        return {
            "regions": len(self._regions),
            "registered_bytes": sum(each.length for each in tuple(self._regions)),
            "registrations": self._registered,
        }

    def attach(
        self,
        descriptor: bytes | bytearray | memoryview,
        owner: Peer | Address | None = None,
        access: str | None = None,
        nbytes: int = 0,
    ) -> RemoteRegion:
        """Make another engine's memory usable; see `Engine.attach`."""
        self._runtime.require_open()
        remote = RemoteRegion.attached(RegionDescriptor.from_bytes(descriptor), self.address.identity)
        if owner is not None:
            _check_owner(remote, owner)
        if access is not None and not (remote.writable if access == "write" else remote.readable):
            raise UsageError(
                f"attach: {remote} may not be {'written' if access == 'write' else 'read'}: its owner "
                "registered it with other access"
            )
        if remote.nbytes < nbytes:
            raise UsageError(f"attach: {remote} is too short: expected at least {nbytes} bytes")
        return remote

    def register_part(self, whole: LocalMemory, start: int, stop: int, access: int) -> LocalMemory:
        """Register a slice of registered memory again, with its own keys. Raises FabricError."""
        memory = self._runtime.rail_set.register(section(whole.buffer, start, stop), access)
        self._memories.add(memory)
        return memory

    async def wait_idle(self, memory: LocalMemory) -> None:
        """Revoke the leases of a registration and wait until no transfer uses it."""
        await self.leases.revoke_all(memory)
        while memory.in_flight:
            memory.on_idle = self._idle.wake_all
            await self._idle.wait()

    async def retire(self, region: Region) -> None:
        """Refuse the keys of a region, and wait until its GPU has ended copies for peers; removal would block."""
        memories = (*region.parts, region.memory)

        def are_still() -> bool:
            copying = [memory.retire() for memory in memories]
            if any(copying):
                # Peers that have its allocation open may sleep.
                self._runtime.rail_set.nudge()
            return not any(copying)

        await poll_until(self._runtime.loop, are_still, COPIES_S)

    def remove(self, region: Region) -> None:
        """End the registrations of a region."""
        for memory in (*region.parts, region.memory):
            memory.close()
            self._memories.discard(memory)
        self._regions.pop(region.memory, None)

    async def finish(self) -> None:
        """Abandon the registrations that threads still make for a closing engine, and wait until they have ended."""
        calls = tuple(self._calls)
        for call in calls:
            call.abandon()
        for call in calls:
            await call.join()

    def close(self) -> None:
        """End every registration, even one in use: the links are closed by now."""
        for call in self._calls:
            call.abandon()
        # Drop each call only once it is over: if an interrupt ends this loop, the next close finds the remaining calls.
        for call in tuple(self._calls):
            call.give_up()
            self._calls.discard(call)
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        self._regions.clear()
        self._idle.wake_all()
