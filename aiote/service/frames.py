"""The frames that two engines exchange about calls: version 1 of the protocol.

An engine message of this protocol is one byte that marks it (MAGIC), then a MessagePack list of frames. Messages may
overtake each other, so no frame relies on the earlier arrival of another one. The exception is the `HelloFrame`: a call
that overtakes it waits for it.

A call is identified by its *slot*, a number below the limit in the server's `HelloFrame`, and by a *generation*, which
grows each time the caller uses the slot again. So the state that both sides keep about calls is bounded by the number
of slots.
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
    "CallStatus",
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
    "pack",
    "unpack",
]

MAGIC = b"\xc1"  # the one byte that MessagePack never uses
VERSION = 1
MAX_LEFT_S = float(1 << 31)
"""The longest time to a deadline that a call carries: 68 years; callers reduce a longer one to it. Frames with more, or
with NaN, are refused, because a timer set to NaN stops the timers of an event loop.
"""

Slot: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Generation: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_LEFT_S)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
Context: TypeAlias = Annotated[str, msgspec.Meta(max_length=CONTEXT_BYTES)]
Piece: TypeAlias = tuple[Number, Count, Count]
"""Bytes in memory that the receiver has lent to the sender: number of the lent memory, offset, length in bytes."""
Pieces: TypeAlias = Annotated[list[Piece], msgspec.Meta(max_length=256)]


class CallStatus:
    """How a call ended."""

    DONE = 0
    FAILED = 1  # the method raised; the body holds the names of the exception's classes, and its text
    CANCELLED = 2  # by the caller, or at the deadline that the call carried
    BUSY = 3
    DRAINING = 4
    NOT_SERVED = 5
    INVALID = 6  # the arguments do not fit the method; the body is a text
    STOPPED = 7  # the server ended while the call ran


class HelloFrame(msgspec.Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The first frame of each side: its protocol version and its limits. `asks` requests the other's HelloFrame."""

    version: Number
    asks: bool
    message_bytes: Number
    slots: Number
    stream_items: Number
    stream_bytes: Count


class CallFrame(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """A call. `left` is the time until the caller's deadline in seconds, 0 if there is none."""

    slot: Slot
    generation: Generation
    method: Text
    left: Seconds
    body: bytes
    pieces: Pieces
    outside: bool = False
    """Whether the body is the first piece."""
    context: Context = ""
    """The trace to which the call belongs, as a W3C `traceparent`; this package passes it on and does not parse it."""


class End(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The end of a call, for whatever reason. The server writes no byte of the call into the caller's memory after it.

    `items` is the number of stream items that the server sent before.
    """

    slot: Slot
    generation: Generation
    status: Number
    body: bytes
    pieces: Pieces
    outside: bool = False
    items: Count = 0


class Items(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Items of a stream, numbered from `first` on. An item with pieces comes alone in its frame."""

    slot: Slot
    generation: Generation
    first: Count
    bodies: list[bytes]
    pieces: Pieces
    outside: bool = False


class Credit(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """The caller has taken the first `taken` items of a stream."""

    slot: Slot
    generation: Generation
    taken: Count


class Cancel(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The caller cancels a call. The call is over when its End comes."""

    slot: Slot
    generation: Generation


class Ask(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """The sender asks the receiver to lend it `nbytes` bytes of contiguous memory."""

    nbytes: Count


class Grant(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The answer to an Ask: number, length and lease descriptor of lent memory; or no descriptor, and the reason."""

    number: Number
    nbytes: Count
    descriptor: bytes
    reason: Text = ""


class Free(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """The sender has read these pieces."""

    pieces: Pieces


class Return(msgspec.Struct, array_like=True, tag=9, frozen=True, gc=False):
    """The sender gives this lent memory back: it has nothing there and will place nothing there."""

    number: Number


class OutSpec(msgspec.Struct, array_like=True, frozen=True):
    """A caller's array that the method fills. `descriptor` is its lease; if empty, the End carries the bytes."""

    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=32)]
    descriptor: bytes


Frame: TypeAlias = HelloFrame | CallFrame | End | Items | Credit | Cancel | Ask | Grant | Free | Return

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Frame])


def pack(frames: list[Frame]) -> bytes:
    """Encode frames as one message."""
    return MAGIC + _encoder.encode(frames)


def unpack(data: bytes) -> list[Frame]:
    """Return a message's frames. Raises ValueError if the bytes do not encode frames."""
    try:
        return _decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not frames of calls: {error}") from error
