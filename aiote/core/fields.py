"""Fields: how one value of a record becomes bytes and back.

A record is a frozen dataclass whose annotations carry their field, `port: Annotated[int, U16]`; the order of the
annotations is the order on the wire, with no bytes between two values. `Record` reads the annotations once. All
integers are big-endian. Every field has a bound, and decoding is strict and canonical: one value has one encoding (a
flag is 0 or 1, a text is valid UTF-8 without control characters). So a decoded record encodes to the same bytes again,
on which the handshake's transcript relies. A length field alone reserves no memory: the length is first compared with
the bytes that are really there.

This module knows neither messages nor addresses nor which side is at fault for a bad value: it raises `FieldError`, and
its callers turn that into their own error.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_type_hints

__all__ = [
    "U8",
    "U16",
    "U32",
    "U64",
    "Blob",
    "Constant",
    "Converted",
    "Cursor",
    "Field",
    "FieldError",
    "Fixed",
    "Flag",
    "Many",
    "Record",
    "Sentence",
    "Text",
    "Unsigned",
    "unwrap",
    "wrap",
]

T = TypeVar("T")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class FieldError(ValueError):
    """A value does not fit its field, or bytes are not the encoding of any value."""


class Cursor:
    """Reads bytes from the front; `take_bytes` raises FieldError if fewer are left than it is asked for."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        """The number of bytes not taken yet."""
        return len(self._data) - self._at

    def take_bytes(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if count > self.remaining:
            raise FieldError(f"truncated: {count} bytes expected, {self.remaining} left")
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def expect_end(self) -> None:
        """Raise FieldError unless all bytes were taken."""
        if self.remaining:
            raise FieldError(f"{self.remaining} bytes too many at the end")


class Field(ABC, Generic[T]):
    """The encoding of one kind of value."""

    @abstractmethod
    def pack(self, value: T) -> bytes:
        """Return the bytes of `value`; raises FieldError if it does not fit."""

    @abstractmethod
    def unpack(self, cursor: Cursor) -> T:
        """Take one value off the cursor; raises FieldError if the bytes encode no value."""


class Unsigned(Field[int]):
    """An unsigned integer of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.maximum = (1 << 8 * size) - 1

    def pack(self, value: int) -> bytes:
        _expect(value, int)
        if not 0 <= value <= self.maximum:
            raise FieldError(f"{value} is outside 0 to {self.maximum}")
        return value.to_bytes(self.size, "big")

    def unpack(self, cursor: Cursor) -> int:
        return int.from_bytes(cursor.take_bytes(self.size), "big")


U8, U16, U32, U64 = Unsigned(1), Unsigned(2), Unsigned(4), Unsigned(8)


class Signed(Field[int]):
    """A signed integer of eight bytes, in two's complement."""

    def pack(self, value: int) -> bytes:
        _expect(value, int)
        if not -(1 << 63) <= value < 1 << 63:
            raise FieldError(f"{value} is outside -2**63 to 2**63 - 1")
        return value.to_bytes(8, "big", signed=True)

    def unpack(self, cursor: Cursor) -> int:
        return int.from_bytes(cursor.take_bytes(8), "big", signed=True)


I64 = Signed()


class Flag(Field[bool]):
    """A truth value of one byte, 0 or 1."""

    def pack(self, value: bool) -> bytes:
        _expect(value, bool)
        return b"\x01" if value else b"\x00"

    def unpack(self, cursor: Cursor) -> bool:
        octet = cursor.take_bytes(1)
        if octet not in (b"\x00", b"\x01"):
            raise FieldError(f"a flag is {octet[0]}, expected 0 or 1")
        return octet == b"\x01"


class Fixed(Field[bytes]):
    """Exactly `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def pack(self, value: bytes) -> bytes:
        _expect(value, bytes)
        if len(value) != self.size:
            raise FieldError(f"expected exactly {self.size} bytes, got {len(value)}")
        return value

    def unpack(self, cursor: Cursor) -> bytes:
        return cursor.take_bytes(self.size)


class Constant(Fixed):
    """Bytes that are the same in every record."""

    def __init__(self, value: bytes) -> None:
        super().__init__(len(value))
        self.value = value

    def pack(self, value: bytes) -> bytes:
        if value != self.value:
            raise FieldError(f"{self.value!r} expected")
        return self.value

    def unpack(self, cursor: Cursor) -> bytes:
        return self.pack(super().unpack(cursor))


class Blob(Field[bytes]):
    """Up to `limit` bytes after a 16-bit length."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def pack(self, value: bytes) -> bytes:
        _expect(value, bytes)
        if len(value) > self.limit:
            raise FieldError(f"expected at most {self.limit} bytes, got {len(value)}")
        return U16.pack(len(value)) + value

    def unpack(self, cursor: Cursor) -> bytes:
        length = U16.unpack(cursor)
        if length > self.limit:
            raise FieldError(f"expected at most {self.limit} bytes, {length} are announced")
        return cursor.take_bytes(length)


