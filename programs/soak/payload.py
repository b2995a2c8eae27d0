"""What is written, so that its receiver knows every byte without being told: the data of one ticket are a slice of one
table, and where the slice begins follows from the seed, the two lives and the ticket.

A *life* is one engine, numbered by the soak's parent over all processes. No byte of the table is CLEAN, BLACK or GREY.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

TABLE_BYTES = 8 << 20
SLOT_BYTES = 768 << 10
"""The longest that is written at once."""
CLEAN = 0
BLACK = 0xFE
"""What a writer's memory is filled with once its transfer is over: nobody may ever see it."""
GREY = 0xFD
"""The same after an error that said confirmed=False: it may be seen."""


class Payload:
    """The data of every ticket of one soak."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._table = np.random.default_rng(seed).integers(1, 251, TABLE_BYTES, dtype=np.uint8)

    def of(self, length: int, *what: object) -> Any:
        """Return the bytes of something; not to be written to."""
        digest = hashlib.blake2b(repr((self._seed, *what)).encode(), digest_size=8).digest()
        start = int.from_bytes(digest, "big") % (TABLE_BYTES - length)
        return self._table[start : start + length]


def first_difference(found: Any, expected: Any) -> str:
    """Say where two arrays of bytes differ, for a person."""
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return "nothing differs"
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(found)} bytes are wrong ({name_bytes(found[wrong])}), first at {at}: "
        f"{bytes(found[at : at + 8]).hex()} instead of {bytes(expected[at : at + 8]).hex()}"
    )


def name_bytes(found: Any) -> str:
    """Say of which kinds wrong bytes are."""
    names = {CLEAN: "clean", BLACK: "BLACK POISON", GREY: "grey poison"}
    counts = {name: int(np.count_nonzero(found == value)) for value, name in names.items()}
    counts["other data"] = len(found) - sum(counts.values())
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
