"""Region descriptors: one engine's description of a piece of its memory for another.

A descriptor names the owner with its incarnation; the region, by a random number that the owner drew when it registered
the memory; the range of virtual addresses; and for each of the owner's rails the key and the base. The base is the
remote address of the descriptor's first byte on that rail: a virtual address or an offset, whichever the rail's
provider uses. A slice advances the address and every base together and keeps region and keys, so the owner can identify
the registration from any slice of it.

The descriptor of a lease also names the lease and its holder, the one engine that may use it.

A descriptor is a claim and gives no right by itself: it may be stale or forged. The engine that writes through it
checks bounds here; the owner of the memory is protected by the keys and by its own checks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, SupportsIndex

from ..errors import UsageError
from .address import ANYONE, IDENTITY_BYTES, Address
from .fields import U64, Converted, FieldError, Fixed, Flag, Many, Record, unwrap, wrap

__all__ = ["MAX_RAILS", "RailKey", "RegionDescriptor", "SharedDescriptor"]

MAX_RAILS = 16

_MAGIC = b"aioR"
_VERSION = 3
_SHARED_MAGIC = b"aioS"
_SHARED_VERSION = 1
_END = 1 << 64


# A peer lends hundreds of slices at once, all of the same owner.
_packed_address = lru_cache(64)(bytes)
_address_of = lru_cache(64)(Address.from_bytes)


@dataclass(frozen=True, slots=True)
class RailKey:
    """A region on one rail: its remote key, and the remote address of the descriptor's first byte; 64 bits each."""

    key: Annotated[int, U64]
    base: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """The portable description of a range of registered memory; raises UsageError if a part is malformed.

    `region` is the registration's random 64-bit number, `address` the virtual address of the first byte, `length` in
    bytes, `keys` one entry per rail of the owner (1 to 16), in the order of its rails. `writable` and `readable` are
    the rights of peers. `lease` is the number of the owner's lease, `holder` the identity that it was granted to;
    without a lease they are 0 and zeros.
    """

    owner: Annotated[Address, Converted(Address, _packed_address, _address_of, 400)]
    region: Annotated[int, U64]
    address: Annotated[int, U64]
    length: Annotated[int, U64]
    writable: Annotated[bool, Flag()]
    keys: Annotated[tuple[RailKey, ...], Many(RailKey, 1, MAX_RAILS)]
    lease: Annotated[int, U64] = 0
    holder: Annotated[bytes, Fixed(IDENTITY_BYTES)] = ANYONE
    readable: Annotated[bool, Flag()] = True
    _packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_packed", _LAYOUT.pack(self))
        except FieldError as error:
            raise UsageError(str(error)) from error
        if self.owner.is_anyone:
            raise UsageError("RegionDescriptor.owner: memory belongs to one engine, give an address with its identity")
        if (self.lease == 0) != (self.holder == ANYONE):
            raise UsageError("RegionDescriptor: a lease has a number and a holder; memory without a lease has neither")
        for start in (self.address, *(key.base for key in self.keys)):
            # The end itself must be an address, so that an empty slice there has an address.
            if start + self.length >= _END:
                raise UsageError(f"RegionDescriptor: {self.length} bytes from {start:#x} leave the 64-bit space")

    def __bytes__(self) -> bytes:
        return wrap(_MAGIC, _VERSION, self._packed)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> RegionDescriptor:
        """Return the descriptor that `bytes(descriptor)` gave; raises UsageError for anything else."""
        try:
            return unwrap(_MAGIC, _VERSION, _LAYOUT, data)
        except FieldError as error:
            raise UsageError(f"these bytes are not a region descriptor: {error}; use region.descriptor") from error

    def slice(self, start: SupportsIndex, stop: SupportsIndex) -> RegionDescriptor:
        """Return the descriptor of bytes `start` to `stop`, counted from this one's first byte; raises UsageError.

        Unlike Python's slices it neither counts from the end nor clips: a range outside is an error.
        """
        try:
            first, last = operator.index(start), operator.index(stop)
        except TypeError as error:
            raise UsageError(f"the bounds of a slice must be integers: {error}") from error
        if not 0 <= first <= last <= self.length:
            raise UsageError(f"slice {first} to {last} is not within the {self.length} bytes of the region")
        return replace(
            self,
            address=self.address + first,
            length=last - first,
            keys=tuple(RailKey(key.key, key.base + first) for key in self.keys),
        )


@dataclass(frozen=True, slots=True)
class SharedDescriptor:
    """The portable description of shared memory: its owner, the random number of the memory, and its bytes."""

    owner: Annotated[Address, Converted(Address, _packed_address, _address_of, 400)]
    memory: Annotated[int, U64]
    nbytes: Annotated[int, U64]

    def __post_init__(self) -> None:
        if self.owner.is_anyone or self.nbytes == 0:
            raise UsageError("SharedDescriptor: expected an owner with its identity, and at least one byte")

    def __bytes__(self) -> bytes:
        return wrap(_SHARED_MAGIC, _SHARED_VERSION, _SHARED_LAYOUT.pack(self))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SharedDescriptor:
        """Return the descriptor that `bytes(descriptor)` gave; raises UsageError for anything else."""
        try:
            return unwrap(_SHARED_MAGIC, _SHARED_VERSION, _SHARED_LAYOUT, data)
        except FieldError as error:
            raise UsageError(f"these bytes do not describe shared memory: {error}; use memory.descriptor") from error


_LAYOUT = Record(RegionDescriptor)
_SHARED_LAYOUT = Record(SharedDescriptor)