class Text(Field[str]):
    """Text without control characters, up to `limit` bytes of UTF-8 after a 16-bit length.

    Control characters are refused because texts of a peer end up in terminals and logs.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blob = Blob(limit)

    def pack(self, value: str) -> bytes:
        _expect(value, str)
        if _CONTROL.search(value):
            raise FieldError("control characters are not allowed in a text")
        try:
            return self._blob.pack(value.encode())
        except UnicodeEncodeError as error:
            raise FieldError(f"text without a UTF-8 form: {error.reason}") from error

    def unpack(self, cursor: Cursor) -> str:
        try:
            value = self._blob.unpack(cursor).decode()
        except UnicodeDecodeError as error:
            raise FieldError(f"not UTF-8: {error.reason}") from error
        if _CONTROL.search(value):
            raise FieldError("control characters are not allowed in a text")
        return value


class Sentence(Text):
    """Text for people: packing adapts text that does not fit, because reporting an error must not raise another error.

    Control characters become spaces, lone surrogates question marks, and a text over the limit ends in "...".
    """

    def pack(self, value: str) -> bytes:
        _expect(value, str)
        octets = _CONTROL.sub(" ", value).encode(errors="replace")
        if len(octets) > self.limit:
            octets = octets[: self.limit - 3].decode(errors="ignore").encode() + b"..."
        return self._blob.pack(octets)


class Converted(Field[T]):
    """A value that knows its own bytes, at most `limit`; `load` raises a ValueError for bytes that encode no value."""

    def __init__(self, kind: type[T], dump: Callable[[T], bytes], load: Callable[[bytes], T], limit: int) -> None:
        self._kind = kind
        self._dump = dump
        self._load = load
        self._blob = Blob(limit)

    def pack(self, value: T) -> bytes:
        _expect(value, self._kind)
        return self._blob.pack(self._dump(value))

    def unpack(self, cursor: Cursor) -> T:
        octets = self._blob.unpack(cursor)
        try:
            return self._load(octets)
        except ValueError as error:
            raise FieldError(str(error)) from error


class Record(Field[T]):
    """A dataclass whose every annotation carries a field; the values follow one another in order."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        hints = get_type_hints(kind, include_extras=True)
        self._fields: tuple[tuple[str, Field[Any]], ...] = tuple(
            (item.name, _field_of(hints[item.name]))
            for item in dataclasses.fields(kind)  # type: ignore[arg-type]
            if item.init
        )

    def pack(self, value: T) -> bytes:
        _expect(value, self.kind)
        parts = []
        for name, field in self._fields:
            try:
                parts.append(field.pack(getattr(value, name)))
            except FieldError as error:
                raise FieldError(f"{self.kind.__name__}.{name}: {error}") from error
        return b"".join(parts)

    def unpack(self, cursor: Cursor) -> T:
        values = {}
        for name, field in self._fields:
            try:
                values[name] = field.unpack(cursor)
            except FieldError as error:
                raise FieldError(f"{self.kind.__name__}.{name}: {error}") from error
        return self.kind(**values)


class Many(Field[tuple[T, ...]]):
    """Between `least` and `most` records after their count, which has 8 bits if `most` fits in them, otherwise 16."""

    def __init__(self, kind: type[T], least: int, most: int) -> None:
        self._record = Record(kind)
        self._count = U8 if most < 1 << 8 else U16
        self._least = least
        self._most = most

    def _check(self, count: int) -> None:
        if not self._least <= count <= self._most:
            raise FieldError(f"expected {self._least} to {self._most} entries, got {count}")

    def pack(self, value: tuple[T, ...]) -> bytes:
        _expect(value, tuple)
        self._check(len(value))
        return self._count.pack(len(value)) + b"".join(self._record.pack(entry) for entry in value)

    def unpack(self, cursor: Cursor) -> tuple[T, ...]:
        count = self._count.unpack(cursor)
        self._check(count)
        return tuple(self._record.unpack(cursor) for _ in range(count))


def _field_of(hint: Any) -> Field[Any]:
    """Return the field that an `Annotated` hint carries."""
    return next(extra for extra in hint.__metadata__ if isinstance(extra, Field))


def _expect(value: object, kind: type) -> None:
    """Raise FieldError unless `value` is of `kind`; a bool does not count as an int."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FieldError(f"{kind.__name__} expected, got {type(value).__name__}")


def wrap(magic: bytes, version: int, body: bytes) -> bytes:
    """Return `body` after its magic, a version byte and a 16-bit length, for bytes that travel by themselves."""
    return magic + U8.pack(version) + U16.pack(len(body)) + body


def unwrap(magic: bytes, version: int, layout: Record[T], data: bytes | bytearray | memoryview) -> T:
    """Return the record that `wrap` enclosed; raises FieldError for anything else, trailing bytes included."""
    if not isinstance(data, bytearray | memoryview):
        _expect(data, bytes)
    cursor = Cursor(bytes(data))
    if cursor.take_bytes(len(magic)) != magic:
        raise FieldError(f"does not begin with {magic!r}")
    found = U8.unpack(cursor)
    if found != version:
        raise FieldError(
            f"the format has version {found}, and this aiote reads version {version}; use one version "
            "of aiote on both sides"
        )
    body = Cursor(cursor.take_bytes(U16.unpack(cursor)))
    cursor.expect_end()
    value = layout.unpack(body)
    body.expect_end()
    return value
