"""Immediates of requests: blocks in a row, counted together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiote

__all__ = ["Block", "Immediates"]


class Immediates:
    """The blocks of immediates that requests have now; the engine grants them."""

    def __init__(self, engine: aiote.Engine) -> None:
        self._engine = engine
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, needs: Sequence[int], sources: Sequence[aiote.Peer]) -> Block:
        """Take a block, and wait for so many counts of each, by these peers alone.

        Raises UsageError at the engine's limits, ClosedError.
        """
        granted = self._engine.reserve_immediates(len(needs), sources)
        try:
            row = self._engine.counters(granted.first, needs)
        except BaseException:
            granted.close()
            raise
        self._used.add(granted.first)
        return Block(self._engine, granted, row, lambda: self._used.discard(granted.first))


@dataclass(slots=True)
class Block:
    """The immediates of one attempt, one for each layer."""

    engine: aiote.Engine
    granted: aiote.ImmediateBlock
    row: aiote.CounterRow
    over: Callable[[], None]

    @property
    def first(self) -> int:
        """The immediate of the first layer."""
        return self.granted.first

    def close(self, *, complete: bool) -> None:
        """Free the immediates, and what has come on them since the row was closed, where it was not `complete`."""
        self.row.close()
        if not complete:
            # Else each stays in use until its value is granted again. An engine that is closed has none.
            with suppress(aiote.AioteError):
                self.engine.counters(self.first, [0] * len(self.granted)).close()
        self.granted.close()
        self.over()
