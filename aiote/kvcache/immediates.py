"""Own the immediates of a decode rank's requests: one block per request, counted together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiote

__all__ = ["Block", "Immediates"]


class Immediates:
    """The blocks of immediates that requests hold now; the engine grants them."""

    def __init__(self, engine: aiote.Engine) -> None:
        self._engine = engine
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._used)

    def open(self, needs: Sequence[int], sources: Sequence[aiote.Peer]) -> Block:
        """Reserve a block and begin to count on it: `needs[i]` counts on the i-th immediate, by these peers alone.

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
    """The immediates of one request, one for each layer."""

    engine: aiote.Engine
    granted: aiote.ImmediateBlock
    row: aiote.CounterRow
    on_close: Callable[[], None]

    @property
    def first(self) -> int:
        """The immediate of the first layer."""
        return self.granted.first

    def close(self, *, complete: bool) -> None:
        """Free the immediates; unless `complete`, also drop the counts that came after the row was closed."""
        self.row.close()
        if not complete:
            # A leftover count keeps its immediate in use until the value is granted again. A closed engine has none.
            with suppress(aiote.AioteError):
                self.engine.counters(self.first, [0] * len(self.granted)).close()
        self.granted.close()
        self.on_close()
