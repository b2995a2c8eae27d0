"""Entering an epoch: a rank meets all others, opens its counters, and gets the inboxes that it writes to.

A rank enters the first epoch when it opens the group, and a later one at each reset. It asks every rank that takes part
to meet, and answers the same call from them (`joining`). If another rank is in a later epoch already, or reports that
this one is broken, the rank moves on, and meets the others there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from typing import Protocol

import anyio

import aiote

from .. import service
from ..aio import Backoff, Condition, run_shielded
from .arrivals import EpochImmediates
from .joining import AGAIN_S, COMES_LATER, ELSEWHERE, Meeting, MoeService, within_reach
from .lane import Lane
from .posting import Posting, attach_inbox, groups_alone
from .round_parts import RoundHost

__all__ = ["EpochHost", "Epochs"]


class EpochHost(RoundHost, Protocol):
    """The part of a group that entering an epoch uses."""

    @property
    def others(self) -> list[aiote.Address]:
        """The addresses of the other ranks that take part."""

    def is_member(self, rank: int, caller: aiote.Peer) -> bool:
        """Return whether the caller is that rank."""

    async def watch(self, rank: int, peer: aiote.Peer) -> None:
        """Lose a rank once its connection has ended; a task beside the rounds."""


class Epochs:
    """The connections, the counters and the immediates of one rank in its current epoch, and how it enters the next."""

    def __init__(self, host: EpochHost, lanes: Sequence[Lane], offered: type[MoeService]) -> None:
        self._host, self._lanes, self._service = host, lanes, offered
        self._membership, self._memory = host.membership, host.memory
        ranks = host.sizes.ranks
        self.digest = hashlib.blake2b(host.config.digest + bytes([ranks & 0xFF, ranks >> 8])).digest()[:16]
        """What the members must agree on, in 16 bytes."""
        self.peers: dict[int, aiote.Peer] = {}
        self.met: dict[int, Meeting] = {}
        """The answers of the ranks that have met this one in the epoch that it enters."""
        self.leaving = False
        self._ready = 0
        self._immediates: EpochImmediates | None = None
        self._asking: anyio.CancelScope | None = None
        self._changed = Condition()

    def client(self, rank: int) -> MoeService:
        """Return the service of another rank."""
        return service.client(self._host.engine, self._host.members[rank], self._service)

    def wake(self) -> None:
        """Make the answers to ranks that wait be considered again."""
        self._changed.wake_all()

    def stop(self) -> None:
        """Ask no rank any more, because the group is broken."""
        if self._asking is not None:
            self._asking.cancel()

    def close(self) -> None:
        """Free the counters, their immediates and the mapped inboxes. Idempotent."""
        for lane in self._lanes:
            lane.close()
        if self._immediates is not None:
            self._immediates.close()
        self._host.mapped_inboxes.close()

    async def end(self) -> None:
        """End the epoch: return once no rank can write to its inbox any more."""
        # A rank that asks to meet now waits for the next epoch, because this epoch's rows would get no answers.
        self._ready = 0
        self._host.mapped_inboxes.close()
        await self._memory.take_all_back()
        await run_shielded(lambda: self._memory.renew(self._host.others))

    async def enter(self, epoch: int, back: Sequence[int], *, first: bool) -> Posting:
        """Enter an epoch together with all ranks that take part; return how to write to them.

        This rank moves on to a later epoch if another rank is already in it, or if another rank reports that this epoch
        is broken; the other rank then begins the next epoch, and waits for this rank there.
        """
        membership = self._membership
        membership.reset(epoch, back)
        while True:
            epoch = membership.epoch
            self._open_counters()
            self._ready = epoch
            self._changed.wake_all()
            found = await self._meet_all(epoch, range(self._host.sizes.ranks) if first else back)
            latest = max([epoch + membership.heard, *(met.epoch for met in found.values())])
            if latest == epoch:
                membership.require_whole()
                break
            await self.end()
            membership.follow(latest, [rank for rank, met in found.items() if met.epoch > epoch])
        return await self._attach_inboxes(found)

    def _open_counters(self) -> None:
        """Open new counters on new immediates, so that late writes of an earlier epoch are not counted."""
        host = self._host
        for lane in self._lanes:
            lane.close()
        if self._immediates is not None:
            self._immediates.close()
        separate = host.sizes.ranks if host.config.on_loss == "mask" else 0
        self._immediates = EpochImmediates(host.engine, len(self._lanes), separate)
        for lane in self._lanes:
            lane.open(self._immediates.first_immediates)

    async def _attach_inboxes(self, found: dict[int, Meeting]) -> Posting:
        host, engine, memory = self._host, self._host.engine, self._memory
        inboxes, first_immediates, parts = {}, {}, memory.map.parts(host.rank)
        for rank in self._membership.active:
            if rank in found:
                try:
                    first_immediates[rank] = found[rank].first_immediate(len(self._lanes))
                    inboxes[rank] = attach_inbox(engine, self.peers[rank], rank, parts, found[rank].inbox)
                except aiote.UsageError as error:
                    if host.config.on_loss == "raise":
                        raise
                    host.lose(rank, str(error))
                    continue
                # Begin at a different rail for each pair of ranks, so that together they load each rank's NICs evenly.
                self.peers[rank].rotate_rails(host.rank + rank)
        connected = {rank: self.peers[rank] for rank in inboxes}  # With on_loss="mask" some may be lost already.
        if memory.may_share:
            await host.mapped_inboxes.map(engine, connected, {rank: found[rank].shared for rank in inboxes})
        peers = None if host.config.on_loss == "mask" else await engine.peer_group(connected.values())
        alone = {} if host.launcher is None else await groups_alone(engine, connected, host.lose)
        return Posting(engine, memory.outbox, inboxes, first_immediates, peers=peers, lost=host.lose, alone=alone)

    # Meeting.

    async def admit_rank(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        """Answer a rank that asks to meet, as `joining.RankHost.admit_rank`."""
        host = self._host
        if self._is_over(rank, digest):
            return ELSEWHERE
        if digest != self.digest:
            raise aiote.UsageError(
                f"rank {rank} has another MoeConfig or other members than rank {host.rank}: {host.config}"
            )
        if not 0 <= rank < host.sizes.ranks or rank == host.rank:
            raise aiote.UsageError(f"rank {rank} asked rank {host.rank}: expected another of {host.sizes.ranks}")
        await self._changed.until(
            lambda: self._ready >= epoch and self._membership.failure is None and host.is_member(rank, caller)
        )
        assert self._immediates is not None
        self._immediates.allow(rank, caller)
        lent, first = self._memory.lend(rank, caller.address), self._immediates.first_of(rank)
        return Meeting(self._ready, lent, first, await self._memory.describe(rank, caller))

    def _is_over(self, rank: int, digest: bytes) -> bool:
        """Return whether a rank has left this group, or may have, and so calls from a later group of this number."""
        membership = self._membership
        if self.leaving or rank in membership.departed:
            return True
        return digest != self.digest and (membership.failure is not None or not membership.takes_part(rank))

    async def _meet_all(self, epoch: int, late: Container[int]) -> dict[int, Meeting]:
        """Ask all ranks that take part for their inboxes, until the group breaks; return the answers by rank.

        Ranks in `late` may open the group later than this rank. Raises the first error.
        """
        found = self.met = {}
        failed: list[Exception] = []
        refused: dict[int, aiote.UsageError] = {}
        asked = len(self._membership.active)

        async def meet_one(rank: int) -> None:
            try:
                met = await self._meet_rank(rank, epoch, first=rank in late)
            except aiote.UsageError as error:
                refused[rank] = error
                # A rank that refuses this one is masked. If all refuse, this rank is at fault.
                if self._host.config.on_loss == "raise" or len(refused) == asked:
                    failed.append(error)
                    tasks.cancel_scope.cancel()
                else:
                    self._host.lose(rank, str(error))
            except Exception as error:
                failed.append(error)
                tasks.cancel_scope.cancel()
            else:
                found.update({} if met is None else {rank: met})

        try:
            async with anyio.create_task_group() as tasks:
                self._asking = tasks.cancel_scope
                if self._membership.failure is None:
                    for rank in self._membership.active:
                        tasks.start_soon(meet_one, rank)
        finally:
            self._asking = None
        if failed:
            raise failed[0]
        return found

    async def _meet_rank(self, rank: int, epoch: int, *, first: bool) -> Meeting | None:
        """Ask a rank for its inbox, again until it is in the group; return None if it is lost and masked."""
        backoff = Backoff(*AGAIN_S)
        while True:
            try:
                await self._connect(rank)
                met = await self.client(rank).meet(self._host.rank, epoch, self.digest)
                if met != ELSEWHERE:
                    return within_reach(met, epoch, first=first)
            except service.NotServedError as error:
                # Such a rank has not opened the group yet, or, after the first meeting, has left it.
                if not first:
                    self._host.lose(rank, str(error))
            except (aiote.PeerError, service.CallError) as error:
                if first and isinstance(error, COMES_LATER):
                    pass
                elif self._host.config.on_loss == "raise":
                    raise
                else:
                    self._host.lose(rank, str(error))
            if rank not in self._membership.active:
                return None
            await anyio.sleep(backoff.next())

    async def _connect(self, rank: int) -> None:
        peer = await self._host.engine.connect(self._host.members[rank])
        if self.peers.get(rank) is not peer:
            self.peers[rank] = peer
            self._host.start_task(self._host.watch, rank, peer)
