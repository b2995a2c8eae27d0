"""Posting the writes of one step to many ranks. This module alone decides how.

With on_loss="raise" all writes of a step are one scatter, which is prepared for the epoch. With on_loss="mask" each
write is a transfer of its own, because a scatter reports only its first failure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import aiote

__all__ = ["LeasedInbox", "OutboxWrite", "Posting", "attach_inbox", "groups_alone"]

Ints = NDArray[np.int64]


class OutboxWrite(NamedTuple):
    """Bytes of the outbox to write to a rank's inbox: the offset in the inbox, that in the outbox, and how many."""

    rank: int
    to: int
    at: int
    nbytes: int


class LeasedInbox:
    """The parts of a rank's inbox that it has lent to this rank, in order, and a region for each."""

    def __init__(self, parts: Sequence[slice], regions: Sequence[aiote.RemoteRegion]) -> None:
        self.regions = regions
        self._begins = [part.start for part in parts]

    def find(self, to: int) -> tuple[int, int]:
        """Return the number of the part that contains an offset of the inbox, and the offset within that part."""
        number = bisect_right(self._begins, to) - 1
        return number, to - self._begins[number]


def attach_inbox(
    engine: aiote.Engine, owner: aiote.Peer, rank: int, parts: Sequence[slice], descriptors: Sequence[bytes]
) -> LeasedInbox:
    """Return the inbox that a rank has lent. Raises UsageError if it is another's, or differs from `parts`."""
    try:
        if len(descriptors) != len(parts):
            raise aiote.UsageError(f"expected {len(parts)} descriptors, got {len(descriptors)}")
        regions = [
            engine.attach(one, owner=owner, access="write", nbytes=part.stop - part.start)
            for one, part in zip(descriptors, parts, strict=True)
        ]
    except aiote.UsageError as error:
        raise aiote.UsageError(f"rank {rank} lent something else than an inbox of its own: {error}") from None
    return LeasedInbox(parts, regions)


