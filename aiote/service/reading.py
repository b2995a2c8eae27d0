"""Taking values off bytes from outside, one after the other: what both protocols of this package are read with."""

from __future__ import annotations

import aiote

__all__ = ["Reader", "WireError"]


class WireError(aiote.AioteError):
    """Bytes that are no message of this protocol, or of another version of it."""


class Reader:
    """Takes values off the front of bytes, integers big-endian; raises WireError where they are not there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """Take so many bytes."""
        if count > len(self._data) - self._at:
            raise WireError(f"truncated: {count} bytes expected, {len(self._data) - self._at} left")
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def integer(self, size: int, least: int = 0, most: int | None = None) -> int:
        """Take an unsigned integer of so many bytes, within bounds."""
        value = int.from_bytes(self.take(size), "big")
        if value < least or (most is not None and value > most):
            raise WireError(f"{value} is out of bounds")
        return value

    def blob(self, limit: int) -> bytes:
        """Take the bytes behind a 16-bit length, which is first compared with `limit`."""
        return self.take(self.integer(2, most=limit))

    def text(self, limit: int) -> str:
        """Take a text behind a 16-bit length, in bytes. What may stand in it is for the caller to say."""
        try:
            return self.blob(limit).decode()
        except UnicodeDecodeError as error:
            raise WireError(f"no text: {error}") from error

    def end(self) -> None:
        """Check that nothing is left."""
        if self._at != len(self._data):
            raise WireError(f"{len(self._data) - self._at} bytes too many at the end")
