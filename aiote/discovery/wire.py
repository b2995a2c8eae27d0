"""The bytes of the embedded registry: what its clients and its server say to each other, and a member by itself.

Every message is a kind (the mailroom's byte), a version, a type and that type's fields; integers are big-endian, texts
and addresses stand behind a 16-bit length, which is first compared with the bytes that are really there. One value has
one encoding. A message has at most `MESSAGE_BYTES`, so every engine that takes part has to take messages of that
length.

Whatever is not such a message raises `WireError`, and nothing else. All messages carry states, not steps: one that
comes twice or late does no harm.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import aiote

from ..service.reading import Reader, WireError
from .membership import (
    ADDRESS_BYTES,
    ATTRIBUTES,
    KEY_BYTES,
    LEASE_S,
    NAME_BYTES,
    ROLES,
    VALUE_BYTES,
    Attribute,
    Member,
    check_text,
)

__all__ = [
    "FROM_REGISTRY",
    "MESSAGE_BYTES",
    "TO_REGISTRY",
    "Announce",
    "Answer",
    "Entry",
    "FromRegistry",
    "Leave",
    "Subscribe",
    "ToRegistry",
    "Update",
    "decode",
    "decode_member",
    "encode",
    "encode_member",
    "size_of",
]

TO_REGISTRY = 0xE0
FROM_REGISTRY = 0xE1
VERSION = 1
MESSAGE_BYTES = 4096
REFUSAL_BYTES = 256
MAX_ENTRIES = 255
MEMBER_MAGIC = b"aioM\x01"
_TRUTH, _INTEGER, _REAL, _TEXT = range(4)


@dataclass(frozen=True, slots=True)
class Announce:
    """A client has a member: it joins, changes, or renews its lease of `lease_ms`. `number` grows with each change."""

    session: int
    number: int
    lease_ms: int
    member: Member


@dataclass(frozen=True, slots=True)
class Leave:
    """A client has this member no more, or, without a name, none at all; what it announced up to `number` is void."""

    session: int
    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A client listens, and asks whether anybody is there; a greater `subscription` wants everything once more."""

    session: int
    subscription: int
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A member's announcement of this number was taken, or refused for a reason."""

    name: str
    number: int
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A member and its lease, or (None) that nobody has the name."""

    name: str
    lease_ms: int
    member: Member | None


@dataclass(frozen=True, slots=True)
class Update:
    """What a client is told. `run` is the server's, `stream` this sequence of updates, which `number` counts from 0.

    `complete`: everything that was there when the stream began has been told.
    """

    run: int
    stream: int
    session: int
    subscription: int
    number: int
    complete: bool
    answers: tuple[Answer, ...] = ()
    entries: tuple[Entry, ...] = ()


ToRegistry = Announce | Leave | Subscribe
FromRegistry = Update
LEASE_MS = (round(LEASE_S[0] * 1000), round(LEASE_S[1] * 1000))


def encode(message: ToRegistry | FromRegistry) -> bytes:
    """Return the bytes of a message. Raises WireError where a field does not fit."""
    try:
        match message:
            case Announce(session, number, lease_ms, member):
                kind, body = 1, struct.pack(">QQI", session, number, lease_ms) + _member(member)
            case Leave(session, name, number):
                kind, body = 2, struct.pack(">QQ", session, number) + _text(name)
            case Subscribe(session, subscription, lease_ms):
                kind, body = 3, struct.pack(">QQI", session, subscription, lease_ms)
            case Update():
                return bytes((FROM_REGISTRY, VERSION, 4)) + _update(message)
    except (struct.error, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__}: {error}") from error
    return bytes((TO_REGISTRY, VERSION, kind)) + body


def decode(data: bytes) -> ToRegistry | FromRegistry:
    """Return the message that `encode` wrote. Raises WireError for anything else."""
    if len(data) > MESSAGE_BYTES:
        raise WireError(f"{len(data)} bytes; a message has at most {MESSAGE_BYTES}")
    reader = Reader(data)
    kind, version, number = reader.take(3)
    if version != VERSION:
        raise WireError(f"written in version {version} of the protocol, this aiote speaks version {VERSION}")
    read = _READERS.get((kind, number))
    if read is None:
        raise WireError(f"unknown message type {number} of kind {kind}")
    message = read(reader)
    reader.end()
    return message


def encode_member(member: Member) -> bytes:
    """Return the bytes of a member that stands by itself."""
    return MEMBER_MAGIC + _member(member)


def decode_member(data: bytes) -> Member:
    """Return the member that `encode_member` wrote. Raises WireError for anything else."""
    reader = Reader(data)
    if (magic := reader.take(len(MEMBER_MAGIC))) != MEMBER_MAGIC:
        raise WireError(f"begins with {magic!r}, not with {MEMBER_MAGIC!r}")
    member = _read_member(reader)
    reader.end()
    return member


def size_of(part: Answer | Entry) -> int:
    """Return how many bytes of an update it takes."""
    return len(_answer(part) if isinstance(part, Answer) else _entry(part))


UPDATE_HEAD = 3 + 5 * 8 + 1 + 2
"""Bytes of an update without its answers and entries."""


def _text(text: str) -> bytes:
    return _blob(text.encode())


def _blob(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _member(member: Member) -> bytes:
    head = _text(member.name) + bytes((ROLES.index(member.role),)) + struct.pack(">Q", member.incarnation)
    attributes = b"".join(_text(key) + _attribute(value) for key, value in member.attributes.items())
    return head + _blob(member.address) + bytes((len(member.attributes),)) + attributes


def _attribute(value: Attribute) -> bytes:
    if isinstance(value, bool):
        return bytes((_TRUTH, value))
    if isinstance(value, int):
        return struct.pack(">Bq", _INTEGER, value)
    if isinstance(value, float):
        return struct.pack(">Bd", _REAL, value)
    return bytes((_TEXT,)) + _text(value)


def _answer(answer: Answer) -> bytes:
    return _text(answer.name) + struct.pack(">Q", answer.number) + _text(answer.refusal)


def _entry(entry: Entry) -> bytes:
    if entry.member is None:
        return b"\x00" + _text(entry.name)
    return b"\x01" + struct.pack(">I", entry.lease_ms) + _member(entry.member)


def _update(update: Update) -> bytes:
    head = struct.pack(">QQQQQ", update.run, update.stream, update.session, update.subscription, update.number)
    head += bytes((update.complete, len(update.answers), len(update.entries)))
    return head + b"".join(map(_answer, update.answers)) + b"".join(map(_entry, update.entries))


def _read_text(reader: Reader, limit: int) -> str:
    text = reader.text(limit)
    try:
        check_text("text", text, limit)  # it may end up in terminals and logs
    except aiote.UsageError as error:
        raise WireError(f"no text: {error}") from error
    return text


def _read_attribute(reader: Reader) -> Attribute:
    match reader.integer(1, most=_TEXT):
        case 0:
            return bool(reader.integer(1, most=1))
        case 1:
            return cast("int", struct.unpack(">q", reader.take(8))[0])
        case 2:
            return cast("float", struct.unpack(">d", reader.take(8))[0])
        case _:
            return _read_text(reader, VALUE_BYTES)


def _read_member(reader: Reader) -> Member:
    name, role = _read_text(reader, NAME_BYTES), ROLES[reader.integer(1, most=len(ROLES) - 1)]
    incarnation, address = reader.integer(8), reader.blob(ADDRESS_BYTES)
    attributes: dict[str, Attribute] = {}
    last = None
    for _ in range(reader.integer(1, most=ATTRIBUTES)):
        key = _read_text(reader, KEY_BYTES)
        if last is not None and key <= last:
            raise WireError("attributes are not in the order of their names")
        attributes[key], last = _read_attribute(reader), key
    try:
        return Member(name, role, address, incarnation, attributes)
    except aiote.UsageError as error:
        raise WireError(str(error)) from error


def _read_announce(reader: Reader) -> Announce:
    return Announce(reader.integer(8), reader.integer(8), reader.integer(4, *LEASE_MS), _read_member(reader))


def _read_leave(reader: Reader) -> Leave:
    session, number = reader.integer(8), reader.integer(8)
    return Leave(session, _read_text(reader, NAME_BYTES), number)


def _read_subscribe(reader: Reader) -> Subscribe:
    return Subscribe(reader.integer(8), reader.integer(8), reader.integer(4, *LEASE_MS))


def _read_answer(reader: Reader) -> Answer:
    return Answer(_read_text(reader, NAME_BYTES), reader.integer(8), _read_text(reader, REFUSAL_BYTES))


def _read_entry(reader: Reader) -> Entry:
    if not reader.integer(1, most=1):
        return Entry(_read_text(reader, NAME_BYTES), 0, None)
    lease_ms = reader.integer(4, *LEASE_MS)
    member = _read_member(reader)
    return Entry(member.name, lease_ms, member)


def _read_update(reader: Reader) -> Update:
    run, stream, session, subscription, number = (reader.integer(8) for _ in range(5))
    complete = bool(reader.integer(1, most=1))
    answers, entries = reader.integer(1), reader.integer(1)
    return Update(
        run,
        stream,
        session,
        subscription,
        number,
        complete,
        tuple(_read_answer(reader) for _ in range(answers)),
        tuple(_read_entry(reader) for _ in range(entries)),
    )


_READERS: dict[tuple[int, int], Callable[[Reader], ToRegistry | FromRegistry]] = {
    (TO_REGISTRY, 1): _read_announce,
    (TO_REGISTRY, 2): _read_leave,
    (TO_REGISTRY, 3): _read_subscribe,
    (FROM_REGISTRY, 4): _read_update,
}
