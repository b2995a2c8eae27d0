"""The layout of a stream of tensors in buckets, for senders and receivers. Pure.

Senders that iterate over the same tensors compute the same layout without communicating. Therefore sender b mod n can
fill and write bucket b, and the receivers still get one stream, in order. A tensor that fits into a bucket is in one
piece, which the receiver uses in place. A larger tensor is split, and the receiver joins its pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

__all__ = ["Bucket", "BucketPiece", "Bytes", "Joiner", "Size", "Splitter", "UpdateEnd", "slots_of"]

Bytes: TypeAlias = NDArray[np.uint8]
Size: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 47)]
Text: TypeAlias = Annotated[str, Meta(max_length=4096)]

ALIGNMENT = 64
"""Pieces begin at multiples of a cache line, which is aligned enough for every dtype."""
MOST_PIECES = 4096
"""The most pieces in a bucket, because their description travels as one message."""
LARGEST_BUCKET = 64 << 20
"""A receiver starts on a bucket once it is full, so larger buckets would delay the first one, and save no time."""
SMALLEST_BUCKET = 1 << 20


def slots_of(bucket_bytes: int, senders: int) -> tuple[int, int]:
    """Return how many buckets a receiver has for this many senders, and their size in bytes.

    Each sender has two, so that it fills one while the receiver reads the other. Together they have at most twice
    `bucket_bytes`, unless a bucket would be smaller than SMALLEST_BUCKET.
    """
    size = min(bucket_bytes, max(bucket_bytes // senders, SMALLEST_BUCKET), LARGEST_BUCKET)
    return 2 * senders, max(size // ALIGNMENT, 1) * ALIGNMENT


class BucketPiece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a tensor in a bucket: `length` of them, from the tensor's byte `start` on, at the bucket's `offset`."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    nbytes: Size
    start: Size
    length: Size
    offset: Size


class Bucket(msgspec.Struct, frozen=True, tag=True):
    """The content of a bucket. Its first `nbytes` are written. Numbers count all buckets of an update, from 0."""

    number: Size
    nbytes: Size
    pieces: Annotated[list[BucketPiece], Meta(max_length=MOST_PIECES)]


class UpdateEnd(msgspec.Struct, frozen=True, tag=True):
    """The end of an update, with its totals. The digest covers the names, dtypes and shapes in their order."""

    buckets: Size
    tensors: Size
    digest: Annotated[bytes, Meta(max_length=64)]


class Splitter:
    """Assigns tensors to buckets of one size, one after the other."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._number = self._used = self._pieces = self._tensors = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def split(self, name: str, dtype: str, shape: Sequence[int], nbytes: int) -> Iterator[tuple[int, BucketPiece]]:
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
            yield self._number, BucketPiece(name, dtype, tuple(shape), nbytes, start, length, self._used)
            self._used = -(-(self._used + length) // ALIGNMENT) * ALIGNMENT
            self._pieces += 1
            start += length
            if start == nbytes:
                return

    def describe_end(self) -> UpdateEnd:
        """Return the totals of all tensors so far."""
        return UpdateEnd(self._number + 1 if self._tensors else 0, self._tensors, self._digest.digest())


class Joiner:
    """Joins the pieces of split tensors. The receiver calls `add` with every piece, in order."""

    def __init__(self) -> None:
        self._piece: BucketPiece | None = None
        self._bytes: Bytes | None = None

    def add(self, piece: BucketPiece, bucket: Bytes) -> tuple[Bytes | None, tuple[Bytes, Bytes] | None]:
        """Return the tensor's bytes if this piece is its last, else None, and the copy to make first: (target, source).

        The bytes of a tensor in one piece are the bucket's own, without a copy. Raises ValueError for a piece that does
        not continue the unfinished tensor, and for a tensor that is too large for this process's memory.
        """
        part = bucket[piece.offset : piece.offset + piece.length]
        if len(part) != piece.length:
            raise ValueError(f"{piece.name} leaves its bucket")
        if self._piece is None and piece.length == piece.nbytes:
            return part, None
        before = self._piece
        if before is None:
            begun = not piece.start
            try:
                self._bytes = np.empty(piece.nbytes, np.uint8)
            except MemoryError:
                raise ValueError(
                    f"{piece.name} has {piece.nbytes} bytes, and memory for them cannot be allocated"
                ) from None
        else:
            begun = piece.start == before.start + before.length and is_same_tensor(piece, before)
        if not begun or self._bytes is None:
            raise ValueError(f"{piece.name} arrived from byte {piece.start} on, out of order")
        stop, whole = piece.start + piece.length, self._bytes
        self._piece = None if stop == piece.nbytes else piece
        return whole if self._piece is None else None, (whole[piece.start : stop], part)

    @property
    def unfinished_name(self) -> str:
        """The name of the tensor that lacks pieces, or an empty string."""
        return self._piece.name if self._piece is not None else ""


def is_same_tensor(piece: BucketPiece, other: BucketPiece) -> bool:
    """Return whether two pieces belong to one tensor."""

    def of(one: BucketPiece) -> Any:
        return one.name, one.dtype, one.shape, one.nbytes

    return bool(of(piece) == of(other))
