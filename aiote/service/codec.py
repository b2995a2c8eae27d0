"""Encode values as bytes and decode them: msgspec's MessagePack, with numpy arrays anywhere in a value.

The encoding contains the bytes of a small array. A larger array travels one-sided: the encoding contains only its
index in the list of *pieces*, which locate arrays in the receiver's memory. The decoder executes none of the received
data and trusts none of it: it checks types, dtypes, shapes and lengths.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

import msgspec
import numpy
from numpy.typing import NDArray

from ..core.masked_arrays import require_unmasked
from ..errors import UsageError

__all__ = [
    "INLINE_BYTES",
    "LONG_BODY",
    "LONG_ITEM",
    "array_of",
    "check_dtype",
    "decode",
    "decoder",
    "describe_array",
    "encode",
    "takes_long",
]

INLINE_BYTES = 8192
"""Arrays up to this size travel in the message itself: one message is then faster than a write and a message."""
LONG_BODY = 64 << 10
LONG_ARRAYS = 2 << 20
"""Longer bodies and arrays are decoded in a thread. Copying a MiB of arrays takes 0.1 to 0.3 ms, and a thread adds 0.5.
But a body of 64 KiB may hold 10,000 empty arrays, which take tens of milliseconds.
"""
LONG_ITEM = 1 << 20
"""The same for the arrays of a stream's item: items are decoded when they arrive, up to 128 in a turn of the loop."""
MAX_DIMENSIONS = 32
MAX_LENGTH = 1 << 48
"""The length of each dimension of an array is below this."""
DTYPES = {numpy.dtype(code).str: numpy.dtype(numpy.dtype(code).str) for code in "?bBhHiIqQefdgFDG"}
"""The dtypes that may travel, by their texts. Texts from other processes are looked up here and never passed to
`numpy.dtype`, because it parses a language of its own and some texts crash it.
"""


class _Arrays(threading.local):
    """The state that the hooks below need while this thread encodes or decodes a value."""

    gathered: list[NDArray[Any]] | None = None
    take: Callable[[int, int], memoryview] | None = None


_arrays = _Arrays()


def describe_array(array: NDArray[Any]) -> str:
    """Return the text of an array's dtype. Raises UsageError for a masked array and for a dtype that cannot travel."""
    if type(array) is not numpy.ndarray:
        require_unmasked(f"an array of {array.dtype}", array)
    text = array.dtype.str
    if text not in DTYPES:
        raise UsageError(
            f"an array of {array.dtype} cannot travel: expected booleans, integers, floats or complex numbers in this "
            "machine's byte order"
        )
    return text


def array_of(text: object, shape: object) -> tuple[numpy.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and size in bytes of an array that another process describes.

    Raises ValueError for an invalid description.
    """
    if not isinstance(text, str) or not isinstance(shape, list | tuple):
        raise ValueError("expected an array's type and shape")
    if text not in DTYPES:
        raise ValueError(f"dtype {text[:20]!r} cannot travel")
    if len(shape) > MAX_DIMENSIONS or [
        length for length in shape if type(length) is not int or not 0 <= length < MAX_LENGTH
    ]:
        raise ValueError("the shape of an array is invalid")
    dtype = DTYPES[text]
    return dtype, tuple(shape), _extent(dtype, shape)


def _extent(dtype: numpy.dtype[Any], shape: Sequence[int]) -> int:
    """Return the size of an array in bytes. Raises ValueError from 2**48 bytes on."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes >= 1 << 48:
        raise ValueError(f"an array has {nbytes} bytes, expected fewer than 2**48")
    return nbytes


def _encode_array(value: object) -> object:
    if not isinstance(value, numpy.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot travel: expected a type of msgspec or a numpy array")
    text = describe_array(value)
    if value.nbytes <= INLINE_BYTES or _arrays.gathered is None:
        return text, value.shape, value.tobytes()
    _arrays.gathered.append(value)
    return text, value.shape, len(_arrays.gathered) - 1


@functools.lru_cache(4096)
def _is_array(kind: type) -> bool:
    return (get_origin(kind) or kind) is numpy.ndarray


def _decode_array(kind: type, value: object) -> object:
    if not _is_array(kind) or not isinstance(value, list) or len(value) != 3:
        raise ValueError("expected an array")
    dtype, shape, nbytes = array_of(value[0], value[1])
    check_dtype(kind, dtype)
    where = value[2]
    if isinstance(where, bytes):
        if len(where) != nbytes:
            raise ValueError(f"an array has {len(where)} bytes, its type and shape need {nbytes}")
        memory: bytes | memoryview = where
    elif type(where) is int and _arrays.take is not None:
        memory = _arrays.take(where, nbytes)
    else:
        raise ValueError("the message does not say where the bytes of an array are")
    # Copy the bytes: the peer can still write to the lent memory, and numpy reads some values twice.
    array = numpy.frombuffer(memory, dtype).copy()
    return array if len(shape) == 1 else array.reshape(shape)


@functools.lru_cache(4096)
def check_dtype(kind: Any, dtype: numpy.dtype[Any]) -> None:
    """Raise ValueError if a dtype does not match an annotation such as `NDArray[numpy.float32]`."""
    arguments = get_args(kind)
    wanted = get_args(arguments[1]) if len(arguments) == 2 else ()
    scalar = wanted[0] if wanted and isinstance(wanted[0], type) else numpy.generic
    if issubclass(scalar, numpy.generic) and not issubclass(dtype.type, scalar):
        raise ValueError(f"expected an array of {scalar.__name__}, got {dtype.name}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(value: object) -> tuple[bytes, list[NDArray[Any]]]:
    """Return a value as bytes, and the arrays that travel one-sided. Raises UsageError if it cannot be encoded."""
    gathered: list[NDArray[Any]] = []
    _arrays.gathered = gathered
    try:
        return _encoder.encode(value), gathered
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        raise error if isinstance(error, UsageError) else UsageError(str(error)) from error
    finally:
        _arrays.gathered = None


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of one type, to be passed to `decode`."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)


def decode(
    decoder: msgspec.msgpack.Decoder[Any],
    body: bytes,
    take: Callable[[int, int], memoryview] | None = None,
) -> Any:
    """Decode a value; it owns its arrays. `take(number, nbytes)` returns the memory of a piece.

    Raises msgspec.ValidationError, a subclass of ValueError, if the body does not encode a value of that type.
    """
    _arrays.take = take
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise msgspec.ValidationError(str(error)) from error
    finally:
        _arrays.take = None


def takes_long(body: bytes, pieces: Sequence[tuple[int, int, int]], outside: bool, arrays: int = LONG_ARRAYS) -> bool:
    """Return whether a value is to be decoded in a thread: from `arrays` bytes of arrays on, or for a long body.

    `outside`: the last piece is its body.
    """
    if not pieces:
        return len(body) >= LONG_BODY
    if outside and pieces[-1][2] >= LONG_BODY:
        return True
    return len(body) >= LONG_BODY or sum([piece[2] for piece in pieces]) >= arrays
