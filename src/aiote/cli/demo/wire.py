"""The messages between the demo's processes, and their bytes. Never pickle: what arrives is checked field by field.

A message is a kind (one byte), then its fields in order: int as i64, str and bytes with a u32 length in front,
tuple[int, ...] as a u32 count and so many u32. All little-endian; nothing may follow.

The engine's messages are small and come in no promised order. So the bytes of a message travel as frames of at most
`FRAME_BYTES`, each of which says which message it belongs to, how long that is and where in it this part stands; an
`Assembler` puts them together in whatever order they come, and refuses what does not fit.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiote.cli.demo.faults import DemoError

__all__ = [
    "FRAME_BYTES",
    "MESSAGE_LIMIT",
    "Assembler",
    "Done",
    "Failed",
    "Fill",
    "Generate",
    "Hello",
    "Introduce",
    "Message",
    "Progress",
    "Refused",
    "Report",
    "Stop",
    "Token",
    "WireError",
    "decode",
    "encode",
    "split",
]

FRAME_BYTES = 8192
MESSAGE_LIMIT = 1 << 20
_OPEN_LIMIT = 256


class WireError(DemoError):
    """Bytes that are no message of this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A child to the router: it is ready. `fingerprint` tells models apart, `address` is that of its engine."""

    role: str
    pid: int
    address: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Introduce:
    """The router to the decoder: the prefiller to use."""

    address: str


@dataclass(frozen=True, slots=True)
class Generate:
    """The router to the decoder: a prompt."""

    request: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """The decoder to the prefiller: fill these pages of the pool with this prompt, and this place with the logits.

    `pool_pages` is the pages of the decoder's pool, by which the place of a layer is known; `imm` counts one a page of
    each layer and one for the logits.
    """

    request: int
    imm: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    pool: bytes
    pool_pages: int
    logits: bytes
    logits_offset: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The prefiller to the decoder: this request failed and nothing is written any more."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The prefiller to the router: so many more pages of this request have arrived at the decoder."""

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
    pages_peak: int
    pages_total: int
    writes: int
    pages: int
    bytes: int
    busy_ns: int


Message = Hello | Introduce | Generate | Fill | Refused | Progress | Token | Done | Failed | Stop | Report
_KINDS: dict[int, type[Any]] = dict(
    enumerate((Hello, Introduce, Generate, Fill, Refused, Progress, Token, Done, Failed, Stop, Report), start=1)
)
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Return the bytes of a message; raises WireError where a value does not fit its field or the whole the limit."""
    out = bytearray([_NUMBERS[type(message)]])
    for entry in dataclasses.fields(message):
        try:
            out += _PUT[str(entry.type)](getattr(message, entry.name))
        except (struct.error, UnicodeEncodeError) as error:
            raise WireError(f"{type(message).__name__}.{entry.name}: {error}") from error
    if len(out) > MESSAGE_LIMIT:
        raise WireError(f"a {type(message).__name__} of {len(out)} bytes; at most {MESSAGE_LIMIT} are sent")
    return bytes(out)


def decode(data: bytes) -> Message:
    """Return the message that the bytes stand for; raises WireError if they are not exactly one."""
    reader = _Reader(data)
    number = reader.take(1)[0]
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"message kind {number} is unknown; expected 1..{len(_KINDS)}")
    values = [_GET[str(entry.type)](reader) for entry in dataclasses.fields(kind)]
    if reader.left:
        raise WireError(f"{reader.left} bytes too many after a {kind.__name__}")
    message: Message = kind(*values)
    return message


class _Reader:
    """Walks over bytes; asking for more than is left is a WireError."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise WireError(f"a message ends after {len(self._data)} bytes, {count - self.left} too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def integer(self) -> int:
        value: int = struct.unpack("<q", self.take(8))[0]
        return value

    def data(self) -> bytes:
        return self.take(struct.unpack("<I", self.take(4))[0])

    def text(self) -> str:
        try:
            return self.data().decode()
        except UnicodeDecodeError as error:
            raise WireError(f"a text is not UTF-8: {error}") from error

    def integers(self) -> tuple[int, ...]:
        (count,) = struct.unpack("<I", self.take(4))
        return struct.unpack(f"<{count}I", self.take(4 * count))


def _put_bytes(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def _put_integers(values: tuple[int, ...]) -> bytes:
    return struct.pack(f"<I{len(values)}I", len(values), *values)


_PUT: dict[str, Callable[[Any], bytes]] = {
    "int": lambda value: struct.pack("<q", value),
    "str": lambda value: _put_bytes(value.encode()),
    "bytes": _put_bytes,
    "tuple[int, ...]": _put_integers,
}
_GET: dict[str, Callable[[_Reader], Any]] = {
    "int": _Reader.integer,
    "str": _Reader.text,
    "bytes": _Reader.data,
    "tuple[int, ...]": _Reader.integers,
}

_FRAME = struct.Struct("<4sIII")
_MAGIC = b"kvd1"
_PART = FRAME_BYTES - _FRAME.size


def split(data: bytes, number: int) -> Iterator[bytes]:
    """Cut a message into frames. `number` must differ from that of any message still under way to the same receiver."""
    for start in range(0, max(len(data), 1), _PART):
        yield _FRAME.pack(_MAGIC, number, len(data), start) + data[start : start + _PART]


@dataclass(slots=True)
class _Open:
    """A message of which some frames are still to come."""

    data: bytearray
    missing: set[int] = field(default_factory=set)


class Assembler:
    """Joins frames to messages, for each source apart; holds at most `_OPEN_LIMIT` unfinished messages a source."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, _Open]] = {}

    def feed(self, source: str, frame: bytes) -> bytes | None:
        """Take a frame and return the message that it completes, if it does; raises WireError if it cannot belong."""
        if len(frame) < _FRAME.size:
            raise WireError(f"a frame of {len(frame)} bytes; at least {_FRAME.size} were expected")
        magic, number, total, start = _FRAME.unpack_from(frame)
        part = frame[_FRAME.size :]
        if magic != _MAGIC:
            raise WireError(f"a frame begins with {magic!r}; expected {_MAGIC!r}")
        if total > MESSAGE_LIMIT or start % _PART or start > total or len(part) != min(_PART, total - start):
            raise WireError(f"a frame of {len(part)} bytes at {start} does not fit a message of {total} bytes")
        opened = self._open.setdefault(source, {})
        entry = opened.get(number)
        if entry is None:
            if len(opened) >= _OPEN_LIMIT:
                raise WireError(f"{source} left {_OPEN_LIMIT} messages unfinished")
            entry = opened[number] = _Open(bytearray(total), set(range(0, max(total, 1), _PART)))
        if len(entry.data) != total or start not in entry.missing:
            raise WireError(f"two frames of message {number} of {source} contradict each other at {start}")
        entry.data[start : start + len(part)] = part
        entry.missing.discard(start)
        if entry.missing:
            return None
        del opened[number]
        return bytes(entry.data)
