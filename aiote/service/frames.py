"""What two engines tell each other about calls: version 1 of the protocol.

A message of the engine is a byte that says that it is one of ours, then a MessagePack list of frames. Messages may
overtake each other, so no frame relies on another one's having come before, but for `HelloFrame`.

A call is known by its *slot*, a number below what the server's `HelloFrame` admits, and a *generation*, which grows
each time that the caller uses the slot again: so both sides keep as much about calls as there are slots.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from ..observe.context import CONTEXT_BYTES

__all__ = [
    "MAGIC",
    "MAX_LEFT_S",
    "VERSION",
    "Ask",
    "CallFrame",
    "Cancel",
    "Credit",
    "End",
    "Frame",
    "Free",
    "Grant",
    "HelloFrame",
    "Items",
    "Number",
    "OutSpec",
    "Piece",
    "Return",
    "Status",
    "pack",
    "unpack",
]

MAGIC = b"\xc1"  # the one byte that MessagePack never uses
VERSION = 1
MAX_LEFT_S = float(1 << 31)
"""A deadline that is further away, 68 years, is none. NaN is within no bounds: a timer of NaN stops an event loop's."""

Slot: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_LEFT_S)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Context: TypeAlias = Annotated[str, msgspec.Meta(max_length=CONTEXT_BYTES)]
Piece: TypeAlias = tuple[Number, Count, Count]
"""Bytes in memory that the receiver has lent to the sender: number of the lent memory, offset, length."""
Pieces: TypeAlias = Annotated[list[Piece], msgspec.Meta(max_length=256)]


class Status:
    """How a call ended."""

    DONE = 0
    FAILED = 1  # the method raised; the body is the names of the exception's types, and its text
    CANCELLED = 2  # by the caller, or at the deadline that it had named
    BUSY = 3
    DRAINING = 4
    NOT_SERVED = 5
    INVALID = 6  # the arguments do not fit the method; the body is a text
    STOPPED = 7  # the server ended meanwhile


class HelloFrame(msgspec.Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The first frame of each side: its version, and what it takes. `asks` for the other side's."""

    version: Number
    asks: bool
    message_bytes: Number
    slots: Number
    stream_items: Number
    stream_bytes: Count


class CallFrame(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A call. `left` are the seconds until the caller's deadline, 0 where there is none."""

    slot: Slot
    generation: Generation
    method: Text
    left: Seconds
    body: bytes
    pieces: Pieces
    outside: bool = False
    """Whether the body is the first piece."""
    context: Context = ""
    """The trace that it is part of, as a W3C `traceparent`; nothing here reads it."""


class End(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The end of a call, for whatever reason: no byte of it lands after this. `items` were sent before."""

    slot: Slot
    generation: Generation
    status: Number
    body: bytes
    pieces: Pieces
    outside: bool = False
    items: Count = 0


class Items(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Items of a stream, numbered from `first` on. One whose body is a piece comes alone."""

    slot: Slot
    generation: Generation
    first: Count
    bodies: list[bytes]
    pieces: Pieces
    outside: bool = False


class Credit(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The caller has taken so many items of a stream."""

    slot: Slot
    generation: Generation
    taken: Count


class Cancel(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The caller wants no more of a call. It is over when its End comes."""

    slot: Slot
    generation: Generation


class Ask(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The sender wants memory to be lent to it: so many bytes in one piece."""

    nbytes: Count


class Grant(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The answer to an Ask: the number of lent memory and its lease's descriptor; or none, and why."""

    number: Number
    nbytes: Count
    descriptor: bytes
    reason: Text = ""


class Free(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """The sender has read these pieces."""

    pieces: Pieces


class Return(msgspec.Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The sender has nothing in this lent memory, and places nothing there any more."""

    number: Number


class OutSpec(msgspec.Struct, array_like=True, frozen=True):
    """An array of the caller's that the method fills. The descriptor is a lease's; without, the bytes go by the End."""

    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=32)]
    descriptor: bytes


Frame: TypeAlias = HelloFrame | CallFrame | End | Items | Credit | Cancel | Ask | Grant | Free | Return

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Frame])


def pack(frames: list[Frame]) -> bytes:
    """Return frames as one message."""
    return MAGIC + _encoder.encode(frames)


def unpack(data: bytes) -> list[Frame]:
    """Return a message's frames. Raises ValueError for bytes that are none."""
    try:
        return _decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no frames: {error}") from error
