"""Posting the writes of one step to many ranks: the one place that says how.

Where a lost rank breaks the group, all writes of a step are one scatter, which is prepared for the epoch. Where it is
masked each has a transfer of its own, for of a scatter only the first failure is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiote

__all__ = ["Inbox", "Posting", "Write", "groups_alone"]

Ints = NDArray[np.int64]


class Write(NamedTuple):
    """Bytes of the outbox to write to a rank's inbox: where they begin there and here, and how many."""

    rank: int
    to: int
    at: int
    nbytes: int


class Inbox:
    """The parts of a rank's inbox that it has lent, in order, and a region of each."""

    def __init__(self, parts: Sequence[slice], regions: Sequence[aiote.RemoteRegion]) -> None:
        self.regions = regions
        self._begins = [part.start for part in parts]

    def find(self, to: int) -> tuple[int, int]:
        """Return the number of the part that a place in the inbox is in, and where in that part."""
        number = bisect_right(self._begins, to) - 1
        return number, to - self._begins[number]


class Posting:
    """The ranks' inboxes in one epoch, and the transfers under way to them."""

    def __init__(
        self,
        engine: aiote.Engine,
        outbox: aiote.Region,
        inboxes: Mapping[int, Inbox],
        firsts: Mapping[int, int],
        peers: aiote.PeerGroup | None,
        lost: Callable[[int, str], None],
        alone: Mapping[int, aiote.PeerGroup],
    ) -> None:
        """`firsts` are the first immediates of each rank, `peers` the inboxes' ranks; None where each may be masked.

        `lost` is told of one that cannot be written to by itself. What flags release may go to each of those `alone`,
        which are as `groups_alone` has made them.
        """
        self._firsts = firsts
        self._engine, self._outbox, self._inboxes, self._lost = engine, outbox, inboxes, lost
        self._places = {rank: place for place, rank in enumerate(inboxes)}
        targets = {rank: [aiote.ScatterTarget(outbox, part) for part in one.regions] for rank, one in inboxes.items()}
        # Where a lost rank breaks the group, an inbox has one part.
        whole = [part for parts in targets.values() for part in parts]
        self._scatter = None if peers is None else engine.prepare_scatter(peers, whole)
        self._alone: dict[int, aiote.PreparedScatter] = {}
        for rank, group in alone.items():
            try:
                self._alone[rank] = engine.prepare_scatter(group, targets.get(rank, ()))
            except aiote.PeerError as error:
                lost(rank, str(error))

    def write(self, writes: list[Write], slot: int) -> list[tuple[int, aiote.Transfer]]:
        """Start writes that count 1 each, on that one of their rank's immediates (`wire.slot_of`); return the transfers
        with the rank that each is to, -1 for several.

        Raises as `PreparedScatter.submit`.
        """
        if not writes:
            return []
        if self._scatter is None:
            return [made for one in writes for made in self._one(one, slot)]
        rows = np.array([(one.nbytes, one.at, one.to, self._places[one.rank]) for one in writes], np.int64).T
        lengths, local, remote, places = rows
        imms = self._numbers([one.rank for one in writes], slot)
        return [(-1, self._scatter.submit(lengths, local, remote, imms, to=places))]

    def _numbers(self, ranks: Sequence[int], slot: int) -> Ints:
        """Return the immediate with which each rank is written to."""
        return np.array([self._firsts[rank] + slot for rank in ranks], np.int64)

    def when(
        self, flag: NDArray[np.uint32], value: int, ranks: Sequence[int], numbers: Sequence[Ints], slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Start writes that are posted when a flag is raised: lengths and places here are read then, places there now.

        A length of 0 posts nothing; a rank may be named more than once. It is one transfer, where a lost rank breaks
        the group. Else as `write`.
        """
        if self._scatter is None:
            return self.when_alone(flag, value, ranks, numbers, slot)
        places, (lengths, at, there) = np.array([self._places[rank] for rank in ranks], np.int64), numbers
        imms = self._numbers(ranks, slot)
        made = self._scatter.submit_when(flag, value, lengths, at, there, imms, to=places, skip_empty=True)
        return [(-1, made)]

    def when_alone(
        self, flag: NDArray[np.uint32], value: int, ranks: Sequence[int], numbers: Sequence[Ints], slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Start the same, each a transfer of its own: one that fails, or whose rank leaves, stops no other."""
        made = []
        for place, rank in enumerate(ranks):
            # It may have been lost before the group was whole.
            if rank in self._alone:
                length, at = (one[place : place + 1] for one in numbers[:2])
                part, there = np.array([self._inboxes[rank].find(int(numbers[2][place]))], np.int64).T
                imm = self._firsts[rank] + slot
                try:
                    one = self._alone[rank].submit_when(
                        flag, value, length, at, np.ascontiguousarray(there), imm, to=part, skip_empty=True
                    )
                    made.append((rank, one))
                except aiote.PeerError as error:
                    self._lost(rank, str(error))
        return made

    def told(self, flag: NDArray[np.uint32], value: int) -> aiote.Transfer:
        """Return what is over when a flag is raised. Raises as `PreparedScatter.submit_when`."""
        nothing = np.zeros(0, np.int64)
        return self._alone[-1].submit_when(flag, value, nothing, to=nothing)

    def _one(self, one: Write, slot: int) -> list[tuple[int, aiote.Transfer]]:
        imm = self._firsts[one.rank] + slot
        try:
            return [(one.rank, self._engine.submit_write_imm(*self._sides(one), imm))]
        except aiote.PeerError as error:
            self._lost(one.rank, str(error))
            return []

    def _sides(self, one: Write) -> tuple[aiote.Region, aiote.RemoteRegion]:
        inbox = self._inboxes[one.rank]
        part, to = inbox.find(one.to)
        return self._outbox[one.at : one.at + one.nbytes], inbox.regions[part][to : to + one.nbytes]

    def pages(
        self, rank: int, to: tuple[int, Ints], at: tuple[int, Ints], nbytes: int, slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Start to write rows, each of which counts 1: from where the rows begin there and here, and their numbers."""
        if not len(to[1]):
            return []
        source = aiote.Pages(self._outbox, at[1], nbytes, offset=at[0])
        part, offset = self._inboxes[rank].find(to[0])
        target = aiote.Pages(self._inboxes[rank].regions[part], to[1], nbytes, offset=offset)
        return [(rank, self._engine.submit_write_pages(source, target, self._firsts[rank] + slot))]


async def groups_alone(
    engine: aiote.Engine, peers: Mapping[int, aiote.Peer], lost: Callable[[int, str], None]
) -> dict[int, aiote.PeerGroup]:
    """Return a group of each rank by itself, but of those that are lost, and, as -1, one of nobody."""
    found = {-1: await engine.peer_group([])}
    for rank, peer in peers.items():
        try:
            found[rank] = await engine.peer_group([peer])
        except aiote.PeerError as error:
            lost(rank, str(error))
    return found
