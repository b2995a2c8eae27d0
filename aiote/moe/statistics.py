"""The counters that a rank keeps of its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["MoeStatistics"]


@dataclass(slots=True)
class MoeStatistics:
    """The counters of one rank: rounds that ended, rows that it sent, rows that it received (by its own expert and by
    source rank), bytes that it wrote to others, and seconds that it waited for routes, rows and answers.

    `waited_for` (ranks,) has the seconds that this rank waited for one rank's route alone, after the routes of all
    others had come; with on_loss="mask", after those of the ranks before it. The slowest rank has the largest value on
    every other rank.
    """

    rounds: int = 0
    sent_rows: int = 0
    sent_bytes: int = 0
    dropped_rows: int = 0
    expert_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    rank_rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    waited_for: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    waited: dict[str, float] = field(default_factory=lambda: {"routes": 0.0, "rows": 0.0, "answers": 0.0})
