"""Make the batched transfers of one request from a map and page tables, and track them together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio.lowlevel

import aiote

from ..aio import Condition, TransferWindow
from ..rails import PageIndex, RequestPages, page_fault
from ..transfers import Move, PreparedMoves
from .mapping import CacheMap, PageRow, Pattern
from .tensors import CacheSpec

if TYPE_CHECKING:
    from ..rails import LayerRun

__all__ = [
    "PagedMoves",
    "Rows",
    "SessionMoves",
    "TransferBatch",
    "TransferStatistics",
    "Written",
    "check_rows",
    "check_target",
    "token_count",
]

Rows = dict[int, PageRow]

MOST_AT_ONCE = 1 << 14
"""A transfer moves this many pieces, or one unit if that has more. The other rank's layout decides how many pieces a
layer has (up to MOST_PIECES), so both the time of a turn of the loop and the offsets in flight are bounded by this: a
piece takes 11 ns to compute and submit, and 16 bytes.
"""
MOST_KEPT = 1 << 18
"""The most pieces of a request whose offsets are kept for the layers that move alike; the offsets of further pieces are
computed for each layer.
"""


def check_rows(spec: CacheSpec, rows: Rows) -> None:
    """Raise UsageError for page numbers that a cache does not have."""
    fault = page_fault(rows, spec.groups, distinct=False)
    if fault is not None:
        raise _outside(spec, fault[0], rows[fault[0]])


def _outside(spec: CacheSpec, group: int, row: PageRow) -> aiote.UsageError:
    last = spec.groups.get(group, 0) - 1
    return aiote.UsageError(f"{spec.name}: group {group} has pages 0 to {last}, got {row.pages}")


def check_target(spec: CacheSpec, rows: Rows, tokens: int) -> None:
    """Raise UsageError for rows that cannot receive `tokens` tokens: a page that the cache does not have, a page twice
    in a row, or too few pages. Groups without a row are not moved; opaque pages have no tokens.
    """
    fault = page_fault(rows, spec.groups, distinct=True)
    if fault is not None:
        group, twice = fault
        if not twice:
            raise _outside(spec, group, rows[group])
        raise aiote.UsageError(f"{spec.name}: a page occurs twice in the row of group {group}: {rows[group].pages}")
    for group, row in rows.items():
        in_page = spec.page_tokens.get(group, 0)
        room = (row.start + len(row.pages)) * in_page
        if in_page and room < tokens:
            raise aiote.UsageError(
                f"{spec.name}: the row of group {group} ends at token {room} of {tokens}, with "
                f"{len(row.pages)} pages of {in_page} tokens from page {row.start} on: give it pages for all tokens"
            )


def token_count(tokens: int) -> int:
    """Return `tokens` as an integer. Raises UsageError unless it is an integer from 0 on."""
    try:
        count = operator.index(tokens)
    except TypeError:
        count = -1
    if count < 0:
        raise aiote.UsageError(f"tokens={tokens!r}: expected an integer from 0 on")
    return count


class PagedMoves:
    """The page lists of one request in the form that the engine takes. The memories of a side are either regions of
    this engine or remote regions. Layers that move alike share their offsets.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        sources: Sequence[aiote.Region | aiote.RemoteRegion | None],
        targets: Sequence[aiote.Region | aiote.RemoteRegion | None],
        source_rows: Rows,
        target_rows: Rows,
    ) -> None:
        self.map = cache_map
        self._memories = sources, targets
        self._rows = source_rows, target_rows
        self._known: dict[tuple[Pattern, int, int, range], tuple[aiote.Pages, aiote.Pages]] = {}
        self._offsets: dict[tuple[Pattern, range], tuple[PageIndex, PageIndex]] = {}
        self._kept = 0

    def layer(self, layer: int, spans: list[range]) -> Iterator[tuple[aiote.Pages, aiote.Pages]]:
        """Yield the source and target pages of a layer for the units `spans` of each group. Raises UsageError."""
        units_of = dict(zip(self.map.units, spans, strict=True))
        for move in self.map.moves[layer]:
            span = units_of[move.pattern.group]
            step = max(1, MOST_AT_ONCE // move.pattern.pieces)
            for first in range(span.start, span.stop, step):
                units = range(first, min(first + step, span.stop))
                source, target = self._known_pages((move.pattern, move.source_memory, move.target_memory, units))
                yield source.at(move.source_offset), target.at(move.target_offset)

    def _known_pages(self, key: tuple[Pattern, int, int, range]) -> tuple[aiote.Pages, aiote.Pages]:
        found = self._known.get(key)
        if found is None:
            found = self._pages(*key)
            if (key[0], key[3]) in self._offsets:
                self._known[key] = found
        return found

    def offsets(self, pattern: Pattern, span: range) -> tuple[PageIndex, PageIndex]:
        """Return the offsets of the pieces of the units `span` on both sides."""
        found = self._offsets.get((pattern, span))
        if found is None:
            here, there = self._rows
            found = pattern.offsets(here[pattern.group], there[pattern.group], span)
            if self._kept + len(found[0]) <= MOST_KEPT:
                self._kept += len(found[0])
                self._offsets[pattern, span] = found
        return found

    def _pages(self, pattern: Pattern, source: int, target: int, span: range) -> tuple[aiote.Pages, aiote.Pages]:
        ours, theirs = self.offsets(pattern, span)
        region, remote = self._memories[0][source], self._memories[1][target]
        if region is None or remote is None:
            raise aiote.UsageError("the peer did not lend a memory that the part lies in")
        return aiote.Pages(region, ours, pattern.nbytes, 1), aiote.Pages(remote, theirs, pattern.nbytes, 1)


class SessionMoves:
    """The moves of all layers of a session in the form that the engine takes for many layers at once.

    `groups` names for each layer the positions, among the groups of the map, of the groups that it has moves of.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        peer: aiote.Peer,
        sources: Sequence[aiote.Region],
        targets: Sequence[aiote.RemoteRegion | None],
        immediates: dict[int, int],
    ) -> None:
        places = {group: place for place, group in enumerate(cache_map.units)}
        self.groups = [[places[group] for group, _ in cache_map.pieces[layer]] for layer in cache_map.layers]
        numbers: dict[Pattern, int] = {}
        layers: list[tuple[int, list[Move]]] = []
        lent = True
        for layer in cache_map.layers:
            layers.append((immediates[layer], []))
            for move in cache_map.moves[layer]:
                onto = targets[move.target_memory] if targets else None
                lent = lent and onto is not None
                pattern = numbers.setdefault(move.pattern, len(numbers))
                source, nbytes = sources[move.source_memory], move.pattern.nbytes
                if onto is not None:
                    layers[-1][1].append(Move(source, move.source_offset, onto, move.target_offset, pattern, nbytes))
        self._plan = cache_map.plan
        self._patterns = [
            (places[pattern.group], pattern.pieces, pattern.source, pattern.target, pattern.axes) for pattern in numbers
        ]
        self._prepared = PreparedMoves.of(peer, layers) if lent else None

    def pages(self, source: Rows, target: Rows) -> RequestPages:
        """Return the pages of a request in the form that `run` takes."""
        return RequestPages(self._plan, self._patterns, source, target)

    def run(
        self, pages: RequestPages, spans: list[range], layers: list[int], imm: int
    ) -> tuple[LayerRun, Callable[[LayerRun, Any], aiote.Transfer]] | None:
        """Make a request of the first of these layers, as many as one transfer may have; the units `spans` of each
        group move. Return it with the function that starts it, or None if the layers are to be written one by one.
        """
        if self._prepared is None:
            return None
        offsets = pages.offsets(spans, MOST_AT_ONCE)
        run = self._prepared.run(layers, offsets, imm, MOST_AT_ONCE) if offsets is not None else None
        return None if run is None else (run, self._prepared.start)


class Written(NamedTuple):
    """The number of successful transfers, their bytes, and the seconds during which at least one was in flight."""

    transfers: int
    bytes: int
    busy_s: float


class TransferStatistics:
    """Count the transfers of all batches of a rank; a batch counts once none of its transfers is in flight. `now`
    returns the time, also outside of tasks.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._busy = 0
        self._busy_since = 0.0
        self.written = Written(0, 0, 0.0)

    def record_begin(self) -> None:
        """Record that an idle batch has a transfer in flight."""
        if not self._busy:
            self._busy_since = self._now()
        self._busy += 1

    def record_end(self, transfers: int, nbytes: int) -> None:
        """Record that a batch is idle again, with its successful transfers and their bytes since `record_begin`."""
        self._busy -= 1
        took = 0.0 if self._busy else self._now() - self._busy_since
        was = self.written
        self.written = Written(was.transfers + transfers, was.bytes + nbytes, was.busy_s + took)


class TransferBatch(TransferWindow[aiote.Transfer]):
    """A request's transfers in flight toward one peer. The peer limits them, so that batches share its room."""

    def __init__(
        self, engine: aiote.Engine, peer: aiote.Peer, changed: Condition, traffic: TransferStatistics | None = None
    ) -> None:
        super().__init__(changed)
        self.engine, self._peer = engine, peer
        self._traffic = traffic
        self._counted = 0, 0
        self._pieces = 0  # that were submitted since `room` last let other tasks run

    def _record_change(self, failed: aiote.Transfer | None) -> None:
        if self._traffic is not None and not self._flight:
            before, self._counted = self._counted, (self._flight.landed, self._flight.landed_bytes)
            self._traffic.record_end(self._counted[0] - before[0], self._counted[1] - before[1])
        super()._record_change(failed)

    def end_if_idle(self) -> bool:
        """Return whether no transfer is in flight; if so, end the batch: the caller must not submit more."""
        if self._flight:
            return False
        # Break the reference cycle: one in each request would trigger the garbage collector every few requests.
        self._flight.changed = None
        return True

    @property
    def landed(self) -> int:
        """The number of successful transfers."""
        return self._flight.landed

    @property
    def is_busy(self) -> bool:
        """Whether a transfer is in flight. Raises the error of the first one that failed."""
        self.raise_failure()
        return bool(self._flight)

    @property
    def in_flight(self) -> bool:
        """Whether a transfer is in flight."""
        return bool(self._flight)

    @property
    def has_room(self) -> bool:
        """Whether another transfer may start now; if not, the caller awaits `room`."""
        return self._pieces < MOST_AT_ONCE and self._peer.has_room

    async def room(self) -> None:
        """Wait until the peer has room, and let other tasks run first. Raises PeerError."""
        self._pieces = 0
        await anyio.lowlevel.checkpoint()
        await self.engine.room(self._peer)

    def begin_turn(self) -> None:
        """Record that the caller is in another turn of the loop than at the last transfer."""
        self._pieces = 0

    def submit(self, pieces: int, start: Callable[..., aiote.Transfer], *arguments: Any, **more: Any) -> aiote.Transfer:
        """Start a transfer of some pieces; the caller has made sure of room. Raises PeerError once the peer is lost."""
        if self._peer.lost:
            # A transfer started now would use the next connection, and the peer relies on this not happening.
            raise aiote.PeerLostError(str(self._peer.address), self._peer.reason)
        self._pieces += pieces
        transfer = start(*arguments, **more)
        if self._traffic is not None and not self._flight:
            self._traffic.record_begin()
        self.add(transfer)
        return transfer

    async def drain(self) -> None:
        """Cancel the transfers in flight, wait until all are over, and end the batch."""
        await super().drain()
        self.end_if_idle()
