"""Immediates of requests: blocks in a row, counted together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiote

__all__ = ["Block", "Immediates"]


class Immediates:
    """Blocks of `size` immediates in a row, from `base` on, used in rotation.

    Whoever fails leaves counts behind, and a NIC's queue may hold one more that nobody has looked at yet. So a block
    comes up again after all the others, and begins with empty counters.
    """

    def __init__(self, engine: aiote.Engine, base: int, size: int, blocks: int) -> None:
        self._engine = engine
        self._base = base
        self._size = size
        self._blocks = blocks
        self._next = 0
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, needs: Sequence[int]) -> Block:
        """Take a block, and wait for so many counts of each. Raises UsageError at the engine's limit of counters,
        ClosedError.
        """
        while self._next in self._used:
            self._next = (self._next + 1) % self._blocks
        number, self._next = self._next, (self._next + 1) % self._blocks
        first = self._base + number * self._size
        row = self._engine.counters(first, needs)
        self._used.add(number)
        return Block(first, row, lambda: self._used.discard(number))


@dataclass(slots=True)
class Block:
    """The immediates of one attempt: of every layer, then of the tail."""

    first: int
    row: aiote.CounterRow
    give_back: Callable[[], None]

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.row.close()
        self.give_back()
