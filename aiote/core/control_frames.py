"""The frames of the control plane: its messages, their bytes, and the tag that seals them.

A frame is a 4-byte big-endian length of the rest, one byte of type, the payload and, once both sides have proven
themselves, a tag of 16 bytes: HMAC-SHA256, truncated, over the direction, the frame's number in that direction (64
bits, never sent), the type and the payload, under the session's key. A frame that was changed, dropped, repeated, moved
or sent back therefore does not verify. Without a cluster key the tags are still made, but they only guard against
mistakes. The frames are not encrypted: for secrecy, run the connection under TLS.

Before authentication a frame is at most 1 KiB, afterwards 64 KiB, and a greater length is refused as soon as its four
bytes are there. A frame is never buffered beyond its limit, and a sealed frame is verified before a byte of it is
interpreted. Each message is a record of fields (`fields`), so truncated, oversized or trailing bytes are errors.

`Hello`, `Refused` and the two leading fields of `Challenge` must keep their layout in every version of the protocol,
because they travel before a version is agreed. This module must not know the order of messages; `handshake` and
`control` own it.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from ..errors import AioteError, UsageError
from .address import IDENTITY_BYTES, Address
from .descriptor import MAX_RAILS
from .fields import (
    I64,
    U8,
    U16,
    U32,
    U64,
    Blob,
    Constant,
    Converted,
    Cursor,
    FieldError,
    Fixed,
    Flag,
    Many,
    Record,
    Sentence,
    Text,
)

__all__ = [
    "FAILED_PROTOCOL",
    "MAX_COUNTS",
    "NONCE_BYTES",
    "PLAIN_LIMIT",
    "PROOF_BYTES",
    "SEALED_LIMIT",
    "TAG_BYTES",
    "AckCounts",
    "Arrivals",
    "Arrived",
    "Bye",
    "Challenge",
    "Channel",
    "ChannelMessage",
    "ControlError",
    "EngineOffer",
    "Failed",
    "FrameReader",
    "Heartbeat",
    "Hello",
    "ImmCount",
    "Joined",
    "MailboxMoved",
    "Mapped",
    "MemoryKey",
    "Message",
    "Proof",
    "RailDown",
    "RailOffer",
    "Range",
    "Ready",
    "Refused",
    "Revoke",
    "Revoked",
    "Seal",
    "SessionMessage",
    "ShareMessage",
    "ShareRefused",
    "ShareRequest",
    "Welcome",
    "decode",
    "encode",
    "frame",
    "type_of",
]

MAGIC = b"aiote\x00\xaf\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
PLAIN_LIMIT = 1 << 10
SEALED_LIMIT = 1 << 16

MAX_COUNTS = 4096  # 12 bytes each, so a frame of 64 KiB holds them with the other fields
MAX_RANGES = 256
MAX_KEYS = 256  # as many as a channel has work requests

FAILED_PROTOCOL = 1
"""The code of a `Failed` that answers a violation of the protocol; the engine assigns the other codes."""

_LENGTH_BYTES = 4


class ControlError(AioteError):
    """The peer broke the control protocol, or its connection ended where it must not.

    `events` are the events that the same call had found before the violation.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.events: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The initiator's first message: its name, the engine it wants, its versions; zeros as target mean any engine."""

    magic: Annotated[bytes, Constant(MAGIC)] = MAGIC
    version_min: Annotated[int, U16]
    version_max: Annotated[int, U16]
    nonce: Annotated[bytes, Fixed(NONCE_BYTES)]
    identity: Annotated[bytes, Fixed(IDENTITY_BYTES)]
    incarnation: Annotated[int, U64]
    target_identity: Annotated[bytes, Fixed(IDENTITY_BYTES)]
    target_incarnation: Annotated[int, U64]
    keyed: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """The acceptor's answer to a Hello: the version that it chose, its own nonce and its name."""

    version: Annotated[int, U16]
    nonce: Annotated[bytes, Fixed(NONCE_BYTES)]
    identity: Annotated[bytes, Fixed(IDENTITY_BYTES)]
    incarnation: Annotated[int, U64]
    keyed: Annotated[bool, Flag()]


@dataclass(frozen=True, slots=True)
class Proof:
    """The initiator's proof that it holds the cluster key."""

    hmac: Annotated[bytes, Fixed(PROOF_BYTES)]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The acceptor's proof, given only to an initiator that has proven itself."""

    hmac: Annotated[bytes, Fixed(PROOF_BYTES)]


@dataclass(frozen=True, slots=True)
class Refused:
    """The end of a handshake: a `RefusalCode` and a sentence."""

    code: Annotated[int, U16]
    text: Annotated[str, Sentence(512)]


