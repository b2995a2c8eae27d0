"""One route's pages of one chunk, layer after layer: between the caches of two ranks, as the engine takes them.

The tables are looked at once. Layers whose turns agree have the same pages at a constant distance on either side, so
that a layer costs two offsets: page numbers are neither copied nor compared again.
"""

from __future__ import annotations

import aiote

from .transfer_plan import PageTable, Route

__all__ = ["Lane"]

Both = tuple[aiote.Pages, aiote.Pages]


class Lane:
    """What goes over a route of the pages of two tables, from a region to a remote one, which are whole caches."""

    __slots__ = ("_caches", "_first", "_route", "_source", "_steps", "_target")

    def __init__(
        self, route: Route, source: PageTable, target: PageTable, region: aiote.Region, remote: aiote.RemoteRegion
    ) -> None:
        self._route = route
        self._source = source
        self._target = target
        self._caches = region, remote
        self._steps = route.steps(source, target)
        self._first: dict[int, tuple[int, Both | None]] = {}

    def pages(self, layer: int) -> Both | None:
        """Return the pages of a layer on either side, None where it has none. Raises UsageError as `Route.move`."""
        turn = layer % self._route.every
        known = self._first.get(turn)
        if known is None:
            move = self._route.move(layer, self._source, self._target)
            region, remote = self._caches
            both = (aiote.Pages(region, *move.source), aiote.Pages(remote, *move.target)) if move.writes else None
            self._first[turn] = layer, both
            return both
        first, both = known
        if both is None:
            return None
        ahead, (ours, theirs), (our_step, their_step) = layer - first, both, self._steps
        return ours.at(ours.offset + ahead * our_step), theirs.at(theirs.offset + ahead * their_step)
