"""The leases that one engine has granted.

The owner registers each slice again with separate keys, which on aiote's own rails work for the holder alone, and can
end these registrations at any time. But it must not end them while the holder's bytes are on their way, because they
could land in memory that belongs to other data by then. So a revocation asks the holder, over the control connection,
to start no more requests through the lease and to answer when it has no request in flight. A holder that does not
answer in time loses its connection, after which none of its bytes is received. A lease that the holder has not heard of
yet is void before its first byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..core.address import name_of
from ..core.lease_numbers import Grants
from ..errors import UsageError
from ..rails import MAY_ALL, section
from ..transfers import Lease, one_engine

if TYPE_CHECKING:
    from ..aio import EventLoop
    from ..core.address import Address
    from ..rails import LocalMemory
    from ..runtime import Runtime
    from ..transfers import Peer, Region

__all__ = ["GrantedLeases"]

Holder = tuple[bytes, int]


class LeaseHolder(Protocol):
    """The part of the session with a peer that asks it to give leases back."""

    async def revoke(self, lease: int, low: int, high: int) -> None: ...


class GrantedLeases:
    """The leases that one engine has granted. `session_of` finds the session with a holder, if there is one."""

    def __init__(self, runtime: Runtime, session_of: Callable[[Holder], LeaseHolder | None]) -> None:
        self._runtime = runtime
        self._session_of = session_of
        self._grants = Grants()
        self._live: dict[LocalMemory, dict[Lease, None]] = {}

    @property
    def loop(self) -> EventLoop:
        """The engine's event loop."""
        return self._runtime.loop

    @property
    def address(self) -> Address:
        """The address of the engine."""
        return self._runtime.address

    def grant(self, slices: Sequence[Region], to: Peer | Address | str) -> Lease:
        """Grant slices of regions to a peer under one lease. Raises UsageError, ClosedError, FabricError."""
        self._runtime.require_open()
        holder = self._holder(to)
        if not slices:
            raise UsageError("lease: expected at least one slice, got none")
        parts: list[tuple[Region, LocalMemory]] = []
        try:
            for region in slices:
                parts.append((region, self._register_for(region, holder)))
        except BaseException:
            for _, memory in parts:
                memory.close()
            raise
        lease = Lease(self, holder, self._grants.grant(_key(holder)), parts)
        for whole, _ in lease.memories:
            self._live.setdefault(whole, {})[lease] = None
        return lease

    def _holder(self, to: Peer | Address | str) -> Address:
        holder = one_engine(to, "lease")
        if holder.identity == self._runtime.address.identity:
            raise UsageError("lease: this is the engine's own address; name the other engine that may use the memory")
        return holder

    def _register_for(self, region: Region, holder: Address) -> LocalMemory:
        """Register a slice again, for one holder alone."""
        region.require_open()
        if region.memory.owner is not self._runtime.core:
            raise UsageError("lease: the region belongs to another engine; register the memory with this one too")
        if region.nbytes == 0:
            raise UsageError("lease: the slice is empty; lend at least one byte")
        whole = region.memory
        part = section(whole.buffer, region.start, region.start + region.nbytes)
        # A lease of a local region allows reads and writes; another lease allows no more than the region's descriptor.
        memory = self._runtime.rail_set.register(part, whole.access or MAY_ALL)
        try:
            memory.bind(name_of(_key(holder)))
        except BaseException:
            memory.close()
            raise
        return memory

    def counted(self) -> dict[str, int]:
        """Return the number of leases that have not ended."""
        return {"leases": len({lease for leases in tuple(self._live.values()) for lease in tuple(leases)})}

    def void_ranges(self, holder: Holder) -> list[tuple[int, int]]:
        """Return the ranges of lease numbers that are void for a holder."""
        return list(self._grants.void_ranges(holder))

    def ask_back(self, lease: Lease) -> None:
        """Ask the holder to give a lease back; end the lease when the holder has, or can no longer use it."""
        holder = _key(lease.holder)
        low, high = self._grants.revoke(holder, lease.number)
        session = self._session_of(holder)
        if session is None:
            self._end_lease(lease)
        else:
            self._runtime.spawn(self._ask_holder, session, lease, low, high, name=f"aiote revoke lease {lease.number}")

    async def _ask_holder(self, session: LeaseHolder, lease: Lease, low: int, high: int) -> None:
        try:
            await session.revoke(lease.number, low, high)
        finally:
            # This task is cancelled only when the engine is closed, and then its endpoints are closed.
            self._end_lease(lease)

    def _end_lease(self, lease: Lease) -> None:
        for whole, memory in lease.memories:
            memory.close()
            leases = self._live.get(whole, {})
            leases.pop(lease, None)
            if not leases:
                self._live.pop(whole, None)
        lease.end()

    async def revoke_all(self, whole: LocalMemory) -> None:
        """Revoke the leases of one registration, and wait until they have ended."""
        leases = tuple(self._live.get(whole, ()))
        for lease in leases:
            lease.begin_revoking()
        for lease in leases:
            await lease.revoke()

    def abandon(self) -> None:
        """End all leases: every endpoint is closed."""
        for leases in tuple(self._live.values()):
            for lease in tuple(leases):
                self._end_lease(lease)


def _key(holder: Address) -> Holder:
    return holder.identity, holder.incarnation