class Posting:
    """The ranks' inboxes in one epoch, and the ways to write to them."""

    def __init__(
        self,
        engine: aiote.Engine,
        outbox: aiote.Region,
        inboxes: Mapping[int, LeasedInbox],
        first_immediates: Mapping[int, int],
        *,
        peers: aiote.PeerGroup | None,
        lost: Callable[[int, str], None],
        alone: Mapping[int, aiote.PeerGroup],
    ) -> None:
        """Prepare the scatters. `first_immediates` are the first immediates of each rank.

        `peers` is one group of all ranks in `inboxes`, or None with on_loss="mask". `lost` is called for a rank that
        cannot be written to. `alone` are the groups from `groups_alone`, for writes that flags release.
        """
        self._first_immediates = first_immediates
        self._engine, self._outbox, self._inboxes, self._lost = engine, outbox, inboxes, lost
        self._places = {rank: place for place, rank in enumerate(inboxes)}
        targets = {rank: [aiote.ScatterTarget(outbox, part) for part in one.regions] for rank, one in inboxes.items()}
        # With on_loss="raise" an inbox has one part.
        whole = [part for parts in targets.values() for part in parts]
        self._scatter = None if peers is None else engine.prepare_scatter(peers, whole)
        self._scatter_alone: dict[int, aiote.PreparedScatter] = {}
        for rank, group in alone.items():
            try:
                self._scatter_alone[rank] = engine.prepare_scatter(group, targets.get(rank, ()))
            except aiote.PeerError as error:
                lost(rank, str(error))

    def post_writes(self, writes: list[OutboxWrite], slot: int) -> list[tuple[int, aiote.Transfer]]:
        """Start writes that each count 1 on their rank's immediate for `slot` (`wire.slot_of`); return the transfers,
        each with its target rank, or -1 for several ranks.

        Raises the errors of `PreparedScatter.submit`.
        """
        if not writes:
            return []
        if self._scatter is None:
            return [made for one in writes for made in self._post_one(one, slot)]
        rows = np.array([(one.nbytes, one.at, one.to, self._places[one.rank]) for one in writes], np.int64).T
        lengths, local, remote, places = rows
        imms = self._numbers([one.rank for one in writes], slot)
        return [(-1, self._scatter.submit(lengths, local, remote, imms, to=places))]

    def _numbers(self, ranks: Sequence[int], slot: int) -> Ints:
        """Return the immediates that writes to these ranks carry."""
        return np.array([self._first_immediates[rank] + slot for rank in ranks], np.int64)

    def post_when(
        self, flag: NDArray[np.uint32], value: int, ranks: Sequence[int], numbers: Sequence[Ints], slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Start writes that are posted when a flag is raised.

        `numbers` are lengths, offsets in the outbox and offsets in the inboxes; the first two are read when the flag is
        raised, the last now. A length of 0 posts no write; a rank may be named more than once. With on_loss="raise" all
        writes are one transfer. Otherwise as `post_writes`.
        """
        if self._scatter is None:
            return self.post_when_alone(flag, value, ranks, numbers, slot)
        places, (lengths, at, there) = np.array([self._places[rank] for rank in ranks], np.int64), numbers
        imms = self._numbers(ranks, slot)
        made = self._scatter.submit_when(flag, value, lengths, at, there, imms, to=places, skip_empty=True)
        return [(-1, made)]

    def post_when_alone(
        self, flag: NDArray[np.uint32], value: int, ranks: Sequence[int], numbers: Sequence[Ints], slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Do as `post_when`, with one transfer for each write, so that one that fails or leaves stops no other."""
        made = []
        for place, rank in enumerate(ranks):
            # The rank may have been lost before the group was complete.
            if rank in self._scatter_alone:
                length, at = (one[place : place + 1] for one in numbers[:2])
                found = self._inboxes[rank].find(int(numbers[2][place]))
                part, there = (np.array([number], np.int64) for number in found)
                imm = self._first_immediates[rank] + slot
                try:
                    one = self._scatter_alone[rank].submit_when(
                        flag, value, length, at, there, imm, to=part, skip_empty=True
                    )
                    made.append((rank, one))
                except aiote.PeerError as error:
                    self._lost(rank, str(error))
        return made

    def submit_flag_wait(self, flag: NDArray[np.uint32], value: int) -> aiote.Transfer:
        """Return a transfer that ends when a flag is raised. Raises the errors of `PreparedScatter.submit_when`."""
        nothing = np.zeros(0, np.int64)
        return self._scatter_alone[-1].submit_when(flag, value, nothing, to=nothing)

    def _post_one(self, one: OutboxWrite, slot: int) -> list[tuple[int, aiote.Transfer]]:
        imm = self._first_immediates[one.rank] + slot
        try:
            if not one.nbytes:
                return [(one.rank, self._engine.submit_write_imm(None, self._inboxes[one.rank].regions[0], imm))]
            return [(one.rank, self._engine.submit_write_imm(*self._regions_of(one), imm))]
        except aiote.PeerError as error:
            self._lost(one.rank, str(error))
            return []

    def _regions_of(self, one: OutboxWrite) -> tuple[aiote.Region, aiote.RemoteRegion]:
        inbox = self._inboxes[one.rank]
        part, to = inbox.find(one.to)
        return self._outbox[one.at : one.at + one.nbytes], inbox.regions[part][to : to + one.nbytes]

    def post_pages(
        self, rank: int, to: tuple[int, Ints], at: tuple[int, Ints], nbytes: int, slot: int
    ) -> list[tuple[int, aiote.Transfer]]:
        """Start to write rows of `nbytes` that each count 1 on the rank's immediate for `slot`.

        `to` and `at` describe the rows in the inbox and in the outbox: the offset of row 0, and the row numbers.
        """
        if not len(to[1]):
            return []
        source = aiote.Pages(self._outbox, at[1], nbytes, offset=at[0])
        part, offset = self._inboxes[rank].find(to[0])
        target = aiote.Pages(self._inboxes[rank].regions[part], to[1], nbytes, offset=offset)
        return [(rank, self._engine.submit_write_pages(source, target, self._first_immediates[rank] + slot))]


async def groups_alone(
    engine: aiote.Engine, peers: Mapping[int, aiote.Peer], lost: Callable[[int, str], None]
) -> dict[int, aiote.PeerGroup]:
    """Return a group for each rank by itself, and, as -1, an empty group. A lost rank is reported and left out."""
    found = {-1: await engine.peer_group([])}
    for rank, peer in peers.items():
        try:
            found[rank] = await engine.peer_group([peer])
        except aiote.PeerError as error:
            lost(rank, str(error))
    return found
