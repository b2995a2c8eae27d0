"""Leases: a slice of memory that one peer may use until it is taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..aio import Signal
from ..core.descriptor import RailKey, RegionDescriptor
from ..errors import ClosedError
from ..rails import MAY_READ, MAY_WRITE

if TYPE_CHECKING:
    from types import TracebackType

    from ..aio import EventLoop
    from ..core.address import Address
    from ..rails import LocalMemory
    from .regions import Region

__all__ = ["Lease"]


class LeaseGrantor(Protocol):
    """What granted a lease."""

    @property
    def loop(self) -> EventLoop: ...
    @property
    def address(self) -> Address: ...
    def ask_back(self, lease: Lease) -> None:
        """Ask the holder to give a lease back, and end the lease when it has or can no longer use it."""


class Lease:
    """A slice of a region that one peer may read and write until it is revoked. Made by `Region.lease`.

    A context manager, which revokes it in the end.
    """

    def __init__(
        self, grantor: LeaseGrantor, holder: Address, number: int, region: Region, memory: LocalMemory
    ) -> None:
        self.holder = holder
        self.number = number
        self._grantor = grantor
        self._region = region
        self._memory = memory
        self._ended = Signal(grantor.loop)
        self._revoking = self._over = False
        self._described = b""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._region.nbytes

    @property
    def revoked(self) -> bool:
        """Whether it was revoked or is being revoked."""
        return self._revoking

    @property
    def memory(self) -> LocalMemory:
        """The native registration."""
        return self._memory

    @property
    def whole(self) -> LocalMemory:
        """The native registration of the region that it is a slice of."""
        return self._region.memory

    @property
    def descriptor(self) -> bytes:
        """The portable description for `Engine.attach` on the holder's engine, and nobody else's."""
        if self.revoked:
            raise ClosedError("the lease was revoked")
        # Nothing in it changes while the lease lasts, and a KV cache's decoder sends it with every request.
        self._described = self._described or self._describe()
        return self._described

    def _describe(self) -> bytes:
        return bytes(
            RegionDescriptor(
                owner=self._grantor.address,
                region=self._region.identity,
                address=self._memory.address,
                length=self._memory.length,
                writable=bool(self._memory.access & MAY_WRITE),
                readable=bool(self._memory.access & MAY_READ),
                keys=tuple(RailKey(key, base) for key, base in self._memory.keys),
                lease=self.number,
                holder=self.holder.identity,
            )
        )

    async def revoke(self) -> None:
        """Return once nobody can write through the lease any more, whatever its holder does.

        A live holder drops what it has not posted, drains what it has, and answers; one that has not within
        `config.drain_timeout` loses its connection. Cancelling the wait leaves the revocation to go on; it may be
        awaited again. Idempotent.
        """
        self.begin_revoking()
        while not self._over:
            await self._ended.wait()

    def begin_revoking(self) -> None:
        """Start the revocation without waiting for its end. Idempotent."""
        if not self._revoking:
            self._revoking = True
            self._grantor.ask_back(self)

    def end(self) -> None:
        """Take note that nobody can write through it any more: for the book of the leases, which knows."""
        self._revoking = self._over = True
        self._ended.set()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.revoke()

    def __repr__(self) -> str:
        state = "revoked" if self._over else "being revoked" if self._revoking else "live"
        return f"<Lease of {self._memory.length} bytes to {self.holder}, {state}>"
