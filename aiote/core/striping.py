"""How one write is split in stripes, and how its immediate is encoded on the wire.

A *stripe* is a part of a write that one rail carries as one message. A write is split for two reasons: a provider has a
largest message, and several rails together are faster than one. With

    largest   the provider's largest message, in bytes
    lanes     the number of rails that can be used now
    smallest  bytes below which a stripe is not worth another rail

a write of `length` bytes is split in

    n = max(ceil(length / largest), min(lanes, max(1, length // smallest)))

stripes. Stripe j of n over L bytes, with q, r = divmod(L, n), is

    offset(j) = j * q + min(j, r)        size(j) = q + 1 if j < r else q

so the sizes differ by one byte at most, their sum is L, and no intermediate value exceeds L: if L fits in 64 bits, so
do `j * q` and `min(j, r)`, whereas `j * L // n` might not.

**The immediate.** A user's immediate has 28 bits. On the wire it has 32, the top four being *stripes - 1*:

    imm_data = (stripes - 1) << 28 | imm         1 <= stripes <= 16

Every stripe of a write carries the same 32 bits and counts 1/stripes at the receiver (docs/immediates.md), so a write
counts one however many stripes it has. Hence a counted write has at most 16 counted stripes: n is computed with at most
16 lanes, and if the largest message requires more than 16 stripes, the write is split in two parts:

| part | bytes                        | in stripes                      | counted | posted                    |
|------|------------------------------|---------------------------------|---------|---------------------------|
| head | the first L - 16 * largest   | ceil(that / largest), all plain | no      | first                     |
| tail | the last 16 * largest        | 16, each of `largest`           | yes     | when the head is complete |

Writes have no promised order, so the tail must wait for the completion of the head; otherwise the count could be
reached before the head's bytes are there. The tail also goes over each NIC that the head went over, because a NIC's
completion says that the NIC has the bytes, not that memory has them (docs/immediates.md). `largest` may be as large as
2**64 - 1 (some providers report that), so `16 * largest` is safe to compute only once n is known to be over 16.

A write of no bytes is one empty stripe: the immediate alone if it is counted, otherwise a probe that ends like any
write.

This module decides; it knows no rail by name and posts nothing. It is the reference for the native twin.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from aiote.errors import UsageError

__all__ = [
    "IMM_BITS",
    "IMM_LIMIT",
    "MAX_COUNTED",
    "NO_IMMEDIATE",
    "Stripe",
    "StripePlan",
    "check_immediate",
    "decode_immediate",
    "encode_immediate",
    "native_immediate",
    "plan",
]

IMM_BITS = 28
IMM_LIMIT = 1 << IMM_BITS
NO_IMMEDIATE = -1
"""What the native core takes for a request without an immediate."""
MAX_COUNTED = 16  # the range of the four bits above the immediate


class Stripe(NamedTuple):
    """One message: `offset` and `length` in bytes of the write, the lane to use, and whether it carries the immediate.

    `lane` is the stripe's running number modulo the number of lanes. It is a preference: a stripe may go over any rail.
    """

    offset: int
    length: int
    lane: int
    counted: bool


class StripePlan(NamedTuple):
    """The stripes of one write: `tail` may be posted only when every stripe of `head` is complete at the target."""

    head: tuple[Stripe, ...]
    tail: tuple[Stripe, ...]

    @property
    def stripes(self) -> tuple[Stripe, ...]:
        """All stripes in the order of their offsets."""
        return self.head + self.tail

    @property
    def counted(self) -> int:
        """The number of stripes that carry the immediate: 0, or the number for `encode_immediate`."""
        return len(self.tail)


def plan(length: int, lanes: int, largest: int, smallest: int, counted: bool) -> StripePlan:
    """Split a write of `length` bytes in stripes; `largest` and `smallest` are bytes, `lanes` the usable rails.

    An uncounted write is all head, a counted write is all tail unless it needs more than 16 stripes. Raises UsageError
    for a negative length, or less than one lane or byte.
    """
    limits = (("length", length, 0), ("lanes", lanes, 1), ("largest", largest, 1), ("smallest", smallest, 1))
    for name, value, least in limits:
        if value < least:
            raise UsageError(f"{name} is {value}, expected at least {least}")
    needed = _ceil(length, largest)
    if not counted:
        return StripePlan(_split(0, length, max(needed, min(lanes, max(1, length // smallest))), 0, lanes), ())
    if needed <= MAX_COUNTED:
        spread = min(lanes, MAX_COUNTED, max(1, length // smallest))
        return StripePlan((), _split(0, length, max(needed, spread), 0, lanes, counted=True))
    split = length - MAX_COUNTED * largest
    head = _split(0, split, _ceil(split, largest), 0, lanes)
    return StripePlan(head, _split(split, length - split, MAX_COUNTED, len(head), lanes, counted=True))


def _ceil(length: int, largest: int) -> int:
    """Return how many messages of at most `largest` bytes hold `length` bytes."""
    return -(-length // largest)


def _split(
    start: int, length: int, pieces: int, number: int, lanes: int, *, counted: bool = False
) -> tuple[Stripe, ...]:
    """Return `pieces` stripes that cover [start, start + length), numbered from `number` for their lanes."""
    size, longer = divmod(length, pieces)
    return tuple(
        Stripe(start + j * size + min(j, longer), size + (j < longer), (number + j) % lanes, counted)
        for j in range(pieces)
    )


def check_immediate(imm: int) -> int:
    """Return a user's immediate as an int; raise UsageError unless it is an integer of 28 bits, without sign."""
    try:
        number = operator.index(imm)
    except TypeError:
        raise UsageError(f"the immediate is {imm!r}, expected an integer from 0 to {IMM_LIMIT - 1}") from None
    if not 0 <= number < IMM_LIMIT:
        raise UsageError(f"the immediate is {number}, expected 0 to {IMM_LIMIT - 1} ({IMM_BITS} bits)")
    return number


def native_immediate(imm: int | None) -> int:
    """Return an immediate as the native core takes it; raise UsageError as `check_immediate`."""
    return NO_IMMEDIATE if imm is None else check_immediate(imm)


def encode_immediate(imm: int, stripes: int) -> int:
    """Return the 32 bits that each of `stripes` stripes carries; raise UsageError if either is out of range."""
    if not 1 <= stripes <= MAX_COUNTED:
        raise UsageError(f"{stripes} stripes cannot share an immediate, expected 1 to {MAX_COUNTED}")
    return (stripes - 1) << IMM_BITS | check_immediate(imm)


def decode_immediate(imm_data: int) -> tuple[int, int]:
    """Return (immediate, stripes) of a 32-bit immediate. Every 32-bit value is valid; raises UsageError for others."""
    if not 0 <= imm_data < 1 << 32:
        raise UsageError(f"the immediate {imm_data} is not 32 bits wide")
    return imm_data & (IMM_LIMIT - 1), (imm_data >> IMM_BITS) + 1
