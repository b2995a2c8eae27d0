"""Leases: a slice of memory that one peer may use until it is taken back.

The owner registers the slice once more, with keys of its own that over our own rails serve the holder alone, and can
end that registration at any time. What it may not do is end it while the holder's bytes are on their way: they could
land in memory that is somebody else's by then. So a revocation asks the holder, over the control connection, to start
nothing more through the lease and to answer when nothing is under way; a holder that does not answer in time loses its
connection, after which none of its bytes is received. A lease that the holder has not heard of yet is void before its
first byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .aio import Signal
from .core.address import Address, name_of
from .core.descriptor import RailKey, RegionDescriptor
from .core.leases import Grants
from .errors import ClosedError, UsageError
from .peer import Peer
from .rails import section

if TYPE_CHECKING:
    from types import TracebackType

    from .engine import Engine
    from .rails import LocalMemory
    from .region import Region
    from .session import Session

__all__ = ["Lease", "Leases"]

Holder = tuple[bytes, int]


class Lease:
    """A slice of a region that one peer may read and write until it is revoked. Made by `Region.lease`.

    A context manager, which revokes it in the end.
    """

    def __init__(self, book: Leases, holder: Address, number: int, region: Region, memory: LocalMemory) -> None:
        self.holder = holder
        self.number = number
        self._book = book
        self._region = region
        self._memory = memory
        self._ended = Signal(book.engine.loop)
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
                owner=self._book.engine.address,
                region=self._region.identity,
                address=self._memory.address,
                length=self._memory.length,
                writable=self._memory.writable,
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
            self._book.ask_back(self)

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


class Leases:
    """The leases that one engine has granted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._grants = Grants()
        self._live: dict[LocalMemory, dict[Lease, None]] = {}

    def grant(self, region: Region, to: Peer | Address) -> Lease:
        """Grant a slice of a region to a peer. Raises UsageError, ClosedError, FabricError."""
        self.engine.require_open()
        region.require_open()
        holder = to.address if isinstance(to, Peer) else to
        if not isinstance(holder, Address):
            raise UsageError(f"lease: a Peer or an Address is expected, got {type(to).__name__}")
        if holder.is_anyone:
            raise UsageError("lease: the address must name one engine, by its identity; connect first")
        if holder.identity == self.engine.address.identity:
            raise UsageError("lease: this is the engine's own address; a lease is another engine's")
        if region.nbytes == 0:
            raise UsageError("lease: the slice has no bytes")
        whole = region.memory
        memory = self.engine.fabric.register(section(whole.buffer, region.start, region.start + region.nbytes))
        try:
            memory.bind(name_of(_key(holder)))
        except BaseException:
            memory.close()
            raise
        lease = Lease(self, holder, self._grants.grant(_key(holder)), region, memory)
        self._live.setdefault(whole, {})[lease] = None
        return lease

    def void(self, holder: Holder) -> list[tuple[int, int]]:
        """Return the ranges of numbers that are void for a holder."""
        return list(self._grants.void(holder))

    def ask_back(self, lease: Lease) -> None:
        """Ask the holder to give a lease back, and end the lease when it has or can no longer use it."""
        holder = _key(lease.holder)
        low, high = self._grants.revoke(holder, lease.number)
        session = self.engine.session_of(holder)
        if session is None:
            self._end(lease)
        else:
            self.engine.spawn(self._ask, session, lease, low, high, name=f"aiote revoke lease {lease.number}")

    async def _ask(self, session: Session, lease: Lease, low: int, high: int) -> None:
        try:
            await session.revoke(lease.number, low, high)
        finally:
            # A cancelled task is a closed engine's: its endpoints are closed.
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        leases = self._live.get(lease.whole, {})
        if leases.pop(lease, True) is None:
            lease.memory.close()
        if not leases:
            self._live.pop(lease.whole, None)
        lease.end()

    async def revoke_all(self, whole: LocalMemory) -> None:
        """Revoke the leases of one registration."""
        leases = tuple(self._live.get(whole, ()))
        for lease in leases:
            lease.begin_revoking()
        for lease in leases:
            await lease.revoke()

    def abandon(self) -> None:
        """End all leases: every endpoint is closed."""
        for leases in tuple(self._live.values()):
            for lease in tuple(leases):
                self._end(lease)


def _key(holder: Address) -> Holder:
    return holder.identity, holder.incarnation
