"""The bytes that decoders and prefillers say to each other, and how long messages travel in frames.

| message    | from      | says                                                                                     |
|------------|-----------|------------------------------------------------------------------------------------------|
| `Fill`     | decoder   | compute this prompt, and write it to these pages under these immediates                  |
| `Cancel`   | decoder   | stop an attempt; only ever sent after its `Accepted` has come                            |
| `Accepted` | prefiller | this `Fill` has come as a whole                                                          |
| `Queued`   | prefiller | this attempt comes after others, of which one has moved on: its silence is no stall      |
| `Ended`    | prefiller | nothing is written for this attempt any more, though not all of it was: and why          |

An attempt is known by its serial, which its decoder uses once in its life. Messages of one engine to another come in no
order. Since a `Cancel` follows what answers its `Fill`, it never overtakes it: of a serial that a prefiller does not
know it has to do with an attempt that is over. There is no message for success: the decoder counts.

Every message travels in frames of at most `FRAME_BYTES`, so every engine that takes part has to take messages of that
length. A frame is a kind (the mailroom's byte), a version, the number and the length of the message that it is a part
of, and where in it that part begins; a message is a type and its fields. Integers are big-endian. Nothing is reserved
on the strength of a length: what is held is what has come. One value has one encoding; whatever is none raises
`WireError`, and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..service.reading import Reader, WireError
from .layout import CacheLayout

__all__ = [
    "FRAME_BYTES",
    "LAST_IMMEDIATE",
    "TO_DECODER",
    "TO_PREFILLER",
    "Accepted",
    "Assembler",
    "Cancel",
    "Ended",
    "Fill",
    "Message",
    "Queued",
    "decode",
    "encode",
    "fingerprint",
    "fits_frame",
    "frames",
]

TO_PREFILLER = 0xE2
TO_DECODER = 0xE3
VERSION = 2
FRAME_BYTES = 16384
"""As an engine takes without being told to: a prompt of 3000 tokens is asked for in one message."""
MESSAGE_LIMIT = 1 << 25
OPEN_MESSAGES = 256
OPEN_BYTES = 1 << 26
REQUEST_BYTES = 64
DESCRIPTOR_BYTES = 4096
REASON_BYTES = 1024
PRINT_BYTES = 16
LAST_IMMEDIATE = (1 << 28) - 1
"""The greatest value that an engine's users have."""

Numbers = NDArray[np.uint32]
_FRAME = struct.Struct(">BBQII")
_HEAD = struct.Struct(">QHHHHHIQQII")
_PART = FRAME_BYTES - _FRAME.size


class Ranks(NamedTuple):
    """Which rank of how many the decoder is, and which it takes the prefiller for."""

    prefill: int
    of_prefill: int
    decode: int
    of_decode: int


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Ask for a prompt's cache. `round` counts the requests' tries with one group of prefillers after another.

    `imm` is the immediate of layer 0, the next ones those of the others, then that of the tail. `pool` and `tails` are
    descriptors of leases; `pool_pages` is how many pages a layer has there. The tail's `tail_bytes` (0: it is not asked
    for of this rank) begin at `tail_offset`. `tokens` and `pages` are arrays of 32 bits.
    """

    serial: int
    round: int
    ranks: Ranks
    imm: int
    pool_pages: int
    tail_offset: int
    tail_bytes: int
    request: bytes
    print: bytes
    pool: bytes
    tails: bytes
    tokens: Numbers
    pages: Numbers


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the attempt of this serial."""

    serial: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The `Fill` of this serial is here."""

    serial: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt of this serial is over before its end: nothing is written for it from now on."""

    serial: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Queued:
    """The attempt of this serial waits for earlier ones, which move on."""

    serial: int


