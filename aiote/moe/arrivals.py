"""Waiting for the writes of other ranks, counted by immediates.

Where a lost rank breaks the group one count for all ranks is enough. Where it is masked each rank's writes count by
themselves: a count over all would not tell whose write is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

import aiote

from .wire import ANSWER, PAYLOAD, ROUTE, SLOTS, slot_of

__all__ = ["ALL", "KINDS", "Arrivals", "Immediates"]

KINDS = (ROUTE, PAYLOAD, ANSWER)
ALL = -1
"""In place of a rank: the count of all ranks together."""
Lost = Callable[[int | None], BaseException | None]
Near = Callable[[int | None], None]


class Immediates:
    """The immediates of a rank in one epoch, which others write with; closed with it, after the counters."""

    def __init__(self, engine: aiote.Engine, lanes: int, sources: int) -> None:
        """Reserve them. `sources`: how many ranks count by themselves; 0 for one count of all of them."""
        self._blocks: dict[int, aiote.ImmediateBlock] = {}
        try:
            for rank in range(sources) if sources else (ALL,):
                self._blocks[rank] = engine.reserve_immediates(lanes * SLOTS, sources=())
        except BaseException:
            self.close()
            raise
        self.firsts = {rank: block.first for rank, block in self._blocks.items()}

    def first_of(self, rank: int) -> int:
        """Return the first of the immediates that a rank writes with."""
        return self.firsts.get(rank, self.firsts.get(ALL, -1))

    def allow(self, rank: int, peer: aiote.Peer) -> None:
        """Count what a rank writes with its own."""
        self._blocks[rank if rank in self._blocks else ALL].allow(peer)

    def close(self) -> None:
        """Give them back. Idempotent."""
        for block in self._blocks.values():
            block.close()


class Arrivals:
    """The counters of one lane in one epoch; closed with it."""

    def __init__(self, engine: aiote.Engine, lane: int, firsts: Mapping[int, int]) -> None:
        """Open them; `firsts` are the ranks' first immediates (`Immediates.firsts`)."""
        self._separate = ALL not in firsts
        self._sources = tuple(firsts)
        self._counters: dict[tuple[int, int, int], aiote.Counter] = {}
        with ExitStack() as opened:
            for kind, parities in ((ROUTE, 2), (PAYLOAD, 2), (ANSWER, 1)):
                for parity in range(parities):
                    for source, first in firsts.items():
                        counter = opened.enter_context(engine.counter(first + slot_of(lane, kind, parity)))
                        self._counters[kind, parity, source] = counter
            self._opened = opened.pop_all()

    async def wait(
        self, kind: int, parity: int, needs: Mapping[int, int], lost: Lost, near: Near | None = None
    ) -> list[int]:
        """Wait until so many writes of each rank have come, and return the ranks of which all have.

        `lost(rank)` returns an error when a rank will not write any more, `lost(None)` when nobody needs to be waited
        for; the first one leaves that rank out, the second is raised. `near(rank)` is called when that rank alone is
        waited for, `near(None)` when any one rank is. A wait that is cancelled or lost leaves counts of no use.
        """
        parity = parity if kind != ANSWER else 0
        if not self._separate:
            counter, need = self._counters[kind, parity, ALL], sum(needs.values())
            if near is not None and counter.value < need:
                # Who is late is asked only where somebody is: it costs one more turn of the loop.
                await counter.wait_unless(need - 1, lambda: lost(None))
                near(None)
                need = 1
            await counter.wait_unless(need, lambda: lost(None))
            return list(needs)
        came = []
        for rank, need in needs.items():
            if near is not None:
                near(rank)
            try:
                await self._counters[kind, parity, rank].wait_unless(need, lambda rank=rank: lost(rank))  # type: ignore[misc]
            except aiote.PeerLostError:
                if lost(None) is not None:
                    raise
            else:
                came.append(rank)
        return came

    def surplus(self, parity: int, kinds: Iterable[int]) -> set[int]:
        """Return the ranks, or ALL, whose counters are not at zero after the waits of a round.

        A rank is one round ahead at most, and answers a round only after this one has begun it: so these counts cannot
        be of a later round.
        """
        slots = [(kind, parity if kind != ANSWER else 0) for kind in kinds]
        return {source for source in self._sources for slot in slots if self._counters[*slot, source].value}

    def wake(self) -> None:
        """Have all waits look again whether they are lost."""
        for counter in self._counters.values():
            counter.wake_waits()

    def close(self) -> None:
        """Free the immediates; what came on them and was not waited for is dropped."""
        self._opened.close()
