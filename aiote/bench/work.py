"""The description of one run, and the line protocol that every worker of a comparison speaks.

A worker is one process, a side of a pair. It prints lines of JSON and reads lines of text:

1. it prints `{"address": text, "library": text}`; it receives `peer TEXT` with the other side's address and prints
   `{"ready": true}`;
2. for each run both sides receive `run op=... size=... window=... count=... pages=... seed=...`; the side that sends
   bytes fills its arena with the run's pattern, the other clears its own; each prints `{"prepared": true}`, or
   `{"unsupported": why}`;
3. both receive `go`, the target first, and print a result: `seconds`, `cpu` (seconds of CPU time of the process),
   `verified` (the receiving side found the pattern in its place), and for round trips `p50_us`, `p99_us`, `max_us`;
4. `quit`, or the end of standard input, ends it. `{"error": text}` may come at any time, before it ends by itself.

The pattern: word i (64 bits, little-endian) of the arena is seed * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["HUGE_BYTES", "MEMORIES", "OPS", "PAGE_STEP", "Work", "pattern"]

HUGE_BYTES = 2 << 20
"""The unit of an arena's length, a huge page, because with small pages a copy between processes costs twice as much."""
OPS = ("write", "pages", "latency", "rate", "read", "send")
MEMORIES = {
    "host": ("host", "host"),
    "cuda": ("cuda", "cuda"),
    "cuda-host": ("cuda", "host"),
    "host-cuda": ("host", "cuda"),
}
"""The memories of the initiator and of the target, by the name of the combination."""
PAGE_STEP = 7919
"""Page j of a request goes to page j * PAGE_STEP modulo the pages of a request: a prime, so that all are hit."""

_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)
_WORD_STEP = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True)
class Work:
    """One run: `count` requests of `size` bytes (`pages` pages of `size` bytes each), `window` of them outstanding.

    Request r uses slot r modulo window; a slot is as long as a request, and slots begin at the start of the arena.
    """

    op: str
    size: int
    window: int
    count: int
    pages: int = 0
    seed: int = 1

    @property
    def request_bytes(self) -> int:
        """Bytes of one request."""
        return self.size * (self.pages if self.op == "pages" else 1)

    @property
    def slots(self) -> int:
        """How many slots the run uses."""
        return 1 if self.op == "latency" else min(self.window, self.count)

    @property
    def used(self) -> int:
        """How many bytes of the arena the run uses, from its start."""
        return self.slots * self.request_bytes

    def line(self) -> str:
        """Return the line that orders this run from a worker."""
        names = ("op", "size", "window", "count", "pages", "seed")
        return "run " + " ".join(f"{name}={getattr(self, name)}" for name in names)

    @classmethod
    def parse(cls, line: str) -> Work:
        """Parse such a line. Raises ValueError for any other text."""
        words = line.split()
        values: dict[str, Any] = dict(word.split("=", 1) for word in words[1:])
        try:
            op = values.pop("op")
            return cls(op=op, **{name: int(value) for name, value in values.items()})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a run: {line!r}: {error}") from None


def pattern(seed: int, words: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return `words` words of the pattern of a run, from word `first` on."""
    with np.errstate(over="ignore"):
        steps = np.arange(first, first + words, dtype=np.uint64) * _WORD_STEP
        return steps + np.uint64(seed) * _SEED_STEP