Message = Fill | Cancel | Accepted | Ended | Queued
_SERIAL_ONLY: dict[int, type[Cancel] | type[Accepted] | type[Queued]] = {2: Cancel, 3: Accepted, 5: Queued}
_KINDS = {1: TO_PREFILLER, 2: TO_PREFILLER, 3: TO_DECODER, 4: TO_DECODER, 5: TO_DECODER}


@functools.lru_cache(maxsize=64)
def fingerprint(layout: CacheLayout) -> bytes:
    """Return 16 bytes that two layouts have in common only if pages of one are pages of the other."""
    fields = (layout.layers, layout.kv_heads, layout.head_size, layout.page_tokens, str(layout.dtype))
    text = repr((*fields, "MLA" if layout.mla else layout.order))
    return hashlib.blake2b(text.encode(), digest_size=PRINT_BYTES).digest()


def encode(message: Message) -> bytes:
    """Return the bytes of a message, without frames. Raises WireError where a field does not fit."""
    try:
        match message:
            case Fill():
                data = b"\x01" + _fill(message)
            case Cancel(serial):
                data = b"\x02" + struct.pack(">Q", serial)
            case Accepted(serial):
                data = b"\x03" + struct.pack(">Q", serial)
            case Ended(serial, reason):
                data = b"\x04" + struct.pack(">Q", serial) + _blob(_clipped(reason), REASON_BYTES)
            case Queued(serial):
                data = b"\x05" + struct.pack(">Q", serial)
    except struct.error as error:
        raise WireError(f"{type(message).__name__}: {error}") from error
    if len(data) > MESSAGE_LIMIT:
        raise WireError(f"a {type(message).__name__} of {len(data)} bytes, at most {MESSAGE_LIMIT} are sent")
    return data


def decode(data: bytes) -> Message:
    """Return the message that `encode` wrote. Raises WireError for anything else."""
    reader = Reader(data)
    kind = reader.take(1)[0]
    message: Message
    if kind == 1:
        message = _read_fill(reader)
    elif kind in _SERIAL_ONLY:
        message = _SERIAL_ONLY[kind](reader.integer(8))
    elif kind == 4:
        message = Ended(reader.integer(8), _read_reason(reader))
    else:
        raise WireError(f"unknown message type {kind}")
    reader.end()
    return message


def fits_frame(data: bytes) -> bool:
    """Whether an encoded message travels in one frame."""
    return len(data) <= _PART


def frames(data: bytes, number: int) -> Iterator[bytes]:
    """Cut an encoded message in frames; no other under way to that receiver may have its number (64 bits)."""
    kind = _KINDS[data[0]]
    for start in range(0, len(data), _PART):
        yield _FRAME.pack(kind, VERSION, number, len(data), start) + data[start : start + _PART]


class Assembler:
    """Joins the frames of each peer to messages, in whatever order they come.

    Of a peer it holds up to `messages` unfinished ones and `nbytes` of them; more make the oldest give way, whose
    sender then waits for an answer in vain. What a peer left unfinished goes with the peer.
    """

    def __init__(self, messages: int = OPEN_MESSAGES, nbytes: int = OPEN_BYTES) -> None:
        self._limits = messages, nbytes // _PART
        self._open: weakref.WeakKeyDictionary[object, dict[int, _Open]] = weakref.WeakKeyDictionary()

    def feed(self, source: object, frame: bytes) -> Message | None:
        """Take a frame and return the message that it completes, if it does; raise WireError if it cannot belong."""
        kind, number, total, start, part = _read_frame(frame)
        if len(part) == total:
            return decode(part)
        messages = self._open.setdefault(source, {})
        entry = messages.setdefault(number, _Open(kind, total, {}))
        if (entry.kind, entry.total) != (kind, total) or start in entry.parts:
            raise WireError(f"two frames of message {number} contradict each other at {start}")
        entry.parts[start] = part
        if len(entry.parts) * _PART < total:
            self._make_room(messages)
            return None
        del messages[number]
        return decode(b"".join(entry.parts[at] for at in sorted(entry.parts)))

    def forget(self, source: object) -> None:
        """Drop what a peer left unfinished."""
        self._open.pop(source, None)

    def _make_room(self, messages: dict[int, _Open]) -> None:
        # All parts but the last of a message are of one length, so their number tells the bytes well enough.
        most, most_parts = self._limits
        while len(messages) > most or sum(len(entry.parts) for entry in messages.values()) > most_parts:
            del messages[next(iter(messages))]


