"""A member as it travels, in calls of the embedded registry and in etcd's values, and what the server tells of many."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from .membership import LEASE_S, Attribute, Member

__all__ = ["LeaseSeconds", "MemberRecord", "RosterUpdate", "decode_member", "encode_member"]

LeaseSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=LEASE_S[0], le=LEASE_S[1])]


class MemberRecord(msgspec.Struct, frozen=True):
    """A member as it travels; one that would be malformed is not decoded."""

    name: str
    role: str
    address: bytes
    incarnation: int
    attributes: dict[str, Attribute]

    def __post_init__(self) -> None:
        self.member()

    @classmethod
    def of(cls, member: Member) -> MemberRecord:
        """Return the record of a member."""
        return cls(member.name, member.role, member.address, member.incarnation, dict(member.attributes))

    def member(self) -> Member:
        """Return the member. Raises UsageError for one that is malformed."""
        return Member(self.name, self.role, self.address, self.incarnation, self.attributes)


class RosterUpdate(msgspec.Struct, frozen=True):
    """What a client is told: first of all that are there, then of changes. `run` is the server's.

    The names in `gone` have left; then these members are there, each with the length of its lease. `complete`: all that
    is known by now has been told.
    """

    run: int
    complete: bool
    gone: list[str]
    present: list[tuple[LeaseSeconds, MemberRecord]]


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
