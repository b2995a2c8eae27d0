"""Values, messages and bytes drawn at random, of which many are just beside what is right."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, get_type_hints

from aiote.core import control_frames as frames
from aiote.core import fields
from aiote.core.address import Address

EDGES = (0, 1, 2, 3, 7, 255, 256, 4095, 4096, 65535, 65536, 2**28 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


class DrawnValues:
    """A source of them; `known` are numbers that mean something to the engine that is attacked (keys, addresses)."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.known: list[int] = []

    def number(self, maximum: int = 2**64 - 1) -> int:
        """Return one at an edge, beside one that means something, small, or any."""
        rng = self.rng
        way = rng.randrange(4)
        if way == 0:
            found = rng.choice(EDGES)
        elif way == 1 and self.known:
            found = rng.choice(self.known) + rng.choice((-4096, -1, 0, 0, 0, 1, 4096))
        elif way == 2:
            found = rng.randrange(4)
        else:
            found = rng.getrandbits(64)
        return found % (maximum + 1)

    def bytes(self, most: int) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, most // 2, most)))

    def value(self, field: fields.Field[Any]) -> Any:
        """Return a value that a field takes."""
        rng = self.rng
        match field:
            case fields.Constant():
                return field.value
            case fields.Fixed():
                return rng.randbytes(field.size)
            case fields.Blob():
                return self.bytes(field.limit)
            case fields.Unsigned():
                return self.number(field.maximum)
            case fields.Signed():
                return rng.choice((1, -1)) * self.number((1 << 63) - 1)
            case fields.Flag():
                return rng.random() < 0.5
            case fields.Text():
                return "x" * rng.choice((0, 1, field.limit))
            case fields.Many():
                count = rng.choice((field._least, min(field._least + 2, field._most), field._most))
                return tuple(self.message(field._record.kind) for _ in range(count))
            case fields.Converted() if field._kind is Address:
                return Address("127.0.0.1", 1 + self.number(2**16 - 2), rng.randbytes(16), self.number())
        raise AssertionError(f"no value for {field}")

    def message(self, kind: type[Any]) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{item.name: self.value(fields._field_of(hints[item.name])) for item in dataclasses.fields(kind)})

    def session_message(self) -> Any:
        """Return a message that may come after the handshake."""
        kinds = [kind for kind, number in frames._NUMBERS.items() if number >= 16]
        return self.message(self.rng.choice(kinds))

    def damaged(self, data: bytes) -> bytes:
        """Return bytes that were right, with a few things done to them."""
        found = bytearray(data)
        for _ in range(self.rng.randint(1, 3)):
            at = self.rng.randrange(len(found) + 1)
            way = self.rng.randrange(5)
            if way == 0 and at < len(found):
                found[at] ^= 1 << self.rng.randrange(8)
            elif way == 1 and at < len(found):
                found[at] = self.rng.choice((0, 1, 127, 128, 255))
            elif way == 2:
                del found[at : at + self.rng.randint(1, 8)]
            elif way == 3:
                found[at:at] = self.bytes(16)
            else:
                size = self.rng.choice((2, 4, 8))
                found[at : at + size] = self.number(256**size - 1).to_bytes(size, "big")
        return bytes(found)
