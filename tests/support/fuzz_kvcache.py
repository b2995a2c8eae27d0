"""What is fuzzed of the KV cache: what decoders and prefillers say to each other.

The target `transfer` takes one message. `assembler` takes a program: steps of an `Op` and a source, then a 16-bit
length and that many bytes; what `Op.PART` makes of ten bytes is a frame of full length, so that the limits are within
reach of short inputs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from aiote.kvcache.transferwire import Accepted, Assembler, Cancel, Ended, Fill, Queued, Ranks

from aiote.kvcache import transferwire
from aiote.service.reading import WireError

MESSAGES, NBYTES = 8, 1 << 16
"""What an assembler holds of a peer here: less than in earnest, for short inputs to come there."""
_PART = struct.Struct(">BBIHB")


class Op(IntEnum):
    """What a peer does next; a number beyond these is taken modulo their count."""

    RAW = 0  # a frame as it is
    PART = 1  # a frame of full length: kind, number, total, which part, and the first byte of it
    LOST = 2  # the peer goes


class Source:
    """Somebody who sends frames."""


def transfer(data: bytes) -> None:
    """Decode one message between a decoder and a prefiller."""
    try:
        found = transferwire.decode(data)
    except WireError:
        return
    assert transferwire.encode(found) == data


def assembler(data: bytes) -> None:
    """Feed an assembler frames of four peers; it holds no more of each than it says."""
    sources, tested, at = [Source() for _ in range(4)], Assembler(MESSAGES, NBYTES), 0
    while at < len(data):
        op, who = Op(data[at] % len(Op)), data[at] >> 6
        stop = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        body, at = data[at + 3 : stop], stop
        if op is Op.LOST:
            tested.forget(sources[who])
            sources[who] = Source()
            continue
        frame = part(body) if op is Op.PART else body
        _feed(tested, sources[who], frame)
        held = tested._open.get(sources[who], {})
        assert len(held) <= MESSAGES
        assert sum(len(one) for entry in held.values() for one in entry.parts.values()) <= NBYTES


def part(body: bytes) -> bytes:
    """Return the frame that a step `PART` stands for."""
    kind, number, total, place, first = _PART.unpack(body[: _PART.size].ljust(_PART.size, b"\0"))
    start = place * transferwire._PART
    size = max(0, min(transferwire._PART, total - start))
    head = transferwire._FRAME.pack(kind, transferwire.VERSION, number, total, start)
    return head + bytes((first,)).ljust(size, b"\0")


def _feed(tested: Assembler, source: Source, frame: bytes) -> None:
    try:
        found = tested.feed(source, frame)
    except WireError:
        return
    if found is not None:
        number = transferwire._FRAME.unpack_from(frame)[2]
        assert frame in transferwire.frames(transferwire.encode(found), number)


KVCACHE: dict[str, Callable[[bytes], None]] = {function.__name__: function for function in (transfer, assembler)}


# Seeds.


def kvcache_seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of these targets: target, name, bytes."""
    messages = _messages()
    return {
        "transfer": {name: transferwire.encode(one) for name, one in messages.items()},
        "assembler": _programs(messages),
    }


def _messages() -> dict[str, transferwire.Message]:
    def fill(tokens: int) -> Fill:
        numbers = np.arange(tokens, dtype=np.uint32)
        places = {"imm": 5, "pool_pages": 64, "tail_offset": 8, "tail_bytes": 4}
        blobs = {"request": b"r", "print": bytes(16), "pool": b"pool", "tails": b"tails"}
        return Fill(serial=1, round=2, ranks=Ranks(0, 2, 1, 4), **places, **blobs, tokens=numbers, pages=numbers[:3])

    return {
        "fill": fill(5),
        "long-fill": fill(10_000),  # three frames
        "cancel": Cancel(1),
        "accepted": Accepted(2),
        "queued": Queued(4),
        "ended": Ended(3, "why"),
    }


def step(op: Op, body: bytes = b"", who: int = 0) -> bytes:
    """Return the bytes of one step of `assembler`."""
    choice = next(value for value in range(who << 6, 1 << 8) if Op(value % len(Op)) is op)
    return bytes((choice,)) + len(body).to_bytes(2, "big") + body


def _programs(messages: dict[str, transferwire.Message]) -> dict[str, bytes]:
    cut = {name: list(transferwire.frames(transferwire.encode(one), 9)) for name, one in messages.items()}
    found = {name: b"".join(step(Op.RAW, frame) for frame in frames) for name, frames in cut.items()}
    backwards = cut["long-fill"][::-1]
    return found | {
        "backwards": b"".join(step(Op.RAW, frame) for frame in backwards),
        "twice": b"".join(step(Op.RAW, frame) for frame in backwards[:2] * 2),
        "other-kind": b"".join(step(Op.RAW, frame) for frame in (*backwards[:2], b"\xe3" + backwards[2][1:])),
        "other-kind-last": b"".join(
            step(Op.RAW, frame) for frame in (*cut["long-fill"][:2], b"\xe3" + backwards[0][1:])
        ),
        "lost": step(Op.RAW, backwards[0]) + step(Op.LOST) + b"".join(step(Op.RAW, frame) for frame in backwards),
        "many": b"".join(step(Op.PART, _PART.pack(0xE2, number, 1 << 20, 1, 0)) for number in range(20)),
        "large": b"".join(step(Op.PART, _PART.pack(0xE2, place % 2, 1 << 20, place, 1)) for place in range(40)),
    }
