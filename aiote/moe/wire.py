"""The data that travels besides rows: the route of a round, and the meaning of each immediate. Pure.

A rank sends a route to every other rank in each round, even if it sends no rows. A route consists of little-endian
32-bit numbers:

    magic | epoch | round, low and high half | tokens | rows | rows of each expert ... | copies for each rank ...
    | a bit for each rank: whether the sender writes to its inbox through shared memory (`sharing`)

A route comes from a peer and is untrusted: this rank checks it against itself and against the config before it derives
any offset from it.

Each rank reserves blocks of immediates for an epoch, and tells every other rank the first immediate that it has to
write with (`joining.Meeting`). Each lane has SLOTS consecutive immediates in a block:

    routes, rounds 0, 3, 6 ... | routes, rounds 1, 4, 7 ... | routes, rounds 2, 5, 8 ... | rows, likewise | answers

Each kind of write has three immediates, by the number of the round modulo 3. Two would be enough to keep apart the
counts of a rank that is one round ahead of another. The third keeps the counts of the last round apart from both, so
that a count that comes after its round is noticed, and not taken for one of a later round (`Lane.wait`). With
on_loss="raise" one count over all ranks is enough, so all ranks write with the same immediates; with on_loss="mask"
each rank has immediates of its own.
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
    "ROUNDS_APART",
    "ROUTE",
    "SLOTS",
    "OtherRoundError",
    "Route",
    "is_of",
    "route_bytes",
    "slot_of",
    "words_of_bits",
]

MAGIC = 0x4D6F4501
HEADER = 6
ROUTE, PAYLOAD, ANSWER = range(3)
ROUNDS_APART = 3
"""Rounds with immediates of their own; the next round uses the first's again."""
SLOTS = 3 * ROUNDS_APART
MAX_GROUPS = 32
Words = NDArray[np.uint32]


def slot_of(lane: int, kind: int, number: int) -> int:
    """Return the offset in a block of immediates for one kind of write to a lane, in the round of this number."""
    return lane * SLOTS + ROUNDS_APART * kind + number % ROUNDS_APART


def route_bytes(sizes: Sizes) -> int:
    """Return the size of a route in bytes."""
    return round_up(4 * (HEADER + sizes.config.experts + sizes.ranks + words_of_bits(sizes.ranks)), 64)


def words_of_bits(count: int) -> int:
    """Return how many numbers of 32 bits hold so many bits."""
    return -(-count // 32)


def is_of(words: Words, epoch: int, number: int) -> bool:
    """Return whether a route names this epoch and round; the rest of the route is not checked."""
    return bool(words[1:4].tolist() == [epoch & 0xFFFFFFFF, number & 0xFFFFFFFF, number >> 32])


class OtherRoundError(ValueError):
    """A route names another round than the current one. This rank cannot tell which of the two ranks is wrong."""


class Route(NamedTuple):
    """The counts that a rank sends in a round: its tokens, its rows for each expert, and its copies for each rank.

    `mapped` has a bit for each rank that it writes to through shared memory.
    """

    epoch: int
    round: int
    tokens: int
    experts: NDArray[np.int64]
    copies: NDArray[np.int64]
    mapped: Words = np.zeros(0, np.uint32)

    def write(self, words: Words) -> None:
        """Write the route into the memory that it is sent from."""
        count = len(self.experts)
        low, high = self.round & 0xFFFFFFFF, self.round >> 32
        words[:HEADER] = MAGIC, self.epoch & 0xFFFFFFFF, low, high, self.tokens, int(self.experts.sum())
        words[HEADER : HEADER + count] = self.experts
        end = HEADER + count + len(self.copies)
        words[HEADER + count : end] = self.copies
        words[end : end + len(self.mapped)] = self.mapped

    def maps(self, rank: int) -> bool:
        """Return whether the sender writes to that rank's inbox through shared memory."""
        return bool(int(self.mapped[rank // 32]) >> rank % 32 & 1)

    @classmethod
    def read(cls, words: Words, sizes: Sizes, epoch: int, number: int) -> Route:
        """Return a peer's route. Raises ValueError for an impossible route, OtherRoundError if the round differs.

        The memory is copied before the first check, because the peer may write to it at any time.
        """
        words = words.copy()
        magic, their_epoch, low, high, tokens, rows = map(int, words[:HEADER])
        if magic != MAGIC:
            raise ValueError(f"it begins with {magic:#x}, so it is not a route")
        if (their_epoch, low | high << 32) != (epoch & 0xFFFFFFFF, number):
            raise OtherRoundError(
                f"it is of round {low | high << 32} in epoch {their_epoch}, and round {number} in epoch {epoch} is "
                "under way: every rank must take part in every round"
            )
        config, count = sizes.config, sizes.config.experts
        experts = words[HEADER : HEADER + count].astype(np.int64)
        end = HEADER + count + sizes.ranks
        copies = words[HEADER + count : end].astype(np.int64)
        if tokens > config.tokens:
            raise ValueError(f"it has {tokens} tokens, expected at most {config.tokens}")
        if int(experts.sum()) != rows or rows > tokens * config.top_k:
            raise ValueError(f"it counts {int(experts.sum())} rows by expert, but announces {rows} for {tokens} tokens")
        if sizes.may_overflow(experts):
            raise ValueError(f"it names experts so often that rows may overflow: {experts.tolist()}")
        for_rank = sizes.for_ranks(experts)
        least = -(-for_rank // config.top_k)
        if (copies < least).any() or (copies > np.minimum(for_rank, tokens)).any():
            raise ValueError(f"its copies {copies.tolist()} do not fit its rows for each rank {for_rank.tolist()}")
        return cls(their_epoch, number, tokens, experts, copies, words[end : end + words_of_bits(sizes.ranks)])
