"""The config that all ranks of a group share, and the sizes that follow from it. Pure: it knows no engine or memory.

Every rank computes the same sizes from the same config. Experts are assigned to ranks in order: rank r of R holds
experts r * L to (r + 1) * L, with L = ceil(experts / R), so the last ranks may hold fewer experts or none. A row on the
wire is a token's `hidden` elements, its scales, and a tail that identifies the token:

    | hidden elements | pad to 4 | scales | pad to 4 | token u32 | top_k ids i32 | top_k weights f32 | pad to 16 |
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

__all__ = ["FLOAT_TYPES", "ITEMSIZES", "MoeConfig", "Sizes"]

ITEMSIZES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "uint8": 1,
    "int8": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
}
FLOAT_TYPES = ("bfloat16", "float16", "float32")
MAX_RANKS = 511
MAX_LANES = 8
MAX_EXPERTS = 1 << 16
NO_LIMIT = 1 << 62
DIRECT_BYTES = 2048
"""A row of fewer bytes costs less to pack than to post by itself: over `local`, in CPU time, by 2 to 16 %."""


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of `unit` that is not below a value."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The description of a group's tokens and of their transport; it is the same on every rank of a group.

    experts: their number over all ranks. top_k: experts that a token names. hidden: elements of a token. tokens: the
    most that one rank sends in a round; a rank may send fewer or none. dtype, scales, scale_dtype: the type of a
    token's elements, the number of scales beside them, and their type; bytes are moved and never interpreted.
    out_dtype: the type of the experts' results.

    layout: "grouped" (experts of a rank, rows, hidden), "contiguous" (rows, hidden), where each expert's rows begin at
    a multiple of `align`, or "rank" (ranks, tokens, hidden), where each rank gets a token once. rows: the receive
    capacity of an expert ("grouped") or of a rank ("contiguous"); by default enough for tokens that name no expert
    twice. on_overflow: "raise" MoeOverflowError on every rank, or "drop" the last rows of each expert, in the order of
    source rank, token and k.

    placement: "packed" (one write to each peer, which then places the rows) or "direct" (one write for each row, to its
    final place); "auto" is "direct" for tokens of 2 KiB and more, where the config allows it. private: rows of the
    "packed" receive region that are reserved for each source; rows beyond them wait for the counts of all ranks. None
    reserves all rows. copies: send a token once to each "expert", or once to each "rank" that holds one of its experts.
    reduce: apply weights at the "source", or at the "expert", where each rank sums its own experts' results; "expert"
    needs copies="rank" and rounds twice.

    lanes: rounds that may be in flight at once. on_loss: "raise" PeerLostError, or "mask" a lost rank and go on.
    shared_memory: "auto" lets ranks of one host write rows and results straight into each other's memory, where that is
    possible; with "off" they use the rails, as ranks of different hosts do.
    """

    experts: int
    top_k: int
    hidden: int
    tokens: int
    dtype: str = "bfloat16"
    scales: int = 0
    scale_dtype: str = "float32"
    out_dtype: str = "bfloat16"
    layout: Literal["grouped", "contiguous", "rank"] = "grouped"
    align: int = 1
    rows: int | None = None
    on_overflow: Literal["raise", "drop"] = "raise"
    private: int | None = None
    placement: Literal["auto", "packed", "direct"] = "auto"
    copies: Literal["expert", "rank"] = "expert"
    reduce: Literal["source", "expert"] = "source"
    lanes: int = 1
    on_loss: Literal["raise", "mask"] = "raise"
    shared_memory: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        """Check each field, then their combinations. Raises UsageError."""
        _check_numbers(self)
        _check_choices(self)
        _check_together(self)

    @property
    def digest(self) -> bytes:
        """The 16 bytes that two ranks compare; equal configs have equal digests."""
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=16).digest()


def _check_numbers(config: MoeConfig) -> None:
    limits = {
        "experts": (1, MAX_EXPERTS),
        "top_k": (1, 1 << 10),
        "hidden": (1, 1 << 24),
        "tokens": (1, 1 << 24),
        "scales": (0, 1 << 20),
        "align": (1, 1 << 16),
        "lanes": (1, MAX_LANES),
        "rows": (1, 1 << 31),
        "private": (1, 1 << 31),
    }
    for name, (least, most) in limits.items():
        value = getattr(config, name)
        if value is None and name in ("rows", "private"):
            continue
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{name}={value!r}: expected an integer from {least} to {most}")
    if config.tokens * config.top_k >= 1 << 31:
        raise UsageError(f"tokens={config.tokens}, top_k={config.top_k}: expected a product below 2**31")


