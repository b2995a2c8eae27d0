"""How ranks find each other: what they say before the first round of an epoch, and when one goes wrong.

Each rank asks every other to meet in an epoch, and is answered with a lease of the other's inbox once that one is
there, too; the later epoch wins. Nobody waits for all to be ready: who has everybody's inbox may write, for whoever has
lent it has its counters open.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta

import aiote

from .. import service
from .config import MAX_LANES
from .wire import SLOTS

__all__ = [
    "AGAIN_S",
    "COMES_LATER",
    "ELSEWHERE",
    "Meeting",
    "MoeService",
    "RankHost",
    "service_of",
    "within_reach",
]

Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
RoundNumber: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]
Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
Reason: TypeAlias = Annotated[str, Meta(max_length=1024)]
MOST_AHEAD = 1 << 16
"""Epochs by which another rank may be ahead of one that is in the group already."""
MOST_FIRST = 1 << 61
"""The last epoch that a rank joins: as many are left for resets."""
AGAIN_S = 0.01, 0.5
"""So long a rank waits, at first and at most, before it asks again one that does not serve the group yet."""
COMES_LATER = service.BusyError, service.DrainingError, service.CallLostError
"""What a rank answers that is busy, or is about to leave an earlier group of the same number."""


class Meeting(msgspec.Struct, frozen=True):
    """A rank's answer: the epoch that it is in, descriptors of the parts of its inbox that the one that asked may write
    to (`memory.LaneMap.parts`), and the first of the immediates that it writes with.
    """

    epoch: Epoch
    inbox: Annotated[list[Annotated[bytes, Meta(max_length=4096)]], Meta(max_length=3 * MAX_LANES)]
    imm: Annotated[int, Meta(ge=0, lt=1 << 28)]

    def first(self, lanes: int) -> int:
        """Return the first of the immediates. Raises UsageError where those of so many lanes have over 28 bits."""
        if self.imm + lanes * SLOTS > 1 << 28:
            raise aiote.UsageError(f"immediates from {self.imm:#x} on, {SLOTS} for each of {lanes} lanes, pass 28 bits")
        return self.imm


ELSEWHERE = Meeting(0, [], 0)
"""The answer of a rank that is still in an earlier group of the same number: it is to be asked again."""


class RankHost(Protocol):
    """A rank of a group, as its peers' calls see it."""

    async def meet(self, rank: int, epoch: int, digest: bytes, caller: aiote.Peer) -> Meeting:
        """Return the inbox for a rank, once this one is in that epoch or a later one."""

    def told(self, rank: int, epoch: int, reason: str, caller: aiote.Peer) -> None:
        """Take note that another rank broke an epoch, if the caller is that rank."""

    async def left(self, rank: int, epoch: int, rounds: list[int], caller: aiote.Peer) -> None:
        """Take note that the caller, which is that rank, takes part in no round from these on, one for each lane."""


class MoeService(service.Service):
    """What ranks of one group call at each other."""

    def __init__(self, host: RankHost) -> None:
        self._host = host

    @service.method(idempotent=True, raises=[aiote.UsageError])
    async def meet(self, rank: Rank, epoch: Epoch, digest: Digest) -> Meeting:
        """Return this rank's inbox, once it is in that epoch or a later one. Raises UsageError for another config."""
        return await self._host.meet(rank, epoch, digest, service.current_call().peer)

    @service.method(idempotent=True)
    async def broke(self, rank: Rank, epoch: Epoch, reason: Reason) -> None:
        """Hear that a rank broke an epoch."""
        self._host.told(rank, epoch, reason, service.current_call().peer)

    @service.method(idempotent=True)
    async def left(self, rank: Rank, epoch: Epoch, rounds: Annotated[list[RoundNumber], Meta(max_length=1024)]) -> None:
        """Hear that a rank takes part in no more rounds; return once nothing is being written to it."""
        await self._host.left(rank, epoch, rounds, service.current_call().peer)


def service_of(group: int) -> type[MoeService]:
    """Return the service of a group, by whose number an engine may be in several."""
    return type("MoeService", (MoeService,), {"name": f"MoeService.{group}"})


def within_reach(met: Meeting, epoch: int, *, first: bool) -> Meeting:
    """Return what a rank has answered. Raises UsageError for an epoch that it cannot have come to."""
    if met.epoch > (MOST_FIRST if first else epoch + MOST_AHEAD):
        raise aiote.UsageError(f"it says that it is in epoch {met.epoch}, this rank is in {epoch}")
    return met
