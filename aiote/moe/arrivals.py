"""Counters for the writes of other ranks, by immediates, and waits for them.

With on_loss="raise" one count over all ranks is enough. With on_loss="mask" each rank has a count of its own, because a
count over all ranks would not tell whose write is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import aiote

from .wire import ANSWER, PAYLOAD, ROUNDS_APART, ROUTE, SLOTS, slot_of

__all__ = ["ALL", "KINDS", "EpochImmediates", "LaneCounters"]

KINDS = (ROUTE, PAYLOAD, ANSWER)
ALL = -1
"""A key in place of a rank: the count of all ranks together."""
Lost = Callable[[int | None], BaseException | None]
Near = Callable[[int | None], None]


class EpochImmediates:
    """The immediates that others write to this rank with, in one epoch. Closed with the epoch, after the counters."""

    def __init__(self, engine: aiote.Engine, lanes: int, sources: int) -> None:
        """Reserve the immediates. `sources`: the number of ranks with counts of their own; 0 for one count over all."""
        self._blocks: dict[int, aiote.ImmediateBlock] = {}
        try:
            for rank in range(sources) if sources else (ALL,):
                self._blocks[rank] = engine.reserve_immediates(lanes * SLOTS, sources=())
        except BaseException:
            self.close()
            raise
        self.first_immediates = {rank: block.first for rank, block in self._blocks.items()}

    def first_of(self, rank: int) -> int:
        """Return the first of the immediates that a rank writes with; -1 for an unknown rank."""
        return self.first_immediates.get(rank, self.first_immediates.get(ALL, -1))

    def allow(self, rank: int, peer: aiote.Peer) -> None:
        """Count a rank's writes with its immediates from now on."""
        self._blocks[rank if rank in self._blocks else ALL].allow(peer)

    def close(self) -> None:
        """Release the immediates. Idempotent."""
        for block in self._blocks.values():
            block.close()


class LaneCounters:
    """The counters of one lane in one epoch. Closed with the epoch."""

    def __init__(self, engine: aiote.Engine, lane: int, first_immediates: Mapping[int, int]) -> None:
        """Open the counters; `first_immediates` are those of `EpochImmediates`."""
        self._separate = ALL not in first_immediates
        self._sources = tuple(first_immediates)
        self._counters: dict[tuple[int, int, int], aiote.Counter] = {}
        with ExitStack() as opened:
            for source, first in first_immediates.items():
                for kind in KINDS:
                    for number in range(ROUNDS_APART):
                        counter = opened.enter_context(engine.counter(first + slot_of(lane, kind, number)))
                        self._counters[kind, number, source] = counter
            self._opened = opened.pop_all()

    async def wait(
        self, kind: int, number: int, needs: Mapping[int, int], lost: Lost, on_late: Near | None = None
    ) -> list[int]:
        """Wait until each rank has made the writes of a round that it owes (`needs`); return the ranks that have.

        `lost(rank)` returns an error when that rank will write no more; the wait then leaves the rank out. `lost(None)`
        returns an error when the whole wait is in vain; the wait then raises it. `on_late(rank)` is called before the
        wait for that rank alone, `on_late(None)` when one write is missing and its rank is unknown. After a cancelled
        or lost wait the counts are unusable.
        """
        apart = number % ROUNDS_APART
        if not self._separate:
            counter, need = self._counters[kind, apart, ALL], sum(needs.values())
            if on_late is not None and counter.value < need:
                # Look for the late rank only if one is late: this costs one more turn of the event loop.
                await counter.wait_unless(need - 1, lambda: lost(None))
                on_late(None)
                need = 1
            await counter.wait_unless(need, lambda: lost(None))
            return list(needs)
        came = []
        for rank, need in needs.items():
            if on_late is not None:
                on_late(rank)
            try:
                counter = self._counters[kind, apart, rank]
                await counter.wait_unless(need, lambda rank=rank: lost(rank))  # type: ignore[misc]
            except aiote.PeerLostError:
                if lost(None) is not None:
                    raise
            else:
                came.append(rank)
        return came

    def surplus(self, number: int, kinds: Iterable[int]) -> set[int]:
        """Return the ranks, or ALL, whose counters are not at zero after the waits of a round.

        Call it before the end of the next round: these counts cannot belong to a later round, because another rank is
        at most one round ahead of this one.
        """
        slots = [(kind, number % ROUNDS_APART) for kind in kinds]
        return {source for source in self._sources for slot in slots if self._counters[*slot, source].value}

    def wake(self) -> None:
        """Make all waits call `lost` again."""
        for counter in self._counters.values():
            counter.wake_waits()

    def close(self) -> None:
        """Close the counters; counts that no wait has consumed are dropped."""
        self._opened.close()
