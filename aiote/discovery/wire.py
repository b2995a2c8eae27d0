"""The wire formats of a member, in calls of the embedded registry and in etcd's values, and of the server's updates."""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import msgspec

from .membership import ADDRESS_BYTES, ATTRIBUTES, KEY_BYTES, LEASE_S, NAME_BYTES, ROLE_BYTES, VALUE_BYTES, Member

__all__ = [
    "MOST_KNOWN",
    "LeaseSeconds",
    "MemberRecord",
    "Name",
    "Number",
    "RosterUpdate",
    "decode_member",
    "encode_member",
]

MOST_TOLD = 64
"""The most names, and the most members, in one update. Checking a member takes up to 50 us."""
MOST_KNOWN = 1 << 14
"""The most members that a client takes from a server: what it does with all of them takes some milliseconds."""
LeaseSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=LEASE_S[0], le=LEASE_S[1])]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_BYTES)]
Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=KEY_BYTES)]
Value: TypeAlias = (
    Annotated[str, msgspec.Meta(max_length=VALUE_BYTES)]
    | Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    | Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    | bool
)


class MemberRecord(msgspec.Struct, frozen=True):
    """A member as it travels. Decoding a malformed member fails."""

    name: Name
    role: Annotated[str, msgspec.Meta(min_length=1, max_length=ROLE_BYTES)]
    address: Annotated[bytes, msgspec.Meta(max_length=ADDRESS_BYTES)]
    incarnation: Annotated[int, msgspec.Meta(ge=0)]
    attributes: Annotated[dict[Key, Value], msgspec.Meta(max_length=ATTRIBUTES)]

    def __post_init__(self) -> None:
        self.member()

    @classmethod
    def of(cls, member: Member) -> MemberRecord:
        """Return the record of a member."""
        return cls(member.name, member.role, member.address, member.incarnation, dict(member.attributes))

    def member(self) -> Member:
        """Return the member. Raises UsageError if it is malformed."""
        return Member(self.name, self.role, self.address, self.incarnation, self.attributes)


class RosterUpdate(msgspec.Struct, frozen=True):
    """An update from the server to a client: first all present members, then changes. `run` identifies the server.

    The members named in `gone` have left; after that, those in `present` are there, each with the length of its lease.
    `complete`: the client now has everything that the server knows.
    """

    run: Number
    complete: bool
    gone: Annotated[list[Name], msgspec.Meta(max_length=MOST_TOLD)]
    present: Annotated[list[tuple[LeaseSeconds, MemberRecord]], msgspec.Meta(max_length=MOST_TOLD)]


_decoder = msgspec.json.Decoder(MemberRecord)


def encode_member(member: Member) -> bytes:
    """Return a member as JSON."""
    return msgspec.json.encode(MemberRecord.of(member))


def decode_member(data: bytes) -> Member:
    """Return the member that `encode_member` wrote. Raises ValueError for anything else."""
    try:
        return _decoder.decode(data).member()
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
