"""The messages between the router and the other two, and their bytes. What prefiller and decoder say is the library's.

A message is the mailroom's byte, a type (one byte), then its fields in order: int as u64, str with a u16 length in
front, bytes with a u32 length; all big-endian, and nothing may follow. Never pickle: what arrives is checked field by
field. The engine promises no order between messages.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiote.service.reading import Reader, WireError

__all__ = [
    "KIND",
    "MESSAGE_BYTES",
    "Done",
    "Failed",
    "Generate",
    "Hello",
    "Message",
    "Progress",
    "Report",
    "Stop",
    "Token",
    "WireError",
    "decode",
    "encode",
    "identity",
    "request_of",
]

KIND = 0xD0
MESSAGE_BYTES = 1 << 17
"""What the engines of the demo take: a whole prompt, of `prompts.MOST_BYTES` at most and a number in front, in one."""
_TEXT_BYTES = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Hello:
    """A child to the router: it is ready. `fingerprint` tells models apart, `address` is that of its engine."""

    role: str
    pid: int
    address: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Generate:
    """The router to the decoder: a prompt, and the address of the prefiller to ask."""

    request: int
    prompt: bytes
    prefiller: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The prefiller to the router: so many more pages of this request are computed and on their way to the decoder."""

    request: int
    pages: int


@dataclass(frozen=True, slots=True)
class Token:
    """The decoder to the router: the token at this place of the answer."""

    request: int
    index: int
    token: int


@dataclass(frozen=True, slots=True)
class Done:
    """The decoder to the router: the answer has so many tokens, and its pages are free again.

    `checksum` is that of the prompt's keys and values as they arrived.
    """

    request: int
    count: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The decoder to the router: no answer will come, and the request's pages are free again."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The router to a child: no more will come; report."""


@dataclass(frozen=True, slots=True)
class Report:
    """A child to the router, after Stop. `busy_ns` is the time in which at least one transfer was in flight."""

    role: str
    pages_held: int
    pages_total: int
    writes: int = 0
    bytes: int = 0
    busy_ns: int = 0


Message = Hello | Generate | Progress | Token | Done | Failed | Stop | Report
_TYPES: dict[int, type[Any]] = dict(enumerate((Hello, Generate, Progress, Token, Done, Failed, Stop, Report), start=1))
_NUMBERS = {kind: number for number, kind in _TYPES.items()}


def encode(message: Message) -> bytes:
    """Return the bytes of a message; raises WireError where a value does not fit its field."""
    out = bytearray([KIND, _NUMBERS[type(message)]])
    for entry in dataclasses.fields(message):
        try:
            out += _PUT[str(entry.type)](getattr(message, entry.name))
        except (struct.error, UnicodeEncodeError) as error:
            raise WireError(f"{type(message).__name__}.{entry.name}: {error}") from error
    return bytes(out)


def decode(data: bytes) -> Message:
    """Return the message that the bytes stand for; raises WireError if they are not exactly one."""
    reader = Reader(data)
    kind, number = reader.take(2)
    known = _TYPES.get(number)
    if kind != KIND or known is None:
        raise WireError(f"type {number} of kind {kind:#x} is unknown; expected 1 to {len(_TYPES)} of kind {KIND:#x}")
    values = [_GET[str(entry.type)](reader) for entry in dataclasses.fields(known)]
    reader.end()
    message: Message = known(*values)
    return message


def identity(request: int) -> bytes:
    """Return what a request is called between decoder and prefiller."""
    return struct.pack(">Q", request)


def request_of(identity: bytes) -> int:
    """Return the number of the request that `identity` named; raises WireError if it did not."""
    if len(identity) != 8:
        raise WireError(f"a request is called {identity!r}; expected 8 bytes")
    return int.from_bytes(identity, "big")


def _put_text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


_PUT: dict[str, Callable[[Any], bytes]] = {
    "int": lambda value: struct.pack(">Q", value),
    "str": _put_text,
    "bytes": lambda value: struct.pack(">I", len(value)) + value,
}
_GET: dict[str, Callable[[Reader], Any]] = {
    "int": lambda reader: reader.integer(8),
    "str": lambda reader: reader.text(_TEXT_BYTES),
    "bytes": lambda reader: reader.take(reader.integer(4)),
}
