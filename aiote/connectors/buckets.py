"""How a stream of tensors is laid into buckets, and taken out of them again; pure.

Senders that iterate over the same tensors lay them out alike without a word between them: so bucket b can be sender
b mod n's to fill and to write, and the receivers still have one stream, in order. A tensor that fits into a bucket lies
in one piece, where the receiver uses it in place. A larger one is split, and put together at the receiver.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

__all__ = ["Bucket", "Bytes", "Ended", "Joiner", "Piece", "Size", "Splitter", "slots_of"]

Bytes: TypeAlias = NDArray[np.uint8]
Size: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 47)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line, which is enough for every dtype."""
MOST_PIECES = 4096
"""In a bucket: their description travels as one message."""
LARGEST_BUCKET = 64 << 20
"""A receiver begins with a bucket when it is full; larger ones save nothing and delay the first."""
SMALLEST_BUCKET = 1 << 20


def slots_of(bucket_bytes: int, senders: int) -> tuple[int, int]:
    """Return how many buckets a receiver has for this many senders, and their size.

    Two for each sender, so that it fills one while another is read, within twice `bucket_bytes` in all.
    """
    size = min(bucket_bytes, max(bucket_bytes // senders, SMALLEST_BUCKET), LARGEST_BUCKET)
    return 2 * senders, max(size // ALIGNMENT, 1) * ALIGNMENT


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a tensor in a bucket: `length` from its byte `start` on, at the bucket's byte `offset`."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    nbytes: Size
    start: Size
    length: Size
    offset: Size


class Bucket(msgspec.Struct, frozen=True, tag=True):
    """What lies in a bucket, of which `nbytes` are written. Numbers count all buckets of an update, from 0."""

    number: Size
    nbytes: Size
    pieces: Annotated[list[Piece], Meta(max_length=MOST_PIECES)]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """There are no more: what an update was in all. The digest is of the names, dtypes and shapes in their order."""

    buckets: Size
    tensors: Size
    digest: Annotated[bytes, Meta(max_length=64)]


class Splitter:
    """Lays tensors into buckets of a size, one after the other."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._number = self._used = self._pieces = self._tensors = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def split(self, name: str, dtype: str, shape: Sequence[int], nbytes: int) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of the next tensor, each with its bucket's number."""
        self._tensors += 1
        self._digest.update(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        whole = nbytes <= self._bucket_bytes
        start = 0
        while True:
            room = self._bucket_bytes - self._used
            if self._pieces == MOST_PIECES or room < (nbytes if whole else 1):
                self._number, self._used, self._pieces = self._number + 1, 0, 0
                room = self._bucket_bytes
            length = min(nbytes - start, room)
            yield self._number, Piece(name, dtype, tuple(shape), nbytes, start, length, self._used)
            self._used = -(-(self._used + length) // ALIGNMENT) * ALIGNMENT
            self._pieces += 1
            start += length
            if start == nbytes:
                return

    def ended(self) -> Ended:
        """Return what all tensors were."""
        return Ended(self._number + 1 if self._tensors else 0, self._tensors, self._digest.digest())


class Joiner:
    """Puts tensors together that are split. `add` is called with every piece, in order."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._bytes: Bytes | None = None

    def add(self, piece: Piece, bucket: Bytes) -> tuple[Bytes | None, tuple[Bytes, Bytes] | None]:
        """Return the tensor's bytes if this piece is its last, and what has to be copied before: to where, from where.

        Of a tensor in one piece the bytes are the bucket's own. Raises ValueError for a piece that does not continue
        the tensor before it.
        """
        part = bucket[piece.offset : piece.offset + piece.length]
        if len(part) != piece.length:
            raise ValueError(f"{piece.name} does not lie within its bucket")
        if self._piece is None and piece.length == piece.nbytes:
            return part, None
        before = self._piece
        if before is None:
            begun = not piece.start
            try:
                self._bytes = np.empty(piece.nbytes, np.uint8)
            except MemoryError:
                raise ValueError(f"{piece.name} has {piece.nbytes} bytes, for which there is no memory") from None
        else:
            begun = piece.start == before.start + before.length and same(piece, before)
        if not begun or self._bytes is None:
            raise ValueError(f"{piece.name} comes from its byte {piece.start} on, which is not what was due")
        stop, whole = piece.start + piece.length, self._bytes
        self._piece = None if stop == piece.nbytes else piece
        return whole if self._piece is None else None, (whole[piece.start : stop], part)

    @property
    def unfinished(self) -> str:
        """The name of the tensor that more pieces are due of, or an empty one."""
        return self._piece.name if self._piece is not None else ""


def same(piece: Piece, other: Piece) -> bool:
    """Tell whether two pieces are of one tensor."""

    def of(one: Piece) -> Any:
        return one.name, one.dtype, one.shape, one.nbytes

    return bool(of(piece) == of(other))
