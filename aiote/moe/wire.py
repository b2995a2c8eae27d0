"""What travels besides rows: the route of a round, and what an immediate says. Pure.

A route is what a rank sends to every other in each round, with rows or without: 32-bit numbers, little-endian.

    magic | epoch | round, low and high half | tokens | rows | rows of each expert ... | copies for each rank ...

It is data of a peer: nothing of it becomes an offset before it was checked against itself and the config.

Each rank reserves a block of immediates for an epoch, and tells every other where its own begin (`joining.Meeting`): of
each lane SLOTS in a row,

    route, even rounds | route, odd rounds | rows, even rounds | rows, odd rounds | answers

The route and the dispatch of a round count on the parity of the round, so that a rank may be a round ahead of another;
answers need one value alone. Where one count for all ranks is enough they are told the same values; else each rank has
values of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import Sizes, round_up

__all__ = [
    "ANSWER",
    "MAX_GROUPS",
    "PAYLOAD",
    "ROUTE",
    "SLOTS",
    "OtherRoundError",
    "Route",
    "is_of",
    "route_bytes",
    "slot_of",
]

MAGIC = 0x4D6F4501
HEADER = 6
ROUTE, PAYLOAD, ANSWER = range(3)
SLOTS = 5
MAX_GROUPS = 32
Words = NDArray[np.uint32]


def slot_of(lane: int, kind: int, parity: int) -> int:
    """Return which of a rank's immediates counts what is written to it in a round."""
    return lane * SLOTS + 2 * kind + (parity if kind != ANSWER else 0)


def route_bytes(sizes: Sizes) -> int:
    """Return how many bytes the route of a rank takes."""
    return round_up(4 * (HEADER + sizes.config.experts + sizes.ranks), 64)


def is_of(words: Words, epoch: int, number: int) -> bool:
    """Whether a route says that it is of a round; nothing else of it is looked at."""
    return bool(words[1:4].tolist() == [epoch & 0xFFFFFFFF, number & 0xFFFFFFFF, number >> 32])


class OtherRoundError(ValueError):
    """A route of another round than the one that is under way; it cannot be said which of the two ranks is wrong."""


class Route(NamedTuple):
    """What a rank sends in a round: how many tokens it has, rows for each expert, and copies for each rank."""

    epoch: int
    round: int
    tokens: int
    experts: NDArray[np.int64]
    copies: NDArray[np.int64]

    def write(self, words: Words) -> None:
        """Put it into memory that is sent."""
        count = len(self.experts)
        low, high = self.round & 0xFFFFFFFF, self.round >> 32
        words[:HEADER] = MAGIC, self.epoch & 0xFFFFFFFF, low, high, self.tokens, int(self.experts.sum())
        words[HEADER : HEADER + count] = self.experts
        words[HEADER + count : HEADER + count + len(self.copies)] = self.copies

    @classmethod
    def read(cls, words: Words, sizes: Sizes, epoch: int, number: int) -> Route:
        """Return what a peer says. Raises ValueError for what cannot be, OtherRoundError for another round."""
        magic, their_epoch, low, high, tokens, rows = map(int, words[:HEADER])
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic:#x}, which is no route")
        if (their_epoch, low | high << 32) != (epoch & 0xFFFFFFFF, number):
            raise OtherRoundError(
                f"it is of round {low | high << 32} in epoch {their_epoch}, and round {number} in epoch {epoch} is "
                "under way: every rank takes part in every round"
            )
        config, count = sizes.config, sizes.config.experts
        experts = words[HEADER : HEADER + count].astype(np.int64)
        copies = words[HEADER + count : HEADER + count + sizes.ranks].astype(np.int64)
        if tokens > config.tokens:
            raise ValueError(f"it has {tokens} tokens, of {config.tokens} at most")
        if int(experts.sum()) != rows or rows > tokens * config.top_k:
            raise ValueError(f"its {int(experts.sum())} rows are not the {rows} that it says, of {tokens} tokens")
        if sizes.may_overflow(experts):
            raise ValueError(f"it names experts so often that rows may overflow: {experts.tolist()}")
        for_rank = sizes.for_ranks(experts)
        least = -(-for_rank // config.top_k)
        if (copies < least).any() or (copies > np.minimum(for_rank, tokens)).any():
            raise ValueError(f"its copies {copies.tolist()} do not fit its rows for each rank {for_rank.tolist()}")
        return cls(their_epoch, number, tokens, experts, copies)
