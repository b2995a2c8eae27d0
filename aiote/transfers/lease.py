"""Leases: slices of memory that one peer may use until the owner revokes them, all slices of a lease at once.

This module holds the owner's view of one lease. It must not know how the holder is asked to give it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..aio import Condition
from ..core.descriptor import RailKey, RegionDescriptor
from ..errors import ClosedError, UsageError
from ..rails import MAY_READ, MAY_WRITE

if TYPE_CHECKING:
    from types import TracebackType

    from ..aio import EventLoop
    from ..core.address import Address
    from ..rails import LocalMemory
    from .regions import Region

__all__ = ["Lease"]


class LeaseGrantor(Protocol):
    """The granting side of a lease."""

    @property
    def loop(self) -> EventLoop: ...
    @property
    def address(self) -> Address: ...
    def ask_back(self, lease: Lease) -> None:
        """Ask the holder to give a lease back; end the lease when the holder has, or can no longer use it."""


class Lease:
    """Slices of regions that one peer may read and write until they are revoked, all at once.

    Made by `Region.lease` from one slice, by `Engine.lease` from several. A context manager, which revokes it on exit.
    """

    def __init__(
        self, grantor: LeaseGrantor, holder: Address, number: int, parts: Sequence[tuple[Region, LocalMemory]]
    ) -> None:
        self.holder = holder
        self.number = number
        self._grantor = grantor
        self._parts = tuple(parts)
        self._ended = Condition(grantor.loop)
        self._revoking = self._over = False
        self._described: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """The length of all slices together, in bytes."""
        return sum(region.nbytes for region, _ in self._parts)

    @property
    def revoked(self) -> bool:
        """Whether it was revoked or is being revoked."""
        return self._revoking

    @property
    def memories(self) -> tuple[tuple[LocalMemory, LocalMemory], ...]:
        """For each slice, the native registration of its region and the native registration of the lease."""
        return tuple((region.memory, memory) for region, memory in self._parts)

    @property
    def descriptor(self) -> bytes:
        """The portable description for `Engine.attach` on the holder's engine; other engines cannot use it.

        Raises ClosedError once the lease was revoked, UsageError for a lease of several slices, which has
        `descriptors`.
        """
        if len(self._parts) != 1:
            raise UsageError(
                f"the lease has {len(self._parts)} slices and no single descriptor: use "
                "lease.descriptors, one for each slice"
            )
        return self.descriptors[0]

    @property
    def descriptors(self) -> tuple[bytes, ...]:
        """The descriptor of each slice, in the order of the slices. Raises ClosedError once the lease was revoked."""
        if self.revoked:
            raise ClosedError("the lease was revoked, so its descriptors are void: make another lease")
        # Descriptors do not change while the lease lasts, and the decoder of a KV cache sends them with every request.
        self._described = self._described or tuple(self._describe(region, memory) for region, memory in self._parts)
        return self._described

    def _describe(self, region: Region, memory: LocalMemory) -> bytes:
        return bytes(
            RegionDescriptor(
                owner=self._grantor.address,
                region=region.identity,
                address=memory.address,
                length=memory.length,
                writable=bool(memory.access & MAY_WRITE),
                readable=bool(memory.access & MAY_READ),
                keys=tuple(RailKey(key, base) for key, base in memory.keys),
                lease=self.number,
                holder=self.holder.identity,
            )
        )

    async def revoke(self) -> None:
        """Return once no engine can write through the lease any more, whatever its holder does.

        A live holder drops the requests that it has not posted, drains the posted ones, and answers; a holder that has
        not answered within `config.drain_timeout` loses its connection. If the wait is cancelled, the revocation still
        continues; it may be awaited again. Idempotent.
        """
        self.begin_revoking()
        await self._ended.until(lambda: self._over)

    def begin_revoking(self) -> None:
        """Start the revocation without waiting for its end. Idempotent."""
        self._grantor.loop.require_here()
        if not self._revoking:
            self._revoking = True
            self._grantor.ask_back(self)

    def end(self) -> None:
        """Record that no engine can write through it any more; only the lease table, which knows that, calls this."""
        self._revoking = self._over = True
        self._ended.wake_all()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.revoke()

    def __repr__(self) -> str:
        state = "revoked" if self._over else "being revoked" if self._revoking else "live"
        return f"<Lease of {self.nbytes} bytes to {self.holder}, {state}>"