def _check_choices(config: MoeConfig) -> None:
    choices = {
        "dtype": tuple(ITEMSIZES),
        "scale_dtype": tuple(ITEMSIZES),
        "out_dtype": FLOAT_TYPES,
        "layout": ("grouped", "contiguous", "rank"),
        "on_overflow": ("raise", "drop"),
        "placement": ("auto", "packed", "direct"),
        "copies": ("expert", "rank"),
        "reduce": ("source", "expert"),
        "on_loss": ("raise", "mask"),
        "shared_memory": ("auto", "off"),
    }
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise UsageError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _check_together(config: MoeConfig) -> None:
    """Refuse fields that exclude each other. Raises UsageError with the reason."""
    whole = config.layout == "rank"
    wrong = (
        (
            whole and config.rows is not None,
            "rows: layout='rank' has room for `tokens` of each rank, no more and no less",
        ),
        (whole and config.copies != "rank", "layout='rank' has a token once for each rank: it needs copies='rank'"),
        (whole and config.reduce != "expert", "layout='rank' returns one row for each copy: it needs reduce='expert'"),
        (config.reduce == "expert" and config.copies != "rank", "reduce='expert' needs copies='rank'"),
        (config.align > 1 and config.layout != "contiguous", "align is of layout='contiguous' alone"),
        (
            config.layout == "contiguous" and (config.rows or 0) % config.align != 0,
            f"rows={config.rows} is no multiple of align={config.align}",
        ),
        (
            config.placement == "direct" and (config.copies == "rank" or config.on_loss == "mask"),
            "placement='direct' needs copies='expert', for each row has one place, and on_loss='raise', for the place "
            "depends on what every rank sends",
        ),
        (
            config.private is not None and (config.copies == "rank" or config.placement == "direct"),
            "private is of placement='packed' with copies='expert' alone",
        ),
        (
            config.on_loss == "mask" and (config.private is not None or config.rows is not None),
            "on_loss='mask' needs rows=None and private=None: what overflows depends on every rank's counts, and ranks "
            "may differ about those of a rank that is lost",
        ),
    )
    for bad, why in wrong:
        if bad:
            raise UsageError(why)


class Sizes:
    """The sizes of a config on a number of ranks. All ranks have the same, so each knows the layout of the others."""

    def __init__(self, config: MoeConfig, ranks: int) -> None:
        """Compute the sizes. Raises UsageError for an impossible number of ranks."""
        if not 1 <= ranks <= MAX_RANKS:
            raise UsageError(f"{ranks} ranks: expected from 1 to {MAX_RANKS}")
        self.config, self.ranks = config, ranks
        self.local = -(-config.experts // ranks)
        by_rank = config.copies == "rank"
        self.whole = config.layout == "rank"
        self.direct = config.placement == "direct" or (
            config.placement == "auto"
            and not by_rank
            and config.on_loss == "raise"
            and config.private is None
            and config.hidden * ITEMSIZES[config.dtype] >= DIRECT_BYTES
        )
        # The layout of a row, in bytes.
        self.x_bytes = config.hidden * ITEMSIZES[config.dtype]
        self.scales_at = round_up(self.x_bytes, 4)
        self.scale_bytes = config.scales * ITEMSIZES[config.scale_dtype]
        self.token_at = round_up(self.scales_at + self.scale_bytes, 4)
        self.ids_at = self.token_at + 4
        self.weights_at = self.ids_at + 4 * config.top_k
        self.row = round_up(self.weights_at + 4 * config.top_k, 16)
        self.y_bytes = config.hidden * ITEMSIZES[config.out_dtype]
        self.y_row = round_up(self.y_bytes, 16)
        # Numbers of rows.
        self.sent = config.tokens * (min(config.top_k, ranks) if by_rank else config.top_k)
        full = config.tokens if by_rank else config.tokens * config.top_k
        self.private = min(config.private or full, full)
        most = ranks * config.tokens
        if config.layout == "grouped":
            self.rows = config.rows or most
            self.placed = self.rows * self.local
        elif config.layout == "contiguous":
            least = most * min(config.top_k, self.local) + self.local * (config.align - 1)
            self.rows = config.rows or round_up(least, config.align)
            self.placed = self.rows
        else:
            self.rows, self.placed = config.tokens, most
        self.shared = min(self.placed, ranks * (full - self.private))
        self._count_answers()

    def _count_answers(self) -> None:
        config = self.config
        self.answers = self.sent if config.reduce == "expert" else config.tokens * config.top_k
        # With on_loss="mask" each rank has slots of its own for everything that it writes, including its answers.
        self.has_own_slots = config.on_loss == "mask"
        of_rank = config.tokens if config.reduce == "expert" else config.tokens * min(config.top_k, self.local)
        self.answers_of_rank = min(self.answers, of_rank)
        self.answer_lines = self.ranks * self.answers_of_rank if self.has_own_slots else self.answers

    def for_ranks(self, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows for each rank (ranks,), from the rows for each expert (experts,)."""
        padded = np.zeros(self.ranks * self.local, np.int64)
        padded[: self.config.experts] = experts
        found: NDArray[np.int64] = padded.reshape(self.ranks, self.local).sum(1)
        return found

    def most_of_source(self) -> tuple[int, int]:
        """Return the most rows that a source may have for one expert and for one rank.

        There is a limit with on_loss="mask", because ranks may then know different counts of the other ranks. While
        every source stays within it, all rows fit.
        """
        config = self.config
        if config.on_loss == "raise" or self.whole:
            return NO_LIMIT, NO_LIMIT
        if config.layout == "grouped":
            return config.tokens, NO_LIMIT
        return NO_LIMIT, config.tokens * min(config.top_k, self.local)

    def may_overflow(self, experts: NDArray[np.int64]) -> bool:
        """Return whether the rows of one source (experts,) exceed `most_of_source`."""
        of_expert, of_rank = self.most_of_source()
        return bool((experts > of_expert).any() or (self.for_ranks(experts) > of_rank).any())

    def first_expert_of(self, rank: int) -> int:
        """Return the first expert of a rank."""
        return min(rank * self.local, self.config.experts)

    def experts_of(self, rank: int) -> int:
        """Return how many experts a rank holds."""
        return self.first_expert_of(rank + 1) - self.first_expert_of(rank)