@dataclass(slots=True)
class _Open:
    """A message of which frames are still to come."""

    kind: int
    total: int
    parts: dict[int, bytes]


def _read_frame(frame: bytes) -> tuple[int, int, int, int, bytes]:
    if len(frame) <= _FRAME.size:
        raise WireError(f"a frame of {len(frame)} bytes, at least {_FRAME.size + 1} expected")
    kind, version, number, total, start = _FRAME.unpack_from(frame)
    part = frame[_FRAME.size :]
    if version != VERSION:
        raise WireError(f"written in version {version} of the protocol, this aiote speaks version {VERSION}")
    if total > MESSAGE_LIMIT or start % _PART or start >= total or len(part) != min(_PART, total - start):
        raise WireError(f"a frame of {len(part)} bytes at {start} does not fit a message of {total} bytes")
    if start == 0 and _KINDS.get(part[0]) != kind:
        raise WireError(f"message type {part[0]} does not travel under kind {kind:#x}")
    return kind, number, total, start, part


def _clipped(text: str) -> bytes:
    """Return a text's bytes, made printable and cut to the length of a reason."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    return clean.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore").encode()


def _blob(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise WireError(f"{len(data)} bytes, at most {limit} allowed")
    return struct.pack(">H", len(data)) + data


def _numbers(values: Numbers) -> bytes:
    return struct.pack(">I", len(values)) + values.astype(">u4").tobytes()


def _read_reason(reader: Reader) -> str:
    text = reader.text(REASON_BYTES)
    if _clipped(text) != text.encode():
        raise WireError("a text with control characters")  # it may end up in terminals and logs
    return text


def _read_numbers(reader: Reader) -> Numbers:
    return np.frombuffer(reader.take(4 * reader.integer(4)), ">u4").astype(np.uint32)


def _fill(fill: Fill) -> bytes:
    head = _HEAD.pack(
        fill.serial, fill.round, *fill.ranks, fill.imm, fill.pool_pages, fill.tail_offset, fill.tail_bytes, 0
    )
    if len(fill.print) != PRINT_BYTES:
        raise WireError(f"Fill.print has {len(fill.print)} bytes, expected {PRINT_BYTES}")
    blobs = _blob(fill.request, REQUEST_BYTES), _blob(fill.pool, DESCRIPTOR_BYTES), _blob(fill.tails, DESCRIPTOR_BYTES)
    return b"".join((head, fill.print, *blobs, _numbers(fill.tokens), _numbers(fill.pages)))


def _read_fill(reader: Reader) -> Fill:
    head = _HEAD.unpack(reader.take(_HEAD.size))
    serial, attempt, prefill, of_prefill, decode_rank, of_decode, imm, pool_pages, offset, tail_bytes, reserved = head
    if reserved:
        raise WireError("a reserved field is not 0")
    ranks = Ranks(prefill, of_prefill, decode_rank, of_decode)
    if not (ranks.prefill < ranks.of_prefill and ranks.decode < ranks.of_decode):
        raise WireError(f"{ranks} are no ranks of groups")
    known = reader.take(PRINT_BYTES)
    request, pool, tails = reader.blob(REQUEST_BYTES), reader.blob(DESCRIPTOR_BYTES), reader.blob(DESCRIPTOR_BYTES)
    tokens, pages = _read_numbers(reader), _read_numbers(reader)
    return Fill(serial, attempt, ranks, imm, pool_pages, offset, tail_bytes, request, known, pool, tails, tokens, pages)