@dataclass(frozen=True, slots=True)
class RailOffer:
    """One rail of the sender: its index, provider, wire format, name, and speed in Mbit/s."""

    index: Annotated[int, U8]
    provider: Annotated[str, Text(64)]
    wire: Annotated[str, Text(64)]
    name: Annotated[str, Text(128)]
    speed_mbps: Annotated[int, U32]


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """The sender's resources and wishes: its host (opaque, 32 bytes), its largest message in bytes, its receive pool in
    messages, the milliseconds between two heartbeats that it wants to hear, its rails, its address.
    """

    host_id: Annotated[bytes, Fixed(32)]
    message_bytes: Annotated[int, U32]
    pool: Annotated[int, U16]
    heartbeat_ms: Annotated[int, U32]
    rails: Annotated[tuple[RailOffer, ...], Many(RailOffer, 0, MAX_RAILS)]
    address: Annotated[Address, Converted(Address, bytes, Address.from_bytes, 400)]


@dataclass(frozen=True, slots=True)
class Channel:
    """The sender's endpoint of one pair of rails, in its generation: how to reach it and how to write to it."""

    rail_local: Annotated[int, U8]
    rail_remote: Annotated[int, U8]
    generation: Annotated[int, U32]
    address: Annotated[bytes, Blob(256)]
    imm_key: Annotated[int, U64]
    imm_base: Annotated[int, U64]
    wakeup: Annotated[bytes, Blob(128)]


@dataclass(frozen=True, slots=True)
class Mapped:
    """The sender has told all its channels and joined all of the receiver's."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The sender has heard Mapped, made progress since, and can be written to."""


@dataclass(frozen=True, slots=True)
class ImmCount:
    """An immediate, its 32 bits on the wire, and its number of occurrences."""

    imm_data: Annotated[int, U32]
    times: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers of messages from `first` to `last`, both included."""

    first: Annotated[int, U64]
    last: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class AckCounts:
    """Counts that were confirmed to the sender on a channel: the receiver removes them from its own tally."""

    channel: Annotated[int, U8]
    generation: Annotated[int, U32]
    counts: Annotated[tuple[ImmCount, ...], Many(ImmCount, 0, MAX_COUNTS)]


@dataclass(frozen=True, slots=True)
class MemoryKey:
    """The key of a registration, as posts name it."""

    key: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class RailDown:
    """The sender has shut its endpoint of a channel and acknowledges no more there. It lost work for `keys`."""

    channel: Annotated[int, U8]
    generation: Annotated[int, U32]
    reason: Annotated[str, Sentence(512)]
    keys: Annotated[tuple[MemoryKey, ...], Many(MemoryKey, 0, MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class Arrived:
    """An immediate, its 32 bits, and its arrivals minus the acknowledged ones; negative if the provider forgets."""

    imm_data: Annotated[int, U32]
    times: Annotated[int, I64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals at the sender: the counts that arrived over a channel that both sides have shut; the messages that
    arrived over any channel, all up to `high` and the ranges `beyond`; and the keys it was told that are not, or no
    longer, of its memory.

    If the counts do not fit in one frame, several frames follow one another: `more` is set in all but the last, and
    only the last frame's other fields count.
    """

    channel: Annotated[int, U8]
    generation: Annotated[int, U32]
    counts: Annotated[tuple[Arrived, ...], Many(Arrived, 0, MAX_COUNTS)]
    high: Annotated[int, U64]
    beyond: Annotated[tuple[Range, ...], Many(Range, 0, MAX_RANGES)]
    unknown: Annotated[tuple[MemoryKey, ...], Many(MemoryKey, 0, MAX_KEYS)]
    more: Annotated[bool, Flag()] = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The sender, which initiated the connection, has written over a channel that was opened again."""

    channel: Annotated[int, U8]
    generation: Annotated[int, U32]


@dataclass(frozen=True, slots=True)
class MailboxMoved:
    """The sender receives messages over this channel from now on."""

    channel: Annotated[int, U8]
    generation: Annotated[int, U32]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sender is alive."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Revokes the sender's leases with numbers `low` to `high`. If `lease` is not 0, the receiver answers once it has
    no transfer in flight through that lease.
    """

    lease: Annotated[int, U64]
    low: Annotated[int, U64]
    high: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class Revoked:
    """The sender has no transfer in flight through the receiver's lease, and starts no more."""

    lease: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class ShareRequest:
    """Asks for the descriptor of the receiver's shared memory `memory`, to be handed over at a socket's address."""

    request: Annotated[int, U32]
    memory: Annotated[int, U64]
    address: Annotated[bytes, Blob(128)]


@dataclass(frozen=True, slots=True)
class ShareRefused:
    """The sender hands over no descriptor for that request, for this reason."""

    request: Annotated[int, U32]
    reason: Annotated[str, Sentence(512)]


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender's last message, at an orderly close."""

    reason: Annotated[str, Sentence(512)]


