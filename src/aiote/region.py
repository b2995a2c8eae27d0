"""Memory that takes part in transfers: local regions, and what is known of remote ones."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .core.descriptor import RailKey, RegionDescriptor
from .errors import ClosedError, UsageError
from .rails import LocalSlice, PageIndex, PageSet, RemoteMemory, RemoteSlice

if TYPE_CHECKING:
    from .core.address import Address
    from .leases import Lease
    from .peer import Peer
    from .rails import LocalMemory

__all__ = ["Pages", "Region", "RegionBook", "RemoteRegion"]


def _bounds(item: object, length: int, kind: str) -> tuple[int, int]:
    """Read a slice of bytes strictly: a range that leaves the region is a mistake, not something to clip."""
    if not isinstance(item, slice):
        raise UsageError(f"{kind}[{item!r}]: a slice of bytes is expected, like {kind}[0:4096]")
    if item.step not in (None, 1):
        raise UsageError(f"{kind}: a slice has no step, got {item.step}; for strided access use Pages")
    start = 0 if item.start is None else _integer(f"{kind}: the start of a slice", item.start)
    stop = length if item.stop is None else _integer(f"{kind}: the end of a slice", item.stop)
    if not 0 <= start <= stop <= length:
        raise UsageError(
            f"{kind}[{start}:{stop}] leaves its {length} bytes: 0 <= start <= stop <= {length} is expected"
        )
    return start, stop


def _integer(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} is {value!r}, expected an integer") from None


@dataclass(frozen=True, slots=True)
class RegionBook:
    """What a registration has of its engine: `identity` is its random number; the others are for its end and leases."""

    owner: Address
    identity: int
    register: Callable[[LocalMemory, int, int], LocalMemory]
    wait_idle: Callable[[LocalMemory], Awaitable[None]]
    on_close: Callable[[Region], None]
    grant: Callable[[Region, Peer | Address], Lease]
    parts: dict[tuple[int, int], LocalMemory] = field(default_factory=dict)

    def part(self, whole: LocalMemory, start: int, stop: int) -> LocalMemory:
        """Return the registration of a slice, made the first time: its keys open nothing else."""
        if (start, stop) == (0, whole.length):
            return whole
        found = self.parts.get((start, stop))
        if found is None:
            found = self.parts[start, stop] = self.register(whole, start, stop)
        return found


class Region(LocalSlice):
    """Registered local memory, or a slice of it.

    Made by `Engine.register`. It keeps its buffer alive and exported until it is closed; `region[a:b]` are bytes
    a to b of it, with the same registration. The buffer must not be freed or moved by others meanwhile.
    """

    __slots__ = ("__weakref__", "_book", "_is_slice")

    def __init__(self, memory: LocalMemory, start: int, nbytes: int, book: RegionBook, *, is_slice: bool) -> None:
        self._book = book
        self._is_slice = is_slice

    def __len__(self) -> int:
        return self.nbytes

    @property
    def writable(self) -> bool:
        """Whether transfers may write to it."""
        return self.memory.writable

    @property
    def closed(self) -> bool:
        """Whether the registration is gone, or its engine."""
        return self.memory.closing or not self.memory.registrations

    def __getitem__(self, item: slice) -> Region:
        start, stop = _bounds(item, self.nbytes, "region")
        return Region(self.memory, self.start + start, stop - start, self._book, is_slice=True)

    @property
    def descriptor(self) -> bytes:
        """The portable description of this region or slice, for `Engine.attach` on another engine.

        Whoever has it may read and, where it is writable, write these bytes and no others, until the region is closed.
        For that a slice is registered once more, with keys of its own, the first time that it is asked: what is handed
        out for many slices costs the NIC many registrations. Raises ClosedError, FabricError.
        """
        self.require_open()
        # Of no bytes nothing is opened.
        keys = [(0, 0) for _ in self.memory.keys]
        if self.nbytes:
            keys = list(self._book.part(self.memory, self.start, self.start + self.nbytes).keys)
        return bytes(
            RegionDescriptor(
                owner=self._book.owner,
                region=self._book.identity,
                address=self.memory.address + self.start,
                length=self.nbytes,
                writable=self.memory.writable,
                keys=tuple(RailKey(key, base) for key, base in keys),
            )
        )

    @property
    def parts(self) -> tuple[LocalMemory, ...]:
        """The registrations of the slices whose descriptors were asked for."""
        return tuple(self._book.parts.values())

    @property
    def identity(self) -> int:
        """The registration's random number."""
        return self._book.identity

    def lease(self, item: slice, to: Peer | Address) -> Lease:
        """Lend a slice of the region to one peer until it is revoked: `async with region.lease(slice(a, b), peer)`.

        The lease has keys of its own. Raises UsageError for a slice that leaves the region and for an address without
        an identity, FabricError when the NIC refuses.
        """
        return self._book.grant(self[item], to)

    def require_open(self) -> None:
        """Raise ClosedError when the region is closed."""
        if self.closed:
            raise ClosedError("the region is closed")

    async def aclose(self) -> None:
        """Revoke its leases, wait for the transfers that use it, end the registration and let go of the buffer.

        Idempotent. Closing a slice closes nothing. A cancelled close leaves the region closed for new transfers; call
        it again.
        """
        if self._is_slice:
            return
        self.memory.closing = True
        if self.memory.registrations:
            await self._book.wait_idle(self.memory)
            self._book.on_close(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Region {self.nbytes} bytes at {self.memory.address + self.start:#x}, {state}>"


class RemoteRegion(RemoteSlice):
    """Another engine's memory, or a slice of it, as its descriptor says. Made by `Engine.attach`."""

    __slots__ = ("_descriptor",)

    def __init__(self, memory: RemoteMemory, start: int, nbytes: int, descriptor: RegionDescriptor) -> None:
        self._descriptor = descriptor

    @classmethod
    def attached(cls, descriptor: RegionDescriptor, identity: bytes) -> RemoteRegion:
        """Make one of what its owner says of it, for the engine of an identity. Raises UsageError for that one's own
        memory, and for what was lent to another.
        """
        if descriptor.owner.identity == identity:
            raise UsageError(
                "attach: the descriptor is of this very engine; its own memory is copied without an engine"
            )
        if descriptor.lease and descriptor.holder != identity:
            raise UsageError("attach: the lease was granted to another engine, which alone may use it")
        keys = [(item.key, item.base) for item in descriptor.keys]
        memory = RemoteMemory(descriptor.length, descriptor.writable, keys, descriptor.lease)
        return cls(memory, 0, descriptor.length, descriptor)

    @property
    def owner(self) -> Address:
        """The address of the engine that owns the memory."""
        return self._descriptor.owner

    def __len__(self) -> int:
        return self.nbytes

    @property
    def writable(self) -> bool:
        """Whether the owner lets others write to it."""
        return self._descriptor.writable

    @property
    def lease(self) -> int:
        """The number of the owner's lease; 0 where it is none."""
        return self._descriptor.lease

    def __getitem__(self, item: slice) -> RemoteRegion:
        start, stop = _bounds(item, self.nbytes, "remote")
        return RemoteRegion(self.memory, self.start + start, stop - start, self._descriptor)

    def __repr__(self) -> str:
        return f"<RemoteRegion {self.nbytes} bytes of {self.owner}>"


class Pages(PageSet):
    """Pages of a region: page i is the `page_bytes` bytes from `offset + indices[i] * stride`.

    `region` is a Region or a RemoteRegion (or a slice: offsets count from its start); `stride` is `page_bytes`
    unless given. The indices are copied and checked here, once, so one Pages object may serve many requests.
    Raises UsageError that names the first bad page.
    """

    __slots__ = ()

    def __init__(
        self, region: Region | RemoteRegion, indices: Any, page_bytes: int, stride: int | None = None, offset: int = 0
    ) -> None:
        if not isinstance(region, (Region, RemoteRegion)):
            raise UsageError(f"Pages: region must be a Region or a RemoteRegion, got {type(region).__name__}")
        try:
            index = PageIndex(indices)
        except (TypeError, AttributeError, OverflowError) as error:
            raise UsageError(
                f"page indices must be integers that fit in 64 bits, got {type(indices).__name__}: {error}"
            ) from error
        self._settle(region, index, page_bytes, page_bytes if stride is None else stride, offset)

    def _settle(
        self, region: Region | RemoteRegion, index: PageIndex, page_bytes: Any, stride: Any, offset: Any
    ) -> None:
        length, step, first = _integer("page_bytes", page_bytes), _integer("stride", stride), _integer("offset", offset)
        given = f"page_bytes={page_bytes}, stride={stride}, offset={offset}"
        if length <= 0 or step < 0 or first < 0:
            raise UsageError(f"{given}: page_bytes must be positive, the others not negative")
        if max(length, step, first) >= 1 << 63:
            raise UsageError(f"{given}: they must fit in 63 bits")
        bad = self.settle(region, index, length, step, first)
        if bad >= 0:
            begin = first + index[bad] * step
            raise UsageError(
                f"page {bad} (index {index[bad]}) covers bytes {begin} to {begin + length}, "
                f"outside of the region's {region.nbytes}"
            )

    def at(self, offset: int) -> Pages:
        """Return the same pages at another offset, as those of another layer are: the indices are not copied again.

        Raises UsageError as the constructor does.
        """
        moved = self.moved(offset)
        if moved is None:
            moved = Pages.__new__(Pages)
            moved._settle(self.region, self.index, self.page_bytes, self.stride, offset)
        return moved

    def __len__(self) -> int:
        return len(self.index)