@dataclass(frozen=True, slots=True)
class Failed:
    """The sender's last message when it gives up: a code and a sentence."""

    code: Annotated[int, U16]
    text: Annotated[str, Sentence(1024)]


ChannelMessage: TypeAlias = Channel | AckCounts | RailDown | Arrivals | Joined | MailboxMoved
ShareMessage: TypeAlias = ShareRequest | ShareRefused
SessionMessage: TypeAlias = (
    ChannelMessage | ShareMessage | EngineOffer | Mapped | Ready | Heartbeat | Revoke | Revoked | Bye | Failed
)
Message: TypeAlias = Hello | Challenge | Proof | Welcome | Refused | SessionMessage

_TYPES: dict[int, type[Message]] = {
    1: Hello,
    2: Challenge,
    3: Proof,
    4: Welcome,
    5: Refused,
    16: EngineOffer,
    17: Channel,
    18: Ready,
    19: Heartbeat,
    21: Revoke,
    22: Revoked,
    23: Bye,
    24: Failed,
    25: Mapped,
    26: AckCounts,
    27: RailDown,
    28: Arrivals,
    29: Joined,
    30: MailboxMoved,
    31: ShareRequest,
    32: ShareRefused,
}
_RECORDS = {kind: Record(kind) for kind in _TYPES.values()}
_NUMBERS = {kind: number for number, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    """Return the type byte and payload of `message`; raises UsageError if a value does not fit its field."""
    try:
        number = _NUMBERS[type(message)]
    except KeyError:
        raise UsageError(f"a control message expected, got {type(message).__name__}") from None
    try:
        return bytes((number,)) + _RECORDS[type(message)].pack(message)
    except FieldError as error:
        raise UsageError(str(error)) from error


def type_of(body: bytes) -> type[Message]:
    """Return the message type that the first byte of `body` names; raises ControlError for an unknown number."""
    try:
        return _TYPES[body[0]]
    except KeyError:
        raise ControlError(f"unknown message type {body[0]}") from None
    except IndexError:
        raise ControlError("a frame without a type") from None


def decode(body: bytes) -> Message:
    """Return the message of a type byte and payload; raises ControlError unless they are exactly one message."""
    record = _RECORDS[type_of(body)]
    cursor = Cursor(body)
    cursor.take_bytes(1)
    try:
        message = record.unpack(cursor)
        cursor.expect_end()
    except FieldError as error:
        raise ControlError(f"malformed {record.kind.__name__}: {error}") from error
    return message


def frame(body: bytes, seal: Seal | None = None) -> bytes:
    """Return a frame of a type byte and payload, sealed if a seal is given. Raises UsageError if it is too long."""
    limit = PLAIN_LIMIT if seal is None else SEALED_LIMIT
    length = len(body) + (0 if seal is None else TAG_BYTES)
    if length > limit:
        raise UsageError(f"a frame of {length} bytes is over the limit of {limit}")
    if seal is None:
        return length.to_bytes(_LENGTH_BYTES, "big") + body
    sealed = seal.next_frame(body)
    seal.sequence += 1
    return sealed


class Seal:
    """Makes and verifies the tags of one direction of a session, in order. `sequence` numbers the next frame."""

    def __init__(self, key: bytes, direction: int) -> None:
        self._key = key
        self._direction = bytes((direction,))
        self.sequence = 0

    def tag(self, body: bytes) -> bytes:
        """Return the tag of the next frame, whose type byte and payload are `body`. The frame stays the next one."""
        number = self.sequence.to_bytes(8, "big")
        return hmac.digest(self._key, self._direction + number + body, "sha256")[:TAG_BYTES]

    def next_frame(self, body: bytes) -> bytes:
        """Return the whole next frame. It stays the next one until `sequence` grows."""
        return (len(body) + TAG_BYTES).to_bytes(_LENGTH_BYTES, "big") + body + self.tag(body)

    def open(self, sealed: bytes) -> bytes:
        """Return the type byte and payload of the next frame; raises ControlError if its tag is wrong."""
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self.tag(body)):
            raise ControlError("a frame has a wrong tag: changed, repeated, after a lost one, or of another session")
        self.sequence += 1
        return body


class FrameReader:
    """Splits a stream into frames; it holds at most one incomplete frame once `next` has returned None."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """The number of bytes that were fed and not handed out."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes that arrived from the stream."""
        self._buffer += data

    def next(self, limit: int) -> bytes | None:
        """Return the next frame without its length, or None if it is incomplete.

        Raises ControlError as soon as the length field is zero or over `limit`.
        """
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if not 1 <= length <= limit:
            raise ControlError(f"the peer announces a frame of {length} bytes, expected 1 to {limit}")
        end = _LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return body

    def clear(self) -> None:
        """Drop the pending bytes."""
        self._buffer.clear()
